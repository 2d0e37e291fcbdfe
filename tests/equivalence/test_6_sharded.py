"""Identity 6: full-batch training over any number of shards has the loss and gradients of plain PyG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

import hopline as hl
from tests.equivalence.test_5_historical import DATA, GRAPH, MODELS, X
from tests.support.helpers import plain_gnn


def loss_and_gradients(model: hl.nn.GNN, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """[loss, gradient of each parameter] after a call that runs backward."""
    model.zero_grad()
    loss_value = loss()
    return [
        loss_value.detach(),
        *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()),
    ]


def loss_by_plain_pyg(model: hl.nn.GNN) -> torch.Tensor:
    """The oracle: loss and backward of plain PyG over the whole graph."""
    ids = DATA.splits["train"]
    loss = torch.nn.functional.cross_entropy(plain_gnn(model, X, GRAPH)[ids], DATA.labels[ids])
    loss.backward()
    return loss


def loss_over_shards(model: hl.nn.GNN, method: hl.FullBatch) -> torch.Tensor:
    """Loss and backward of one full-batch step over shards."""
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
def test_loss_and_gradients_over_shards_equal_those_of_the_whole_graph(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    expected = loss_and_gradients(model, lambda: loss_by_plain_pyg(model))
    for num_shards, aggregation in WAYS:
        method = hl.FullBatch(num_shards=num_shards, partition="random", aggregation=aggregation, trim=num_shards == 3)
        ours = loss_and_gradients(model, lambda method=method: loss_over_shards(model, method))
        for our_tensor, expected_tensor in zip(ours, expected, strict=True):
            torch.testing.assert_close(
                our_tensor, expected_tensor, rtol=1e-10, atol=1e-12, msg=f"{num_shards} {aggregation}"
            )
