"""Shards in a custom loop: the gradients of the Trainer, the outputs of plain PyG, and refused misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from tests.methods.full_batch.loops import DATA, OwnLayers, apart, model_of, on_ranks, own_loop, predict
from tests.support.helpers import assert_close

CASES: list[dict[str, Any]] = [
    {"kind": "own"},
    {"kind": "gnn"},
    {"kind": "gnn", "trim": True},
    {"kind": "norm", "aggregation": "one_shot"},
    {"kind": "median", "aggregation": "one_shot"},
    {"kind": "pyg", "aggregation": "stored", "trim": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_every_step_equal_those_of_the_trainer(case: dict[str, Any]):
    assert apart(World.alone(), **case) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_gradients_equal_those_of_the_trainer(case: dict[str, Any]):
    world = World.alone("cuda")
    assert apart(world, **case) < 1e-9


def test_over_ranks_gradients_equal_those_of_the_trainer_with_the_dataset_and_with_shards(tmp_path: Path):
    hl.shards.cut(DATA, tmp_path / "shards", 2, how="random", seed=1)
    hl.shards.cut(DATA, tmp_path / "one", 2, labels=(torch.arange(70) == 5).long())  # a shard of one node
    folders = [{**case, "folder": str(tmp_path / "shards")} for case in CASES]
    one_node_cases = [{"kind": kind, "folder": str(tmp_path / "one")} for kind in ("own", "norm")]
    cases = [*CASES, {"kind": "gnn", "compress": "bf16"}, *folders, *one_node_cases]
    differences = run(on_ranks, LaunchSettings(devices=2, timeout_s=60), cases)
    assert max(differences) < 1e-12


def test_auto_is_sequential():
    ours = own_loop(World.alone(), "gnn", aggregation="auto")
    theirs = own_loop(World.alone(), "gnn", aggregation="sequential")
    assert all(
        torch.equal(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )


def foreign_model() -> tuple[nn.Module, torch.Tensor]:
    """A plain PyG model, as another library would have trained it, and its outputs on the whole graph."""
    torch.manual_seed(3)
    model = pyg.GAT(6, 8, num_layers=2, out_channels=3, heads=2).double().eval()
    with torch.no_grad():
        return model, model(DATA.x[torch.arange(70)], DATA.graph.edge_index())


def test_inference_with_weights_of_another_library_is_that_of_plain_pyg(tmp_path: Path):
    model, expected = foreign_model()
    hl.shards.cut(DATA, tmp_path / "shards", 2, how="random")
    assert_close(hl.infer.exact(model, hl.shards.join(tmp_path / "shards")), expected)
    weights = {name: rows.tolist() for name, rows in model.state_dict().items()}
    columns = run(predict, LaunchSettings(devices=2, timeout_s=30), str(tmp_path / "shards"), weights)
    assert_close(torch.tensor(columns, dtype=torch.float64).t(), expected)


def test_seeds_labels_and_rows_are_those_of_the_dataset():
    ids = torch.tensor([69, 3, 20])
    (batch,) = hl.FullBatch(num_shards=3, partition="random").loader(DATA, ids, num_layers=2)
    assert sorted(batch.seeds.tolist()) == [3, 20, 69]
    assert batch.total_seeds == 3
    assert torch.equal(batch.labels, DATA.labels[batch.seeds])
    assert torch.equal(batch.input_ids[batch.output_idx], batch.seeds)

    assert isinstance(batch.x, hl.extend.Rows)
    assert torch.equal(batch.x.read(), DATA.x[batch.input_ids])


class ModuleWithoutLayers(nn.Module):
    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return x


def test_misuse_is_refused_with_a_message(tmp_path: Path):
    method = hl.FullBatch(num_shards=3, partition="random")
    model = model_of("gnn")
    with pytest.raises(ValueError, match=r"aggregation=sweep .*sequential"):
        hl.FullBatch(aggregation="sweep").loader(DATA, model=model)
    for depth in ({}, {"model": model, "num_layers": 3}):
        with pytest.raises(ValueError, match=r"model= .*num_layers="):
            method.loader(DATA, **depth)
    for module in (ModuleWithoutLayers(), OwnLayers()):
        with pytest.raises(ValueError, match="num_layers= in place of model="):
            method.loader(DATA, model=module)
    with pytest.raises(ValueError, match="trim=true leaves some out"):
        hl.FullBatch(trim=True, num_shards=3).loader(DATA, model=model_of("norm"))
    with pytest.raises(ValueError, match=r"num_shards=71 .* 70 nodes"):
        hl.FullBatch(num_shards=71).loader(DATA, model=model)
    with pytest.raises(ValueError, match=r"compress= .*between ranks"):
        hl.FullBatch(compress="bf16").loader(DATA, model=model)
    with pytest.raises(ValueError, match=r"num_layers .*at least 1, not 0"):
        method.loader(DATA, num_layers=0)
    with pytest.raises(ValueError, match="batch has 2 blocks"):
        model(next(iter(method.loader(DATA, num_layers=2))))

    hl.shards.cut(DATA, tmp_path / "shards", 2, how="range")
    with pytest.raises(ValueError, match=r"2 shards and 1 processes: .*hl\.shards\.join\(folder\)"):
        method.loader(hl.shards.open_shard(tmp_path / "shards", 0), model=model)
