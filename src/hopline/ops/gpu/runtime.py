"""What the Triton kernels share: the generator, keys on the device, the shape of a launch, and errors that they find.

A key is always read from device memory: passed as a number it would be compiled into the kernel, once per step.

A kernel cannot raise, and asking it after every call would stall the host. Kernels never follow an id that is out of
range: they raise a flag in device memory instead. The calls that wait for the device anyway (the sizes of a sampled
block) look at the flags, and so does `check_device_errors`, for the ends of epochs and of runs.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
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


_VERIFY = "check the dataset by `hopline verify FOLDER`"
_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (ValueError, f"a node id is outside the graph, or the graph's indptr is damaged: check the ids, or {_VERIFY}"),
    (ValueError, f"an edge index is out of range: {_VERIFY}"),
    (IndexError, "a row id is outside its table"),
    (IndexError, "an edge's source is outside the rows, or indptr does not fit the edges"),
    (IndexError, "a group is outside the number of groups"),
)
NODE_ERROR, INDEX_ERROR, ROW_ERROR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EDGE_ERROR, GROUP_ERROR = tl.constexpr(3), tl.constexpr(4)

_flags: dict[torch.device, Tensor] = {}
"""By device: the flags that its kernels raise, some bytes. Owned by this module: captured graphs have their address, so
they stay for as long as the process lives, and `setdefault` lets the first of two threads win."""


@triton.jit
def report(flags, kind: tl.constexpr, wrong):
    """Raise flag number `kind` where anything is wrong."""
    tl.store(flags + kind + wrong.to(tl.int32) * 0, 1, mask=wrong)


def error_flags(device: torch.device) -> Tensor:
    """[number of kinds] int32: what kernels on this device found wrong since somebody looked."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _flags:
        _flags.setdefault(device, torch.zeros(len(_ERRORS), dtype=torch.int32, device=device))
    return _flags[device]


def read_with_errors(number: Tensor) -> int:
    """A number [1] from the device, waiting for it once; raises what kernels there found wrong until then."""
    value, *flags = torch.cat([number.long(), error_flags(number.device)]).tolist()
    _raise(number.device, flags)
    return value


def check_device_errors() -> None:
    """Raise what kernels on any device found wrong since somebody looked: waits for the devices."""
    for device, flags in list(_flags.items()):
        _raise(device, flags.tolist())


def _raise(device: torch.device, flags: Sequence[int]) -> None:
    for raised, (error, message) in zip(flags, _ERRORS, strict=True):
        if raised:
            error_flags(device).zero_()  # reported: what comes next may be right
            raise error(message)
