"""Convs between two tables of rows, as between two node types: equal to plain PyG on (x_src, x_dst), or refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.core.batch import Part
from hopline.core.row_handles import Rows
from hopline.nn.conv_adapter import calling_convention, convolve, convolve_pair
from hopline.tables import TensorTable
from tests.support.helpers import (
    assert_close,
    backward,
    batch_of,
    conv_of,
    gradients,
    graph_of,
    mlp,
    randint,
    randn,
    random_graph,
    twin,
)

SRC_WIDTH = 5
DST_WIDTH = 8
CONVS: dict[str, Any] = {
    "sage": lambda: pyg.SAGEConv((SRC_WIDTH, DST_WIDTH), 3),
    "sage-max": lambda: pyg.SAGEConv((SRC_WIDTH, DST_WIDTH), 3, aggr="max"),
    "sage-sum-normalize": lambda: pyg.SAGEConv((SRC_WIDTH, DST_WIDTH), 3, aggr="sum", normalize=True),
    "sage-project": lambda: pyg.SAGEConv((SRC_WIDTH, DST_WIDTH), 3, project=True),
    "sage-no-root": lambda: pyg.SAGEConv((SRC_WIDTH, DST_WIDTH), 3, root_weight=False),
    "sage-lazy": lambda: pyg.SAGEConv((-1, -1), 3),
    "graph": lambda: pyg.GraphConv((SRC_WIDTH, DST_WIDTH), 3),
    "graph-mean": lambda: pyg.GraphConv((SRC_WIDTH, DST_WIDTH), 3, aggr="mean"),
    "gin": lambda: pyg.GINConv(mlp(SRC_WIDTH, 6, 3), train_eps=True),
    "gat": lambda: pyg.GATConv((SRC_WIDTH, DST_WIDTH), 3, heads=2, add_self_loops=False),
    "gat-residual": lambda: pyg.GATConv((SRC_WIDTH, DST_WIDTH), 3, add_self_loops=False, residual=True),
    "gat-one-linear": lambda: pyg.GATConv(SRC_WIDTH, 3, heads=2, add_self_loops=False),
    "gat-mean": lambda: pyg.GATConv((SRC_WIDTH, DST_WIDTH), 4, heads=3, concat=False, add_self_loops=False),
    "gatv2": lambda: pyg.GATv2Conv((SRC_WIDTH, DST_WIDTH), 3, heads=2, add_self_loops=False, residual=True),
    "gatv2-shared": lambda: pyg.GATv2Conv(SRC_WIDTH, 3, heads=2, add_self_loops=False, share_weights=True),
    "transformer": lambda: pyg.TransformerConv((SRC_WIDTH, DST_WIDTH), 3),
    "sage-median": lambda: pyg.SAGEConv((SRC_WIDTH, DST_WIDTH), 3, aggr="median"),
    "edge": lambda: pyg.EdgeConv(mlp(2 * SRC_WIDTH, 3, 3)),
}
ONE_WIDTH = ("gin", "gat-one-linear", "gatv2-shared", "edge")
"""Convs for which rows of both tables have SRC_WIDTH columns."""
SIZES = {
    "more destinations than sources": (6, 15, 40),
    "more sources": (30, 7, 60),
    "no edges": (6, 9, 0),
    "no sources": (0, 4, 0),
}
"""(sources, destinations, edges)."""


class Pair(NamedTuple):
    """The edges and rows of one case."""

    part: Part
    edge_index: Tensor
    h_src: Tensor
    h_dst: Tensor


def pair_of(name: str, sizes: str, **edge: Tensor) -> Pair:
    """Random edges, many of them double. The last destinations have none, nor has the last source."""
    num_src, num_dst, num_edges = SIZES[sizes]
    src = randint(0, max(num_src - 1, 1), num_edges, seed=1)
    dst = randint(0, max(num_dst // 2, 1), num_edges, seed=2)
    src[: num_edges // 4] = src[:1]
    dst[: num_edges // 4] = dst[:1]
    graph = graph_of(src, dst, num_dst, **edge)
    dst_width = SRC_WIDTH if name in ONE_WIDTH else DST_WIDTH
    part = Part(graph.indptr, graph.indices.int(), graph.edge)
    h_src = randn(num_src, SRC_WIDTH, seed=3).requires_grad_()
    return Pair(part, graph.edge_index(), h_src, randn(num_dst, dst_width, seed=4).requires_grad_())


def conv_by(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CONVS[name]().double()


def gradient_of(rows: Tensor) -> Tensor:
    """Zeros for rows that are not read, as those of both tables where there is no edge."""
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


def ids_of(rows: Tensor) -> Tensor:
    return torch.arange(rows.size(0), device=rows.device)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CONVS)
def test_a_pair_has_the_outputs_and_gradients_of_plain_pyg(name: str, sizes: str) -> None:
    if name == "sage-median" and sizes.startswith("no "):
        pytest.skip("plain PyG's quantiles fail without edges")
    conv = conv_by(name)
    part, edge_index, h_src, h_dst = pair_of(name, sizes)
    ours = convolve_pair(conv, h_src, h_dst, part, ids_of(h_dst))
    plain = twin(conv)
    plain_src, plain_dst = (h.detach().clone().requires_grad_() for h in (h_src, h_dst))
    expected = plain((plain_src, plain_dst), edge_index)
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    for our_gradient, expected_gradient in zip(gradients(conv).values(), gradients(plain).values(), strict=True):
        assert_close(our_gradient, expected_gradient)
    assert_close(gradient_of(h_src), gradient_of(plain_src))
    assert_close(gradient_of(h_dst), gradient_of(plain_dst))


@pytest.mark.parametrize("name", CONVS)
def test_all_edges_of_some_destinations_are_enough(name: str) -> None:
    conv = conv_by(name)
    part, edge_index, h_src, h_dst = pair_of(name, "more sources")
    some = part.destinations_from(2)
    ours = convolve_pair(conv, h_src, h_dst[2:], some, ids_of(h_dst)[2:])
    assert_close(ours, conv((h_src, h_dst), edge_index)[2:])


@pytest.mark.parametrize("name", ["graph", "sage"])
def test_edge_weights_go_to_the_convs_that_take_them(name: str) -> None:
    conv = conv_by(name)
    weight = torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    part, edge_index, h_src, h_dst = pair_of(name, "more sources", weight=weight)
    given = {"edge_weight": part.edge["weight"]} if name == "graph" else {}
    ours = convolve_pair(conv, h_src, h_dst, part, ids_of(h_dst))
    assert_close(ours, conv((h_src, h_dst), edge_index, **given))


@pytest.mark.parametrize("name", ["sage", "graph", "gin"])
def test_handles_to_both_tables_are_read(name: str) -> None:
    conv = conv_by(name)
    part, edge_index, h_src, h_dst = pair_of(name, "more sources")
    handles = [Rows(TensorTable(h.detach()), ids_of(h)) for h in (h_src, h_dst)]
    ours = convolve_pair(conv, handles[0], handles[1], part, ids_of(h_dst))
    assert_close(ours, conv((h_src, h_dst), edge_index))


@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "graph", "gin", "transformer"])
def test_destinations_among_the_sources_are_a_special_case(name: str) -> None:
    block = batch_of(random_graph(), None, (3,), torch.tensor([0, 5, 2, 48])).blocks[0]
    h = randn(block.num_src, 4)
    conv = conv_of(name, 4, 3)
    ours = convolve_pair(conv, h, h[: block.num_dst], block.part, block.dst_ids, in_graph_order=False)
    assert_close(ours, convolve(conv, h, block), 1e-14)


@pytest.mark.parametrize(
    ("conv", "message"),
    [
        (pyg.GCNConv(SRC_WIDTH, 3), r"GCNConv cannot be called as conv\(\(x_src, x_dst\).*use a conv that PyG calls"),
        (pyg.GCN2Conv(SRC_WIDTH, 0.1), r"GCN2Conv cannot be called as conv\(\(x_src, x_dst\)"),
        (pyg.APPNP(1, 0.1), r"APPNP cannot be called as conv\(\(x_src, x_dst\)"),
        (pyg.PNAConv(SRC_WIDTH, 3, ["mean"], ["identity"], deg=torch.ones(3)), "PNAConv cannot be called as conv"),
        (pyg.GATConv((SRC_WIDTH, DST_WIDTH), 3), "GATConv adds self-loops.*add_self_loops=False"),
        (pyg.GATv2Conv((SRC_WIDTH, DST_WIDTH), 3), "GATv2Conv adds self-loops.*add_self_loops=False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_conv_that_pyg_cannot_call_with_a_pair_is_refused(conv: nn.Module, message: str) -> None:
    part, _, h_src, h_dst = pair_of("", "more sources")
    with pytest.raises(ValueError, match=message):
        convolve_pair(conv.double(), h_src, h_dst, part, ids_of(h_dst))


def test_a_norm_over_the_sources_is_refused() -> None:
    class Centred(pyg.SAGEConv):
        def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward((x[0] - x[0].mean(0), x[1]), edge_index)

    with pytest.raises(ValueError, match="Centred cannot run between two tables"):
        calling_convention(Centred((4, 6), 3), (4, 6), {}, "two tables")


def test_a_pair_and_a_single_table_have_ways_of_their_own() -> None:
    conv = pyg.GATConv(4, 3, add_self_loops=False)
    assert calling_convention(conv, 4, {}).convention == "pair"
    assert calling_convention(conv, (4, 4), {}, "two tables").convention == "pair"
    conv.add_self_loops = True
    assert calling_convention(conv, 4, {}).convention == "pair"
    with pytest.raises(ValueError, match="add_self_loops=False"):
        calling_convention(conv, (4, 4), {}, "two tables")


def test_the_order_of_edges_is_asked_for_as_in_a_block() -> None:
    conv = pyg.SAGEConv((SRC_WIDTH, DST_WIDTH), 3, aggr=pyg.aggr.MLPAggregation(SRC_WIDTH, SRC_WIDTH, 60, num_layers=1))
    part, edge_index, h_src, h_dst = pair_of("sage", "more sources")
    conv = conv.double()
    assert_close(convolve_pair(conv, h_src, h_dst, part, ids_of(h_dst)), conv((h_src, h_dst), edge_index))
    with pytest.raises(ValueError, match="order of a node's in-edges"):
        convolve_pair(conv, h_src, h_dst, part, ids_of(h_dst), in_graph_order=False)
