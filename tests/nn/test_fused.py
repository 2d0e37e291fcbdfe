"""Fused convs build no matrix with a row per edge, and read tables themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hopline.core.row_handles import ReducedRows, Rows
from hopline.core.sampler import NeighborSampler
from hopline.nn.conv_adapter import convolve
from hopline.nn.conv_facts import facts_of, is_fused, reads_rows
from hopline.nn.fused import project, read_ahead, run_fused
from hopline.tables import SparseTable, TensorTable
from tests.support.helpers import CONVS, assert_close, backward, batch_of, conv_of, randn, random_graph, stock

WIDTH = 16
FUSED = ["sage-mean", "sage-max", "sage-sum", "gcn", "gcn-no-loops", "gin", "graph", "graph-mean"]


class LargestFloats(TorchDispatchMode):
    """Measures the size of the largest floating-point tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        self.largest = max([self.largest, *sizes])
        return out


def measure_largest_tensor(name: str, *, fused: bool) -> tuple[int, int]:
    """(numbers in the largest tensor made in forward and backward, edges x features)."""
    graph = random_graph(60, 6000, weight=True)
    block = batch_of(graph, None, (-1,)).blocks[0]
    conv = conv_of(name, WIDTH, WIDTH)
    x = randn(60, WIDTH).requires_grad_()
    convolve(conv, x, block)  # probed before
    with LargestFloats() as sizes:
        out = convolve(conv, x, block) if fused else stock(conv, x, block)
        backward(out)
    return sizes.largest, block.num_edges * WIDTH


@pytest.mark.parametrize("name", FUSED)
def test_no_tensor_has_a_row_per_edge(name: str) -> None:
    largest, per_edge = measure_largest_tensor(name, fused=True)
    assert largest < per_edge / 8


@pytest.mark.parametrize("name", ["sage-mean", "gcn"])
def test_stock_pyg_has_a_tensor_with_a_row_per_edge(name: str) -> None:
    largest, per_edge = measure_largest_tensor(name, fused=False)
    assert largest >= per_edge


def test_autograd_keeps_nothing_with_a_row_per_edge() -> None:
    graph = random_graph(60, 6000)
    block = batch_of(graph, None, (-1,)).blocks[0]
    conv = conv_of("sage-max", WIDTH, WIDTH)
    x = randn(60, WIDTH).requires_grad_()
    saved_sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved_sizes.append(t.numel()), t)[1], lambda t: t):
        convolve(conv, x, block)
    assert 0 < max(saved_sizes) <= block.num_edges


@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "gin", "graph"])
def test_a_handle_is_read_straight_from_the_table(name: str) -> None:
    """The sources' rows go into the reduction, the destinations' own beside it where one product takes both."""
    reads = []

    class Watched(TensorTable):
        def read(self, ids: Tensor) -> Tensor:
            reads.append(ids.numel())
            return super().read(ids)

    graph = random_graph()
    x = randn(50, 4)
    block = batch_of(graph, None, (3,), torch.arange(6)).blocks[0]
    conv = conv_of(name, 4, 3)
    ours = convolve(conv, Rows(Watched(x), block.src_ids), block)
    assert reads == ([6] if name.startswith("gin") else [])
    assert_close(ours, convolve(conv, x[block.src_ids], block), 1e-14)


def test_sage_gcn_gin_and_graph_convs_are_fused() -> None:
    fused = {name for name in CONVS if is_fused(conv_of(name, 4, 3))}
    assert fused == {name for name in CONVS if name.split("-")[0] in ("sage", "gcn", "gin", "graph")} - {"sage-std"}
    assert is_fused(pyg.GCN2Conv(4, 0.1))


def test_which_convs_read_rows() -> None:
    assert {n for n in CONVS if reads_rows(conv_of(n, 4, 3))} == {
        "sage-mean",
        "sage-max",
        "sage-sum",
        "sage-normalize",
        "sage-no-root",
        "gin",
        "graph",
        "graph-mean",
        "graph-max",
    }


@pytest.mark.parametrize("linear", [nn.Linear(6, 3), nn.Linear(6, 3, bias=False), pyg.Linear(6, 3)], ids=str)
def test_sparse_rows_are_projected_without_being_made_dense(linear: nn.Module) -> None:
    linear = linear.double()
    x = randn(20, 6) * (randn(20, 6, seed=4) > 0)
    rows = Rows(SparseTable.from_dense(x), torch.tensor([3, 19, 3, 0]))
    ours = project(linear, rows)
    assert_close(ours, linear(x[rows.ids]))
    backward(ours)
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    our_gradient = weight.grad
    weight.grad = None
    backward(linear(x[rows.ids]))
    assert our_gradient is not None
    assert weight.grad is not None
    assert_close(our_gradient, weight.grad)


def test_gcn_on_sparse_features_never_reads_them_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph()
    x = randn(50, 6)
    block = batch_of(graph, None, (3,)).blocks[0]
    conv = conv_of("gcn", 6, 3)
    expected = convolve(conv, x[block.src_ids], block)
    monkeypatch.setattr(SparseTable, "read", None)
    assert_close(convolve(conv, Rows(SparseTable.from_dense(x), block.src_ids), block), expected)


