"""Parts that all Triton kernels share: random numbers, keys on the device, launches, and error flags.

Random numbers are those of `hopline.ops.random`, bit for bit. Draw j for id v is

    mix(mix(key ^ v) + (j + 1) * GOLDEN)

A kernel reads its key from device memory. A key passed as a number would be part of a captured CUDA graph,
and every replay would draw the same numbers.

Errors. A kernel cannot raise, and asking it after every call would stall the host. So a kernel that checks
its ids does not follow one that is out of range, and sets a flag in device memory instead:

    kernel                           host
    report(flags, kind, is_wrong) -> read_with_errors, in calls that synchronise anyway, such as sampling
                                  -> check_device_errors, at the ends of epochs and of runs

An error is therefore raised later than the call that caused it. The results of that call are wrong, but no
memory outside its arrays was touched. Kernels that check no id, such as those of `tree`, say so in their
module.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops import random
from hopline.ops.reference import WRONG_WEIGHT

GOLDEN = tl.constexpr(random.GOLDEN)
"""Increment of SplitMix64 from draw to draw."""
_MIX_1 = tl.constexpr(random.MIX_1)
_MIX_2 = tl.constexpr(random.MIX_2)


@triton.jit
def mix(z):
    """SplitMix64's finaliser on uint64: `random.mix`."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def first_state(key, ids):
    """The first state of each id's sequence, uint64. For every draw add GOLDEN to the state and `mix` the sum."""
    return mix(key.to(tl.uint64) ^ ids.to(tl.uint64))


@triton.jit
def bounded(raw, limit):
    """raw * limit / 2**64, rounded down: int64 in 0 .. limit - 1. raw: uint64. limit: below 2**31.

    The product has up to 95 bits, so it is added up from the halves of `raw`.
    """
    n = limit.to(tl.uint64)
    high = raw >> 32
    low = raw & 0xFFFFFFFF
    return ((high * n + ((low * n) >> 32)) >> 32).to(tl.int64)


def key_on(device: torch.device, key: int | Tensor) -> Tensor:
    """A key in device memory: [1] int64. A tensor must be on the device already, with one element."""
    if isinstance(key, Tensor):
        return key.view(1)
    return torch.full((1,), key, dtype=torch.int64, device=device)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


# ---- draws over a segment: of `degree` edges, by a generator in a state


@triton.jit
def draw_distinct(state, degree, FANOUT: tl.constexpr):
    """A tuple of FANOUT int32 blocks: the first numbers of each lane's keyed shuffle of 0 .. degree - 1.

    Fisher-Yates draws a target in j .. degree - 1 and swaps positions j and target, for j = 0, 1, ... An
    array of all positions would need `degree` registers. Only the swapped positions differ from the
    identity, so only these are held: swap i moved the value `swap_values[i]` to the position
    `swap_targets[i]`. That is O(FANOUT) registers for any degree. Picks from number `degree` on are
    meaningless; the caller masks them.
    """
    picks = ()
    swap_targets = ()
    swap_values = ()
    for j in tl.static_range(FANOUT):
        state += GOLDEN
        target = (j + bounded(mix(state), tl.maximum(degree - j, 1))).to(tl.int32)
        value_at_target = target
        value_at_j = tl.zeros_like(target) + j
        for i in tl.static_range(j):  # the latest swap into a position says what it holds
            value_at_target = tl.where(swap_targets[i] == target, swap_values[i], value_at_target)
            value_at_j = tl.where(swap_targets[i] == j, swap_values[i], value_at_j)
        picks = picks + (value_at_target,)
        swap_targets = swap_targets + (target,)
        swap_values = swap_values + (value_at_j,)
    return picks


@triton.jit
def draw_repeated(state, degree, FANOUT: tl.constexpr):
    """A tuple of FANOUT int64 blocks: independent draws of each lane from 0 .. degree - 1."""
    picks = ()
    for _ in tl.static_range(FANOUT):
        state += GOLDEN
        picks = picks + (bounded(mix(state), degree),)
    return picks


