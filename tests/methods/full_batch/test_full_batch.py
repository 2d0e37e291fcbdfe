"""Full-batch training in shards: every way gives the gradient of plain PyG, in one process and in several ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import hopline as hl
from hopline.core.partition import make_partition
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.shards.write import cut
from hopline.util.errors import RankError
from tests.methods.full_batch.ranks import DATA, differences, model_of, train, train_all, train_until_death
from tests.support.helpers import GNN_OPTIONS, KERNEL_DEVICE, dataset_of, gnn_of, plain_gnn, randn, random_graph

AGGREGATIONS = ("sweep", "sequential", "stored", "one_shot")
SETTINGS: dict[str, Any] = {"partition": "random", "num_shards": 4}
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def loss_and_gradients(model: hl.nn.GNN, **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of one step of full-batch training."""
    data = DATA
    work = hl.Trainer(model, data, hl.FullBatch(**(SETTINGS | settings)), epochs=1, show=False).work
    model.train()
    model.zero_grad()
    (unit,) = work.units(1)
    assert unit.total_size is not None
    loss = unit.forward_backward(unit.total_size) / unit.total_size
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


NORMED = ("batch-norm", "jk-last", "everything")
"""Models with batch norms, which a sweep refuses."""


def plain_loss(model: hl.nn.GNN) -> float:
    """The loss of plain PyG over the whole graph; gradients are in the parameters."""
    model.zero_grad()
    assert DATA.y is not None
    train_ids = DATA.splits["train"]
    out = plain_gnn(model, DATA.x[torch.arange(DATA.num_nodes)].double(), DATA.graph)
    loss = torch.nn.functional.cross_entropy(out[train_ids], DATA.y[train_ids])
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("name", [name for name in GNN_OPTIONS if name not in NORMED])
def test_dropout_is_the_same_for_every_aggregation(name: str):
    model = gnn_of(name)
    model.dropout = 0.4
    model.input_dropout = 0.2
    loss, expected = loss_and_gradients(model, aggregation="sequential")
    for trim in (False, True):
        again, found = loss_and_gradients(model, aggregation="sweep", trim=trim)
        assert again == pytest.approx(loss, rel=1e-10)
        for key, grad in expected.items():
            torch.testing.assert_close(found[key], grad, rtol=1e-9, atol=1e-12)


def assert_that_of_plain_pyg(name: str, **settings: Any) -> None:
    """Loss and gradients of one step."""
    model = gnn_of(name) if name in GNN_OPTIONS else model_of(name)
    model.dropout = model.input_dropout = 0.0
    loss, found = loss_and_gradients(model, **settings)
    assert loss == pytest.approx(plain_loss(model), rel=1e-10)
    for key, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[key], p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", *GNN_OPTIONS])
def test_the_gradient_is_that_of_plain_pyg(aggregation: str, name: str):
    if name in NORMED and aggregation == "sweep":
        pytest.skip("batch norms need all rows at once")
    assert_that_of_plain_pyg(name, aggregation=aggregation)


@pytest.mark.parametrize("aggregation", ["sweep", "sequential"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", *(name for name in GNN_OPTIONS if name not in NORMED)])
def test_trimmed_the_gradient_is_that_of_plain_pyg(aggregation: str, name: str):
    assert_that_of_plain_pyg(name, aggregation=aggregation, trim=True)


def test_trimmed_training_counts_fewer_bytes():
    runs = [train(World.alone(), "gcn", {"aggregation": "sequential", "trim": trim}) for trim in (False, True)]
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-10)
    for name in ("bytes.forward", "bytes.gradient"):
        assert 0 < runs[1]["counters"][name] < runs[0]["counters"][name]


def test_a_trimmed_sweep_counts_fewer_rows_and_edges():
    runs = [train(World.alone(), "gcn", {"aggregation": "sweep", "trim": trim}) for trim in (False, True)]
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-10)
    assert runs[1]["weights"] == pytest.approx(runs[0]["weights"], rel=1e-8, abs=1e-10)
    for name in ("sweep.rows", "sweep.edges"):
        assert 0 < runs[1]["counters"][name] < runs[0]["counters"][name]


def test_degrees_are_exchanged_in_the_first_epoch_only():
    run = train(World.alone(), "gcn", {"aggregation": "sequential"})
    assert "bytes.degrees" not in run["counters"]


