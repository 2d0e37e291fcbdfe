"""`RowMover`: moves rows between tables in host memory and a GPU while the GPU computes.

There are two ways, by the memory of the table. Kernels of the GPU read and write a pinned table directly:

    pull   table --gather kernel, mover's stream--> new tensor on the GPU
    push   rows on the GPU --scatter kernel or copy, mover's stream--> table

The host reads and writes any other table, such as a memory-mapped file, through a few pinned buffers:

    pull   table --index_select, host--> pinned buffer --copy, mover's stream--> new tensor on the GPU
    push   rows on the GPU --copy, mover's stream--> pinned buffer --copy, host, later--> table

The host's copy of a push runs when its buffer is needed again, before the host reads a table, or by `flush`.

Pulls and pushes run on one stream in the order of the calls. So a pull sees every push before it, and none after it.
The stream that computes waits for pulled rows only where it uses them. The price is `NUM_BUFFERS` pinned buffers.
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
"""Number of pinned buffers of a mover: the host gathers rows into one while others are copied."""
BUFFER_BYTES = 32 << 20
"""Bytes of a pinned buffer; more if a single row is wider."""


@dataclass(frozen=True, eq=False)
class PulledRows:
    """Rows whose copy to the device has begun."""

    rows: Tensor
    """[n, ...] on the device. On a GPU, only `wait` makes them safe to use."""
    arrival: Any
    """The CUDA event after which the rows are complete; None on a CPU, where they are complete at once."""

    def wait(self) -> Tensor:
        """The rows, for use on the current stream. That stream waits for them; the host does not."""
        if self.arrival is not None:
            compute = torch.cuda.current_stream(self.rows.device)
            compute.wait_event(self.arrival)
            # The rows were allocated on the mover's stream. Without this, the allocator could give their memory to a
            # later pull while the computation still reads it.
            self.rows.record_stream(compute)
        return self.rows


@dataclass(eq=False)
class _Buffer:
    """A pinned buffer, and the copies that still need it."""

    memory: Tensor
    """[num_bytes] uint8 on the host, pinned if the device is a GPU."""
    copied: Any = None
    """The CUDA event after which the last copy from or into this memory is done; None if no copy is under way."""
    pushes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(rows in this memory, a view of the table rows to write) of each push that the host has still to copy."""


