"""CuPy and JAX on a GPU: the same checks as on the CPU, and the example."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.interop.checks import CHECKS
from tests.interop.test_frameworks import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def need(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    if framework == "jax" and "gpu" not in run("-c", "import jax; print(jax.default_backend())"):
        pytest.skip("this JAX has no GPU: pip install 'jax[cuda13]'")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("framework", ["cupy", "jax"])
def test_a_framework_passes_the_check_on_a_gpu(framework: str, check: str):
    need(framework)
    print(framework, check, run("-m", "tests.interop.checks", framework, check, "cuda").strip())


def test_the_cupy_example_learns():
    need("cupy")
    assert float(run("examples/cupy_features.py").split()[-1]) > 0.45
