"""Gradients summed over ranks: a flat all-reduce per bucket of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from hopline.distributed.world import World


BUCKET_BYTES = 25 << 20
"""Gradients are exchanged in pieces of about this size: few enough to be fast, small enough to be held twice."""


def sum_over_ranks(parameters: Iterable[Tensor], world: World) -> None:
    """Replace every gradient by its sum over the ranks; one that only some ranks have counts as zero elsewhere.

    Afterwards all ranks have the same gradients: one that no rank has stays None. Half-precision gradients are
    summed in float32. All ranks must call this with the same parameters.
    """
    if world.size == 1:
        return
    buckets = list(_buckets([p for p in parameters if p.requires_grad]))
    flats = [_flatten(bucket, world.device) for bucket in buckets]
    with world.exchange():
        works = [dist.all_reduce(flat, group=world.group, async_op=True) for flat in flats]
        for work in works:
            assert work is not None
            work.wait()
    for bucket, flat in zip(buckets, flats, strict=True):
        _unflatten(bucket, flat)


def in_groups(num_bytes: int, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, in groups of about that size."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(t.nbytes for t in group) + tensor.nbytes > num_bytes:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that are exchanged together: the same on every rank, whichever gradients it has."""
    for dtype in dict.fromkeys(_exchanged(p.dtype) for p in parameters):
        yield from in_groups(BUCKET_BYTES, [p for p in parameters if _exchanged(p.dtype) == dtype])


def _flatten(bucket: Sequence[Tensor], device: torch.device) -> Tensor:
    """The gradients one after another, zeros for missing ones, then 1 for each that is there and 0 for others."""
    dtype = _exchanged(bucket[0].dtype)
    flat = torch.zeros(sum(p.numel() for p in bucket) + len(bucket), dtype=dtype, device=device)
    start = 0
    for position, parameter in enumerate(bucket, start=-len(bucket)):
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                raise ValueError("a gradient is sparse, which ranks cannot sum: make the embedding with sparse=False")
            flat[start : start + parameter.numel()].copy_(parameter.grad.reshape(-1))
            flat[position] = 1
        start += parameter.numel()
    return flat


def _unflatten(bucket: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat[: -len(bucket)].split([p.numel() for p in bucket])
    # Looked at only where a gradient is missing: on a GPU this waits for the exchange to end.
    incomplete = any(p.grad is None for p in bucket)
    held = (flat[-len(bucket) :].tolist()) if incomplete else [1.0] * len(bucket)
    for parameter, part, ranks in zip(bucket, parts, held, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(part.view_as(parameter))
        elif ranks:
            parameter.grad = part.view_as(parameter).to(parameter.device, parameter.dtype, copy=True)


def _exchanged(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
