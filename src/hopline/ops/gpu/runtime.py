"""What the Triton kernels share: the generator, keys on the device, and the shape of a launch.

A key is always read from device memory: passed as a number it would be compiled into the kernel, once per step.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops import random

GOLDEN = tl.constexpr(random.GOLDEN)
_MIX_1, _MIX_2 = tl.constexpr(random.MIX_1), tl.constexpr(random.MIX_2)


@triton.jit
def mix(z):
    """SplitMix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def first_state(key, ids):
    """Where the sequence of each id begins: add GOLDEN before every draw, and `mix` the sum."""
    return mix(key.to(tl.uint64) ^ ids.to(tl.uint64))


@triton.jit
def bounded(raw, limit):
    """`raw` scaled to 0 .. limit - 1 (int64), by the high half of a 64-bit product; limit below 2**31."""
    n = limit.to(tl.uint64)
    high = raw >> 32
    low = raw & 0xFFFFFFFF
    return ((high * n + ((low * n) >> 32)) >> 32).to(tl.int64)


def key_on(device: torch.device, key: int | Tensor) -> Tensor:
    """A key where kernels can read it: [1] int64."""
    if isinstance(key, Tensor):
        return key.view(1)
    return torch.full((1,), key, dtype=torch.int64, device=device)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


# ---- draws without replacement


@triton.jit
def shuffled(state, degree, FANOUT: tl.constexpr):
    """The first FANOUT of each row's keyed shuffle of 0 .. degree - 1: a tuple of int32, in registers.

    Of the shuffle only the touched positions are kept: swap i took what stood at i to `targets[i]`. The picks of a row
    beyond its degree mean nothing.
    """
    picks, targets, moved = (), (), ()
    for j in tl.static_range(FANOUT):
        state += GOLDEN
        target = (j + bounded(mix(state), tl.maximum(degree - j, 1))).to(tl.int32)
        at_target = target
        at_j = tl.zeros_like(target) + j
        for i in tl.static_range(j):  # the latest swap into a position says what it holds
            at_target = tl.where(targets[i] == target, moved[i], at_target)
            at_j = tl.where(targets[i] == j, moved[i], at_j)
        picks, targets, moved = picks + (at_target,), targets + (target,), moved + (at_j,)
    return picks


# ---- memory and launches


def readable(tensor: Tensor) -> bool:
    """Whether kernels can read it where it is: device memory, or host memory that is pinned."""
    return tensor.is_cuda or is_interpreted() or tensor.is_pinned()


def check_readable(what: str, *tensors: Tensor) -> None:
    if not all(map(readable, tensors)):
        raise ValueError(f"{what} is in host memory that the GPU cannot read: move it there, or pin it (pin_memory())")


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: within, that is the one of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
