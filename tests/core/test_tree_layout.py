"""Blocks in the tree layout: a model on them equals plain PyG on the graph that has a node for every slot.

Empty slots must not count in norms, sums or losses, and splitting the seeds must not change a draw.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline import ops
from hopline.core.batch import Batch
from hopline.core.tree_layout import TreeRows, TreeSampler
from hopline.nn import GNN
from hopline.ops import derive_key
from hopline.tables import TensorTable
from tests.support.helpers import dataset_of, randn, random_graph, twin
from tests.support.own_modules import opaque

CPU = torch.device("cpu")
X = randn(50, 6)


def tree_batch(
    graph: Any, num_seeds: int = 12, first: int = 0, key: int = 5, fanouts: tuple[int, ...] = (8, 3), times: int = 1
) -> Batch:
    """A batch in the tree layout at the seeds `first` .. `num_seeds`.

    times: how often each seed occurs; every occurrence draws for itself.
    """
    seeds = torch.arange(num_seeds)[first:].repeat(times)
    blocks = TreeSampler(graph, fanouts).sample(seeds, key, first)
    return Batch(seeds, blocks, TreeRows(TensorTable(X), blocks[0]), seeds % 3, key=key)


def graph_of_slots(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle: (node of each slot, edge_index between slots, which slots are filled)."""
    block: Any = batch.blocks[0]
    parents = block.parents
    child = ((block.tree.nodes >= 0) & (parents >= 0)).nonzero().view(-1)
    return block.src_ids, torch.stack([child, parents[child].long()]), block.present


CONVS = {
    "sage": lambda i, o: pyg.SAGEConv(i, o),
    "sage max": lambda i, o: pyg.SAGEConv(i, o, aggr="max"),
    "gin": lambda i, o: pyg.GINConv(nn.Linear(i, o)),
    "graph": lambda i, o: pyg.GraphConv(i, o),
    "gat": lambda i, o: pyg.GATConv(i, o, heads=2, concat=False),
    "gatv2": lambda i, o: pyg.GATv2Conv(i, o, heads=2, concat=False),
    "transformer": lambda i, o: pyg.TransformerConv(i, o),
}


@pytest.mark.parametrize("name", CONVS)
def test_a_model_on_a_tree_is_stock_pyg_on_the_graph_of_its_slots(name: str):
    torch.manual_seed(0)
    model = GNN([CONVS[name](6, 8), CONVS[name](8, 3)]).double()
    batch = tree_batch(random_graph())
    node, edge_index, _ = graph_of_slots(batch)
    copy: Any = twin(model)
    expected = X[node]
    for l, conv in enumerate(copy.convs):
        expected = conv(expected, edge_index)
        expected = expected.relu() if l == 0 else expected
    expected = expected[: batch.num_seeds]
    ours = model(batch)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)

    weights = randn(*ours.shape, seed=3)
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()

    for our_parameter, expected_parameter in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(our_parameter.grad, expected_parameter.grad, rtol=1e-9, atol=1e-11)


def test_gcn_is_unbiased_on_trees():
    graph = random_graph(weight=True, loops=True)
    conv = pyg.GCNConv(6, 3).double()
    model = GNN([conv])
    expected = conv(X, graph.edge_index(), graph.edge["weight"])[:12]
    # Derived keys are far apart: no two batches share draws.
    keys = [ops.derive_key(0, number) for number in range(100)]
    outputs = [model(tree_batch(graph, key=key, fanouts=(2,), times=40)).view(40, 12, 3) for key in keys]
    assert (torch.cat(outputs).mean(0) - expected).norm() / expected.norm() < 0.05


