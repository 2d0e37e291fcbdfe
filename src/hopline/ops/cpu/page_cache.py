"""Reading rows of a memory-mapped file from disk: pages are requested before a kernel reads them.

A kernel that touches a page which is not in memory waits for the disk, one page at a time. The system reads
many pages in parallel if it is told of all pages of a batch at once, in the order of the file:

    is_cold             looks up the pages of a few rows: are they in memory?
    in_order_of_file    sorts the rows by position in the file, and divides them into pieces
                            request piece 0
                            request piece 1,  give piece 0 to the caller, who reads it
                            request piece 2,  give piece 1 to the caller, ...

The requests are `madvise` with MADV_WILLNEED, which does not wait for the disk. `mincore` says which pages
are in memory. Both are called from Numba kernels, without the GIL. Only Linux is supported: on other
systems `is_cold` is always False, and rows are read page by page. Failed requests are ignored, since they
only cost time.
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
"""Bytes. Smaller arrays are never cold: they are soon in memory as a whole."""
LOOKED_AT = 32
"""Rows whose first pages `is_cold` looks up, evenly spread: at least this many, and fewer than twice as many.
All rows, if there are fewer."""
LARGEST_GAP = 4
"""Pages. Two needed pages with a gap up to this are requested together, and the gap is read too."""

BYTES_AT_ONCE = 1 << 26
"""Bytes of one piece: enough to keep the disk busy, and few enough to stay in memory until they are read."""

_PAGE = mmap.PAGESIZE
# Advice for `madvise`. 0 on systems that lack the name. It is not used on them: `is_cold` is False, and
# callers of `in_order_of_file` ask `is_cold` first.
_RANDOM = np.int64(getattr(mmap, "MADV_RANDOM", 0))
_WILL_NEED = np.int64(getattr(mmap, "MADV_WILLNEED", 0))


def _c_function(name: str) -> Any:
    """A function of the C library with the signature int name(address, size, last), for kernels to call.

    All arguments are declared as int64. For `madvise` the last one is an int, for `mincore` a pointer: in
    the calling conventions of 64-bit systems, each takes a whole register.
    """

    @intrinsic
    def call(typingctx, address, size, last):
        signature = types.int32(types.int64, types.int64, types.int64)

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * 3)
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

        return signature, codegen

    return call


_madvise = _c_function("madvise")
_mincore = _c_function("mincore")


@kernel
def _all_in_memory(address, row_bytes, ids, num_probes):
    """Whether the first pages of about `num_probes` of the rows, evenly spread over `ids`, are in memory."""
    state = np.zeros(1, dtype=np.uint8)
    step = max(1, ids.shape[0] // num_probes)
    for i in range(0, ids.shape[0], step):
        page = (address + np.int64(ids[i]) * row_bytes) // _PAGE * _PAGE
        # A system that does not tell, or a call that fails, counts as "in memory": rows are then read page
        # by page.
        has_answer = _mincore(page, np.int64(_PAGE), np.int64(state.ctypes.data)) == 0
        if has_answer and not state[0] & 1:
            return False
    return True


@kernel
def _request_pages(address, row_bytes, ids):
    """Request the pages of the rows `ids`, which ascend. Pages that are close to each other make one request."""
    # start, stop: the addresses of the run of pages that is not requested yet. It is empty at first.
    start = address // _PAGE * _PAGE
    stop = start
    for i in range(ids.shape[0]):
        first = (address + np.int64(ids[i]) * row_bytes) // _PAGE * _PAGE
        end = (address + (np.int64(ids[i]) + 1) * row_bytes + _PAGE - 1) // _PAGE * _PAGE
        if first > stop + LARGEST_GAP * _PAGE:
            if stop > start:
                _madvise(start, stop - start, _WILL_NEED)
            start = first
        elif stop == start:
            # The first row, if it is within LARGEST_GAP of the start of the array. The run begins at its page.
            start = first
        stop = max(stop, end)
    if stop > start:
        _madvise(start, stop - start, _WILL_NEED)


@kernel
def _expect_random_reads(address, num_bytes):
    """Tell the system not to read ahead in this array (MADV_RANDOM).

    Otherwise it reads megabytes around every missing page, and drops other pages for them.
    """
    start = address // _PAGE * _PAGE
    _madvise(start, address + num_bytes - start, _RANDOM)


def is_cold(rows: Tensor, ids: np.ndarray) -> bool:
    """Whether some of the rows `ids` are on disk and not in memory, judged by a few of them.

    rows: [num_rows, ...], contiguous, possibly a view of a mapped file; ids: [n], within 0 .. num_rows - 1.
    """
    num_bytes = rows.numel() * rows.element_size()
    if num_bytes < SMALLEST_BYTES or not ids.shape[0] or not sys.platform.startswith("linux"):
        return False
    return not _all_in_memory(rows.data_ptr(), num_bytes // rows.size(0), ids, LOOKED_AT)


def in_order_of_file(rows: Tensor, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yield indices into `ids`, 0 .. len(ids) - 1, in pieces and sorted by id. The file has its rows by id.

    Call it only if `is_cold` is True, which implies Linux.

    When a piece is given out, its pages have been requested, and those of the next piece as well. So the
    disk reads the next piece while the caller copies this one.

    rows, ids: as in `is_cold`.
    """
    num_bytes = rows.numel() * rows.element_size()
    address = rows.data_ptr()
    row_bytes = num_bytes // rows.size(0)
    _expect_random_reads(address, num_bytes)
    order = np.argsort(ids, kind="stable")
    # A row is read in whole pages: about one page more than its bytes.
    rows_per_piece = max(1, BYTES_AT_ONCE // (row_bytes + _PAGE))
    pieces = [order[i : i + rows_per_piece] for i in range(0, order.shape[0], rows_per_piece)]
    for piece, following in itertools.zip_longest(pieces, pieces[1:]):
        if piece is pieces[0]:
            _request_pages(address, row_bytes, ids[piece])
        if following is not None:
            _request_pages(address, row_bytes, ids[following])
        yield piece
