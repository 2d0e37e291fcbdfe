"""What a step takes at most: bytes of the tensors that live at once, on the CPU and on a GPU by one interface."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(Protocol):
    """`with meter_of(device) as meter: step()`, then `meter.peak_bytes`: above what was there before, from 0 on."""

    peak_bytes: int

    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None: ...


def meter_of(device: torch.device | str) -> Meter:
    """The meter of a device: CUDA's allocator counts by itself, elsewhere tensors are counted as they are made."""
    target = torch.device(device)
    return CudaMeter(target) if target.type == "cuda" else TensorMeter()


class TensorMeter(TorchDispatchMode):
    """Bytes of the storages made within, for as long as they live, whoever holds them: a graph, a view, an array.

    It sees what this thread makes and what autograd makes for it in any thread; threads that prepare other batches are
    not of the step. What an operation of torch takes for itself and frees before it returns is not seen, nor are
    arrays of NumPy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._live: dict[int, int] = {}
        # A storage may be freed anywhere, also in the middle of the sums below: it is noted here and taken off there.
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for storage in _storages(out):
            key = storage._cdata
            with self._lock:
                while self._freed:
                    self.now_bytes -= self._live.pop(self._freed.popleft())
                known = self._live.get(key)
                if known is None and any(key == given._cdata for given in _storages((args, kwargs))):
                    continue  # a view of what was there before
                self._live[key] = storage.nbytes()  # an `out=` argument may have grown
                self.now_bytes += self._live[key] - (known or 0)
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            if known is None:
                weakref.finalize(storage, self._freed.append, key).atexit = False
        return out


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor) and t.device.type != "meta"]


class CudaMeter:
    """The peak of CUDA's allocator, all streams and threads of this process together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.peak_bytes = max(0, torch.cuda.max_memory_allocated(self.device) - self._before)
