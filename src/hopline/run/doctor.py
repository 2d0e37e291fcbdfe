"""Whether this machine can run hopline, and how well: what `hopline doctor` prints."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

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


def examine() -> Iterator[tuple[str, str, bool]]:
    """(what, finding, whether it is fine), one after the other."""
    yield "python", platform.python_version(), True
    for package in PACKAGES:
        yield package, *_version(package)
    yield "cores", f"{os.cpu_count()} ({torch.get_num_threads()} used by torch)", True
    memory = psutil.virtual_memory()
    yield "memory", f"{format_size(memory.available)} free of {format_size(memory.total)}", True
    yield (
        "gpu",
        torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none: hopline runs on the CPU",
        True,
    )
    for name, check in (("kernels", _kernels), ("kernel cache", _kernel_cache)):
        try:
            yield name, check(), True
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}", False


def _version(package: str) -> tuple[str, bool]:
    optional = {"pyarrow", "scipy", "triton", "hopline", "pymetis"}
    try:
        return importlib.metadata.version(package), True
    except importlib.metadata.PackageNotFoundError:
        hint = "not installed" + (" (optional)" if package in optional else f": pip install {package}")
        return hint, package in optional


def _kernels() -> str:
    """Compile and run the kernels once, and compare them with their definitions."""
    indptr = torch.arange(0, 41, 4)
    indices = (torch.arange(40) * 7 % 10).int()
    nodes = torch.arange(10)
    compiled = ops.sample_neighbors(indptr, indices, nodes, 2, 1)
    defined = reference.sample_neighbors(indptr, indices, nodes, 2, 1)
    if not all(torch.equal(a, b) for a, b in zip(compiled, defined, strict=True)):
        raise RuntimeError("the compiled sampler differs from its definition: please report this machine")
    return "compiled, and equal to their definitions"


def _kernel_cache() -> str:
    path = ops.kernel_cache()
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RuntimeError(f"{path} cannot be written, so kernels are compiled in every process: set NUMBA_CACHE_DIR")
    return "compiled kernels are kept"
