"""What the Triton kernels share: the generator, keys on the device, and the shape of a launch.

A key is always read from device memory: passed as a number it would be compiled into the kernel, once per step.
"""

from __future__ import annotations

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
