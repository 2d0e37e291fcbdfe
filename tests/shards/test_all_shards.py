"""One process trains a folder of shards with the losses of the whole dataset, by every method."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import hopline as hl
from hopline.data.fingerprint import fingerprint
from hopline.tables.stacked import StackedTable
from tests.shards.test_write import rich
from tests.support.runs import command, records, small

METHODS: dict[str, hl.extend.Method] = {
    "sampled": hl.Sampled(fanouts=(4, 3), batch_size=7),
    "sweep": hl.FullBatch(num_shards=3, partition="random"),
    "sequential": hl.FullBatch(num_shards=3, partition="random", aggregation="sequential"),
    "historical": hl.Historical(num_parts=6, parts_per_batch=2, partition="random"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hl.shards.cut(rich(), tmp_path / "shards", 3, how="random", seed=2)
    return tmp_path / "shards"


def losses_of(data: hl.Dataset, method: hl.extend.Method, kind: Any) -> list[float]:
    torch.manual_seed(0)
    model = hl.nn.GNN([kind(4, 8), kind(8, 5)], dropout=0.3).double()
    run = hl.Trainer(model, data, method, epochs=3, lr=0.05, show=False).fit()
    return [*(epoch.loss for epoch in run.history), run.valid, run.test]


@pytest.mark.parametrize("kind", [SAGEConv, GCNConv, GATConv])
@pytest.mark.parametrize("method", METHODS)
def test_losses_are_those_of_the_dataset_that_was_cut(folder: Path, method: str, kind: type):
    ours = losses_of(hl.shards.join(folder), METHODS[method], kind)
    assert ours == pytest.approx(losses_of(rich(), METHODS[method], kind), rel=1e-12)


def test_joined_features_stay_in_the_shards_and_have_the_same_contents(folder: Path):
    data = rich()
    joined = hl.shards.join(folder)
    # Graphs in folders have 32-bit indices where these are enough.
    data = replace(data, graph=replace(data.graph, indices=data.graph.indices.int()))
    assert isinstance(joined.x, StackedTable)
    assert joined.x.version == 0
    ids = torch.tensor([59, 0, 7, 7, 30])
    assert torch.equal(joined.x[ids], data.x[ids])
    assert joined.x[ids[:0]].shape == (0, 4)
    assert fingerprint(joined) == fingerprint(data)
    assert hl.shards.join(folder, split=1).splits["train"].tolist() == [5, 6, 7, 8, 9]


def test_what_cannot_be_joined_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"hl\.shards\.join\(folder\)"):
        hl.open(folder)
    with pytest.raises(ValueError, match=r"split 2: .*0 to 1"):
        hl.shards.join(folder, split=2)
    with pytest.raises(ValueError, match="folder above it"):
        hl.shards.join(folder / "shard-1")
    with pytest.raises(ValueError, match="there is no folder"):
        hl.shards.join(tmp_path / "nothing")
    shutil.rmtree(folder / "shard-1")
    with pytest.raises(ValueError, match=r"no shard 1 in .*is missing"):
        hl.shards.join(folder)


@pytest.mark.parametrize(
    "settings",
    [
        ["method.fanouts=4,3", "method.batch_size=50"],
        ["method=full_batch", "method.num_shards=3", "method.partition=random"],
        ["method=full_batch", "method.aggregation=one_shot", "method.partition=random"],
        ["method=historical", "method.num_parts=6", "method.parts_per_batch=2", "method.partition=random"],
    ],
    ids=str,
)
def test_the_command_line_trains_shards_in_one_process(tmp_path: Path, settings: list[str]):
    small().save(tmp_path / "graph")
    assert command("partition", tmp_path / "graph", tmp_path / "shards", "shards=3", "how=random").status == 0
    same = ["model.layers=2", "model.hidden=8", "epochs=2", *settings]
    for name in ("graph", "shards"):
        status, _, err = command("train", tmp_path / name, *same, f"out={tmp_path / 'runs' / name}")
        assert (status, err) == (0, "")
    whole, cut = ([one["loss"] for one in records(tmp_path / "runs" / name, "epoch")] for name in ("graph", "shards"))
    assert len(cut) == 2
    assert cut == pytest.approx(whole, rel=1e-6)
    again = [*same[:2], "epochs=3", *settings, f"out={tmp_path / 'runs' / 'shards'}", "resume=true"]
    assert command("train", tmp_path / "shards", *again).status == 0
    assert len(records(tmp_path / "runs" / "shards", "epoch")) == 3


def test_a_plan_and_asynchronous_evaluation_take_shards_too(folder: Path):
    status, text, err = command("plan", folder, "model.layers=2", "model.hidden=8", "budget=1GiB")
    assert (status, err) == (0, "")
    assert "recommended: method=" in text
    metrics = []
    for evaluate in ("async", "blocking"):
        torch.manual_seed(0)
        model = hl.nn.GNN([SAGEConv(4, 5)])
        joined = hl.shards.join(folder)
        run = hl.Trainer(model, joined, hl.Sampled(fanouts=(3,)), epochs=2, evaluate=evaluate, show=False).fit()
        metrics.append([one.metrics for one in run.evaluations])
    assert metrics[0] == metrics[1]