@pytest.mark.parametrize("settings", [{"num_shards": 1}, {"num_shards": 7}, {"partition": "range"}], ids=str)
def test_training_is_the_same_for_every_aggregation(settings: dict[str, Any], tmp_path: Path):
    ways = [{"aggregation": a} for a in AGGREGATIONS]
    ways += [{"aggregation": "sweep", "folder": tmp_path / "tables"}, {"aggregation": "sweep", "trim": True}]
    runs = [train(World.alone(), "gcn", settings | way, dropout=0.4) for way in ways]
    for other_run in runs[1:]:
        assert other_run["losses"] == pytest.approx(runs[0]["losses"], rel=1e-10)
        assert other_run["weights"] == pytest.approx(runs[0]["weights"], rel=1e-8, abs=1e-10)


def test_aggregation_auto_logs_its_choice(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="hopline")
    for norm, message in ((None, "aggregation=sweep"), ("batch", "aggregation=sequential")):
        hl.Trainer(model_of("gcn", norm=norm), DATA, hl.FullBatch(**SETTINGS), epochs=1)
        assert message in caplog.text
        caplog.clear()


@pytest.mark.parametrize(("num_shards", "message"), [(1, "(one process), 1 shard"), (2, "(one process), 2 shards")])
def test_the_logged_choice_counts_the_shards(num_shards: int, message: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="hopline")
    hl.Trainer(model_of("gcn"), DATA, hl.FullBatch(num_shards=num_shards), epochs=1)
    assert any(line.endswith(message) for line in caplog.messages)


def test_batch_norms_are_those_of_all_rows():
    runs = [train(World.alone(), "gin", {"aggregation": a}, norm="batch") for a in ("sequential", "one_shot")]
    assert runs[0]["weights"] == pytest.approx(runs[1]["weights"], rel=1e-8)
    with pytest.raises(ValueError, match="aggregation=sequential"):
        train(World.alone(), "gcn", {"aggregation": "sweep"}, norm="batch")
    with pytest.raises(ValueError, match=r"BatchNorm1d .*trim=true"):
        train(World.alone(), "gcn", {"trim": True}, norm="batch")


def test_ranks_train_as_one_process(tmp_path: Path):
    cut(DATA, make_partition(DATA.graph, 2, "random"), tmp_path / "shards")
    one_shot = {"aggregation": "one_shot"}
    cases: list[dict[str, Any]] = [
        {"kind": "gcn", "settings": {}, "dropout": 0.4},
        {"kind": "sage", "settings": {"aggregation": "stored"}},
        {"kind": "gat", "settings": one_shot, "seed_of_weights": 0},
        {"kind": "gin", "settings": {}, "norm": "batch"},
        {"kind": "gcn", "settings": {}, "folder": str(tmp_path / "shards"), "dropout": 0.4},
        {"kind": "gin", "settings": one_shot, "folder": str(tmp_path / "shards"), "norm": "batch"},
        {"kind": "gcn", "settings": {"trim": True}, "dropout": 0.4},
        {"kind": "gat", "settings": {"trim": True}, "folder": str(tmp_path / "shards")},
        {"kind": "gcn", "settings": {}, "dropout": 0.4, "loss": "weighted"},
        {"kind": "gat", "settings": {"trim": True}, "folder": str(tmp_path / "shards"), "loss": "weighted"},
        {"kind": "gin", "settings": one_shot, "norm": "batch", "loss": "spread", "accumulate": 2},
    ]
    results = run(train_all, LaunchSettings(devices=2, timeout_s=60), cases)
    for case, result in zip(cases, results, strict=True):
        alone: dict[str, Any] = {name: value for name, value in case.items() if name != "folder"}
        alone["settings"] = {"aggregation": "sequential"}
        expected = train(World.alone(), **alone)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert result["weights"] == pytest.approx(expected["weights"], rel=1e-7, abs=1e-9)
        assert result["test"] == pytest.approx(expected["test"])


