"""GCN's norm on a block: full-graph degrees, unbiased under sampling, self-loops exact."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline import ops
from hopline.core import sampler
from hopline.core.batch import Batch, Block
from hopline.core.graph import Graph
from hopline.core.laws import LaborLaw
from hopline.core.sampler import HopKey, NeighborSampler, hop_keys
from hopline.core.tree_layout import TreeSampler
from hopline.nn import GNN
from hopline.nn.conv_adapter import convolve
from tests.support.grids import parametrize_pairwise
from tests.support.helpers import (
    assert_close,
    assert_same_gradients,
    backward,
    batch_of,
    conv_of,
    generator,
    graph_of,
    randint,
    randn,
    random_graph,
    stock,
)

NAMES = ["gcn", "gcn-improved", "gcn-no-loops"]
KINDS = ["plain", "weighted", "loops", "weighted-loops"]
SEEDS = torch.tensor([2, 0, 25, 49, 48, 13, 1])


def graph_like(kind: str, dtype: torch.dtype = torch.int64) -> Graph:
    return random_graph(weight="weighted" in kind, loops="loops" in kind, dtype=dtype)


def explicit_edges(conv: pyg.GCNConv, graph: Graph, block: Block) -> tuple[Tensor, Tensor]:
    """The block's edges with their weights, by hand: what GCNConv(normalize=False) must be given."""
    weights = graph.edge.get("weight", torch.ones(graph.num_edges)).tolist()
    src, dst = (row.tolist() for row in graph.edge_index())
    fill = 2.0 if conv.improved and "weight" in graph.edge else 1.0
    loop = [fill if conv.add_self_loops else 0.0] * graph.num_nodes
    degree = [0.0] * graph.num_nodes
    count = [0] * graph.num_nodes
    for u, v, w in zip(src, dst, weights, strict=True):
        count[v] += 1
        if u == v and conv.add_self_loops:
            loop[v] = w
        else:
            degree[v] += w
    degree = [d + l for d, l in zip(degree, loop, strict=True)]
    norm = [0.0 if d == 0 else d**-0.5 for d in degree]
    ids = block.src_ids.tolist()
    sampled = block.part.indptr.diff().tolist()
    edges = []
    values = []
    assert block.part.edge_ids is not None
    for (a, b), e in zip(block.edge_index.t().tolist(), block.part.edge_ids.tolist(), strict=True):
        u = ids[a]
        v = ids[b]
        if u == v and conv.add_self_loops:
            continue
        edges.append((a, b))
        values.append(norm[u] * weights[e] * norm[v] * count[v] / sampled[b])
    if conv.add_self_loops:
        for b in range(block.num_dst):
            edges.append((b, b))
            values.append(loop[ids[b]] * norm[ids[b]] ** 2)
    return torch.tensor(edges).t(), torch.tensor(values, dtype=torch.float64)


@parametrize_pairwise(name=NAMES, kind=KINDS, fanout=[1, 3, -1], replacement=[False, True])
def test_equals_stock_gcn_with_explicit_weights(name: str, kind: str, fanout: int, replacement: bool) -> None:
    graph = graph_like(kind, torch.int32)
    fanout = 4 if replacement and fanout < 0 else fanout
    block = batch_of(graph, None, (fanout,), SEEDS, replacement=replacement).blocks[0]
    conv = conv_of(name, 4, 3)
    assert isinstance(conv, pyg.GCNConv)
    stock_conv = pyg.GCNConv(4, 3, normalize=False).double()
    stock_conv.load_state_dict(conv.state_dict())
    edge_index, weight = explicit_edges(conv, graph, block)
    x, stock_x = (randn(block.num_src, 4).requires_grad_() for _ in range(2))
    ours = convolve(conv, x, block)
    expected = stock_conv(stock_x, edge_index, weight)[: block.num_dst]
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    assert_same_gradients(conv, stock_conv)
    assert x.grad is not None
    assert stock_x.grad is not None
    assert_close(x.grad, stock_x.grad)


@parametrize_pairwise(name=NAMES, kind=KINDS, dtype=[torch.int32, torch.int64])
def test_on_all_edges_equals_stock_gcn(name: str, kind: str, dtype: torch.dtype) -> None:
    graph = graph_like(kind, dtype)
    x = randn(50, 4)
    block = batch_of(graph, None, (-1,)).blocks[0]
    conv = conv_of(name, 4, 3)
    assert_close(convolve(conv, x, block), stock(conv, x, graph))


