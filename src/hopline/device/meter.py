"""Memory meters: the most bytes of tensors that live at the same time during a step.

    with meter_of(device) as meter:
        step()
    meter.peak_bytes     # the peak above the bytes that lived when the block was entered

There are two meters with one interface, because only CUDA's allocator keeps a peak:

    CudaMeter      reads the peak of torch's allocator: a few calls per step, all streams and threads of the process
    TensorMeter    elsewhere: intercepts every torch operation of the step, and counts the storages that it returns

A step may be measured in laps. `lap()` begins a new one, and `lap_bytes` is the peak since then.
"""

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
"""Bytes that CUDA's libraries keep per stream for matrix products, on the GPUs where they keep most.

The environment variable CUBLAS_WORKSPACE_CONFIG can change it. Used where `library_bytes` cannot measure.
"""


class Meter(Protocol):
    """A context manager that measures the peak memory of what runs within it.

    A meter is entered and left in the same thread.
    """

    peak_bytes: int
    """The most bytes that lived at the same time, above those at the entry. Never negative; valid after the exit."""

    @property
    def lap_bytes(self) -> int:
        """The most bytes that lived at the same time since the last `lap()`, above those at that moment."""
        ...

    def lap(self) -> None:
        """Begin a new lap, from which `lap_bytes` counts."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None: ...


def meter_of(device: torch.device | str) -> Meter:
    """A new meter for a device: `CudaMeter` for a GPU, `TensorMeter` for any other."""
    target = torch.device(device)
    return CudaMeter(target) if target.type == "cuda" else TensorMeter()


def with_index(device: torch.device | str) -> torch.device:
    """The device with its index, which some functions of CUDA in torch want: "cuda" becomes the current "cuda:0"."""
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a GPU.

    They are the bytes free on the GPU, or those left of this process's memory fraction if that is less. Added are the
    bytes that torch's allocator has reserved and not handed out.
    """
    device = with_index(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    allowed = int(torch.cuda.get_device_properties(device).total_memory * fraction)
    stats = torch.cuda.memory_stats(device)  # once for both numbers, because the call is slow
    reserved = stats.get("reserved_bytes.all.current", 0)
    allocated = stats.get("allocated_bytes.all.current", 0)
    unreserved = min(torch.cuda.mem_get_info(device)[0], allowed - reserved)
    return max(0, unreserved + reserved - allocated)


def library_bytes(device: torch.device) -> int:
    """Bytes that CUDA's libraries allocate at the first matrix product of a stream, and keep.

    It runs that product on the current stream, so afterwards the bytes are allocated there.
    """
    measured_bytes = _first_product(device, torch.cuda.current_stream(device))
    # 0: this stream had a product before, so the libraries had their memory already and nothing could be measured.
    return measured_bytes or WORKSPACE


@functools.cache
def _first_product(device: torch.device, stream: torch.cuda.Stream) -> int:
    """Bytes that a small matrix product leaves allocated. Cached, because only a stream's first product tells."""
    before = torch.cuda.memory_allocated(device)
    rows = torch.ones(16, 16, device=device)
    rows = rows @ rows
    del rows
    return torch.cuda.memory_allocated(device) - before


class TensorMeter(TorchDispatchMode):
    """A meter that counts the storages which torch operations return, on any device.

    A storage counts from the operation that returns it until it is freed. It does not matter who holds it: the
    autograd graph, a view, or a NumPy array over it.

    Counted are operations of the thread that entered the meter, and those of autograd for it, in any thread. Threads
    that prefetch other batches do not count. The meter does not see scratch memory that an operation frees before it
    returns, nor memory that NumPy allocates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._lap_start = self._lap_peak = 0
        self._live: dict[int, int] = {}
        """Bytes of each counted storage, by the address of its C++ object."""
        self._watched: dict[int, weakref.KeyedRef[int, torch.UntypedStorage]] = {}
        """Weak references to the counted storages, by the same address. Their callback tells that one is freed."""
        # The callback of a weak reference may run anywhere, also in a thread that holds the lock, so it must not take
        # the lock. It only appends here, which is atomic. Whoever holds the lock next subtracts the bytes.
        self._freed: deque[int] = deque()
        # Autograd's threads count as well.
        self._lock = threading.Lock()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch asks when this class is made. True would keep torch.compile out of `__torch_dispatch__`, by a wrapper
        # that costs as much as all the rest of the meter. Nothing is compiled within a meter.
        return False

    @property
    def lap_bytes(self) -> int:
        return self._lap_peak - self._lap_start

    def lap(self) -> None:
        with self._lock:
            self._subtract_freed()
            self._lap_start = self._lap_peak = self.now_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            with self._lock:
                # First of all: a new storage may have the address of one that was freed.
                self._subtract_freed()
                counted_bytes = self._live.get(key)
                if counted_bytes is None:
                    arguments = (args, *kwargs.values()) if kwargs else args
                    if any(key == argument.untyped_storage()._cdata for argument in _tensors(arguments)):
                        continue  # a view of a storage that is older than the meter
                    self._watched[key] = weakref.KeyedRef(storage, self._note_freed, key)
                # A storage that is counted already is measured again: an `out=` argument may have grown.
                self._live[key] = storage.nbytes()
                self.now_bytes += self._live[key] - (counted_bytes or 0)
                self._lap_peak = max(self._lap_peak, self.now_bytes)
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return out

    def _note_freed(self, reference: weakref.KeyedRef[int, torch.UntypedStorage]) -> None:
        self._freed.append(reference.key)

    def _subtract_freed(self) -> None:
        """Subtract the storages freed since the last call. The caller holds the lock."""
        while self._freed:
            key = self._freed.popleft()
            self.now_bytes -= self._live.pop(key)
            del self._watched[key]


def _tensors(values: Any) -> Sequence[Tensor]:
    """The tensors in an operation's arguments or results, also inside lists and tuples.

    Meta tensors are left out, because they have no memory.
    """
    if isinstance(values, Tensor):
        return () if values.is_meta else (values,)
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return ()


class NoMeter:
    """A meter that measures nothing, for steps that need not be measured."""

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
    """A meter that reads the peak of torch's CUDA allocator.

    The allocator has one peak per device, for all streams and threads of the process. So a meter also counts what
    other threads allocate meanwhile. Every lap resets that peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # `_end` is the allocator's peak since the last lap, read at the exit. 0 while the meter runs.
        self.peak_bytes = self._end = 0
        library_bytes(device)  # allocates the libraries' memory now, else the first step would seem to need it

    @property
    def lap_bytes(self) -> int:
        return max(0, (self._end or torch.cuda.max_memory_allocated(self.device)) - self._lap_start)

    def lap(self) -> None:
        # The reset loses the allocator's peak, so the highest one of all laps is remembered here.
        self._highest = max(self._highest, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        self._lap_start = torch.cuda.memory_allocated(self.device)

    def __enter__(self) -> Self:
        self._highest = self._end = 0
        self.lap()
        # `lap` has recorded the peak from before this meter. It does not count.
        self._highest = self._start = self._lap_start
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self._end = torch.cuda.max_memory_allocated(self.device)
        self.peak_bytes = max(0, max(self._highest, self._end) - self._start)


def find_device(name: str) -> torch.device:
    """The device of that name; raises ValueError if torch does not know the name or cannot use such a device."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device: set device=cpu or device=cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not here, there is no such device: set device=cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} is not here, there is no GPU that torch can use: set device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"device={name!r} is not here, GPUs are numbered from 0 to {last}: set device=cuda:{last}")
    return device
