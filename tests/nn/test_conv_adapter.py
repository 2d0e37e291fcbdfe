"""Any PyG conv on a block: equal to stock PyG on the same edges, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import aggr
from torch_geometric.utils import add_self_loops

from hopline.core.graph import Graph
from hopline.core.row_handles import Rows
from hopline.nn.conv_adapter import Layout, NeedsWholeGraph, calling_convention, convolve, edge_arguments, takes_x0
from hopline.nn.probe import BATCHES, block_of, probe_graph, tree_of
from hopline.tables import TensorTable
from tests.support.grids import parametrize_pairwise
from tests.support.helpers import (
    CONVS,
    NORMALISED,
    assert_close,
    assert_same_gradients,
    backward,
    batch_of,
    conv_of,
    mlp,
    randn,
    random_graph,
    stock,
    twin,
)

SEEDS = torch.tensor([0, 5, 2, 48, 49, 31])
OTHERS = [name for name in CONVS if name not in NORMALISED]


@parametrize_pairwise(name=OTHERS, fanout=[1, 3], dtype=[torch.int32, torch.int64])
def test_on_sampled_edges_equals_stock_pyg_on_the_same_edges(name: str, fanout: int, dtype: torch.dtype) -> None:
    graph = random_graph(dtype=dtype, weight=True, attr=2, loops=True)
    block = batch_of(graph, None, (fanout,), SEEDS).blocks[0]
    conv = conv_of(name, 4, 3)
    stock_conv = twin(conv)
    x, stock_x = (randn(block.num_src, 4, seed=3).requires_grad_() for _ in range(2))
    ours = convolve(conv, x, block)
    expected = stock(stock_conv, stock_x, block)
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    assert_same_gradients(conv, stock_conv)
    assert x.grad is not None
    assert stock_x.grad is not None
    assert_close(x.grad, stock_x.grad)


@parametrize_pairwise(name=[*CONVS], weighted=[False, True], loops=[False, True])
def test_on_all_edges_equals_stock_pyg_on_the_whole_graph(name: str, weighted: bool, loops: bool) -> None:
    graph = random_graph(weight=weighted, loops=loops, attr=2)
    x = randn(50, 4)
    conv = conv_of(name, 4, 3)
    other = twin(conv)
    block = batch_of(graph, None, (-1,), SEEDS).blocks[0]
    ours = convolve(conv, Rows(TensorTable(x), block.src_ids), block)
    expected = stock(other, x, graph)[SEEDS]
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    assert_same_gradients(conv, other)


@parametrize_pairwise(
    name=["sage-mean", "gcn", "gat", "pna", "gin"],
    stored=[torch.float16, torch.bfloat16, torch.float64],
    handle=[True, False],
)
def test_stored_features_are_brought_to_the_precision_of_the_model(
    name: str, stored: torch.dtype, handle: bool
) -> None:
    graph = random_graph()
    x = randn(50, 4, dtype=stored)
    conv = conv_of(name, 4, 3).float()
    block = batch_of(graph, None, (3,), SEEDS).blocks[0]
    ours = convolve(conv, Rows(TensorTable(x), block.src_ids) if handle else x[block.src_ids], block)
    assert ours.dtype == torch.float32
    assert_close(ours, convolve(conv, x[block.src_ids].float(), block), 1e-6)


@pytest.mark.parametrize(
    "conv",
    [
        pyg.TAGConv(4, 3),
        pyg.ChebConv(4, 3, K=2),
        pyg.SGConv(4, 3, K=2),
        pyg.ARMAConv(4, 3),
        pyg.APPNP(K=3, alpha=0.1),
        pyg.GatedGraphConv(4, num_layers=2),
    ],
    ids=lambda conv: type(conv).__name__,
)
def test_a_conv_that_needs_more_than_one_hop_or_the_degrees_is_refused_by_name(conv: nn.Module) -> None:
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    with pytest.raises(ValueError, match=f"{type(conv).__name__} cannot .*blocks"):
        convolve(conv, torch.randn(block.num_src, 4), block)


def test_a_conv_with_a_norm_over_the_nodes_is_refused_by_name() -> None:
    class Centred(pyg.SAGEConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x - x.mean(0), edge_index)

    block = batch_of(random_graph(), None, (3,)).blocks[0]
    with pytest.raises(ValueError, match="Centred"):
        convolve(Centred(4, 3), torch.randn(block.num_src, 4), block)


def test_messages_against_the_edges_are_refused() -> None:
    conv = pyg.SAGEConv(4, 3, flow="target_to_source")
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    with pytest.raises(ValueError, match="default flow"):
        convolve(conv, torch.randn(block.num_src, 4), block)


def test_something_that_is_no_conv_is_refused_with_the_reason() -> None:
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    with pytest.raises(ValueError, match=r"Linear cannot .*conv\(x, edge_index\)"):
        convolve(nn.Linear(4, 3), torch.randn(block.num_src, 4), block)


def test_a_subclass_with_its_own_message_is_not_replaced() -> None:
    class Doubled(pyg.SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    graph = random_graph()
    x = randn(50, 4)
    block = batch_of(graph, None, (3,)).blocks[0]
    conv = Doubled(4, 3).double()
    assert_close(convolve(conv, x[block.src_ids], block), stock(conv, x[block.src_ids], block))
    plain = pyg.SAGEConv(4, 3).double()
    plain.load_state_dict(conv.state_dict())
    assert not torch.allclose(convolve(plain, x[block.src_ids], block), stock(conv, x[block.src_ids], block))


def test_hooks_of_the_user_run() -> None:
    graph = random_graph()
    x = randn(50, 4)
    block = batch_of(graph, None, (3,)).blocks[0]
    conv = conv_of("sage-mean", 4, 3)
    without_hook = convolve(conv, x[block.src_ids], block)
    shapes = []
    handle = conv.register_forward_hook(lambda m, i, out: shapes.append(out.shape))
    assert_close(convolve(conv, x[block.src_ids], block), without_hook)
    assert shapes[-1] == (50, 3)
    handle.remove()
    assert_close(convolve(conv, x[block.src_ids], block), without_hook)


@pytest.mark.parametrize("make", [pyg.SAGEConv, pyg.GCNConv, pyg.GATConv, pyg.GraphConv, pyg.TransformerConv])
def test_a_conv_without_its_input_width_gets_it_from_the_block(make: type) -> None:
    graph = random_graph()
    x = randn(50, 4, dtype=torch.float32)
    block = batch_of(graph, None, (-1,)).blocks[0]
    conv = make(-1, 3)
    ours = convolve(conv, Rows(TensorTable(x), block.src_ids), block)
    assert_close(ours, stock(conv, x, graph), 1e-5)


def test_the_conv_itself_is_left_as_it_was() -> None:
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    for name in ("sage-max", "gcn", "gat", "pna"):
        conv = conv_of(name, 4, 3).train()
        before = {k: v.clone() for k, v in conv.state_dict().items()}
        state = torch.get_rng_state()
        convolve(conv, randn(block.num_src, 4), block)
        assert conv.training
        assert all(torch.equal(before[k], v) for k, v in conv.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in conv.parameters())


@pytest.mark.parametrize(
    ("name", "convention"),
    [
        ("sage-mean", "fused"),
        ("gcn", "fused"),
        ("gat", "pair"),
        ("transformer", "pair"),
        ("pna", "square"),
        ("edge", "pair"),
    ],
)
def test_each_conv_has_its_calling_convention(name: str, convention: str) -> None:
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    assert calling_convention(conv_of(name, 4, 3), 4, block.edge).convention == convention


def test_edge_arguments_are_those_the_conv_takes() -> None:
    graph = random_graph(weight=True, attr=2)
    graph = Graph(graph.indptr, graph.indices, {**graph.edge, "type": torch.zeros(graph.num_edges, dtype=torch.int64)})
    block = batch_of(graph, None, (3,)).blocks[0]
    arguments = {
        name: set(edge_arguments(conv, block.edge, torch.float32))
        for name, conv in {
            "sage": pyg.SAGEConv(4, 3),
            "graph": pyg.GraphConv(4, 3),
            "gat": pyg.GATConv(4, 3),
            "gat-edges": pyg.GATConv(4, 3, edge_dim=2),
            "rgcn": pyg.RGCNConv(4, 3, 2),
        }.items()
    }
    assert arguments == {
        "sage": set(),
        "graph": {"edge_weight"},
        "gat": set(),
        "gat-edges": {"edge_attr"},
        "rgcn": {"edge_type"},
    }
    assert edge_arguments(pyg.GraphConv(4, 3), block.edge, torch.float32)["edge_weight"].dtype == torch.float32


@pytest.mark.parametrize("name", ["gcn", "graph"])
def test_whole_numbers_are_edge_weights_too(name: str) -> None:
    graph = random_graph()
    x = randn(50, 4)
    weight = torch.arange(graph.num_edges) % 3 + 1
    outputs = []
    for edge_weight in (weight, weight.double()):
        block = batch_of(Graph(graph.indptr, graph.indices, {"weight": edge_weight}), None, (3,)).blocks[0]
        outputs.append(convolve(conv_of(name, 4, 3), x[block.src_ids], block))
    assert_close(*outputs)


@pytest.mark.parametrize("kind", [pyg.RGCNConv, pyg.FastRGCNConv])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_types_of_any_integer_dtype_reach_a_relational_conv(kind: type[pyg.RGCNConv], dtype: torch.dtype) -> None:
    graph = random_graph()
    types = (torch.arange(graph.num_edges) % 3).to(dtype)
    block = batch_of(Graph(graph.indptr, graph.indices, {"type": types}), None, (3,), SEEDS).blocks[0]
    torch.manual_seed(0)
    conv = kind(4, 3, 3).double()
    x = randn(50, 4)
    expected = conv(x[block.src_ids], block.edge_index, block.edge["type"].long())[:6]
    assert_close(convolve(conv, x[block.src_ids], block), expected)


def test_initial_rows_are_found_by_their_argument() -> None:
    assert takes_x0(pyg.GCN2Conv(4, 0.1))
    assert not takes_x0(pyg.GINConv(mlp(4, 4, 4)))


def test_int32_edges_are_a_trap_in_stock_pyg_that_blocks_avoid() -> None:
    """With an int32 edge_index stock SAGE is right forward and wrong (or fails) backward: blocks never give one."""
    block = batch_of(random_graph(dtype=torch.int32), None, (3,)).blocks[0]
    assert block.edge_index.dtype == torch.int64
    grads = []
    for edge_index in (block.edge_index, block.edge_index.int()):
        x = randn(50, 4).requires_grad_()
        conv = pyg.SAGEConv(4, 3, aggr=pyg.SumAggregation()).double()
        conv.load_state_dict(conv_of("sage-sum", 4, 3).state_dict())
        try:
            out = conv(x, edge_index)
            backward(out)
        except (RuntimeError, IndexError, ValueError):
            return
        grads.append((out.detach(), x.grad))
    (right, right_grad), (narrow, narrow_grad) = grads
    assert torch.allclose(right, narrow)
    ours = randn(50, 4).requires_grad_()
    backward(convolve(conv_of("sage-sum", 4, 3), ours, block))
    assert ours.grad is not None
    assert_close(ours.grad, right_grad)
    if torch.allclose(right_grad, narrow_grad):
        pytest.skip("this version of torch and PyG has the right gradient for int32 too")


# ---- what the probe finds


class LoopsUpToTheLargestId(pyg.SAGEConv):
    """A conv of a user's own that does not say how many nodes there are."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, add_self_loops(edge_index)[0])