class RowMover:
    """Moves rows between tables and a device.

    `PartitionedGraph` of the partitioned methods owns the mover, and its history tables call it. Only the training
    thread may call it. A table on the device itself is read and written on the current stream, without the mover's
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = stream_for("rows", device) if device.type == "cuda" else None
        self._buffers: deque[_Buffer] = deque()
        """At most NUM_BUFFERS buffers, the least recently used first."""
        self._last_read: Any = None
        """The CUDA event after which the last `read` is done. A push waits for it before it overwrites rows."""

    def now(self) -> Any:
        """A CUDA event for this moment of the current stream, to pass to `push`; None on a CPU."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def to_device(self, positions: Tensor) -> Tensor:
        """[n]: the positions on the device. The host does not wait for the copy."""
        if self.device.type == "cpu" or positions.is_cuda:
            return positions
        readable = positions if pinned.is_readable(positions) else positions.pin_memory()
        return readable.to(self.device, non_blocking=True)

    # ---- reading

    def pull(self, tables: Mapping[int, Tensor], positions: Tensor) -> dict[int, PulledRows]:
        """Begin to copy rows of the tables in host memory to the device. Returns them by layer, as they are now.

        tables: by layer. Those on the device are left out: the computation reads their rows when it needs them.
        positions: [n] int64 on the host.
        """
        on_host = {l: table for l, table in tables.items() if not self._is_on_device(table)}
        pulled = {}
        # No wait for the current stream: it never writes tables in host memory, the mover's stream does.
        with self._on_own_stream():
            by_kernel = any(pinned.is_registered(table) for table in on_host.values())
            on_device = self.to_device(positions) if by_kernel else positions
            for l, table in on_host.items():
                rows = self._gather(table, positions, on_device)
                pulled[l] = PulledRows(rows, None if self.stream is None else self.stream.record_event())
        return pulled

    def read(self, table: Tensor, positions: Tensor) -> Tensor:
        """Copies of the rows at some positions, on the device, for use on the current stream.

        They contain all earlier pushes: the current stream waits for the mover's.
        """
        if self._is_on_device(table):
            return ops.gather_rows(table, self.to_device(positions))
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        on_device = self.to_device(positions) if pinned.is_registered(table) else positions
        rows = self._gather(table, positions, on_device)
        self._last_read = self.now()
        return rows

    def _gather(self, table: Tensor, positions: Tensor, on_device: Tensor) -> Tensor:
        """Rows of a table in host memory, gathered on the current stream.

        on_device: `positions` on the device if kernels read the table; not used otherwise.
        """
        trace.count("bytes.pulled", positions.numel() * _row_bytes(table))
        if pinned.is_registered(table):
            return ops.gpu_kernels("tiers").gather_host_rows(table, on_device)
        positions = positions.cpu()
        self._write_pushes()  # before the host reads the table, pushes that wait in buffers must be in it
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
        """Write rows into a table. It may return before they are in the table; see `flush`.

        at: [n] positions, each once, or row ranges that have n rows together.
        rows: [n, ...], in any dtype.
        computed: the event, from `now()`, after which the rows are computed; by default this moment.
        """
        if self._is_on_device(table):
            write_rows(table, at, rows)
            return
        if rows.device.type != self.device.type:
            # The rows are on the host, which writes them at once. Earlier pushes must be in the table by then, and
            # no kernel may still be reading it.
            self.flush()
            write_rows(table, at, rows)
            return
        if self.stream is not None:
            self.stream.wait_event(computed or self.now())
            # The last `read` may have been launched after the rows were computed. It must still see the old rows.
            if self._last_read is not None:
                self.stream.wait_event(self._last_read)
            # For the caller's rows, not for `stored`: the mover's stream still reads them when the caller has dropped
            # them, and the allocator must not give their memory to others. `stored` is allocated on that stream.
            rows.record_stream(self.stream)
        with self._on_own_stream():
            stored = rows.to(table.dtype)
            if not isinstance(at, Tensor):
                self._push_ranges(table, at, stored)
            elif pinned.is_registered(table):
                ops.put_rows(table, self.to_device(at), stored)
            else:
                # Scattered rows of a table that the host writes: no buffers here, the host waits for the rows.
                self.flush()
                write_rows(table, at, stored)
        trace.count("bytes.pushed", stored.nbytes)

    def _push_ranges(self, table: Tensor, row_ranges: Sequence[slice], rows: Tensor) -> None:
        """Write rows into row ranges of a table in host memory, on the current stream."""
        start = 0
        for row_range in row_ranges:
            target = table[row_range]
            source = rows[start : start + target.size(0)]
            start += target.size(0)
            if pinned.is_registered(table):
                target.copy_(source, non_blocking=True)
            else:
                self._push_by_buffers(target, source)

    def _push_by_buffers(self, target: Tensor, rows: Tensor) -> None:
        """Begin to copy rows into pinned buffers. `_finish` copies them on into `target`, a view of a table."""
        for start, stop in _runs(target, rows.size(0)):
            buffer = self._next_buffer(target)
            staged = _rows_in(buffer.memory, target, stop - start)
            staged.copy_(rows[start:stop], non_blocking=True)
            buffer.pushes.append((staged, target[start:stop]))
            self._mark(buffer)

    def flush(self) -> None:
        """Wait until every push is in its table. Synchronises with the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._write_pushes()

    # ---- buffers and streams

    def _is_on_device(self, table: Tensor) -> bool:
        return table.device.type == self.device.type

    def _on_own_stream(self) -> AbstractContextManager[object]:
        """A context in which the mover's stream is the current one; on a CPU it does nothing."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _next_buffer(self, table: Tensor) -> _Buffer:
        """A buffer that no copy needs any more, large enough for BUFFER_BYTES and for one row.

        If all buffers exist, the host waits for the copies of the least recently used one.
        """
        num_bytes = max(BUFFER_BYTES, _row_bytes(table))
        buffer = self._buffers.popleft() if len(self._buffers) == NUM_BUFFERS else None
        if buffer is not None:
            _finish(buffer)
        if buffer is None or buffer.memory.numel() < num_bytes:
            buffer = _Buffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
        self._buffers.append(buffer)
        return buffer

    def _mark(self, buffer: _Buffer) -> None:
        """Record that the copy launched last, on the current stream, needs the buffer."""
        if self.device.type == "cuda":
            buffer.copied = torch.cuda.current_stream(self.device).record_event()

    def _write_pushes(self) -> None:
        for buffer in self._buffers:
            _finish(buffer)


def _finish(buffer: _Buffer) -> None:
    """Wait for the copies from and into a buffer, then write the pushes that it holds into their tables."""
    if buffer.copied is not None:
        buffer.copied.synchronize()
        buffer.copied = None
    for staged, target in buffer.pushes:
        target.copy_(staged)
    buffer.pushes.clear()


def write_rows(table: Tensor, at: Tensor | Sequence[slice], rows: Tensor) -> None:
    """Write rows into a table by torch, on the current stream. Rows on another device are moved to the table's.

    at: [n] positions, or row ranges that have n rows together, each of which is copied at once.
    """
    if isinstance(at, Tensor):
        table[at.to(table.device)] = rows.to(table.device, table.dtype)
        return
    start = 0
    for row_range in at:
        count = row_range.stop - row_range.start
        # Not `non_blocking`: the host may read the table as soon as this returns.
        table[row_range].copy_(rows[start : start + count])
        start += count


def _runs(table: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive ranges of the rows, each of which fits a buffer."""
    step = max(1, BUFFER_BYTES // max(1, _row_bytes(table)))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _row_bytes(table: Tensor) -> int:
    """Bytes of one row; 0 for a table without rows."""
    return table[:1].nbytes


def _rows_in(memory: Tensor, table: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...]: a view of the first bytes of a buffer, with the dtype and row shape of the table."""
    return memory[: num_rows * _row_bytes(table)].view(table.dtype).view(num_rows, *table.shape[1:])