# ---- memory and launches


def accumulator(dtype: torch.dtype) -> tuple[torch.dtype, Any]:
    """The dtype in which numbers of `dtype` are summed, as torch's and as Triton's name of it."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)


def is_readable(tensor: Tensor) -> bool:
    """Whether kernels can read a tensor: it is in device memory, or in pinned host memory."""
    return tensor.is_cuda or is_interpreted() or tensor.is_pinned()


def check_readable(what: str, *tensors: Tensor) -> None:
    """Raise ValueError if kernels cannot read one of the tensors. what: their name in the message."""
    if not all(map(is_readable, tensors)):
        raise ValueError(f"{what} is in host memory that the GPU cannot read: move it there, or pin it (pin_memory())")


def launch_on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one inside the block. Triton launches on the current device, not on the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_VERIFY = "check the dataset by `hopline verify FOLDER`"
_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (ValueError, f"a node id is outside the graph, or the graph's indptr is damaged: check the ids, or {_VERIFY}"),
    (ValueError, f"an edge index is out of range: {_VERIFY}"),
    (IndexError, "a row id is outside its table"),
    (IndexError, "an edge's source is outside the rows, or indptr does not fit the edges"),
    (IndexError, "a group is outside the number of groups"),
    (ValueError, WRONG_WEIGHT),
)

# ---- kinds of errors: positions in `_ERRORS` and in the flags of a device

NODE_ERROR = tl.constexpr(0)
"""A node id is outside the graph, or its indptr is damaged."""
INDEX_ERROR = tl.constexpr(1)
"""An edge index is out of range."""
ROW_ERROR = tl.constexpr(2)
"""A row id is outside its table."""
EDGE_ERROR = tl.constexpr(3)
"""An edge's source is outside the rows, or indptr does not fit the edges."""
GROUP_ERROR = tl.constexpr(4)
"""A group is outside the number of groups."""
WEIGHT_ERROR = tl.constexpr(5)
"""A weight of a weighted draw is not allowed."""

_flags: dict[torch.device, Tensor] = {}
"""The error flags of each device: [number of kinds] int32. Owned by this module, for the life of the process.

Captured CUDA graphs have the address of the flags, so a tensor is never replaced. If two threads make the
flags of one device at the same time, `setdefault` keeps the first.
"""


@triton.jit
def report(flags, kind: tl.constexpr, is_wrong):
    """Set flag number `kind` if any lane is wrong. is_wrong: a block of booleans.

    The term `* 0` only gives the address the shape of `is_wrong`, as a masked store needs it. All lanes
    store 1, so their order does not matter.
    """
    tl.store(flags + kind + is_wrong.to(tl.int32) * 0, 1, mask=is_wrong)


def error_flags(device: torch.device) -> Tensor:
    """[number of kinds] int32 on the device: nonzero for each kind of error since the last check."""
    # "cuda" and "cuda:0" may be one device, which must not get two tensors of flags.
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _flags:
        _flags.setdefault(device, torch.zeros(len(_ERRORS), dtype=torch.int32, device=device))
    return _flags[device]


def read_with_errors(number: Tensor) -> int:
    """The value of a tensor [1] on the device.

    Raises the errors that kernels on this device have reported so far.

    Number and flags come in one transfer, so the host synchronises once.
    """
    value, *flags = torch.cat([number.long(), error_flags(number.device)]).tolist()
    _raise(number.device, flags)
    return value


def check_device_errors() -> None:
    """Raise the errors that kernels have reported since the last check. Synchronises with all devices in use."""
    for device, flags in list(_flags.items()):
        _raise(device, flags.tolist())


def _raise(device: torch.device, flags: Sequence[int]) -> None:
    """Raise the first error of `flags`, and clear all flags of the device."""
    for is_set, (error, message) in zip(flags, _ERRORS, strict=True):
        if is_set:
            error_flags(device).zero_()  # once reported, later calls may be right
            raise error(message)
