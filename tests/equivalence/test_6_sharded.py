"""Identity 6: a graph in shards is the graph in one piece: loss and gradients, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

import hopline as hl
from tests.equivalence.test_5_historical import DATA, GRAPH, MODELS, X
from tests.helpers import plain_gnn


def gradients(model: hl.nn.GNN, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """The loss, and behind it the gradients that it leaves."""
    model.zero_grad()
    found = loss()
    return [found.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


def in_one_piece(model: hl.nn.GNN) -> torch.Tensor:
    """Plain PyG over the whole graph."""
    ids = DATA.splits["train"]
    loss = torch.nn.functional.cross_entropy(plain_gnn(model, X, GRAPH)[ids], DATA.labels[ids])
    loss.backward()
    return loss


def in_shards(model: hl.nn.GNN, method: hl.FullBatch) -> torch.Tensor:
    work = hl.Trainer(model, DATA, method, epochs=1, show=False).work
    model.train()
    (unit,) = work.units(1)
    assert unit.total_size is not None
    return unit.forward_backward(unit.total_size) / unit.total_size


WAYS: list[tuple[int, Literal["sweep", "sequential"]]] = [
    (1, "sweep"),
    (3, "sweep"),
    (8, "sweep"),
    (1, "sequential"),
    (3, "sequential"),
    (8, "sequential"),
]


@pytest.mark.parametrize("name", ["gcn", "gat", "sage"])
def test_any_number_of_shards_is_the_whole_graph(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    expected = gradients(model, lambda: in_one_piece(model))
    for num_shards, aggregation in WAYS:
        method = hl.FullBatch(num_shards=num_shards, partition="random", aggregation=aggregation, trim=num_shards == 3)
        found = gradients(model, lambda method=method: in_shards(model, method))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=f"{num_shards} {aggregation}")
