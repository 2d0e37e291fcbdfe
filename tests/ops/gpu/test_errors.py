"""Errors that kernels find on the device are raised once, at the next check."""

from __future__ import annotations

import pytest
import torch

from hopline.ops.gpu import runtime as gpu_runtime
from hopline.ops.gpu import sampling as gpu_sampling
from tests.support.grids import RUNS_ON_GPU
from tests.support.helpers import KERNEL_DEVICE

pytestmark = RUNS_ON_GPU


def test_an_error_is_kept_until_somebody_looks_and_raised_once() -> None:
    gpu_sampling.gather_rows(torch.ones(3, 2, device=KERNEL_DEVICE), torch.tensor([0, 3], device=KERNEL_DEVICE))
    with pytest.raises(IndexError, match="outside its table"):
        gpu_runtime.check_device_errors()
    gpu_runtime.check_device_errors()


def test_a_call_that_waits_anyway_raises_what_was_found_before() -> None:
    gpu_sampling.gather_rows(torch.ones(3, 2, device=KERNEL_DEVICE), torch.tensor([-1], device=KERNEL_DEVICE))
    number = torch.tensor([5], device=KERNEL_DEVICE)
    with pytest.raises(IndexError, match="outside its table"):
        gpu_runtime.read_with_errors(number)
    assert gpu_runtime.read_with_errors(number) == 5