def test_convs_that_add_loops_do_not_see_those_of_the_graph_twice():
    graph = random_graph(loops=True)
    torch.manual_seed(0)
    model = GNN([pyg.GATConv(6, 3)]).double()
    batch = tree_batch(graph, fanouts=(200,))
    expected = model.convs[0](X, graph.edge_index())[:12]
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inside", [False, True])
def test_batch_norm_leaves_out_empty_slots(inside: bool):
    torch.manual_seed(0)
    if inside:
        convs = [pyg.GINConv(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))), pyg.SAGEConv(8, 3)]
        model = GNN(convs).double()
    else:
        model = GNN([pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)], norm="batch").double()
    copy: Any = twin(model)
    batch = tree_batch(random_graph())
    node, edge_index, present = graph_of_slots(batch)
    num_dst = batch.blocks[0].num_dst
    assert not present[:num_dst].all()

    if inside:
        summed = torch.zeros(node.numel(), 6, dtype=torch.float64).index_add(0, edge_index[1], X[node][edge_index[0]])
        h = copy.convs[0].nn[0](summed + X[node])[:num_dst]
        norm = copy.convs[0].nn[1]
    else:
        h = copy.convs[0](X[node], edge_index)[:num_dst]
        norm = copy.norms[0]
    is_filled = present[:num_dst]
    normed = torch.zeros_like(h).index_copy(0, is_filled.nonzero().view(-1), norm(h[is_filled])).relu()
    last = edge_index[:, edge_index[1] < batch.num_seeds]
    expected = copy.convs[1](normed, last)[: batch.num_seeds]
    torch.testing.assert_close(model(batch), expected, rtol=1e-9, atol=1e-11)

    for (name, ours), (_, theirs) in zip(model.named_buffers(), copy.named_buffers(), strict=True):
        if "num_batches" not in name:
            torch.testing.assert_close(ours, theirs, msg=name)


def test_micro_batches_have_the_gradient_of_the_batch_with_dropout():
    torch.manual_seed(0)
    model = GNN([pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)], dropout=0.5, input_dropout=0.2).double()
    copy = twin(model)
    graph = random_graph()
    whole = tree_batch(graph)
    nn.functional.cross_entropy(model(whole), whole.labels, reduction="sum").backward()
    for first, stop in itertools.pairwise([0, 5, 12]):
        seeds = torch.arange(first, stop)
        blocks = TreeSampler(graph, (8, 3)).sample(seeds, 5, first)
        micro_batch = Batch(seeds, blocks, TreeRows(TensorTable(X), blocks[0]), seeds % 3, key=5)
        nn.functional.cross_entropy(copy(micro_batch), micro_batch.labels, reduction="sum").backward()

    for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def test_a_batch_that_moves_moves_its_tree_once():
    batch = tree_batch(random_graph())
    assert len({id(block.tree) for block in batch.blocks}) == 1  # type: ignore[attr-defined]
    moved = batch.to("meta")
    assert len({id(block.tree) for block in moved.blocks}) == 1  # type: ignore[attr-defined]
    assert all(tensor is None or tensor.is_meta for block in moved.blocks for tensor in block.tensors())
    assert batch.blocks[0].to(CPU) is batch.blocks[0]


def test_replace_of_a_tree_block_changes_only_the_fields_named():
    outer, inner = TreeSampler(random_graph(weight=True), (8, 3)).sample(torch.arange(12), 5)
    changed = replace(inner, key=6, scale_sums=True)
    assert (changed.key, changed.scale_sums, changed.tree, changed.hop) == (6, True, outer.tree, inner.hop)
    assert (changed.num_src, changed.num_dst, changed.num_edges) == (inner.num_src, 12, inner.num_edges)
    assert torch.equal(changed.src_ids, inner.src_ids)
    assert torch.equal(changed.edge_index, inner.edge_index)


def test_ids_and_edges_of_a_tree_block_are_computed_on_first_use():
    """If they were always computed, a captured step would run kernels for them and synchronise."""
    batch = tree_batch(random_graph())
    block = batch.blocks[0]
    rows = batch.x
    assert isinstance(rows, TreeRows)
    assert rows.shape == (block.num_src, 6)
    assert block.with_scale_sums(True).num_dst == block.num_dst
    assert not vars(block).keys() & {"src_ids", "_compact", "padded", "child_edges"}
    assert rows.ids is block.src_ids


