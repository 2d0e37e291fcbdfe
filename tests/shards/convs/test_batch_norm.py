"""Batch norms over the rows of all ranks equal torch's batch norm over all rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.shards.convs.batch_norm import norms_over_ranks
from tests.support.helpers import randn

ROWS = (5, 0, 12)
"""Of each rank; one has none."""


def new_batch_norm() -> nn.BatchNorm1d:
    """A batch norm with random weight and bias."""
    batch_norm = nn.BatchNorm1d(4).double()
    with torch.no_grad():
        batch_norm.weight.copy_(randn(4, seed=5))
        batch_norm.bias.copy_(randn(4, seed=6))
    return batch_norm


def run_batch_norm(batch_norm: nn.BatchNorm1d, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    """Outputs, gradients and running statistics after two passes, and outputs in evaluation."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        batch_norm.zero_grad()
        x.grad = None
        out = batch_norm(x)
        (out * weight).sum().backward()
    batch_norm.eval()
    assert x.grad is not None
    assert batch_norm.weight.grad is not None
    assert batch_norm.bias.grad is not None
    assert batch_norm.running_mean is not None
    assert batch_norm.running_var is not None
    return {
        "out": out.detach(),
        "x": x.grad,
        "weight": batch_norm.weight.grad,
        "bias": batch_norm.bias.grad,
        "mean": batch_norm.running_mean,
        "var": batch_norm.running_var,
        "evaluated": batch_norm(x).detach(),
    }


def run_on_rank(world: World) -> dict[str, list[Any]]:
    """The results of `run_batch_norm` over all ranks, by name. This rank has `ROWS[rank]` of the rows."""
    first = sum(ROWS[: world.rank])
    mine = slice(first, first + ROWS[world.rank])
    batch_norm = new_batch_norm()
    with norms_over_ranks(world):
        own_results = run_batch_norm(batch_norm, randn(sum(ROWS), 4)[mine], randn(sum(ROWS), 4, seed=1)[mine])
    world.sum_gradients(batch_norm.parameters())  # as the trainer does
    results = {}
    for name, value in own_results.items():
        by_row = name in ("out", "x", "evaluated")
        pieces = world.all_to_all([value if by_row or r == 0 else value[:0] for r in range(world.size)])
        results[name] = torch.cat(pieces).tolist() if by_row else value.tolist()
    return results


def test_rows_gradients_and_running_statistics_are_those_of_torch():
    ours = run(run_on_rank, LaunchSettings(devices=3, timeout_s=60))
    expected = run_batch_norm(new_batch_norm(), randn(sum(ROWS), 4), randn(sum(ROWS), 4, seed=1))
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(ours[name], dtype=torch.float64), value, rtol=1e-10, atol=1e-12)


def test_one_process_uses_torchs_batch_norm():
    with norms_over_ranks(World.alone()):
        assert torch.equal(new_batch_norm()(randn(6, 4)), new_batch_norm()(randn(6, 4)))
