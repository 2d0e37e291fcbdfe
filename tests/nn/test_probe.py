"""The small graph on which modules are probed, and the copies of modules that run on it."""

from __future__ import annotations

import gc

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.nn.conv_adapter import NeedsWholeGraph, calling_convention
from hopline.nn.probe import (
    Findings,
    block_of,
    copy_module,
    options_of,
    probe_graph,
    reverse_edges_of_nodes,
    tree_of,
    trial_of,
)
from tests.support.helpers import randn


def test_the_probe_graph_has_loops_double_edges_and_isolated_nodes() -> None:
    graph = probe_graph({})
    src, dst = graph.edge_index()
    degrees = graph.in_degrees()
    assert (src == dst).sum() >= 5
    assert graph.num_edges > torch.unique(torch.stack([src, dst]), dim=1).size(1), "double edges"
    assert degrees.max() > 10
    assert (degrees == 0).sum() >= 2
    last = graph.num_nodes - 1
    assert not ((src == last) | (dst == last)).any(), "the last node is isolated"


def test_a_block_and_a_tree_have_the_edges_of_their_nodes() -> None:
    graph = probe_graph({"type": torch.arange(7)})
    nodes = (3, 0, 11, 8)
    for block in (block_of(graph, nodes), tree_of(graph, nodes)):
        src, dst = block.edge_index
        for i, node in enumerate(nodes):
            first = int(graph.indptr[node])
            stop = int(graph.indptr[node + 1])
            assert block.src_ids[src[dst == i]].tolist() == graph.indices[first:stop].tolist()
            assert block.edge["type"][dst == i].tolist() == graph.edge["type"][first:stop].tolist()


def test_the_reverse_order_is_of_each_nodes_edges() -> None:
    graph = probe_graph({"weight": torch.rand(3)})
    other = reverse_edges_of_nodes(graph)
    first = int(graph.indptr[3])
    stop = int(graph.indptr[4])
    assert other.indices[first:stop].tolist() == graph.indices[first:stop].flip(0).tolist()
    assert torch.equal(reverse_edges_of_nodes(other).edge["weight"], graph.edge["weight"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_edge_arrays_are_of_the_same_kind(dtype: torch.dtype) -> None:
    edge = probe_graph({"weight": torch.ones(5).to(dtype), "attr": torch.full((5, 2), 3).to(dtype)}).edge
    assert edge["weight"].is_floating_point() == dtype.is_floating_point
    assert edge["attr"].shape[1:] == (2,)
    if dtype == torch.int64:
        assert (edge["attr"] == 3).all(), "whole numbers are those of the graph"


def test_a_conv_of_two_hops_is_found_out_through_whole_number_features() -> None:
    class TwoHops(pyg.MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            x = self.propagate(edge_index, x=x, edge_attr=edge_attr)
            return self.propagate(edge_index, x=x, edge_attr=edge_attr)

        def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            return x_j * edge_attr

    with pytest.raises(NeedsWholeGraph, match="TwoHops"):
        calling_convention(TwoHops(), 4, {"attr": torch.arange(1, 9)[:, None]})


def test_a_copy_has_other_weights_and_leaves_the_module_alone() -> None:
    conv = pyg.GCNConv(4, 3)
    with torch.no_grad():
        conv.lin.weight.fill_(torch.nan)
    trial = trial_of(conv)
    assert trial.lin.weight.isfinite().all()
    assert trial.bias.abs().min() > 0
    assert conv.lin.weight.isnan().all()
    assert conv.bias.abs().max() == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_with_computed_weights_can_be_copied() -> None:
    conv = pyg.GINConv(nn.utils.weight_norm(nn.Linear(4, 3)))
    conv(randn(5, 4).float(), torch.tensor([[0, 1], [1, 2]]))
    assert calling_convention(conv, 4, {}).convention == "fused"
    computed = conv.nn.weight
    copied = copy_module(conv)
    assert conv.nn.weight is computed
    assert torch.equal(copied.nn.weight, computed)
    assert copied.nn.weight.is_leaf
    assert copied.nn.weight.data_ptr() != computed.data_ptr()


def test_what_was_found_out_is_forgotten_when_a_setting_changes() -> None:
    conv = pyg.GATConv(4, 3)
    assert calling_convention(conv, 4, {}, "tree").without_loops
    conv.add_self_loops = False
    assert not calling_convention(conv, 4, {}, "tree").without_loops
    assert ("add_self_loops", False) in options_of(conv)


def test_findings_are_for_the_settings_at_which_they_were_found():
    findings = Findings()
    conv = pyg.SAGEConv(2, 2)
    findings.put(conv, "way", ("mean", 1), "pair")
    assert findings.get(conv, "way", ("mean", 1)) == "pair"
    assert findings.get(conv, "way", ("max", 1)) is None
    assert findings.get(conv, "rule", ("mean", 1)) is None
    assert findings.get(pyg.SAGEConv(2, 2), "way", ("mean", 1)) is None


def test_findings_go_with_their_module():
    findings = Findings()
    conv = pyg.SAGEConv(2, 2)
    findings.put(conv, "way", (), "pair")
    del conv
    gc.collect()
    assert not findings._answers
