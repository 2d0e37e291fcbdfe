"""`drop_edges`: about the share asked for, the same edges in all blocks of a step, and unbiased sums by degree."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.sampler import NeighborSampler
from hopline.methods.historical.edge_dropout import drop_edges
from hopline.nn import GNN
from tests.support.helpers import batch_of, edges_of, randn, random_graph

GRAPH = random_graph(num_nodes=50, num_edges=2000, weight=True)
X = randn(50, 6)


def block_of(nodes: Tensor) -> Block:
    """The block of all in-edges of some nodes."""
    return NeighborSampler(GRAPH, (-1,), edge_ids=True).sample(nodes, 0)[0]


def ids_of(block: Block) -> Tensor:
    """The edge ids of a block."""
    assert block.part.edge_ids is not None
    return block.part.edge_ids


def test_drop_edges_drops_about_the_share_and_keeps_the_arrays_of_the_others():
    block = block_of(torch.arange(50))
    dropped = drop_edges(block, 0.8, key=3)
    assert 300 < dropped.num_edges < 500
    assert set(edges_of(dropped)) <= set(edges_of(block))
    assert torch.equal(dropped.edge["weight"], GRAPH.edge["weight"][ids_of(dropped)])
    assert torch.equal(dropped.src_ids, block.src_ids)
    assert int(dropped.part.indptr[-1]) == dropped.num_edges
    assert drop_edges(block, 0.0, key=3).num_edges == block.num_edges
    assert drop_edges(block, 1.0, key=3).num_edges == 0


def test_an_edge_is_dropped_in_all_blocks_of_a_step_or_in_none():
    all_nodes = block_of(torch.arange(50))
    some_nodes = block_of(torch.tensor([7, 0, 3]))
    kept_ids = set(ids_of(drop_edges(all_nodes, 0.5, key=3)).tolist())
    assert set(ids_of(drop_edges(some_nodes, 0.5, key=3)).tolist()) == kept_ids & set(ids_of(some_nodes).tolist())
    assert set(ids_of(drop_edges(all_nodes, 0.5, key=4)).tolist()) != kept_ids


def test_gcn_over_dropped_edges_is_unbiased():
    conv = pyg.GCNConv(6, 6).double()
    model = GNN([conv])
    whole = batch_of(GRAPH, X, (-1,))
    block = block_of(torch.arange(50))
    with torch.no_grad():
        expected = model(whole)
        outputs = [model(replace(whole, blocks=(drop_edges(block, 0.3, key),))) for key in range(300)]
    has_many_edges = GRAPH.in_degrees() > 10  # with fewer, some draws drop all in-edges of a node
    mean = torch.stack(outputs).mean(0)

    # Without the factor for dropped edges the distance would be 0.3.
    assert float((mean - expected)[has_many_edges].norm() / expected[has_many_edges].norm()) < 0.06
