"""Trees: children are in-neighbours of their parents, draws follow from key and slot, and blocks are the hops."""

from __future__ import annotations

import pytest
import torch

from hopline.core.tree_layout import TreeSampler
from hopline.ops import derive_key
from tests.support.helpers import random_graph


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
