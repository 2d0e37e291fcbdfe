"""Every framework that is installed, on the CPU; `make test-interop` installs them all."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.interop.checks import CHECKS
from tests.support.warm import run_python

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # else JAX takes most of a GPU at once
    process = run_python(*command, env=environment)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("framework", ["numpy", "jax", "tensorflow", "paddle"])
def test_a_framework_passes_the_check(framework: str, check: str):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: type make test-interop")
    print(framework, check, run("-m", "tests.interop.checks", framework, check).strip())
