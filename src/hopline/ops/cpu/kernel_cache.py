"""Compiled kernels on the disk, each in a file of its own with a checksum.

Numba's own cache believes its files: a truncated one raises in every later process, a flipped bit runs as
machine code. It also names files by number, so two processes that compile a kernel for two signatures at
once may swap them. Here a file is named by its signature and processor, and says for what it was compiled:

    | the kernel, as Numba writes it ...   | identity: SHA-256 of version, source, signature | SHA-256 of all before

A file whose checksum differs is compiled anew and replaced. Where nothing can be written, kernels stay in
memory. Either way the run continues, and says so once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

HASH_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger("hopline")


def cache_on_disk(dispatcher: Any) -> Any:
    """Give a function that Numba compiles this cache. Returns the function.

    Where no folder can be written, neither beside the source nor in the user's cache, it is compiled in
    memory.
    """
    try:
        dispatcher._cache = KernelCache(dispatcher.py_func)
    except RuntimeError:  # Numba: no locator available
        _warn_once("no folder for compiled kernels can be written, so every process compiles them: set NUMBA_CACHE_DIR")
    return dispatcher


class KernelCache(FunctionCache):
    """Numba's cache of one kernel, over `_KernelFiles`."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)
        locator = self._impl.locator
        self._cache_file = _KernelFiles(self._cache_path, self._impl.filename_base, locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a file that may not be read, or a kernel that refers to a module that is gone
            problem = f"{type(error).__name__}: {error}"
            _warn_once(f"{self._cache_path} has kernels that cannot be loaded ({problem}): compiled anew")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(
                f"{self._cache_path} cannot keep compiled kernels ({error.strerror or error}), so every process "
                "compiles them: free some space, or set NUMBA_CACHE_DIR"
            )


class _KernelFiles(IndexDataCacheFile):
    """The files of one kernel, one per signature and processor. There is no index. Files are replaced by a rename."""

    def save(self, key: Any, data: Any) -> None:
        content = self._dump(data) + self._identity(key)
        with self._open_for_write(self._data_path(self._name(key))) as file:
            file.write(content + hashlib.sha256(content).digest())

    def load(self, key: Any) -> Any:
        """What `save` wrote for a key. None if there is no such file, if it is damaged, or of another source."""
        name = self._name(key)
        try:
            with open(self._data_path(name), "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return None
        if hashlib.sha256(content[:-HASH_BYTES]).digest() != content[-HASH_BYTES:]:
            _warn_once(f"{self._cache_path} has damaged kernels: compiled anew")
            return None
        if not content[:-HASH_BYTES].endswith(self._identity(key)):
            return None
        return self._load_data(name)  # reads the file again, to the end of what Numba wrote

    def _identity(self, key: Any) -> bytes:
        described = (self._version, self._source_stamp, _inlined_source(), key)
        return hashlib.sha256(repr(described).encode()).digest()

    def _name(self, key: Any) -> str:
        """The name of a file. A new version or source keeps the name, so that it replaces the file."""
        signature, processor, _ = key
        digest = hashlib.sha256(repr((signature, processor)).encode()).hexdigest()
        return self._index_name.removesuffix("nbi") + f"{digest[:16]}.nbc"


@functools.cache
def _inlined_source() -> str:
    """A hash of `runtime.py`, whose functions kernels of all files inline. Numba compares a kernel's own file alone."""
    return hashlib.sha256(Path(__file__).with_name("runtime.py").read_bytes()).hexdigest()


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
