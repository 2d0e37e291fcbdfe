"""The same run on a GPU and on the CPU has equal losses and outputs; so have two ranks that share a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv, SAGEConv

import hopline as hl
from hopline.data.synthetic import planted_partition
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from tests.methods.full_batch import ranks as full_batch_ranks
from tests.methods.historical import ranks as historical_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = {
    "sage": lambda i, o: hl.nn.GNN([SAGEConv(i, 16), SAGEConv(16, o)], dropout=0.3, norm="batch"),
    "sage max": lambda i, o: hl.nn.GNN([SAGEConv(i, 16, aggr="max"), SAGEConv(16, o)]),
    "gcn": lambda i, o: hl.nn.GNN([GCNConv(i, 16), GCNConv(16, o)], dropout=0.3, input_dropout=0.1),
    "gat": lambda i, o: hl.nn.GNN([GATConv(i, 8, heads=2), GATConv(16, o)]),
    "gcnii": lambda i, o: hl.nn.GNN(
        [GCN2Conv(16, 0.1), GCN2Conv(16, 0.1)], jk="last", encoder=nn.Linear(i, 16), head=nn.Linear(16, o)
    ),
}
METHODS = [
    hl.Sampled(fanouts=(5, 5), batch_size=256),
    hl.Historical(num_parts=6, parts_per_batch=2, partition="range"),
    hl.FullBatch(num_shards=3, partition="range"),
]


@pytest.mark.parametrize("name", MODELS)
def test_training_on_a_gpu_equals_training_on_the_cpu(name: str):
    data = planted_partition(num_nodes=3000, num_edges=30_000, num_classes=5, num_features=12, seed=1)
    runs = {}
    outputs = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = MODELS[name](data.num_features, data.num_classes).double()
        method = hl.Sampled(fanouts=(5, 5), batch_size=256, layout="block")
        runs[device] = hl.Trainer(model, data, method, epochs=2, device=device, show=False).fit()
        outputs[device] = hl.infer.exact(model, data, device=device)
    losses = [[epoch.loss for epoch in runs[device].history] for device in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    torch.testing.assert_close(outputs["cuda"], outputs["cpu"], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("placement", ["device", "host"])
def test_features_stored_sparse_train_on_a_gpu_too(method: hl.extend.Method, placement: str):
    data = planted_partition(num_nodes=3000, num_edges=30_000, num_classes=5, num_features=12, seed=1)
    stored = data.x.storage()
    assert stored is not None
    sparse = hl.extend.SparseTable.from_dense(stored.double() * (stored > 0))
    data = dataclasses.replace(data, tables={"x": sparse})
    losses = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = MODELS["gcn"](data.num_features, data.num_classes).double()
        place = hl.Placement(features=placement)  # type: ignore[arg-type]
        done = hl.Trainer(model, data, method, epochs=2, device=device, placement=place, show=False).fit()
        losses[device] = [epoch.loss for epoch in done.history]

    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-9)


def test_two_ranks_that_share_a_gpu_are_one_process_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOPLINE_BACKEND", "gloo")
    settings = LaunchSettings(devices=2, timeout_s=60)
    cases: list[dict[str, Any]] = [
        {"kind": "gcn", "settings": {"aggregation": "sequential"}, "dropout": 0.4},
        {"kind": "gat", "settings": {"aggregation": "sequential"}},
        {"kind": "sage", "settings": {"aggregation": "stored"}},
        {"kind": "gin", "settings": {"aggregation": "one_shot"}, "norm": "batch"},
        {"kind": "gat", "settings": {"trim": True}, "dropout": 0.4},
    ]
    for case, ours in zip(cases, run(full_batch_ranks.train_all, settings, cases, device="cuda"), strict=True):
        alone: dict[str, Any] = case | {"settings": {"aggregation": "sequential"}}
        expected = full_batch_ranks.train(World.alone(), **alone)
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert ours["weights"] == pytest.approx(expected["weights"], rel=1e-6, abs=1e-9)
    case = {"settings": {"compensate": True}, "dropout": 0.3}
    (ours,) = run(historical_ranks.train_all, settings, [case], False, device="cuda")
    assert ours["losses"] == pytest.approx(historical_ranks.alone(case)["losses"], rel=1e-9)