class KeepsItsEdges(pyg.SAGEConv):
    """A conv that reuses the first edges that it was given."""

    kept: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        self.kept = edge_index if self.kept is None else self.kept
        return super().forward((x, x), self.kept)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.SAGEConv(4, 3, aggr="lstm"),
        lambda: pyg.SAGEConv(4, 3, aggr=aggr.GRUAggregation(4, 4)),
        lambda: pyg.EGConv(4, 3, num_heads=1, num_bases=2, aggregators=["sum"]),
        lambda: pyg.SGConv(4, 3, cached=True),
        lambda: LoopsUpToTheLargestId(4, 3),
    ],
    ids=["lstm", "gru", "eg", "sg-cached", "own-loops"],
)
def test_a_conv_whose_output_depends_on_what_else_is_in_the_batch_is_refused(make: Any) -> None:
    with pytest.raises(NeedsWholeGraph, match="on sampled blocks"):
        calling_convention(make(), 4, {})


def test_a_batch_norm_without_running_statistics_is_the_reason_that_is_given() -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    conv = pyg.GINConv(nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(NeedsWholeGraph, match=r"BatchNorm1d\(track_running_stats=False\) \(nn\.1\)"):
        calling_convention(conv, 6, {})


def test_a_conv_that_keeps_its_first_edges_is_refused() -> None:
    with pytest.raises(ValueError, match="KeepsItsEdges keeps something"):
        calling_convention(KeepsItsEdges(4, 3), 4, {})


@pytest.mark.parametrize("kind", ["block", "tree"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.SAGEConv(4, 3, aggr="median"),
        lambda: pyg.SimpleConv(aggr.QuantileAggregation([0.1, 0.9])),
        lambda: pyg.FeaStConv(4, 3, heads=2, add_self_loops=False),
    ],
    ids=["median", "quantiles", "feast"],
)
def test_a_node_without_in_edges_has_the_output_that_it_has_in_the_whole_graph(make: Any, kind: str) -> None:
    torch.manual_seed(0)
    graph = probe_graph({})
    x = randn(12, 4)
    conv = make().double()
    expected = conv(x, graph.edge_index())
    for nodes in BATCHES:
        block = tree_of(graph, nodes) if kind == "tree" else block_of(graph, nodes)
        assert_close(convolve(conv, x[block.src_ids], block), expected[torch.tensor(nodes)])


@pytest.mark.parametrize("layout", ["tree", "padded tree"])
def test_trees_keep_the_loops_of_convs_that_add_none(layout: Layout) -> None:
    edge = {"weight": torch.rand(3), "attr": torch.rand(3, 2)}
    adds = pyg.GATConv(4, 3)
    assert calling_convention(adds, 4, edge, layout).without_loops
    for conv, initial in [(pyg.PDNConv(4, 3, 2, 4, normalize=False), None), (pyg.FAConv(4, normalize=False), 4)]:
        assert conv.add_self_loops
        assert not calling_convention(conv, 4, edge, layout, initial).without_loops


def test_an_aggregation_by_the_order_of_edges_is_refused_where_sampling_changes_it() -> None:
    graph = random_graph()
    x = randn(50, 4)
    max_degree = int(graph.in_degrees().max())
    conv = pyg.SAGEConv(4, 3, aggr=aggr.MLPAggregation(4, 4, max_degree, num_layers=1)).double()
    all_edges = batch_of(graph, None, (-1,), SEEDS).blocks[0]
    assert_close(convolve(conv, x[all_edges.src_ids], all_edges), conv(x, graph.edge_index())[SEEDS])
    sampled = batch_of(graph, None, (max_degree,), SEEDS).blocks[0]
    with pytest.raises(ValueError, match="order of a node's in-edges"):
        convolve(conv, x[sampled.src_ids], sampled)


@pytest.mark.parametrize("make", [pyg.SAGEConv, pyg.GCNConv, pyg.GATConv, pyg.TransformerConv])
def test_a_conv_in_float64_gets_its_input_width_too(make: type) -> None:
    conv = make(-1, 3).double()
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    assert convolve(conv, randn(block.num_src, 4), block).dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pyg.RGCNConv(4, 3, 2), "assert edge_type is not None.*edge_type"),
        (lambda: pyg.GINEConv(mlp(4, 3, 3)), "edge_attr .edge array 'attr'., which the graph does not have"),
        (lambda: pyg.WLConv(), "assert"),
        (lambda: pyg.PointNetConv(), "missing 1 required positional argument"),
        (lambda: pyg.GATConv(9, 3), r"rows of width 4: mat1 and mat2 shapes"),
    ],
    ids=["rgcn", "gine", "wl", "pointnet", "width"],
)
def test_a_refusal_gives_its_reason(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calling_convention(make(), 4, {})


@pytest.mark.parametrize(
    "make",
    [lambda: pyg.GENConv(4, 3), lambda: pyg.GeneralConv(4, 3), lambda: pyg.CGConv(4)],
    ids=["gen", "general", "cg"],
)
def test_a_conv_built_without_edge_features_is_not_given_any(make: Any) -> None:
    torch.manual_seed(0)
    graph = random_graph(attr=2)
    x = randn(50, 4)
    conv = make().double().eval()
    block = batch_of(graph, None, (-1,), SEEDS).blocks[0]
    assert_close(convolve(conv, x[block.src_ids], block), conv(x, graph.edge_index())[SEEDS])


def test_a_conv_that_puts_out_no_tensor_is_refused() -> None:
    class Pair(pyg.SAGEConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x, edge_index), x

    with pytest.raises(ValueError, match="Pair puts out type tuple"):
        calling_convention(Pair(4, 3), 4, {})


def test_a_cached_conv_leaves_and_uses_no_cache() -> None:
    graph = random_graph()
    x = randn(50, 4)
    torch.manual_seed(0)
    conv = pyg.ClusterGCNConv(4, 3).double()
    vars(conv).update(cached=True, _cached_edge_index="the user's")
    block = batch_of(graph, None, (-1,), SEEDS).blocks[0]
    convolve(conv, x[block.src_ids], block)
    assert (conv.cached, conv._cached_edge_index) == (True, "the user's")


def test_an_edge_index_in_place_of_a_block_is_refused():
    conv = pyg.SAGEConv(3, 2)
    with pytest.raises(ValueError, match=r"batch\.blocks, .*\[2, 4\]: .*SAGEConv"):
        convolve(conv, torch.ones(4, 3), torch.zeros(2, 4, dtype=torch.int64))  # type: ignore[arg-type]
