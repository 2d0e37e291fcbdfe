"""Arrays of other frameworks share memory in both directions, or an error says what to type."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from hopline.interop import dlpack
from hopline.interop.dlpack import FRAMEWORKS, aligned, from_any, to


def test_a_read_only_array_is_shared_without_a_word():
    array = np.arange(3)
    array.setflags(write=False)
    assert from_any(array).data_ptr() == array.ctypes.data


def test_a_tensor_is_itself_and_lists_become_one():
    tensor = torch.ones(2)
    assert from_any(tensor) is tensor
    assert to(tensor, "torch") is tensor
    assert from_any([1, 2]).tolist() == [1, 2]
    assert from_any(range(3)).tolist() == [0, 1, 2]
    assert from_any(np.int64(4)).tolist() == 4


class Foreign:
    """An array of another framework, as far as DLPack goes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_whatever_speaks_dlpack_is_shared():
    tensor = torch.arange(4)
    assert from_any(Foreign(tensor)).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(["a"]), "plain array of numbers"),
        (np.arange(4)[::-1], "plain array of numbers"),
        (Foreign(torch.ones(1, requires_grad=True)), r"detach\(\)"),
        (types.SimpleNamespace(read_value=None), r"variable.read_value\(\)"),
        (object(), "has no __dlpack__"),
    ],
)
def test_what_cannot_come_in_says_why(array: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        from_any(array)


@pytest.mark.parametrize("framework", ["numpy", "jax", "tensorflow", "paddle", "cupy"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, requires_grad=True), r"tensor.detach\(\)"),
        (torch.ones(2, 3).t(), r"tensor.contiguous\(\)"),
        (torch.eye(2).to_sparse_coo(), r"tensor.to_dense\(\)"),
        (np.ones(2), r"from_any\(array\)"),
    ],
)
def test_what_cannot_be_shared_says_what_to_type(
    framework: str, tensor: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dlpack, "_import", lambda name: None)  # it is refused before the framework is asked
    with pytest.raises((TypeError, ValueError), match=message):
        to(tensor, framework)


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_memory_that_is_not_aligned_is_refused_by_those_that_need_it(framework: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dlpack, "_import", lambda name: None)
    tensor = torch.ones(9)[1:]
    with pytest.raises(ValueError, match=r"tensor.clone\(\)"):
        to(tensor, framework)
    assert aligned(tensor).data_ptr() % dlpack.ALIGNED_BYTES == 0
    assert aligned(base := torch.ones(9)) is base


def test_types_and_devices_that_a_framework_lacks_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"NumPy .*torch\.bfloat16.*tensor\.float\(\)"):
        to(torch.ones(2, dtype=torch.bfloat16), "numpy")
    with pytest.raises(ValueError, match=r"tensor.cpu\(\)"):
        to(torch.ones(2, device="meta"), "numpy")
    narrow = types.SimpleNamespace(config=types.SimpleNamespace(jax_enable_x64=False))
    monkeypatch.setattr(dlpack, "_import", lambda name: narrow)
    for wide in (torch.arange(2), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"index_dtype=torch\.int32"):
            to(wide, "jax")
    with pytest.raises(ValueError, match=r"tensor.cuda\(\)"):
        to(torch.ones(2), "cupy")


def test_an_unknown_framework_gets_the_list():
    with pytest.raises(ValueError, match=", ".join(FRAMEWORKS)):
        to(torch.ones(1), "mxnet")


def test_a_framework_that_is_not_there_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    for name in ("jax", "tensorflow", "paddle", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match="pip install"):
            to(torch.ones(1), name)


def test_importing_hopline_imports_no_other_framework():
    code = "import sys, hopline; print([m for m in ('jax', 'tensorflow', 'paddle', 'cupy') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert process.stdout.strip() == "[]"
