"""Sequential aggregation: memory it holds, rows it fetches again, and random draws that repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hopline.core.partition import make_partition
from hopline.shards.convs import sequential_aggregation
from hopline.shards.convs.edges import ConvEdges
from hopline.shards.convs.messages import Inputs, plan
from hopline.shards.convs.runner import ShardConvs, run_conv
from hopline.shards.convs.sequential_aggregation import aggregate, profile_messages
from hopline.shards.layout import contiguous_layout, shard_layouts
from hopline.shards.transports import LocalTransport
from tests.shards.test_transports import Wires
from tests.support.helpers import mlp, randn, random_graph

GRAPH = random_graph(30, 150)
LAYOUT = contiguous_layout(GRAPH, torch.tensor([0, 9, 20, 30]))


def convs(**options: Any) -> ShardConvs:
    return ShardConvs.of(LAYOUT, **{"chunk_bytes": 2000, **options})


NO_REFETCH = {
    "sage-mean": (lambda: pyg.SAGEConv(4, 4), True),
    "sage-max": (lambda: pyg.SAGEConv(4, 4, aggr="max"), False),
    "sage-std": (lambda: pyg.SAGEConv(4, 4, aggr="std"), False),
    "gcn": (lambda: pyg.GCNConv(4, 4), True),
    "gin": (lambda: pyg.GINConv(mlp(4, 4, 4)), True),
    "tag": (lambda: pyg.TAGConv(4, 4), True),
    "gat": (lambda: pyg.GATConv(4, 4), False),
    "gine": (lambda: pyg.GINEConv(mlp(4, 4, 4)), False),
    "edge": (lambda: pyg.EdgeConv(mlp(8, 4, 4)), False),
    "edge-linear": (lambda: pyg.EdgeConv(torch.nn.Linear(8, 4), aggr="sum"), False),
}


@pytest.mark.parametrize("name", NO_REFETCH)
def test_rows_are_fetched_again_only_where_gradients_depend_on_them(name: str) -> None:
    make, never = NO_REFETCH[name]
    edge_rows = {"attr": randn(150, 4)} if name == "gine" else {}
    b = convs(edge_rows=edge_rows)
    run_conv(make().double(), randn(30, 4).requires_grad_(), b).sum().backward()
    traffic = b.transport.traffic
    assert traffic["forward"] == traffic["gradient"] > 0
    assert traffic["refetch"] == (0 if never else traffic["forward"])


def test_a_weight_with_a_gradient_needs_the_rows() -> None:
    for needs in (False, True):
        b = convs(edge_rows={"weight": torch.ones(150, dtype=torch.float64).requires_grad_(needs)})
        run_conv(pyg.GraphConv(4, 4).double(), randn(30, 4).requires_grad_(), b).sum().backward()
        assert (b.transport.traffic["refetch"] > 0) == needs


class MaskConv(pyg.SAGEConv):
    """A conv whose backward pass needs only a mask of its source rows."""

    def message(self, x_j: Tensor) -> Tensor:
        return torch.where(x_j > 0.3, x_j, -2 * x_j)


def test_a_mask_made_of_the_rows_is_seen() -> None:
    b = convs()
    conv = MaskConv(4, 4).double()
    x, other = (randn(30, 4).requires_grad_() for _ in range(2))
    run_conv(conv, x, b).square().sum().backward()
    conv(other, GRAPH.edge_index()).square().sum().backward()
    assert b.transport.traffic["refetch"] == b.transport.traffic["forward"]
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_a_frozen_layer_sends_no_gradients() -> None:
    b = convs()
    conv = pyg.EdgeConv(mlp(8, 4, 4)).double()
    run_conv(conv, randn(30, 4), b).sum().backward()  # the rows have no gradient, the parameters have
    assert b.transport.traffic["gradient"] == 0
    assert all(p.grad is not None for p in conv.parameters())
    with torch.no_grad():
        out = run_conv(conv, randn(30, 4), b)
    assert not out.requires_grad


def count_saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of the tensors that autograd saves for backward."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(sizes.values())


@pytest.mark.parametrize("make", [lambda: pyg.GATConv(4, 8, heads=2), lambda: pyg.SAGEConv(4, 8, aggr="max")])
def test_nothing_with_a_row_per_edge_is_kept(make: Callable[[], Any]) -> None:
    """Ten times the edges: plain PyG keeps ten times as much, and the blocks the same."""
    x = randn(30, 4).requires_grad_()
    sizes = []
    for num_edges in (300, 3000):
        graph = random_graph(30, num_edges)
        b = ShardConvs.of(contiguous_layout(graph, torch.tensor([0, 9, 20, 30])), chunk_bytes=2000)
        conv = make().double()
        run_conv(conv, x, b)
        ours = count_saved_bytes(lambda: run_conv(conv, x, b))  # noqa: B023
        plain = count_saved_bytes(lambda: conv(x, graph.edge_index()))  # noqa: B023
        sizes.append((ours, plain))
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] > 5 * sizes[0][1]


class LargestTensor(TorchDispatchMode):
    """Measures the size of the largest floating-point tensor, in numbers, that any operation makes."""

    num_numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.num_numbers = max(self.num_numbers, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("aggr", ["mean", "max", "std", "softmax"])
def test_no_matrix_with_a_row_per_edge_of_a_part_is_made(aggr: str) -> None:
    graph = random_graph(30, 3000)
    b = ShardConvs.of(contiguous_layout(graph, torch.tensor([0, 15, 30])), chunk_bytes=8000)
    conv = pyg.SAGEConv(4, 8, aggr=aggr, project=True).double()
    x = randn(30, 4).requires_grad_()
    run_conv(conv, x, b)
    with LargestTensor() as largest:
        run_conv(conv, x, b).sum().backward()
    assert 30 * 8 <= largest.num_numbers <= 8000 / 8  # own rows, or a chunk
    with LargestTensor() as largest:
        conv(x, graph.edge_index()).sum().backward()
    assert largest.num_numbers >= 3000 * 4


def test_dropout_draws_what_plain_pyg_draws() -> None:
    """With one part and one chunk the edges are in plain PyG's order."""
    b = ShardConvs.of(contiguous_layout(GRAPH, torch.tensor([0, 30])))
    for conv in (pyg.GATConv(4, 3, dropout=0.5, add_self_loops=False), pyg.TransformerConv(4, 3, dropout=0.5)):
        conv = conv.double()
        results = []
        for run in (lambda x: run_conv(conv, x, b), lambda x: conv(x, GRAPH.edge_index())):  # noqa: B023
            x = randn(30, 4).requires_grad_()
            conv.zero_grad()
            torch.manual_seed(3)
            out = run(x)
            next_draws = torch.rand(2)  # both have drawn as often
            torch.rand(5)  # backward does not depend on where the generator is by then
            (out * randn(30, 3, seed=1)).sum().backward()
            results.append(
                [out.detach(), next_draws, x.grad, *(p.grad.clone() for p in conv.parameters() if p.grad is not None)]
            )
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_dropout_is_the_same_in_backward_for_many_chunks() -> None:
    """With equal logits the output is linear in the rows, so that its product with the gradient is the output."""
    conv = pyg.GATConv(4, 3, dropout=0.5, bias=False).double()
    with torch.no_grad():
        conv.att_src.zero_()
        conv.att_dst.zero_()
    x = randn(30, 4).requires_grad_()
    w = randn(30, 3, seed=1)
    total = (run_conv(conv, x, convs(chunk_bytes=700)) * w).sum()
    before = torch.get_rng_state()
    total.backward()
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close((x.grad * x).sum(), total.detach())  # type: ignore[operator]
    other = (run_conv(conv, x, convs()) * w).sum()
    assert not torch.allclose(other, total)  # drawn anew each time


