"""Tables of rows for a GPU: on it, pinned on the host and read from there, or on the host behind pinned buffers.

Rows in host memory come and go on a stream of their own, in the order in which they were asked for: a pull sees what
was pushed before it, and both run beside the computation, which waits for a layer's rows only when it needs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from hopline import ops
from hopline.device import pinned
from hopline.device.meter import free_bytes
from hopline.device.streams import stream_for
from hopline.tables.allocators import Allocator, DeviceMemory, MappedFiles, PinnedMemory
from hopline.tables.history import Histories, Reader
from hopline.tables.layers import At, Sums
from hopline.util import trace

Where = Literal["device", "pinned", "host"]

DEVICE_SHARE, HOST_SHARE = 0.5, 0.7
"""The part of the free memory that tables may take."""
POOL_SIZE = 4
"""Pinned buffers of one pool: the host gathers into one while others are copied."""
BUFFER_BYTES = 32 << 20
"""Room of a pinned buffer, for rows of any width; a rule of thumb."""


def choose_where(num_bytes: int, device: torch.device, wanted: str, folder: Path | None) -> Where:
    """ "auto" replaced: on the device if they fit beside the model and its batches, else pinned, else on the host."""
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if folder is not None or device.type != "cuda":
        return "host"
    if num_bytes <= DEVICE_SHARE * free_bytes(device):
        return "device"
    return "pinned" if num_bytes <= HOST_SHARE * psutil.virtual_memory().available else "host"


@dataclass(eq=False)
class _Buffer:
    """Pinned memory, and when it may be used again."""

    memory: Tensor
    event: Any = None
    pushed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(rows in it, the part of a table that they are for), still to be copied there."""


