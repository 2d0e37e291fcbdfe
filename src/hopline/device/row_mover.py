"""`RowMover`: rows that move between tables in host memory and a GPU while the GPU computes.

A table in pinned memory is read and written by kernels of the GPU. Any other table, such as a mapped file, is read and
written by the host, through a few pinned buffers:

    pull   table --index_select, host--> pinned buffer --copy, mover's stream--> new tensor on the GPU
    push   rows on the GPU --copy, mover's stream--> pinned buffer --copy, host, by `flush`--> table

Pulls and pushes run on one stream, in the order in which they were asked for, so that a pull sees every push before it
and none after it. The stream that computes waits for rows only where it uses them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.device import pinned
from hopline.device.streams import stream_for
from hopline.util import trace

NUM_BUFFERS = 4
"""Pinned buffers of a mover: the host gathers rows into one while others are copied. A rule of thumb."""
BUFFER_BYTES = 32 << 20
"""Size of a pinned buffer, for rows of any width. A rule of thumb."""


@dataclass(frozen=True, eq=False)
class PulledRows:
    """Rows on their way to the device."""

    rows: Tensor
    arrival: Any
    """The CUDA event after which the rows are there; None on a CPU, where they are there at once."""

    def wait(self) -> Tensor:
        """The rows, for the current stream, which waits for them."""
        if self.arrival is not None:
            compute = torch.cuda.current_stream(self.rows.device)
            compute.wait_event(self.arrival)
            # They were allocated on the mover's stream: their memory must not be given to others while it is read.
            self.rows.record_stream(compute)
        return self.rows


@dataclass(eq=False)
class _Buffer:
    """Pinned memory, and the copies that still need it."""

    memory: Tensor
    copied: Any = None
    """The CUDA event after which the last copy from or into this memory is done."""
    pushes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(rows in this memory, the part of a table that they belong to), for the host to copy."""


