"""Any PyG conv on a block: equal to stock PyG on the same edges, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.batch import Rows
from hopline.graph import Graph
from hopline.nn.convs import convolve, edge_arguments, find_way, takes_x0
from hopline.tables import TensorTable
from tests.grids import parametrize_pairwise
from tests.helpers import (
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
    other = twin(conv)
    ours, theirs = (randn(block.num_src, 4, seed=3).requires_grad_() for _ in range(2))
    found, expected = convolve(conv, ours, block), stock(other, theirs, block)
    assert_close(found, expected)
    backward(found)
    backward(expected)
    assert_same_gradients(conv, other)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_close(ours.grad, theirs.grad)


@parametrize_pairwise(name=[*CONVS], weighted=[False, True], loops=[False, True])
def test_on_all_edges_equals_stock_pyg_on_the_whole_graph(name: str, weighted: bool, loops: bool) -> None:
    graph = random_graph(weight=weighted, loops=loops, attr=2)
    x = randn(50, 4)
    conv = conv_of(name, 4, 3)
    other = twin(conv)
    block = batch_of(graph, None, (-1,), SEEDS).blocks[0]
    found = convolve(conv, Rows(TensorTable(x), block.src_ids), block)
    expected = stock(other, x, graph)[SEEDS]
    assert_close(found, expected)
    backward(found)
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
    graph, x = random_graph(), randn(50, 4, dtype=stored)
    conv = conv_of(name, 4, 3).float()
    block = batch_of(graph, None, (3,), SEEDS).blocks[0]
    found = convolve(conv, Rows(TensorTable(x), block.src_ids) if handle else x[block.src_ids], block)
    assert found.dtype == torch.float32
    assert_close(found, convolve(conv, x[block.src_ids].float(), block), 1e-6)


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
    with pytest.raises(ValueError, match=f"{type(conv).__name__} cannot run on sampled blocks"):
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
    with pytest.raises(ValueError, match=r"Linear cannot be called as conv\(x, edge_index\)"):
        convolve(nn.Linear(4, 3), torch.randn(block.num_src, 4), block)


def test_a_subclass_with_its_own_message_is_not_replaced() -> None:
    class Doubled(pyg.SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    graph, x = random_graph(), randn(50, 4)
    block = batch_of(graph, None, (3,)).blocks[0]
    conv = Doubled(4, 3).double()
    assert_close(convolve(conv, x[block.src_ids], block), stock(conv, x[block.src_ids], block))
    plain = pyg.SAGEConv(4, 3).double()
    plain.load_state_dict(conv.state_dict())
    assert not torch.allclose(convolve(plain, x[block.src_ids], block), stock(conv, x[block.src_ids], block))


def test_hooks_of_the_user_run() -> None:
    graph, x = random_graph(), randn(50, 4)
    block = batch_of(graph, None, (3,)).blocks[0]
    conv = conv_of("sage-mean", 4, 3)
    before = convolve(conv, x[block.src_ids], block)
    seen = []
    handle = conv.register_forward_hook(lambda m, i, out: seen.append(out.shape))
    assert_close(convolve(conv, x[block.src_ids], block), before)
    assert seen[-1] == (50, 3)
    handle.remove()
    assert_close(convolve(conv, x[block.src_ids], block), before)


@pytest.mark.parametrize("make", [pyg.SAGEConv, pyg.GCNConv, pyg.GATConv, pyg.GraphConv, pyg.TransformerConv])
def test_a_conv_without_its_input_width_gets_it_from_the_block(make: type) -> None:
    graph, x = random_graph(), randn(50, 4, dtype=torch.float32)
    block = batch_of(graph, None, (-1,)).blocks[0]
    conv = make(-1, 3)
    found = convolve(conv, Rows(TensorTable(x), block.src_ids), block)
    assert_close(found, stock(conv, x, graph), 1e-5)


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
def test_the_way_a_conv_is_called(name: str, convention: str) -> None:
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    assert find_way(conv_of(name, 4, 3), 4, block, None).convention == convention


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
    graph, x = random_graph(), randn(50, 4)
    weight = torch.arange(graph.num_edges) % 3 + 1
    outputs = []
    for given in (weight, weight.double()):
        block = batch_of(Graph(graph.indptr, graph.indices, {"weight": given}), None, (3,)).blocks[0]
        outputs.append(convolve(conv_of(name, 4, 3), x[block.src_ids], block))
    assert_close(*outputs)


def test_typed_edges_reach_a_relational_conv() -> None:
    graph = random_graph()
    graph = Graph(graph.indptr, graph.indices, {"type": torch.arange(graph.num_edges) % 3})
    block = batch_of(graph, None, (3,), SEEDS).blocks[0]
    torch.manual_seed(0)
    conv, x = pyg.RGCNConv(4, 3, 3).double(), randn(50, 4)
    expected = conv(x[block.src_ids], block.edge_index, block.edge["type"])[:6]
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