class Pool:
    """At most `POOL_SIZE` pinned buffers, through which rows of tables that a GPU cannot read come and go."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: deque[_Buffer] = deque()

    def pull(self, table: Tensor, places: Tensor, out: Tensor) -> None:
        """out[:] = table[places], on the current stream; the host reads the rows now."""
        for start, stop in self._pieces(table, places.numel()):
            buffer = self._take(table)
            rows = _view(buffer.memory, table, stop - start)
            torch.index_select(table, 0, places[start:stop], out=rows)
            out[start:stop].copy_(rows, non_blocking=True)
            self._mark(buffer)

    def push(self, rows: Tensor, table: Tensor) -> None:
        """table[:] = rows, from the GPU: begun on the current stream, done by `flush`."""
        for start, stop in self._pieces(table, rows.size(0)):
            buffer = self._take(table)
            staged = _view(buffer.memory, table, stop - start)
            staged.copy_(rows[start:stop], non_blocking=True)
            buffer.pushed.append((staged, table[start:stop]))
            self._mark(buffer)

    def flush(self) -> None:
        """Write what was pushed into its tables; waits until it has come."""
        for buffer in self._buffers:
            _finish(buffer)

    def _pieces(self, table: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
        step = max(1, BUFFER_BYTES // max(1, _row_bytes(table)))
        for start in range(0, num_rows, step):
            yield start, min(start + step, num_rows)

    def _take(self, table: Tensor) -> _Buffer:
        """The buffer that was used the longest time ago, free again."""
        needed = max(BUFFER_BYTES, _row_bytes(table))
        buffer = self._buffers.popleft() if len(self._buffers) == POOL_SIZE else None
        if buffer is not None:
            _finish(buffer)
        if buffer is None or buffer.memory.numel() < needed:
            on_gpu = self.device.type == "cuda"
            buffer = _Buffer(torch.empty(needed, dtype=torch.uint8, pin_memory=on_gpu))
        self._buffers.append(buffer)
        return buffer

    def _mark(self, buffer: _Buffer) -> None:
        if self.device.type == "cuda":
            buffer.event = torch.cuda.Event()
            buffer.event.record()


def _finish(buffer: _Buffer) -> None:
    if buffer.event is not None:
        buffer.event.synchronize()
        buffer.event = None
    for staged, target in buffer.pushed:
        target.copy_(staged)
    buffer.pushed.clear()


def _row_bytes(table: Tensor) -> int:
    return table[:1].nbytes


def _view(memory: Tensor, table: Tensor, num_rows: int) -> Tensor:
    return memory[: num_rows * _row_bytes(table)].view(table.dtype).view(num_rows, *table.shape[1:])


def _allocator(device: torch.device, where: Where, folder: Path | None) -> Allocator:
    if where == "device":
        return DeviceMemory(device)
    if where == "pinned" and device.type == "cuda":
        return PinnedMemory()
    return DeviceMemory() if folder is None else MappedFiles(folder)


@dataclass(eq=False)
class PinnedSums(Sums):
    """In host memory to which the GPU adds."""

    device: torch.device

    def add(self, at: Tensor, rows: Tensor) -> None:
        from hopline.ops.gpu.tiers import put_aside

        put_aside(self.rows, at.to(self.device), rows.to(self.rows.dtype), add=True)

    def read(self, at: Tensor) -> Tensor:
        from hopline.ops.gpu.tiers import gather_aside

        return gather_aside(self.rows, at.to(self.device))

    def all(self) -> Tensor:
        torch.cuda.synchronize(self.device)
        return self.rows


class DeviceHistories(Histories):
    """Tables whose rows a GPU reads and writes."""

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        where: Where,
        *,
        name: str = "h",
        dtype: torch.dtype | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(num_rows, _allocator(device, where, folder), name=name, dtype=dtype)
        self.device, self.where, self.pool = device, where, Pool(device)
        self.stream = stream_for("history", device) if where != "device" and device.type == "cuda" else None
        self._sums: dict[int, Tensor] = {}
        self._read: Any = None
        """When the computation has read what it asked for last, beside the tables' own stream."""
        self._asked: tuple[Tensor, Tensor] | None = None

    def in_place(self, l: int, device: torch.device, dtype: torch.dtype) -> None:
        """Not allowed: rows may still be on their way, in the stream of the tables."""

    def sums(self, l: int, shape: Sequence[int], dtype: torch.dtype) -> Sums:
        if self.where == "device":
            return Sums(torch.zeros(shape, dtype=dtype, device=self.device))
        if self.where == "host" or self.device.type == "cpu":
            return super().sums(l, shape, dtype)
        kept = self._sums.get(l)
        if kept is None or kept.shape != tuple(shape) or kept.dtype != dtype:
            self._sums[l] = kept = pinned.zeros(shape, dtype)  # which takes longer than to clear it
        else:
            torch.cuda.synchronize(self.device)
            kept.zero_()
        return PinnedSums(kept, self.device)

    # ---- reading

    def ahead(self, layers: Sequence[int], places: Tensor) -> Reader:
        if self.where == "device" or not places.numel():
            return self
        pulled = {}
        with self._aside():  # what the current stream was given before does not matter: rows are written here too
            at = self._at(places)
            for l in layers:
                if l in self.tables:
                    rows = self._gather(l, places, at)
                    pulled[l] = rows, self._event()
        return Pulled(self, places, pulled)

    def rows(self, l: int, places: Tensor) -> Tensor:
        self._join()
        found = self._gather(l, places, self._at(places))
        self._read = self.mark()
        return found

    def _at(self, places: Tensor) -> Tensor:
        """Where a kernel reads them, if one does."""
        if self.where == "host" or self.device.type == "cpu":
            return places
        if self._asked is not None and self._asked[0] is places:  # by the layer before
            return self._asked[1]
        at = (places if pinned.is_readable(places) else places.pin_memory()).to(self.device, non_blocking=True)
        if self.stream is None:  # two streams must not share it
            self._asked = places, at
        return at

    def _gather(self, l: int, places: Tensor, at: Tensor) -> Tensor:
        table = self.tables[l]
        if self.where == "device" or self.device.type == "cpu":
            return ops.gather_rows(table, at)
        trace.count("bytes.pulled", places.numel() * _row_bytes(table))
        if self.where == "pinned":
            from hopline.ops.gpu.tiers import gather_aside  # Triton is imported by those who use it only

            return gather_aside(table, at)
        self.pool.flush()
        out = torch.empty(places.numel(), *table.shape[1:], dtype=table.dtype, device=self.device)
        self.pool.pull(table, places, out)
        return out

    # ---- writing

    def mark(self) -> Any:
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def write(self, l: int, at: At, rows: Tensor, mark: Any = None) -> None:
        if isinstance(at, Tensor):
            self._write_at(l, at, rows)
            return
        table, start = self.table(l, rows), 0
        if self.stream is not None:
            self.stream.wait_event(mark or self.mark())
            if self._read is not None:  # which may be after the mark of rows that have waited
                self.stream.wait_event(self._read)
        if self.stream is not None and rows.is_cuda:
            # The caller's own rows, not their copy in the table's type: that copy is made in the stream of the tables,
            # and until then the memory of the rows must not be given to anybody else.
            rows.record_stream(self.stream)
        with self._aside():
            stored = rows.to(table.dtype)
            for slab in at:
                count = slab.stop - slab.start
                piece = stored[start : start + count]
                if self.where == "host" and piece.is_cuda:
                    self.pool.push(piece, table[slab])
                else:
                    table[slab].copy_(piece, non_blocking=True)
                start += count
        if self.where != "device" and rows.is_cuda:
            trace.count("bytes.pushed", stored.nbytes)

    def _write_at(self, l: int, places: Tensor, rows: Tensor) -> None:
        if self.where != "pinned" or not rows.is_cuda:
            self._settle()
            super()._write_at(l, places, rows)
            return
        from hopline.ops.gpu.tiers import put_aside

        table = self.table(l, rows)
        if self.stream is not None:
            self.stream.wait_event(self.mark())
        with self._aside():
            put_aside(table, self._at(places), rows.to(table.dtype))
            if self.stream is not None:
                rows.record_stream(self.stream)
        trace.count("bytes.pushed", rows.nbytes)

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._settle()
        super().load_state_dict(state)

    def _settle(self) -> None:
        """All that was begun is done, on the host too."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.pool.flush()

    # ---- streams

    def _aside(self) -> AbstractContextManager[object]:
        """Within, work goes to the tables' own stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _event(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


