"""The examples with other frameworks train, as they stand, on the built-in graph."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.interop.test_frameworks import run

EXAMPLES = {
    "jax_sage": "jax",
    "tensorflow_sage": "tensorflow",
    "paddle_sage": "paddle",
    "gammagl_sage": "gammagl",
    "cupy_features": "numpy",
}
"""Each example and what it needs; without a GPU the last one is in NumPy."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_from_the_graph(name: str):
    if importlib.util.find_spec(EXAMPLES[name]) is None:
        pytest.skip(f"{EXAMPLES[name]} is not installed: type make test-interop")
    output = run(f"examples/{name}.py")
    (accuracy,) = re.findall(r"^test accuracy ([\d.]+)$", output, flags=re.MULTILINE)
    print(name, accuracy)
    assert float(accuracy) > 0.45  # by chance it is 0.06, and 0.32 without the edges


def test_tensorflow_and_triton_are_in_one_process():
    for name in ("tensorflow", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: type make test-interop")
    run("-c", "import hopline.interop, tensorflow, triton._C.libtriton")