@pytest.mark.parametrize("name", ["sage-sum", "gin", "graph", "gcn-no-norm"])
def test_scaled_sums_multiply_each_destination_by_degree_over_sampled(name: str) -> None:
    graph = random_graph(weight=True)
    x = randn(50, 4)
    conv: Any = conv_of(name, 4, 3)
    plain = batch_of(graph, None, (3,)).blocks[0]
    scaled = batch_of(graph, None, (3,), scale_sums=True).blocks[0]
    expected: list[Tensor] = []

    def sums(weight: Tensor | None) -> Tensor:
        out = torch.zeros(plain.num_dst, 4, dtype=torch.float64)
        rows = x[plain.src_ids][plain.edge_index[0]]
        return out.index_add_(0, plain.edge_index[1], rows if weight is None else rows * weight[:, None])

    weight = plain.edge["weight"] if name in ("graph", "gcn-no-norm") else None
    own_rows = x[plain.dst_ids]
    for factor in (torch.ones(50, dtype=torch.float64), plain.sampling_factor):
        total = factor[:, None] * sums(weight)
        if name == "gin":
            expected.append(conv.nn(total + (1 + conv.eps) * own_rows))
        elif name == "graph":
            expected.append(conv.lin_rel(total) + conv.lin_root(own_rows))
        elif name == "gcn-no-norm":
            expected.append(conv.lin(total) + conv.bias)
        else:
            expected.append(conv.lin_l(total) + conv.lin_r(own_rows))
    assert_close(convolve(conv, x[plain.src_ids], plain), expected[0])
    assert_close(convolve(conv, x[plain.src_ids], scaled), expected[1])


@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "gcn", "gcn-improved"])
def test_scaled_sums_leave_means_maxima_and_gcn_alone(name: str) -> None:
    graph = random_graph()
    x = randn(50, 4)
    conv = conv_of(name, 4, 3)
    plain, scaled = (batch_of(graph, None, (3,), scale_sums=s).blocks[0] for s in (False, True))
    rows = x[plain.src_ids]
    assert torch.equal(convolve(conv, rows, plain), convolve(conv, rows, scaled))


def test_scaled_sums_are_refused_by_name_where_nothing_is_summed() -> None:
    block = batch_of(random_graph(), None, (3,), scale_sums=True).blocks[0]
    with pytest.raises(ValueError, match=r"GATConv .*method\.scale_sums=false"):
        convolve(conv_of("gat", 4, 3), randn(block.num_src, 4), block)


@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "sage-sum", "gin", "graph", "gcn"])
def test_rows_read_ahead_change_no_bit(name: str) -> None:
    graph = random_graph()
    rows = TensorTable(randn(graph.num_nodes, 6))
    conv = conv_of(name, 6, 4)
    (block,) = NeighborSampler(graph, (3,)).sample(torch.tensor([7, 3, 11]), 5)
    handle = Rows(rows, block.src_ids)
    ahead = read_ahead(conv, handle, block)
    assert isinstance(ahead, ReducedRows)
    facts = facts_of(conv)
    assert torch.equal(run_fused(conv, facts, ahead, None, block), run_fused(conv, facts, handle, None, block))


def test_what_depends_on_weights_or_scaling_is_not_read_ahead() -> None:
    graph = random_graph(weight=True)
    rows = TensorTable(randn(graph.num_nodes, 6))
    (block,) = NeighborSampler(graph, (3,)).sample(torch.tensor([7, 3]), 5)
    handle = Rows(rows, block.src_ids)
    assert read_ahead(conv_of("graph", 6, 4), handle, block) is handle
    assert read_ahead(conv_of("sage-sum", 6, 4), handle, replace(block, scale_sums=True)) is handle


@pytest.mark.parametrize(("width_in", "width_out", "reduces_first"), [(WIDTH, WIDTH, True), (8 * WIDTH, 2, False)])
def test_a_gcn_multiplies_where_it_is_cheaper_and_gives_what_pyg_does(
    width_in: int, width_out: int, reduces_first: bool
) -> None:
    graph = random_graph(60, 600, weight=True)
    (block,) = NeighborSampler(graph, (-1,)).sample(torch.arange(20), 0)
    assert block.num_src > 2 * block.num_dst
    conv = conv_of("gcn", width_in, width_out)
    x = randn(60, width_in).requires_grad_()
    expected = stock(conv, x, graph)[:20]
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    rows_multiplied: list[int] = []
    product = torch.nn.functional.linear

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is product:
                rows_multiplied.append(args[0].size(0))
            return func(*args, **(kwargs or {}))

    with Watch():
        ours = convolve(conv, x[block.src_ids], block)
    assert rows_multiplied[-1] == (block.num_dst if reduces_first else block.num_src)
    assert_close(ours, expected)
    assert_close(torch.autograd.grad(ours.square().sum(), x)[0], expected_grad)
