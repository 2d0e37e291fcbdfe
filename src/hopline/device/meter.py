"""What a step takes at most: bytes of the tensors that live at once, on the CPU and on a GPU by one interface."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WORKSPACE = 32 << 20
"""What that is on the GPUs where it is most, unless CUBLAS_WORKSPACE_CONFIG says otherwise."""


class Meter(Protocol):
    """`with meter_of(device) as meter: step()`, then `meter.peak_bytes`: above what was there before, from 0 on."""

    peak_bytes: int

    @property
    def lap_bytes(self) -> int:
        """The same from the last `lap()` on, above what was there then."""
        ...

    def lap(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None: ...


def meter_of(device: torch.device | str) -> Meter:
    """The meter of a device: CUDA's allocator counts by itself, elsewhere tensors are counted as they are made."""
    target = torch.device(device)
    return CudaMeter(target) if target.type == "cuda" else TensorMeter()


def with_index(device: torch.device | str) -> torch.device:
    """A device by its number: some of CUDA's functions do not take "cuda" for the one in use."""
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate on a GPU: within its own limit, with what torch keeps for the next use."""
    device = with_index(device)
    allowed = torch.cuda.get_device_properties(device).total_memory * torch.cuda.get_per_process_memory_fraction(device)
    stats = torch.cuda.memory_stats(device)  # asking takes a while
    reserved, allocated = (stats.get(f"{name}_bytes.all.current", 0) for name in ("reserved", "allocated"))
    left = min(torch.cuda.mem_get_info(device)[0], int(allowed) - reserved)
    return max(0, left + reserved - allocated)


def library_bytes(device: torch.device) -> int:
    """What CUDA's libraries take on a GPU at the first product of a stream, and keep; this one has had it."""
    taken = _first_product(device, torch.cuda.current_stream(device))
    return taken or WORKSPACE  # there was a product before


@functools.cache
def _first_product(device: torch.device, stream: torch.cuda.Stream) -> int:
    before = torch.cuda.memory_allocated(device)
    rows = torch.ones(16, 16, device=device)
    rows = rows @ rows
    del rows
    return torch.cuda.memory_allocated(device) - before


class TensorMeter(TorchDispatchMode):
    """Bytes of the storages made within, for as long as they live, whoever holds them: a graph, a view, an array.

    It sees what this thread makes and what autograd makes for it in any thread; threads that prepare other batches are
    not of the step. What an operation of torch takes for itself and frees before it returns is not seen, nor are
    arrays of NumPy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._lap_start = self._lap_peak = 0
        self._live: dict[int, int] = {}
        self._watched: dict[int, weakref.KeyedRef[int, torch.UntypedStorage]] = {}
        # A storage may be freed anywhere, also in the middle of the sums below: it is noted here and taken off there.
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled within; guarding against it would take as long as all the rest

    @property
    def lap_bytes(self) -> int:
        return self._lap_peak - self._lap_start

    def lap(self) -> None:
        with self._lock:
            self._take_off_freed()
            self._lap_start = self._lap_peak = self.now_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            with self._lock:
                self._take_off_freed()
                known = self._live.get(key)
                if known is None:
                    given = (args, *kwargs.values()) if kwargs else args
                    if any(key == one.untyped_storage()._cdata for one in _tensors(given)):
                        continue  # a view of what was there before
                    self._watched[key] = weakref.KeyedRef(storage, self._note_freed, key)
                self._live[key] = storage.nbytes()  # an `out=` argument may have grown
                self.now_bytes += self._live[key] - (known or 0)
                self._lap_peak = max(self._lap_peak, self.now_bytes)
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return out

    def _note_freed(self, reference: weakref.KeyedRef[int, torch.UntypedStorage]) -> None:
        self._freed.append(reference.key)

    def _take_off_freed(self) -> None:
        while self._freed:
            key = self._freed.popleft()
            self.now_bytes -= self._live.pop(key)
            del self._watched[key]


def _tensors(values: Any) -> Sequence[Tensor]:
    """A tensor, or those in a list: there is nothing deeper in what operations take and return."""
    if isinstance(values, Tensor):
        return () if values.is_meta else (values,)
    return [found for value in values for found in _tensors(value)] if isinstance(values, list | tuple) else ()


class NoMeter:
    """One that measures nothing."""

    peak_bytes = lap_bytes = 0

    def lap(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        pass


class CudaMeter:
    """The peak of CUDA's allocator, all streams and threads of this process together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = self._end = 0
        library_bytes(device)  # or the first step would seem to take it

    @property
    def lap_bytes(self) -> int:
        return max(0, (self._end or torch.cuda.max_memory_allocated(self.device)) - self._lap_start)

    def lap(self) -> None:
        self._highest = max(self._highest, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        self._lap_start = torch.cuda.memory_allocated(self.device)

    def __enter__(self) -> Self:
        self._highest = self._end = 0
        self.lap()
        self._highest = self._start = self._lap_start
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self._end = torch.cuda.max_memory_allocated(self.device)
        self.peak_bytes = max(0, max(self._highest, self._end) - self._start)


def find_device(name: str) -> torch.device:
    """The device of that name, if it is here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device: set device=cpu or device=cuda") from None
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        found = "no GPU that torch can use" if device.type == "cuda" else "no such device"
        raise ValueError(f"device={name!r} is not here, there is {found}: set device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"device={name!r} is not here, GPUs are numbered from 0 to {last}: set device=cuda:{last}")
    return device
