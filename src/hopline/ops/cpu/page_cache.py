"""Rows of a file that is mapped into memory, asked for from the disk before they are read.

A kernel that touches a page which is not in memory waits for the disk, one page at a time. Told of all pages of a
batch at once, in the order of the file, the system reads many of them side by side.
"""

from __future__ import annotations

import itertools
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from hopline.ops.cpu.runtime import kernel

SMALLEST_BYTES = 1 << 26
"""Smaller arrays are read whole soon enough."""
LOOKED_AT = 32
"""Rows whose pages are looked up: if all are in memory, nothing is asked for."""
LARGEST_GAP = 4
"""Pages between two that are needed which are read along, to make one request of two."""

BYTES_AT_ONCE = 1 << 26
"""Bytes that are asked for at a time: enough for the disk to work on, little enough to stay until it is read."""

_PAGE = mmap.PAGESIZE
_RANDOM, _WILL_NEED = (np.int64(getattr(mmap, name, 0)) for name in ("MADV_RANDOM", "MADV_WILLNEED"))


def _c_function(name: str) -> Any:
    """int name(address, size, number or address), for kernels to call: all three travel as whole registers."""

    @intrinsic
    def call(typingctx, address, size, last):
        signature = types.int32(types.int64, types.int64, types.int64)

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * 3)
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

        return signature, codegen

    return call


_madvise, _mincore = _c_function("madvise"), _c_function("mincore")


@kernel
def _all_in_memory(address, row_bytes, ids, looked_at):
    state = np.zeros(1, dtype=np.uint8)
    step = max(1, ids.shape[0] // looked_at)
    for i in range(0, ids.shape[0], step):
        page = (address + np.int64(ids[i]) * row_bytes) // _PAGE * _PAGE
        # Where the system does not tell, it says that the page is there.
        if _mincore(page, np.int64(_PAGE), np.int64(state.ctypes.data)) == 0 and not state[0] & 1:
            return False
    return True


@kernel
def _ask_for(address, row_bytes, ids):
    """Ask for the pages of ascending ids, neighbouring ones in one request."""
    start = address // _PAGE * _PAGE
    stop = start  # of the run that is not asked for yet
    for i in range(ids.shape[0]):
        first = (address + np.int64(ids[i]) * row_bytes) // _PAGE * _PAGE
        past = (address + (np.int64(ids[i]) + 1) * row_bytes + _PAGE - 1) // _PAGE * _PAGE
        if first > stop + LARGEST_GAP * _PAGE:
            if stop > start:
                _madvise(start, stop - start, _WILL_NEED)
            start = first
        elif stop == start:
            start = first
        stop = max(stop, past)
    if stop > start:
        _madvise(start, stop - start, _WILL_NEED)


@kernel
def _expect_random_reads(address, num_bytes):
    """Or else the system reads megabytes around every page that is missed, and drops others for them."""
    start = address // _PAGE * _PAGE
    _madvise(start, address + num_bytes - start, _RANDOM)


def is_cold(rows: Tensor, ids: np.ndarray) -> bool:
    """Whether rows of `ids` have to come from the disk, as far as a few of them tell.

    rows: [num_rows, ...], contiguous; ids: within 0 .. num_rows - 1.
    """
    num_bytes = rows.numel() * rows.element_size()
    if num_bytes < SMALLEST_BYTES or not ids.shape[0] or not sys.platform.startswith("linux"):
        return False
    return not _all_in_memory(rows.data_ptr(), num_bytes // rows.size(0), ids, LOOKED_AT)


def in_order_of_file(rows: Tensor, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Positions in `ids`, in pieces sorted by id: a piece's rows were asked for, and the next one's are."""
    num_bytes = rows.numel() * rows.element_size()
    address, row_bytes = rows.data_ptr(), num_bytes // rows.size(0)
    _expect_random_reads(address, num_bytes)
    order = np.argsort(ids, kind="stable")
    rows_per_piece = max(1, BYTES_AT_ONCE // (row_bytes + _PAGE))
    pieces = [order[i : i + rows_per_piece] for i in range(0, order.shape[0], rows_per_piece)]
    for piece, following in itertools.zip_longest(pieces, pieces[1:]):
        if piece is pieces[0]:
            _ask_for(address, row_bytes, ids[piece])
        if following is not None:
            _ask_for(address, row_bytes, ids[following])
        yield piece
