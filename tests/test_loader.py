"""Which layout a loader takes; its batches are tested in tests/test_methods.py."""

from __future__ import annotations

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.loader import resolve_layout, resolve_workers
from hopline.nn import GNN
from hopline.tree import TreeBlock
from tests.helpers import dataset_of, randn, random_graph

DATA = dataset_of(random_graph(), randn(50, 6))
CPU = torch.device("cpu")


def test_auto_takes_blocks_on_the_cpu():
    model = GNN([SAGEConv(6, 3)])
    assert resolve_layout(hl.Sampled(fanouts=(3,)), DATA, CPU, model) == "block"
    assert resolve_layout(hl.Sampled(fanouts=(3,), layout="tree"), DATA, CPU, model) == "tree"


def test_trees_come_where_they_are_asked_for():
    for batch in hl.Sampled(fanouts=(3, 2), batch_size=16, layout="tree").loader(DATA):
        assert all(isinstance(block, TreeBlock) for block in batch.blocks)
        assert isinstance(batch.x, torch.Tensor)
        assert batch.x.shape == (batch.blocks[0].num_src, 6)


def test_workers_follow_the_cores():
    assert resolve_workers(hl.Sampled(), 2) == (2, 4)
    assert resolve_workers(hl.Sampled(), 64) == (8, 16)
    assert resolve_workers(hl.Sampled(workers=0), 64) == (0, 2)
