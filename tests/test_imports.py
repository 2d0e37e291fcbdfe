"""When modules are imported, checked in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STEPS = {
    "import hopline": "import hopline",
    "check_device_errors without a GPU": "import hopline.ops as ops; ops.check_device_errors()",
    "gather_tiers on the CPU": (
        "import torch; from hopline.ops.gather_tiers import gather_tiers; "
        "gather_tiers(torch.ones(3, 2), None, None, torch.tensor([1]))"
    ),
    "a Triton kernel": "import hopline.ops.gpu.runtime",
}
"""Statements run one after the other, by what they do. The last one shows that a kernel's module would be seen."""

PROGRAM = f"""
import json, sys

loaded = {{}}
for name, code in {STEPS!r}.items():
    exec(code)
    loaded[name] = sorted(sys.modules)
json.dump(loaded, sys.stdout)
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Names of all modules that are loaded after each of the steps."""
    process = subprocess.run([sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(process.stdout)


def kernels_of(modules: list[str]) -> list[str]:
    return [name for name in modules if name.startswith("hopline.ops.gpu.")]


@pytest.mark.parametrize("step", list(STEPS)[:-1])
def test_no_triton_kernel_is_imported_until_it_is_needed(loaded: dict[str, list[str]], step: str):
    """PyG may import Triton itself, by way of torch's compiler."""
    assert kernels_of(loaded[step]) == []


def test_a_triton_kernel_that_is_imported_is_seen(loaded: dict[str, list[str]]):
    pytest.importorskip("triton")
    assert "hopline.ops.gpu.runtime" in kernels_of(loaded["a Triton kernel"])
