"""Every framework that is installed, on the CPU and on a GPU; `make test-interop` installs them all."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.interop.checks import CHECKS
from tests.support.grids import GPU_ONLY
from tests.support.warm import run_python

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # else JAX takes most of a GPU at once
    process = run_python(*command, env=environment)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("framework", "device"),
    [
        *((name, "cpu") for name in ("numpy", "jax", "tensorflow", "paddle")),
        *(pytest.param(name, "cuda", marks=GPU_ONLY) for name in ("cupy", "jax")),
    ],
)
def test_a_framework_passes_the_check(framework: str, device: str, check: str):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: type make test-interop")
    if (framework, device) == ("jax", "cuda") and "gpu" not in run("-c", "import jax; print(jax.default_backend())"):
        pytest.skip("this JAX has no GPU: pip install 'jax[cuda13]'")
    print(framework, check, run("-m", "tests.interop.checks", framework, check, device).strip())