def test_compressed_rows_train_and_say_how_far_off_they_are():
    exact: dict[str, Any] = {"kind": "gcn", "settings": {}, "epochs": 4, "dropout": 0.4}
    ways: list[dict[str, Any]] = [
        {"compress": "bf16_both"},
        {"compress": "bf16", "aggregation": "one_shot"},
        {"compress": "bf16_both", "trim": True},
    ]
    cases = [exact, *(exact | {"settings": way} for way in ways)]
    whole, both, rows, trimmed = run(train_all, LaunchSettings(devices=2, timeout_s=60), cases)
    for name in ("forward", "gradient"):
        assert both["counters"][f"bytes.{name}"] == whole["counters"][f"bytes.{name}"] / 4
        assert 0 < both["counters"][f"error.{name}"] < 2**-8
        assert 0 < trimmed["counters"][f"error.{name}"] < 2**-8
    assert 0 < rows["counters"]["error.forward"] < 2**-8
    assert "error.gradient" not in rows["counters"]
    assert rows["counters"]["bytes.gradient"] == whole["counters"]["bytes.gradient"]
    for compressed in (both, rows, trimmed):
        assert compressed["losses"] == pytest.approx(whole["losses"], rel=1e-2)
        assert compressed["losses"] != whole["losses"]


def test_differences_between_ranks_are_refused_before_the_first_step(tmp_path: Path):
    cut(DATA, make_partition(DATA.graph, 3, "random"), tmp_path / "shards")
    messages = run(differences, LaunchSettings(devices=2, timeout_s=60), str(tmp_path / "shards"))
    names = [
        "'convs.0.lin_l.weight' of the model",
        "the settings or the code of the model",
        "method.aggregation",
        "the edges",
    ]
    for message, name in zip(messages, names, strict=False):
        assert message.startswith(f"rank 1 and rank 0 differ in {name}")
    assert "3 shards and 2 processes" in messages[4]


def test_a_killed_rank_is_named_and_the_run_resumes_exactly(tmp_path: Path):
    case: dict[str, Any] = {"kind": "gat", "settings": {"trim": True}, "dropout": 0.4, "epochs": 4}
    case["loss"] = "mortal"
    settings = LaunchSettings(devices=2, timeout_s=20)
    checkpointed = {"out": str(tmp_path / "run"), "checkpoint_s": 0.0}
    with pytest.raises(RankError, match="rank 1"):
        run(train_until_death, settings, case | checkpointed, str(tmp_path))

    lost = json.loads((tmp_path / "lost").read_text())
    assert lost["steps"] == 3
    assert lost["seconds"] < 20
    assert lost["error"].startswith("rank 1 ")
    assert "resume=true" in lost["error"]

    again, whole = run(train_all, settings, [case | checkpointed | {"resume": True}, case])
    assert again["losses"] == whole["losses"]
    assert again["weights"] == whole["weights"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_shards": 0}, "num_shards must be at least 1"),
        ({"aggregation": "one_shot", "folder": Path("x")}, "folder= is for a sweep"),
        ({"compress": "fp16"}, "compress must be 'none' or 'bf16' or 'bf16_both'"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        hl.FullBatch(**settings)


@pytest.mark.parametrize("settings", [{"compress": "bf16"}, {"compress": "bf16_both"}], ids=str)
def test_compress_is_refused_in_one_process(settings: dict[str, Any]):
    with pytest.raises(ValueError, match="between ranks: set devices=2"):
        hl.Trainer(model_of("gcn"), DATA, hl.FullBatch(**settings), epochs=1, show=False)


def test_a_resumed_run_has_the_losses_of_one_never_interrupted(tmp_path: Path):
    whole = train(World.alone(), "gcn", {}, dropout=0.4, out=tmp_path / "whole", epochs=4)
    train(World.alone(), "gcn", {}, dropout=0.4, out=tmp_path / "cut", epochs=2)
    again = train(World.alone(), "gcn", {}, dropout=0.4, out=tmp_path / "cut", epochs=4, resume=True)
    assert again["losses"] == whole["losses"]


@pytest.mark.parametrize("_", [pytest.param(0, marks=NEEDS_GPU, id="gpu")])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_a_gpu_trains_as_the_cpu_does(kind: str, aggregation: str, _: int):
    expected = train(World.alone(), kind, {"aggregation": aggregation}, dropout=0.4)
    ours = train(World.alone(KERNEL_DEVICE), kind, {"aggregation": aggregation}, dropout=0.4, device=KERNEL_DEVICE)
    assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
    assert ours["weights"] == pytest.approx(expected["weights"], rel=1e-6, abs=1e-8)


def test_more_shards_than_nodes_are_refused_by_the_name_of_the_setting():
    graph = random_graph(num_nodes=20, num_edges=60)
    data = dataset_of(graph, randn(20, 6))
    with pytest.raises(ValueError, match=r"num_shards=1000 .* 20 nodes"):
        hl.Trainer(gnn_of("plain"), data, hl.FullBatch(num_shards=1000), epochs=1, show=False)
