"""Dropped edges."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.sampler import NeighborSampler
from hopline.methods.historical.regularise import drop_edges
from hopline.nn import GNN
from tests.helpers import batch_of, edges_of, randn, random_graph

GRAPH = random_graph(num_nodes=50, num_edges=2000, weight=True)
X = randn(50, 6)


def block_of(nodes: Tensor) -> Block:
    return NeighborSampler(GRAPH, (-1,), edge_ids=True).sample(nodes, 0)[0]


def ids_of(block: Block) -> Tensor:
    assert block.part.edge_ids is not None
    return block.part.edge_ids


def test_about_the_share_of_edges_is_dropped_and_others_keep_what_they_carry():
    block = block_of(torch.arange(50))
    fewer = drop_edges(block, 0.8, key=3)
    assert 300 < fewer.num_edges < 500
    assert set(edges_of(fewer)) <= set(edges_of(block))
    assert torch.equal(fewer.edge["weight"], GRAPH.edge["weight"][ids_of(fewer)])
    assert torch.equal(fewer.src_ids, block.src_ids)
    assert int(fewer.part.indptr[-1]) == fewer.num_edges
    assert drop_edges(block, 0.0, key=3).num_edges == block.num_edges
    assert drop_edges(block, 1.0, key=3).num_edges == 0


def test_an_edge_is_kept_or_dropped_in_every_block_of_a_step():
    all_nodes, some = block_of(torch.arange(50)), block_of(torch.tensor([7, 0, 3]))
    kept = set(ids_of(drop_edges(all_nodes, 0.5, key=3)).tolist())
    assert set(ids_of(drop_edges(some, 0.5, key=3)).tolist()) == kept & set(ids_of(some).tolist())
    assert set(ids_of(drop_edges(all_nodes, 0.5, key=4)).tolist()) != kept


def test_sums_by_degree_stay_right_on_average():
    conv = pyg.GCNConv(6, 6).double()
    model = GNN([conv])
    whole = batch_of(GRAPH, X, (-1,))
    block = block_of(torch.arange(50))
    with torch.no_grad():
        expected = model(whole)
        found = [model(replace(whole, blocks=(drop_edges(block, 0.3, key),))) for key in range(300)]
    many = GRAPH.in_degrees() > 10  # where hardly any draw leaves none of them
    mean = torch.stack(found).mean(0)
    assert float((mean - expected)[many].norm() / expected[many].norm()) < 0.06  # 0.3 without the factor
