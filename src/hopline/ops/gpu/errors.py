"""Errors that kernels find.

A kernel cannot raise, and asking it after every call would stall the host. Kernels never follow an id that is out of
range: they raise a flag in device memory instead. The calls that wait for the device anyway (the sizes of a sampled
block) look at the flags, and so does `check_device_errors`, for the ends of epochs and of runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

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
