"""Check whether this machine can run hopline: the lines of `hopline doctor`.

A check that fails is a finding, not an exception, so that all others are still shown.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from typing import NamedTuple

import torch

from hopline import ops
from hopline.ops import reference
from hopline.util.config import format_size
from hopline.util.host import host_memory

# ---- packages, by their names on PyPI

PACKAGES = {
    "hopline": False,  # imported from a source tree on Python's path, it is not installed and has no version
    "torch": True,
    "torch-geometric": True,
    "numba": True,
    "numpy": True,
    "pyarrow": True,
    "pymetis": False,
    "scipy": False,
    "triton": False,
}
"""Packages whose version is shown, and whether hopline needs them to be installed."""


class Finding(NamedTuple):
    """One line of `hopline doctor`."""

    subject: str
    text: str
    is_fine: bool
    """Whether the check passed. If any check did not, `hopline doctor` exits with status 1.

    Some problems do not keep hopline from running: a cache that cannot be written makes it slower.
    """


def examine() -> Iterator[Finding]:
    """Run all checks, one after the other."""
    yield Finding("python", platform.python_version(), True)
    for package, is_needed in PACKAGES.items():
        yield _check_package(package, is_needed)
    yield Finding("cores", f"{os.cpu_count()} ({torch.get_num_threads()} used by torch)", True)
    memory = host_memory()
    limited = " (the limit of this container)" if memory.is_container else ""
    yield Finding("memory", f"{format_size(memory.available)} free of {format_size(memory.total)}{limited}", True)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none: hopline runs on the CPU"
    yield Finding("gpu", gpu, True)
    yield Finding("PyG's loaders", _samplers_of_pyg(), True)
    for name, check in (("kernels", _check_kernels), ("kernel cache", _check_kernel_cache)):
        try:
            yield Finding(name, check(), True)
        except Exception as error:
            yield Finding(name, f"{type(error).__name__}: {error}", False)


def _check_package(package: str, is_needed: bool) -> Finding:
    """The version of a package. For a missing one: "optional", or the command that installs it."""
    try:
        return Finding(package, importlib.metadata.version(package), True)
    except importlib.metadata.PackageNotFoundError:
        advice = f"not installed: pip install {package}" if is_needed else "not installed (optional)"
        return Finding(package, advice, not is_needed)


def _samplers_of_pyg() -> str:
    """What PyG's own NeighborLoader samples by. Nothing is imported: `import hopline.pyg` would change PyG."""
    found = [name for name in ("pyg_lib", "torch_sparse") if importlib.util.find_spec(name)]
    return f"sample by {found[0]}" if found else "have no sampler of their own: `import hopline.pyg` gives them one"


def _check_kernels() -> str:
    """Compile and run the CPU sampler, which stands for all kernels, and compare it with its definition."""
    indptr = torch.arange(0, 41, 4)
    indices = (torch.arange(40) * 7 % 10).int()
    nodes = torch.arange(10)
    fanout = 2
    key = 1
    compiled = ops.sample_neighbors(indptr, indices, nodes, fanout, key)
    defined = reference.sample_neighbors(indptr, indices, nodes, fanout, key)
    is_equal = all(torch.equal(a, b) for a, b in zip(compiled, defined, strict=True))
    if not is_equal:
        raise RuntimeError("the compiled sampler differs from its definition: please report this machine")
    return "compiled, and equal to their definitions"


def _check_kernel_cache() -> str:
    """Check that compiled kernels can be written. Else they are compiled in every process."""
    path = ops.kernel_cache()
    if path is None or not os.access(path if path.exists() else path.parent, os.W_OK):
        place = path or "the folder of compiled kernels"
        raise RuntimeError(f"{place} cannot be written, so kernels are compiled in every process: set NUMBA_CACHE_DIR")
    return "compiled kernels are kept"
