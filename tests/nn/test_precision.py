"""A first conv without parameters computes in the model's precision: in float64, every mode is plain PyG to 1e-12."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import hopline as hl
from tests.support.helpers import dataset_of, plain_gnn, randn, random_graph

DATA = dataset_of(random_graph(num_nodes=80, num_edges=500, loops=True), randn(80, 6))
FIRST = {
    "simple": lambda: pyg.SimpleConv("mean"),
    "appnp": lambda: pyg.APPNP(1, 0.2),
}
FULL = [("sweep", False), ("sweep", True), *((way, False) for way in ("sequential", "stored", "one_shot"))]


def data_of(stored: torch.dtype) -> hl.Dataset:
    return replace(DATA, tables={"x": hl.extend.TensorTable(DATA.x[torch.arange(80)].to(stored))})


def model_of(first: str) -> hl.nn.GNN:
    torch.manual_seed(0)
    return hl.nn.GNN([FIRST[first](), pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)]).double()


def expected_of(model: hl.nn.GNN, data: hl.Dataset) -> tuple[Tensor, list[Tensor | None]]:
    """(outputs, gradients) of plain PyG in float64."""
    model.zero_grad()
    out = plain_gnn(model, data.x[torch.arange(80)].double(), data.graph)
    torch.nn.functional.cross_entropy(out[data.train_ids], data.labels[data.train_ids]).backward()
    return out.detach(), [p.grad for p in model.parameters()]


def gradients_of(model: hl.nn.GNN, data: hl.Dataset, method: hl.extend.Method) -> list[Tensor | None]:
    """Of one step over all training nodes."""
    work: Any = hl.Trainer(model, data, method, epochs=1, show=False).work
    model.train()
    model.zero_grad()
    (unit,) = work.units(1)
    unit.forward_backward(data.train_ids.numel())
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("aggregation", ["sequential", "stored", "one_shot"])
def test_full_batch_of_a_conv_without_weights_equals_pyg(aggregation: Any):
    torch.manual_seed(0)
    model = hl.nn.GNN([pyg.LGConv(), pyg.SAGEConv(6, 3)]).double()
    method = hl.FullBatch(num_shards=4, partition="random", aggregation=aggregation)
    data = data_of(torch.float64)
    ours = gradients_of(model, data, method)
    torch.testing.assert_close(ours, expected_of(model, data)[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("stored", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("first", FIRST)
class TestFloat64:
    @pytest.mark.parametrize(("aggregation", "trim"), FULL)
    def test_full_batch(self, first: str, stored: torch.dtype, aggregation: Any, trim: bool):
        model = model_of(first)
        data = data_of(stored)
        method = hl.FullBatch(num_shards=4, partition="random", aggregation=aggregation, trim=trim)
        ours = gradients_of(model, data, method)
        torch.testing.assert_close(ours, expected_of(model, data)[1], rtol=1e-11, atol=1e-13)

    def test_sampled_and_historical(self, first: str, stored: torch.dtype):
        model = model_of(first)
        data = data_of(stored)
        methods: list[hl.extend.Method] = [
            hl.Sampled(fanouts=(-1, -1, -1), batch_size=80, workers=0),
            hl.Historical(num_parts=3, parts_per_batch=3, partition="random"),
        ]
        for method in methods:
            ours = gradients_of(model, data, method)
            torch.testing.assert_close(ours, expected_of(model, data)[1], rtol=1e-11, atol=1e-13)

    def test_inference(self, first: str, stored: torch.dtype):
        model = model_of(first).eval()
        data = data_of(stored)
        expected = expected_of(model, data)[0]
        for ids in (None, torch.tensor([3, 79, 5])):
            for chunk in (None, 20):
                options: dict[str, Any] = {} if chunk is None else {"chunk_edges": chunk}
                ours = hl.infer.exact(model, data, ids, **options)
                assert ours.dtype == torch.float64
                torch.testing.assert_close(ours, expected if ids is None else expected[ids], rtol=1e-11, atol=1e-13)