def test_a_tree_trains_through_the_trainer():
    data = dataset_of(random_graph(dtype=torch.int32), X)
    losses = []
    for workers in (0, 2):
        torch.manual_seed(0)
        model = GNN([pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)], dropout=0.3).double()
        method = hl.Sampled(fanouts=(3, 2), batch_size=7, layout="tree", workers=workers)
        run = hl.Trainer(model, data, method, epochs=3, show=False).fit()
        losses.append([epoch.loss for epoch in run.history])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_a_model_without_layers_is_refused_with_what_to_set():
    data = dataset_of(random_graph(), X)

    class ModuleWithoutLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(6, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = opaque(x)
            return self.conv(x, edge_index)

    with pytest.raises(ValueError, match="layout=block"):
        hl.Trainer(ModuleWithoutLayers(), data, hl.Sampled(fanouts=(3,), layout="tree"), show=False)


def test_padded_edges_lead_empty_slots_to_a_row_beyond_the_last():
    batch = tree_batch(random_graph(weight=True))
    for block in batch.blocks:
        (src, dst), edge = block.padded  # type: ignore[attr-defined]
        part = block.part
        is_real = dst < block.num_dst
        assert torch.equal(torch.stack([src, dst])[:, is_real].sort(dim=1).values, part.edge_index.sort(dim=1).values)
        assert not (block.present[src[~is_real]]).any()  # type: ignore[attr-defined]
        assert edge["weight"][is_real].sum() == pytest.approx(float(part.edge["weight"].sum()))


@pytest.mark.parametrize("replace", [False, True])
def test_children_are_neighbours_each_once_without_replacement(replace: bool):
    graph = random_graph(num_nodes=60, num_edges=500)
    blocks = TreeSampler(graph, (4, 3), replace=replace, edge_ids=True).sample(torch.arange(60), 7)
    tree = blocks[0].tree
    parents = tree.slots.parents(torch.device("cpu"))
    assert tree.edge_ids is not None
    for slot in range(tree.slots.num_seeds, tree.nodes.numel()):
        node = int(tree.nodes[slot])
        parent = int(tree.nodes[parents[slot]])
        if node < 0:
            continue
        edge = int(tree.edge_ids[slot - tree.slots.num_seeds])
        assert graph.indptr[parent] <= edge < graph.indptr[parent + 1]
        assert int(graph.indices[edge]) == node
    degrees = graph.in_degrees()
    for slot, count in enumerate(tree.counts.tolist()):
        fanout = 4 if slot < 60 else 3
        node = int(tree.nodes[slot])
        degree = 0 if node < 0 else int(degrees[node])
        assert count == (fanout * (degree > 0) if replace else min(fanout, degree))
        first = int(tree.slots.first_children(torch.device("cpu"))[slot])
        children = tree.nodes[first : first + fanout]
        assert ((children >= 0) == (torch.arange(fanout) < count)).all()
        edges = tree.edge_ids[first - 60 : first - 60 + count]
        assert replace or edges.unique().numel() == count


def test_trees_of_split_seeds_are_those_of_all_seeds():
    graph = random_graph(num_nodes=60, num_edges=500)
    sampler = TreeSampler(graph, (4, 3))
    seeds = torch.randperm(60)
    key = derive_key(3, 1)
    whole = sampler.sample(seeds, key)[-1].tree
    halves = [sampler.sample(seeds[:25], key)[-1].tree, sampler.sample(seeds[25:], key, first_seed=25)[-1].tree]
    for hop in range(3):
        nodes_of_hop = [t.nodes[t.slots.offsets[hop] : t.slots.offsets[hop + 1]] for t in (whole, *halves)]
        assert torch.equal(nodes_of_hop[0], torch.cat(nodes_of_hop[1:]))


def test_slots_of_the_same_node_draw_independently():
    graph = random_graph(num_nodes=30, num_edges=2000)
    tree = TreeSampler(graph, (5,)).sample(torch.zeros(200, dtype=torch.int64), 1)[0].tree
    # 200 slots of node 0, a hub, draw 5 children each: if they shared draws, all rows would be equal.
    assert len({tuple(row) for row in tree.nodes[200:].view(200, 5).tolist()}) > 150


def test_the_blocks_of_a_tree_are_its_hops():
    graph = random_graph()
    blocks = TreeSampler(graph, (4, 3, 2)).sample(torch.arange(10), 1)
    # 10 seeds, and then 10 * 4 = 40, 40 * 3 = 120 and 120 * 2 = 240 slots: 10, 50, 170 and 410 up to each hop.
    assert [(b.num_dst, b.num_src) for b in blocks] == [(170, 410), (50, 170), (10, 50)]
    for block in blocks:
        part = block.part
        assert part.num_edges == block.num_edges == int(block.counts.sum())
        assert torch.equal(block.src_ids[part.src_idx], block.tree.nodes[part.src_idx].long())
        assert (block.tree.nodes[part.src_idx] >= 0).all()


def test_a_fan_out_of_minus_one_is_refused():
    with pytest.raises(ValueError, match="layout=block"):
        TreeSampler(random_graph(), (-1, 2))