@pytest.mark.parametrize("kind", ["plain", "weighted-loops"])
@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "replace"])
def test_one_layer_is_unbiased(kind: str, replacement: bool) -> None:
    graph = graph_like(kind)
    x = randn(50, 4)
    conv = conv_of("gcn", 4, 2)
    full = stock(conv, x, graph).detach()
    with torch.no_grad():
        outputs = []
        for key in range(200):
            block = batch_of(graph, None, (3,), key=key, replacement=replacement).blocks[0]
            outputs.append(convolve(conv, x[block.src_ids], block))
    stacked = torch.stack(outputs)
    standard_error = stacked.std(0) / 200**0.5
    error = (stacked.mean(0) - full).abs()
    # An output that does not vary, as at a node without in-edges, must be exact. The mean of every other output
    # is within five standard errors of the full one.
    is_random = standard_error > 1e-9
    assert float(is_random.double().mean()) > 0.4
    assert float((error[is_random] / standard_error[is_random]).max()) < 5
    assert float(error[~is_random].max()) < 1e-9


def hubs_with_leaves(num_copies: int, one_way: bool = False, loops: bool = False) -> Graph:
    """Copies of a cycle of six hubs with four leaves each, both directions. Walks hub, leaf, hub weigh most, and a hub
    that drew its leaf draws it again if both layers read one list. one_way: the cycle; scaled sums are biased by walks
    that come back only where some neighbours lead back and others do not. loops: every hub has a self-loop, an edge
    like others."""
    cycle = torch.arange(6)
    leaves = torch.arange(6, 30)
    back = cycle[:0] if one_way else cycle
    src = torch.cat([cycle, (back + 1) % 6, leaves, (leaves - 6) // 4])
    dst = torch.cat([(cycle + 1) % 6, back, (leaves - 6) // 4, leaves])
    if loops:
        src, dst = torch.cat([src, cycle]), torch.cat([dst, cycle])
    first = 30 * torch.arange(num_copies)[:, None]
    return graph_of((first + src).view(-1), (first + dst).view(-1), 30 * num_copies)


CONVS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(1, 1, bias=False),
    "gcn-no-loops": lambda: pyg.GCNConv(1, 1, bias=False, add_self_loops=False),
    "graph": lambda: pyg.GraphConv(1, 1, bias=False),
    "sage": lambda: pyg.SAGEConv(1, 1, bias=False),
}


def linear_bias(
    num_layers: int, sample: Callable[[Tensor, int], tuple[Block, ...]], graph: Graph, kind: str = "gcn"
) -> float:
    """By how many standard errors the mean of sampled outputs is from the exact one, without an activation.

    Copies draw independently of each other, so each is a sample of its own."""
    model = GNN([CONVS[kind]() for _ in range(num_layers)], act=None).double()
    rows = 0.5 + torch.rand(30, 1, generator=generator(1), dtype=torch.float64)
    rows[6:] += 3  # of leaves: where all rows are alike, plain sums over what was drawn are as well
    x = rows.repeat(graph.num_nodes // 30, 1)
    seeds = torch.arange(graph.num_nodes)
    exact = x
    errors = []
    with torch.no_grad():
        for conv in model.convs:
            for weight in conv.parameters():
                torch.nn.init.ones_(weight)
            exact = conv(exact, graph.edge_index())
        for draw in range(16):
            blocks = tuple(block.with_scale_sums(kind == "graph") for block in sample(seeds, ops.derive_key(3, draw)))
            out = model(Batch(seeds, blocks, x[blocks[0].src_ids.clamp(min=0)], None))
            errors.append((out - exact).view(-1, 30).sum(1))
    error = torch.cat(errors)
    return float(error.mean() / (error.std() / error.numel() ** 0.5))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
def test_any_number_of_layers_is_unbiased(num_layers: int) -> None:
    graph = hubs_with_leaves(300)
    assert abs(linear_bias(num_layers, NeighborSampler(graph, (1,) * num_layers).sample, graph)) < 4


@pytest.mark.parametrize("kind", CONVS)
def test_any_number_of_layers_is_unbiased_on_trees(kind: str) -> None:
    graph = hubs_with_leaves(300)
    assert abs(linear_bias(3, TreeSampler(graph, (1, 1, 1)).sample, graph, kind)) < 4


@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "replace"])
@pytest.mark.parametrize("kind", ["graph", "sage"])
def test_sums_that_are_scaled_and_means_are_unbiased(kind: str, replacement: bool) -> None:
    graph = hubs_with_leaves(300, one_way=True)
    sample = NeighborSampler(graph, (2, 2, 2), replace=replacement).sample
    assert abs(linear_bias(3, sample, graph, kind)) < 4
    assert abs(linear_bias(4, NeighborSampler(graph, (2,) * 4, replace=replacement).sample, graph, kind)) < 4


@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "replace"])
@pytest.mark.parametrize("kind", CONVS)
def test_layers_that_sample_self_loops_of_the_data_are_unbiased(kind: str, replacement: bool) -> None:
    graph = hubs_with_leaves(300, loops=True)
    for fanouts in ((1, 1), (2, 1, 1)):
        sample = NeighborSampler(graph, fanouts, replace=replacement).sample
        assert abs(linear_bias(len(fanouts), sample, graph, kind)) < 4, fanouts


