"""Batch norms over the rows of all ranks: one mean, one variance, one pair of running statistics.

A rank has only its own rows, and a batch norm must see all of them. With N the number of rows of all ranks:

    mean = 1/N  sum over ranks r  sum over r's rows x of  x
    var  = 1/N  sum over ranks r  sum over r's rows x of  (x - mean)^2

Both sums over ranks are all-reduces through which gradients pass. torch's own `SyncBatchNorm` refuses
tensors on the CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.distributed.world import World
from hopline.nn.norms import OwnStatistics


def norms_over_ranks(world: World) -> AbstractContextManager[Any]:
    """A context in which batch norms in training take their statistics from the rows of all ranks.

    Norms inside convs are included. The Trainer, `hl.nn.GNN` and `hl.nn.as_batch_model(model)` enter it by
    themselves. Enter it yourself around a module of your own that is called with the batches of
    `hl.FullBatch(...).loader(...)`. Every rank must run the same norms in the same order, forward and
    backward. In evaluation, and in a single process, nothing changes.

    Args:
        world: The ranks.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> with hl.shards.norms_over_ranks(hl.extend.World.alone()):
        ...     norm(torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """
    return nullcontext() if world.size == 1 else OwnStatistics(partial(_statistics_of_all_ranks, world))


def _statistics_of_all_ranks(world: World, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean [columns], biased variance [columns], number of rows [1]) of the rows of all ranks. Collective.

    rows: [n, columns], this rank's; n may be 0.
    """
    num_rows = torch.tensor([float(rows.size(0))], dtype=rows.dtype, device=rows.device)
    count = _all_reduce(num_rows, world).clamp(min=1)
    mean = _SumOverRanks.apply(rows.sum(0), world) / count
    variance = _SumOverRanks.apply((rows - mean).square().sum(0), world) / count
    return mean, variance, count


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, s = sum over r of x_r.

    The loss of every rank q depends on s, and the total loss is the sum of theirs. Since ds/dx_r = 1,

        dL/dx_r = sum over q of dL_q/ds

    so backward is a sum over ranks too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return _all_reduce(x, world)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.world), None


def _all_reduce(x: Tensor, world: World) -> Tensor:
    """The sum of a tensor over all ranks, on the tensor's device. Collective."""
    # Tensors on a GPU go through host memory with gloo, as those of `P2PTransport` do.
    on_host = dist.get_backend(world.group) == "gloo"
    total = (x.cpu() if on_host else x).clone(memory_format=torch.contiguous_format)
    with world.collective_call():  # an error names the rank that stopped
        dist.all_reduce(total, group=world.group)
    return total.to(x.device)
