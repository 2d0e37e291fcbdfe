"""Models on trees by the GPU's kernels (or Triton's interpreter), against the CPU's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

pytest.importorskip("triton")

from hopline.core.batch import Batch
from hopline.core.tree_layout import TreeBlock, TreeRows, TreeSampler
from hopline.nn import GNN
from hopline.nn.tree_layers import PendingRows, compute_dtype, pending_rows
from hopline.tables import TensorTable
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randn, random_graph, twin

pytestmark = RUNS_ON_GPU
X = randn(50, 6)
DEVICE = torch.device(KERNEL_DEVICE)


@pytest.fixture
def _pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks say that they are on a GPU: in the interpreter, CPU tensors stand for a GPU's."""
    on_device = property(lambda block: block.tree.nodes.device.type == DEVICE.type)
    monkeypatch.setattr(TreeBlock, "on_gpu", on_device)


def tree_batch(graph: Any, dtype: torch.dtype = torch.float64) -> Batch:
    seeds = torch.arange(8)
    blocks = tuple(b.to(DEVICE) for b in TreeSampler(graph, (8, 3)).sample(seeds, 5))
    table = TensorTable(X.to(DEVICE, dtype))
    return Batch(seeds.to(DEVICE), blocks, TreeRows(table, blocks[0]), (seeds % 3).to(DEVICE), key=5)


MODELS = {
    "sage": lambda: GNN([pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)]),
    "sage sum, no root": lambda: GNN([pyg.SAGEConv(6, 8, aggr="sum"), pyg.SAGEConv(8, 3, root_weight=False)]),
    "sage max": lambda: GNN([pyg.SAGEConv(6, 8, aggr="max"), pyg.SAGEConv(8, 3, aggr="max")]),
    "projected": lambda: GNN([pyg.SAGEConv(6, 8, project=True), pyg.SAGEConv(8, 3)]),
    "gin": lambda: GNN([pyg.GINConv(nn.Linear(6, 8)), pyg.GINConv(nn.Linear(8, 3), train_eps=True)]),
    "graph": lambda: GNN([pyg.GraphConv(6, 8), pyg.GraphConv(8, 3)]),
    "gcn": lambda: GNN([pyg.GCNConv(6, 8), pyg.GCNConv(8, 3, bias=False)]),
    "transformer": lambda: GNN([pyg.TransformerConv(6, 8), pyg.SAGEConv(8, 3)], norm="batch"),
    "jumping": lambda: GNN([pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 8)], jk="cat", head=nn.Linear(16, 3), residual=True),
}


@parametrize_kernel(
    [*((name, False) for name in MODELS), ("graph", True), ("gcn", True)], name=[*MODELS], weight=[False, True]
)
def test_kernels_of_a_gpu_give_what_the_cpu_does(name: str, weight: bool, request: pytest.FixtureRequest):
    torch.manual_seed(0)
    model = MODELS[name]().double().to(DEVICE)
    copy = twin(model).cpu()
    graph = random_graph(weight=weight, loops=True)
    seeds = torch.arange(8)
    blocks = TreeSampler(graph, (8, 3)).sample(seeds, 5)
    expected = copy(Batch(seeds, blocks, TreeRows(TensorTable(X), blocks[0]), None, key=5))
    model(tree_batch(graph))  # finds how its convs are called, which is tried on the host
    request.getfixturevalue("_pretend_gpu")
    ours = model(tree_batch(graph))
    torch.testing.assert_close(ours.cpu(), expected, rtol=1e-9, atol=1e-11)
    weights = randn(*expected.shape, seed=3)
    (ours * weights.to(DEVICE)).sum().backward()
    (expected * weights).sum().backward()
    for parameter, copied in zip(model.parameters(), copy.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), copied.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("_pretend_gpu")
def test_pending_rows_can_be_read_by_whoever_needs_them():
    torch.manual_seed(0)
    conv = pyg.SAGEConv(6, 8).bfloat16().to(DEVICE)
    batch = tree_batch(random_graph(), torch.float32)
    assert isinstance(batch.x, TreeRows)
    pending = pending_rows(batch.x, batch.blocks[0], "mean", (conv.lin_l, conv.lin_r), 0.0, None)
    assert isinstance(pending, PendingRows)
    exact = twin(conv).double()
    expected = GNN([exact]).layer(0, GNN([exact]).encode(batch.x, batch.input_keys, None), batch.blocks[0]).h
    assert isinstance(expected, torch.Tensor)
    assert batch.blocks[0].present is not None
    is_present = batch.blocks[0].present[: expected.size(0)]
    ours = pending.read()
    assert ours.shape == pending.shape == expected.shape
    error = (ours.double() - expected.relu())[is_present].norm() / expected.relu()[is_present].norm()
    assert error < 1e-2


def test_products_run_in_the_precision_of_autocast():
    assert compute_dtype(torch.float64) == torch.float64
    assert compute_dtype(torch.float32) == torch.float32
    if torch.cuda.is_available():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert compute_dtype(torch.float64) == torch.float64
            assert compute_dtype(torch.float32) == torch.bfloat16