@pytest.mark.parametrize("kind", CONVS)
def test_a_self_loop_that_two_layers_draw_by_one_key_biases_all_but_gcn(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would have found where such nodes draw by the key of the pair too. GCN adds its loops."""
    monkeypatch.setattr(sampler, "hop_keys", lambda *arguments: [HopKey(k, False) for k, _ in hop_keys(*arguments)])
    graph = hubs_with_leaves(300, loops=True)
    bias = abs(linear_bias(3, NeighborSampler(graph, (2, 1, 1)).sample, graph, kind))
    assert bias < 4 if kind == "gcn" else bias > 8


def dense_copies(num_copies: int) -> Graph:
    """Copies of a graph of 30 nodes, most of which have in-neighbours in common with their in-neighbours. It has
    double edges, and an edge array "w"."""
    src, dst = randint(0, 8, 180, seed=1), randint(0, 30, 180, seed=2)
    src, dst = src[src != dst], dst[src != dst]
    first = 30 * torch.arange(num_copies)[:, None]
    w = 0.1 + 3 * torch.rand(src.numel(), generator=generator(3), dtype=torch.float64)
    return graph_of((first + src).view(-1), (first + dst).view(-1), 30 * num_copies, w=w.repeat(num_copies))


@pytest.mark.parametrize("law", [{"weight": "w"}, {"law": "labor"}], ids=["weight", "labor"])
@pytest.mark.parametrize("kind", ["gcn", "gcn-no-loops", "graph"])
def test_sums_of_other_laws_are_unbiased(kind: str, law: dict[str, Any]) -> None:
    graph = dense_copies(300)
    for fanouts in ((2,), (2, 1), (1, 2, 2)):
        assert abs(linear_bias(len(fanouts), NeighborSampler(graph, fanouts, **law).sample, graph, kind)) < 4, fanouts


def test_layers_that_share_the_numbers_of_sources_are_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 draws node 1 where this has a smaller number than node 2. By the same numbers, node 1 then draws node 6
    too often, and node 2 too rarely."""
    src, dst = torch.tensor([1, 2, 2, 6, 7]), torch.tensor([0, 0, 1, 1, 2])
    first = 30 * torch.arange(300)[:, None]
    graph = graph_of((first + src).view(-1), (first + dst).view(-1), 9000)

    def bias() -> float:
        return abs(linear_bias(2, NeighborSampler(graph, (1, 1), law="labor").sample, graph, "graph"))

    assert bias() < 4
    monkeypatch.setattr(LaborLaw, "key_per_layer", False)
    assert bias() > 8


def test_three_layers_that_read_one_list_are_biased() -> None:
    """What the tests above would have found where all layers draw by one key."""
    graph = hubs_with_leaves(300)
    assert linear_bias(3, NeighborSampler(graph, (1, 1, 1), one_list=True).sample, graph) > 8
    graph = hubs_with_leaves(300, one_way=True)
    for kind in ("graph", "sage"):
        one_list = NeighborSampler(graph, (2, 2, 2), replace=True, one_list=True)
        assert linear_bias(3, one_list.sample, graph, kind) > 4, kind


def test_gcn2_equals_stock() -> None:
    graph = random_graph(loops=True)
    x = randn(50, 4)
    x0 = randn(50, 4, seed=3)
    torch.manual_seed(0)
    conv = pyg.GCN2Conv(4, alpha=0.2, theta=0.5, layer=2).double()
    block = batch_of(graph, None, (-1,), SEEDS).blocks[0]
    ours = convolve(conv, x[block.src_ids], block, x0[block.dst_ids])
    assert_close(ours, conv(x, x0, graph.edge_index())[SEEDS])


def test_a_cached_gcn_does_not_keep_the_edges_of_a_block() -> None:
    graph = random_graph()
    x = randn(50, 4)
    conv = pyg.GCNConv(4, 3, cached=True).double()
    for key in (1, 2):
        block = batch_of(graph, None, (-1,), SEEDS, key=key).blocks[0]
        assert_close(convolve(conv, x[block.src_ids], block), stock(pyg_copy(conv), x, graph)[SEEDS])


def pyg_copy(conv: pyg.GCNConv) -> pyg.GCNConv:
    other = pyg.GCNConv(4, 3).double()
    other.load_state_dict(conv.state_dict())
    return other


def test_on_a_graph_without_edges_equals_stock_gcn() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    graph = graph_of(nothing, nothing, 5)
    x = randn(5, 4)
    for name in NAMES:
        conv = conv_of(name, 4, 3)
        block = batch_of(graph, None, (2,)).blocks[0]
        assert_close(convolve(conv, x, block), stock(conv, x, graph))


def test_degrees_are_forgotten_with_the_graph() -> None:
    graph = graph_like("weighted-loops")
    block = batch_of(graph, None, (2,)).blocks[0]
    convolve(conv_of("gcn", 4, 3), randn(block.num_src, 4), block)
    gone = weakref.ref(graph)
    del graph, block
    gc.collect()
    assert gone() is None
