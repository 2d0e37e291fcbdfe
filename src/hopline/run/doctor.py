"""Whether this machine can run hopline, and how well: what `hopline doctor` prints."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import torch

from hopline import ops
from hopline.ops import reference
from hopline.util.config import format_size

PACKAGES = (
    "hopline",
    "torch",
    "torch-geometric",
    "numba",
    "numpy",
    "pymetis",
    "pyarrow",
    "scipy",
    "triton",
)
OPTIONAL_PACKAGES = {"pyarrow", "scipy", "triton", "hopline", "pymetis"}


class Finding(NamedTuple):
    """One line of `hopline doctor`."""

    subject: str
    """What was looked at, such as "numba" or "memory"."""
    text: str
    """What was found."""
    is_fine: bool
    """Whether hopline can run with it."""


def examine() -> Iterator[Finding]:
    """(what, finding, whether it is fine), one after the other."""
    yield Finding("python", platform.python_version(), True)
    for package in PACKAGES:
        yield _check_package(package)
    yield Finding("cores", f"{os.cpu_count()} ({torch.get_num_threads()} used by torch)", True)
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{format_size(memory.available)} free of {format_size(memory.total)}", True)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none: hopline runs on the CPU"
    yield Finding("gpu", gpu, True)
    for name, check in (("kernels", _check_kernels), ("kernel cache", _check_kernel_cache)):
        try:
            yield Finding(name, check(), True)
        except Exception as error:
            yield Finding(name, f"{type(error).__name__}: {error}", False)


def _check_package(package: str) -> Finding:
    try:
        return Finding(package, importlib.metadata.version(package), True)
    except importlib.metadata.PackageNotFoundError:
        if package in OPTIONAL_PACKAGES:
            return Finding(package, "not installed (optional)", True)
        return Finding(package, f"not installed: pip install {package}", False)


def _check_kernels() -> str:
    """Compile and run the kernels once, and compare them with their definitions."""
    indptr = torch.arange(0, 41, 4)
    indices = (torch.arange(40) * 7 % 10).int()
    nodes = torch.arange(10)
    compiled = ops.sample_neighbors(indptr, indices, nodes, 2, 1)
    defined = reference.sample_neighbors(indptr, indices, nodes, 2, 1)
    is_equal = all(torch.equal(a, b) for a, b in zip(compiled, defined, strict=True))
    if not is_equal:
        raise RuntimeError("the compiled sampler differs from its definition: please report this machine")
    return "compiled, and equal to their definitions"


def _check_kernel_cache() -> str:
    path = ops.kernel_cache()
    folder = path if path.exists() else path.parent
    if not os.access(folder, os.W_OK):
        raise RuntimeError(f"{path} cannot be written, so kernels are compiled in every process: set NUMBA_CACHE_DIR")
    return "compiled kernels are kept"
