"""Batches of parts: every edge is in one of them, and moving them to a device changes no loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

import hopline as hl
from hopline.core.row_handles import Rows
from hopline.data.synthetic import planted_partition
from hopline.methods.partitioned import batches
from hopline.methods.partitioned.batches import PartBatches


def test_every_edge_is_in_one_batch_whose_sources_are_its_nodes_and_then_its_halo():
    data = planted_partition(num_nodes=300, num_edges=2000, num_classes=3, num_features=5, seed=1)
    net = hl.nn.GNN([pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)])
    method = hl.Historical(num_parts=6, parts_per_batch=2, partition="random", compensate=True)
    work: Any = hl.Trainer(net, data, method, epochs=1, show=False).work
    assert data.y is not None
    edges = []
    seeds = []
    for group in work.groups.groups_of(1):
        hist_batch = work.batches.make(group, 7)
        assert hist_batch is not None
        block = hist_batch.block
        src = block.src_ids[block.edge_index[0]]
        dst = block.src_ids[block.edge_index[1]]
        edges.append(torch.stack([src, dst]))
        seeds.append(hist_batch.batch.seeds)
        assert torch.equal(block.dst_ids, hist_batch.nodes)
        own_positions = torch.cat(
            [torch.arange(row_range.start, row_range.stop) for row_range in hist_batch.halo.row_ranges]
        )
        assert torch.equal(
            torch.cat([own_positions, hist_batch.halo.positions]), work.partitioned.partition.position[block.src_ids]
        )
        assert isinstance(hist_batch.batch.x, Rows)
        assert torch.equal(hist_batch.batch.labels, data.y[hist_batch.batch.seeds])
        out_neighbors = hist_batch.out_neighbors
        assert out_neighbors is not None
        assert torch.equal(
            out_neighbors.block.src_ids[out_neighbors.batch_src_idx], hist_batch.nodes[out_neighbors.own_idx]
        )
        assert not torch.isin(out_neighbors.block.dst_ids, hist_batch.nodes).any()
    all_edges = torch.cat(edges, dim=1)
    key = all_edges[0] * data.num_nodes + all_edges[1]
    expected = data.graph.edge_index()

    assert torch.equal(key.sort().values, (expected[0] * data.num_nodes + expected[1]).sort().values)
    assert torch.equal(torch.cat(seeds).sort().values, data.splits["train"].sort().values)
    assert work.batches.make((), 7) is None


def test_input_rows_are_handles_that_the_model_reads():
    data = planted_partition(num_nodes=50, num_edges=200, num_classes=3, num_features=5, seed=1)
    net = hl.nn.GNN([pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)])
    method = hl.Historical(num_parts=2, parts_per_batch=1, partition="random")
    work: Any = hl.Trainer(net, data, method, epochs=1, show=False).work
    rows = work.partitioned.batches.inputs_of(torch.tensor([3, 1]))
    assert isinstance(rows, Rows)
    assert torch.equal(rows.read(), data.x[torch.tensor([3, 1])])


def test_moving_batches_to_the_device_does_not_change_losses(monkeypatch: pytest.MonkeyPatch):
    """The way to a GPU, on a machine that may have none."""
    data = planted_partition(num_nodes=300, num_edges=2000, num_classes=3, num_features=5, seed=1)
    partly_cached = hl.extend.CachedTable(data.x, torch.arange(20))  # rows that a device does not reach are read first
    losses = []
    for is_moved, x in ((False, data.x), (True, data.x), (True, partly_cached)):
        monkeypatch.setattr(PartBatches, "on_gpu", is_moved)
        monkeypatch.setattr(batches.pinned, "register", lambda tensor: "there is no GPU")
        torch.manual_seed(0)
        net = hl.nn.GNN([pyg.GCNConv(5, 8), pyg.GCNConv(8, 3)], dropout=0.3)
        method = hl.Historical(num_parts=6, parts_per_batch=2, partition="random", compensate=True, groups="fixed")
        placed_data = replace(data, tables={"x": x, "other": hl.extend.TensorTable(torch.ones(300, 2))})
        run = hl.Trainer(net, placed_data, method, epochs=2, show=False).fit()
        losses.append([epoch.loss for epoch in run.history])
    assert losses[0] == losses[1] == losses[2]
