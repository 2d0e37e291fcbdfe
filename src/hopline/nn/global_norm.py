"""Batch norms over the rows of all ranks: one mean, one variance, one pair of running statistics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hopline.nn.norm import remember, scaled
from hopline.world import World


def over_all_ranks(world: World) -> AbstractContextManager[Any]:
    """Within, batch norms in training, also those inside convs, are those of all ranks' rows together.

    Every rank must run the same ones in the same order, forward and backward; in evaluation nothing changes.
    """
    return nullcontext() if world.size == 1 else _OverAllRanks(world)


class _OverAllRanks(TorchFunctionMode):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.batch_norm:
            return batch_norm(self.world, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Summed(torch.autograd.Function):
    """The sum over ranks. Each rank's loss depends on the sum, so its gradient is summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return _sum(x, world)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.world), None


def _sum(x: Tensor, world: World) -> Tensor:
    total = x.cpu() if dist.get_backend() == "gloo" else x.clone()
    total = total.clone(memory_format=torch.contiguous_format)
    with world._exchange():  # says which rank stopped
        dist.all_reduce(total)
    return total.to(x.device)


def batch_norm(
    world: World,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As torch's over the rows of all ranks."""
    if not training:
        return torch.batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, False)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    count = _sum(torch.tensor([float(x.size(0))], dtype=exact.dtype, device=x.device), world).clamp(min=1)
    mean = _Summed.apply(exact.sum(0), world) / count
    var = _Summed.apply((exact - mean).square().sum(0), world) / count
    remember((mean, var, count), (running_mean, running_var), momentum)
    return scaled((exact - mean) * (var + eps).rsqrt(), weight, bias).to(x.dtype)