class RowMover:
    """Moves rows between tables and a device.

    The work that trains owns the mover; its tables call it. Only the thread that trains may call it. Rows of tables on
    the device itself do not move: they are read and written on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = stream_for("rows", device) if device.type == "cuda" else None
        self._buffers: deque[_Buffer] = deque()
        """The one that was used the longest time ago comes first."""
        self._last_read: Any = None
        """The CUDA event after which the computation has done its last `read`."""

    def now(self) -> Any:
        """This moment of the computation, for `push`; None on a CPU, where what was asked for is done."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def to_device(self, positions: Tensor) -> Tensor:
        """[n] positions on the device; the host does not wait for their copy."""
        if self.device.type == "cpu" or positions.is_cuda:
            return positions
        readable = positions if pinned.is_readable(positions) else positions.pin_memory()
        return readable.to(self.device, non_blocking=True)

    # ---- reading

    def pull(self, tables: Mapping[int, Tensor], positions: Tensor) -> dict[int, PulledRows]:
        """By layer, rows of the tables in host memory as they are now; their copies to the device begin now.

        positions: [n] int64 on the host. Tables on the device are left out: the computation reads their rows when it
        needs them.
        """
        on_host = {l: table for l, table in tables.items() if not self._is_on_device(table)}
        pulled = {}
        # Nothing on the current stream needs to be waited for: these tables are written on the mover's stream.
        with self._on_own_stream():
            by_kernel = any(self._is_read_by_kernel(table) for table in on_host.values())
            on_device = self.to_device(positions) if by_kernel else positions
            for l, table in on_host.items():
                rows = self._gather(table, positions, on_device)
                pulled[l] = PulledRows(rows, None if self.stream is None else self.stream.record_event())
        return pulled

    def read(self, table: Tensor, positions: Tensor) -> Tensor:
        """Copies of the rows at some positions, on the device, for the current stream. It waits for all pushes."""
        if self._is_on_device(table):
            return ops.gather_rows(table, self.to_device(positions))
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        on_device = self.to_device(positions) if self._is_read_by_kernel(table) else positions
        rows = self._gather(table, positions, on_device)
        self._last_read = self.now()
        return rows

    def _gather(self, table: Tensor, positions: Tensor, on_device: Tensor) -> Tensor:
        """Rows of a table in host memory, on the current stream."""
        trace.count("bytes.pulled", positions.numel() * _row_bytes(table))
        if self._is_read_by_kernel(table):
            return ops.gpu_kernels("tiers").gather_aside(table, on_device)
        positions = positions.cpu()
        self._write_pushes()  # the host reads the table, so pushes must be in it
        rows = torch.empty(positions.numel(), *table.shape[1:], dtype=table.dtype, device=self.device)
        for start, stop in _runs(table, positions.numel()):
            buffer = self._next_buffer(table)
            staged = _rows_in(buffer.memory, table, stop - start)
            torch.index_select(table, 0, positions[start:stop], out=staged)
            rows[start:stop].copy_(staged, non_blocking=True)
            self._mark(buffer)
        return rows

    # ---- writing

    def push(self, table: Tensor, at: Tensor | Sequence[slice], rows: Tensor, computed: Any = None) -> None:
        """Write rows into a table, at positions (each once) or as slabs.

        computed: the moment, of `now()`, at which the rows were computed; by default now.
        """
        if self._is_on_device(table):
            _write(table, at, rows)
            return
        if rows.device.type != self.device.type:
            # The host writes its own rows. Earlier pushes must be in the table before, and nobody may be reading.
            self.flush()
            _write(table, at, rows)
            return
        if self.stream is not None:
            self.stream.wait_event(computed or self.now())
            # The last read may have been asked for after the rows were computed, and must still see the old ones.
            if self._last_read is not None:
                self.stream.wait_event(self._last_read)
            # The caller's own rows, not their copy in the table's dtype: that copy is made on the mover's stream, and
            # until then the memory of the rows must not be given to others.
            rows.record_stream(self.stream)
        with self._on_own_stream():
            stored = rows.to(table.dtype)
            if not isinstance(at, Tensor):
                self._push_slabs(table, at, stored)
            elif self._is_read_by_kernel(table):
                ops.put_rows(table, self.to_device(at), stored)
            else:
                self.flush()
                _write(table, at, stored)
        trace.count("bytes.pushed", stored.nbytes)

    def _push_slabs(self, table: Tensor, row_ranges: Sequence[slice], rows: Tensor) -> None:
        start = 0
        for slab in row_ranges:
            target = table[slab]
            source = rows[start : start + target.size(0)]
            start += target.size(0)
            if self._is_read_by_kernel(table):
                target.copy_(source, non_blocking=True)
            else:
                self._push_by_buffers(target, source)

    def _push_by_buffers(self, target: Tensor, rows: Tensor) -> None:
        """Begin to copy rows to the host; `flush` writes them into their part of a table."""
        for start, stop in _runs(target, rows.size(0)):
            buffer = self._next_buffer(target)
            staged = _rows_in(buffer.memory, target, stop - start)
            staged.copy_(rows[start:stop], non_blocking=True)
            buffer.pushes.append((staged, target[start:stop]))
            self._mark(buffer)

    def flush(self) -> None:
        """Wait until every push is in host memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._write_pushes()

    # ---- buffers and streams

    def _is_on_device(self, table: Tensor) -> bool:
        return table.device.type == self.device.type

    def _is_read_by_kernel(self, table: Tensor) -> bool:
        return pinned.is_registered(table)

    def _on_own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _next_buffer(self, table: Tensor) -> _Buffer:
        """A buffer that nobody uses any more, large enough for a row."""
        num_bytes = max(BUFFER_BYTES, _row_bytes(table))
        buffer = self._buffers.popleft() if len(self._buffers) == NUM_BUFFERS else None
        if buffer is not None:
            _finish(buffer)
        if buffer is None or buffer.memory.numel() < num_bytes:
            buffer = _Buffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
        self._buffers.append(buffer)
        return buffer

    def _mark(self, buffer: _Buffer) -> None:
        if self.device.type == "cuda":
            buffer.copied = torch.cuda.current_stream(self.device).record_event()

    def _write_pushes(self) -> None:
        for buffer in self._buffers:
            _finish(buffer)


def _finish(buffer: _Buffer) -> None:
    """Wait for the copies of a buffer, and write what was pushed through it into the tables."""
    if buffer.copied is not None:
        buffer.copied.synchronize()
        buffer.copied = None
    for staged, target in buffer.pushes:
        target.copy_(staged)
    buffer.pushes.clear()


def _write(table: Tensor, at: Tensor | Sequence[slice], rows: Tensor) -> None:
    """Write rows into a table on the same device, on the current stream."""
    if isinstance(at, Tensor):
        table[at.to(table.device)] = rows.to(table.device, table.dtype)
        return
    start = 0
    for slab in at:
        count = slab.stop - slab.start
        table[slab].copy_(rows[start : start + count], non_blocking=True)
        start += count


def _runs(table: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of rows that fit a buffer."""
    step = max(1, BUFFER_BYTES // max(1, _row_bytes(table)))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _row_bytes(table: Tensor) -> int:
    return table[:1].nbytes


def _rows_in(memory: Tensor, table: Tensor, num_rows: int) -> Tensor:
    """Rows like a table's in the first bytes of a buffer."""
    return memory[: num_rows * _row_bytes(table)].view(table.dtype).view(num_rows, *table.shape[1:])