class Pulled(Reader):
    """Rows that are on their way, for one batch."""

    def __init__(
        self, histories: DeviceHistories, places: Tensor, pulled: dict[int, tuple[Tensor, torch.cuda.Event | None]]
    ) -> None:
        self.histories, self.places, self.pulled = histories, places, pulled
        self.step, self._stamps = histories.step, histories.stamps(places).clone()

    def stamps(self, places: Tensor) -> Tensor:
        return self._stamps if places is self.places else self.histories.stamps(places)

    def rows(self, l: int, places: Tensor) -> Tensor:
        if places is not self.places or l not in self.pulled:
            return self.histories.rows(l, places)
        rows, event = self.pulled[l]
        if event is not None:
            compute = torch.cuda.current_stream(self.histories.device)
            compute.wait_event(event)
            rows.record_stream(compute)
        return rows

    def read(self, l: int, places: Tensor, like: Tensor) -> Tensor:
        if l not in self.pulled:
            self.histories.table(l, like)
        return super().read(l, places, like)

    def read_some(self, l: int, places: Tensor, idx: Tensor, like: Tensor) -> Tensor:
        if places is not self.places or l not in self.pulled:
            return super().read_some(l, places, idx, like)
        rows = self.rows(l, places)
        return ops.gather_rows(rows, idx.to(rows.device)).to(like.device, like.dtype)