def test_backward_is_that_of_the_mode_of_forward() -> None:
    gradients = []
    for mode in (True, False):
        conv = pyg.EdgeConv(torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.5)), aggr="sum").double()
        with torch.no_grad():
            for p in conv.parameters():
                p.fill_(0.5)
        x = randn(30, 4).requires_grad_()
        torch.manual_seed(2)
        out = run_conv(conv, x, convs())
        conv.train(mode)
        out.sum().backward()
        assert conv.nn[1].training == mode  # type: ignore[index]
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 30])
def test_no_result_depends_on_chunks_or_depth(depth: int, chunk_bytes: int) -> None:
    x = randn(30, 4)
    results = []
    conv = pyg.GATv2Conv(4, 3).double()
    for b in (convs(), convs(depth=depth, chunk_bytes=chunk_bytes)):
        h = x.clone().requires_grad_()
        out = run_conv(conv, h, b)
        out.square().sum().backward()
        results.append((out, h.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_a_look_tells_kinds_and_bytes() -> None:
    conv = pyg.SAGEConv(4, 4, aggr=["max", "std"]).double()
    inputs = Inputs()
    x = randn(30, 4).requires_grad_()
    call = plan(conv, "message", {"x": (x, x)}, inputs, 150, 30)
    state = torch.get_rng_state()
    profile = profile_messages(conv, call, inputs)
    assert [kind.how for kind in profile.specs] == ["max", "sum", "sum"]
    assert profile.specs[0].shape == (4,)
    assert profile.needs_sources
    assert profile.edge_bytes >= 3 * 4 * 8 / 2  # x, its square and their messages; the first may be one tensor
    assert torch.equal(torch.get_rng_state(), state)


def test_messages_in_half_precision_are_drawn_again_in_it() -> None:
    conv = pyg.EdgeConv(torch.nn.Linear(8, 4))
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = run_conv(conv, x, convs())
        plain = conv(x, GRAPH.edge_index())
    assert out.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(out, plain)
    (ours,), (theirs,) = (torch.autograd.grad(o.float().square().sum(), [x]) for o in (out, plain))
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_aggregate_is_what_propagate_computes() -> None:
    conv = pyg.SAGEConv(4, 4, aggr="max").double()
    x = randn(30, 4)
    ours = aggregate(conv, {"x": (x, x)}, ConvEdges.of(LAYOUT), LocalTransport(LAYOUT), 1, 2000)
    assert torch.equal(ours, conv.propagate(GRAPH.edge_index(), x=(x, x), size=None))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_are_asked_for_when_the_gradients_before_have_arrived(depth: int):
    layout = shard_layouts(GRAPH, make_partition(GRAPH, 5, "random", seed=1))[1]
    transport = Wires(layout)
    of_shard = ShardConvs.of(layout, transport, chunk_bytes=1000, depth=depth)
    out = run_conv(pyg.GATConv(4, 4).double(), randn(layout.num_own, 4).requires_grad_(), of_shard)
    out.sum().backward()
    assert not transport.under_way.total()
    # Up to a depth of 1 either rows or gradients take memory beside those of the part at hand.
    assert (("refetch", "gradient") in transport.beside) == (depth > 1)
    assert (("gradient", "refetch") in transport.beside) == (depth > 0)  # rows come while a part is at work


def test_chunks_shrink_with_the_shard(monkeypatch: pytest.MonkeyPatch):
    """Half of the own rows at most, but no less than a size at which calls cost nothing."""
    limits: list[int] = []
    plain = ConvEdges.chunks

    def chunks(self: ConvEdges, k: int, max_edges: int) -> Any:
        if (self.num_dst, k) == (30, 0):  # and not of the graph on which a conv is tried
            limits.append(max_edges)
        return plain(self, k, max_edges)

    monkeypatch.setattr(ConvEdges, "chunks", chunks)
    for min_bytes in (1 << 20, 100):
        monkeypatch.setattr(sequential_aggregation, "MIN_CHUNK_BYTES", min_bytes)
        for chunk_bytes in (200, 10000, 1 << 22):
            run_conv(pyg.SAGEConv(4, 4).double(), randn(30, 4), convs(chunk_bytes=chunk_bytes))
    edge_bytes = 10000 // limits[1]
    assert limits == [max_bytes // edge_bytes for max_bytes in (200, 10000, 1 << 20, 200, 480, 480)]
