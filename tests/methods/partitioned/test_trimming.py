"""Trimming: a sweep computes only the rows that training nodes need, and the edges into them.

`NEEDED` and `EDGES` are worked out by hand for the chain below. `test_full_batch.py` has the gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hopline as hl
from hopline.core.batch import Block
from hopline.methods.full_batch.work import SweepWork
from hopline.nn.gnn import GNN
from tests.support.helpers import gnn_of, graph_of, randn

NEEDED = [{2, 3, 4, 5, 6, 7}, {3, 4, 5, 6}, {4, 5}]
"""Nodes whose rows are needed after each of three layers of `chain`."""
EDGES = [6, 5, 3]
"""Edges into the nodes of `NEEDED`, by layer."""


def chain() -> hl.Dataset:
    """0 -> 1 -> 2 -> 3 -> 4 -> 5, and 7 -> 6 -> 5; 4 and 5 train."""
    graph = graph_of(torch.tensor([0, 1, 2, 3, 4, 7, 6]), torch.tensor([1, 2, 3, 4, 5, 6, 5]), 8)
    splits = {"train": torch.tensor([4, 5])}
    tables = {"x": hl.extend.TensorTable(randn(8, 6))}
    y = torch.arange(8) % 3
    return hl.Dataset(name="chain", graph=graph, tables=dict(tables), y=y, splits=splits, num_classes=3)


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_only_needed_rows_and_their_edges_are_computed(num_shards: int, monkeypatch: pytest.MonkeyPatch):
    data = chain()
    model = gnn_of("plain")
    method = hl.FullBatch(num_shards=num_shards, partition="random", aggregation="sweep", trim=True)
    work = hl.Trainer(model, data, method, epochs=1, show=False).work
    assert isinstance(work, SweepWork)
    assert (work.sweep.num_rows, work.sweep.num_edges) == (sum(map(len, NEEDED)), sum(EDGES))

    calls: list[tuple[int, list[int], int]] = []
    compute_layer = GNN.layer

    def layer(self: GNN, l: int, state: Any, block: Block) -> Any:
        calls.append((l, block.dst_ids.tolist(), block.num_edges))
        return compute_layer(self, l, state, block)

    monkeypatch.setattr(GNN, "layer", layer)
    for epoch in (1, 2):  # the second epoch uses what the first one cached
        (unit,) = work.units(epoch)
        calls.clear()
        unit.forward_backward(2)
        for l, times in enumerate((2, 2, 1)):  # forward and again in backward; the last layer in backward alone
            calls_of_layer = [(nodes, edges) for other, nodes, edges in calls if other == l]
            assert sorted(node for nodes, _ in calls_of_layer for node in nodes) == sorted([*NEEDED[l]] * times)
            assert sum(edges for _, edges in calls_of_layer) == EDGES[l] * times
            assert len(calls_of_layer) <= times * num_shards


def test_rows_that_nobody_needs_are_never_read():
    """Whatever stands in the tables at other nodes, the gradient is the same."""
    gradients = []
    for filler in (0.0, float("nan")):
        model = gnn_of("jk-cat")
        method = hl.FullBatch(num_shards=3, partition="random", aggregation="sweep", trim=True)
        work = hl.Trainer(model, chain(), method, epochs=1, show=False).work
        assert isinstance(work, SweepWork)
        work.partitioned.histories.table(0, torch.zeros(1, 8, dtype=torch.float64)).fill_(filler)
        (unit,) = work.units(1)
        unit.forward_backward(2)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
