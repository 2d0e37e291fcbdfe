"""Keyed random numbers: SplitMix64, the same in Python, torch, Numba and Triton.

A draw depends on a key, a node and a position in that node's sequence, never on a thread, a rank or a call order:
`s = mix(key ^ node)`, draw `j` is `mix(s + (j + 1) * GOLDEN)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number: torch has no shifts on uint64."""
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK
    return z ^ (z >> 31)


def derive_key(seed: int, *parts: int) -> int:
    """A 64-bit key (as a signed int) for a purpose: derive_key(seed, epoch, step), derive_key(key, layer)."""
    state = _mix_int(seed & _MASK)
    for part in parts:
        state = _mix_int((state + ((part + 1) * GOLDEN)) & _MASK)
    return _signed(state)


NUM_PURPOSES = 32
"""How many places of a step a device's keys are made for: the input, the layers, the encoder."""


def purpose_key(key: int | Tensor, purpose: int) -> int | Tensor:
    """The key of the draws at one place of a step, -1 being the input.

    On a device `key` is [1 + PLACES] int64: the step's own, and those of the places from -1 on, made in one kernel.
    """
    if isinstance(key, int):
        return derive_key(key, purpose)
    assert purpose + 1 < NUM_PURPOSES, "too many layers for the keys of a step"
    return key[purpose + 2 : purpose + 3]


AGAIN = 1 << 23
"""Place of further draws of a step among its keys, apart from all others."""


def another_key(key: int | Tensor, number: int) -> int | Tensor:
    """A key of the same step for further draws, for each number another one."""
    if isinstance(key, int):
        return derive_key(key, AGAIN + number)
    return mix(key + _signed((AGAIN + number + 1) * GOLDEN & _MASK))


LAYERS = 1 << 22
"""Place of the draws of neighbours among the keys of a step, apart from all others."""


def layer_key(key: int | Tensor, layer: int) -> int | Tensor:
    """The key by which a layer of a sampled block draws neighbours; layer 0 is the first to be computed.

    Two layers next to each other have one key, so that a node which both expand keeps its neighbours: 2.4% more nodes
    in a batch of products' recipe than with one key for all layers, where a key per layer has 7.6% more
    (`benchmarks/layer_keys.py`). It is enough for an unbiased sum. A linear GCN adds up products of edge weights along
    walks, one sampled edge per layer. If no two edges of a walk are from one draw, that is from one node by one key,
    the mean of the product is the product of the means. A walk that is at one node in two layers with the same key goes
    from the node to itself in between, by the self-loop, which is exact and not drawn.
    """
    pair = layer // 2
    if pair == 0:
        return key
    if isinstance(key, int):
        return derive_key(key, LAYERS + pair)
    return mix(mix(key) + _signed((LAYERS + pair + 1) * GOLDEN & _MASK))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 bit patterns."""
    z = (z ^ _shift_right(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX_2)
    return z ^ _shift_right(z, 31)


def draw(key: int, nodes: Tensor, position: Tensor | int) -> Tensor:
    """Draw number `position` of each node's sequence: int64 bit patterns, broadcast over both."""
    state = mix(nodes.long() ^ key)
    if isinstance(position, int):
        return mix(state + _signed((position + 1) * GOLDEN & _MASK))
    return mix(state + (position + 1) * _signed(GOLDEN))


def bounded(raw: Tensor, limit: Tensor) -> Tensor:
    """`raw` scaled to 0 .. limit - 1 by the high half of a 64-bit product; limit below 2**31."""
    high, low = _shift_right(raw, 32), raw & 0xFFFFFFFF
    return _shift_right(high * limit + _shift_right(low * limit, 32), 32)


def permutation(key: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """A random order of 0 .. size - 1 that depends on the key alone: int64."""
    return torch.argsort(draw(key, torch.arange(size, device=device), 0), stable=True)


def uniform(raw: Tensor, bits: int) -> Tensor:
    """Numbers from 0 up to 1, of the lowest bits of some draws: float64."""
    return (raw & ((1 << bits) - 1)).double() / (1 << bits)
