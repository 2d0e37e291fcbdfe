"""Keyed dropout on the GPU (or in Triton's interpreter) against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hopline.ops import reference
from hopline.ops.gpu import reduce as gpu_reduce
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, assert_close, randint, randn

pytestmark = RUNS_ON_GPU
CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@parametrize_kernel(
    [
        (torch.float32, (64,), 0.3),
        (torch.float32, (6,), 1.0),
        (torch.float64, (3, 5), 0.3),
        (torch.float64, (), 0.0),
        (torch.float16, (), 0.3),
        (torch.bfloat16, (6,), 0.3),
    ],
    dtype=DTYPES,
    shape=[(), (1,), (6,), (64,), (3, 5)],
    p=[0.0, 0.3, 1.0],
)
def test_values_and_gradients_are_those_of_the_reference(dtype: torch.dtype, shape: tuple[int, ...], p: float) -> None:
    x = randn(20, *shape, dtype=dtype)
    ids = randint(0, 2**50, 20)
    key = -(2**63) + 5
    upstream = randn(20, *shape, seed=2, dtype=dtype)
    expected = reference.keyed_dropout(x, p, key, ids)
    expected_grad = reference.keyed_dropout(upstream, p, key, ids)
    leaf = x.to(KERNEL_DEVICE).requires_grad_()
    out = gpu_reduce.keyed_dropout(leaf, p, key, ids.to(KERNEL_DEVICE))
    assert out.dtype == dtype
    (grad,) = torch.autograd.grad(out, leaf, upstream.to(KERNEL_DEVICE))
    for ours, theirs in ((out.detach(), expected), (grad, expected_grad)):
        if dtype == torch.bfloat16 and not CUDA:  # the interpreter cuts what the GPU rounds
            assert torch.equal(ours == 0, theirs == 0)
            assert_close(ours, theirs, torch.finfo(dtype).eps)
        else:
            assert torch.equal(ours.cpu(), theirs)


@parametrize_kernel(
    [
        (torch.float32, (3, 5), 0.3),
        (torch.float64, (6,), 1.0),
        (torch.float64, (64,), 0.0),
        (torch.float16, (), 0.3),
        (torch.bfloat16, (6,), 0.3),
    ],
    dtype=DTYPES,
    shape=[(), (6,), (64,), (3, 5)],
    p=[0.0, 0.3, 1.0],
)
def test_relu_dropout_equals_relu_then_dropout(dtype: torch.dtype, shape: tuple[int, ...], p: float) -> None:
    x = randn(20, *shape, dtype=dtype)
    ids = randint(0, 2**50, 20)
    key = 2**63 - 5
    upstream = randn(20, *shape, seed=2, dtype=dtype).to(KERNEL_DEVICE)
    device_ids = ids.to(KERNEL_DEVICE)
    results: list[tuple[torch.Tensor, ...]] = []
    for fused in (True, False):
        leaf = x.to(KERNEL_DEVICE).requires_grad_()
        weight = upstream.clone().requires_grad_()
        if fused:
            out = gpu_reduce.relu_dropout(leaf, p, key, device_ids)
        else:
            out = gpu_reduce.keyed_dropout(torch.relu(leaf), p, key, device_ids)
        (grad,) = torch.autograd.grad(out, leaf, weight, create_graph=True)
        (second_grad,) = torch.autograd.grad(grad, weight, upstream)
        results.append((out.detach(), grad.detach(), second_grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_relu_dropout_keeps_nan() -> None:
    x = torch.full((4, 8), torch.nan, device=KERNEL_DEVICE)
    out = gpu_reduce.relu_dropout(x, 0.5, 1, torch.arange(4, device=KERNEL_DEVICE))
    assert out.isnan().any()


def test_wide_rows_and_a_key_on_the_device_equal_the_reference() -> None:
    x = randn(3, 2501, dtype=torch.float32)
    ids = torch.tensor([4, 0, 9], dtype=torch.int32)
    expected = reference.keyed_dropout(x, 0.5, 77, ids)
    key = torch.tensor([77], device=KERNEL_DEVICE)
    ours = gpu_reduce.keyed_dropout(x.to(KERNEL_DEVICE), 0.5, key, ids.to(KERNEL_DEVICE))
    assert torch.equal(ours.cpu(), expected)


def test_rows_that_are_not_contiguous_equal_the_reference() -> None:
    x = randn(6, 8).to(KERNEL_DEVICE)
    ids = torch.arange(8, device=KERNEL_DEVICE)
    assert torch.equal(
        gpu_reduce.keyed_dropout(x.t(), 0.5, 1, ids), gpu_reduce.keyed_dropout(x.t().contiguous(), 0.5, 1, ids)
    )


def test_rows_of_no_elements_are_returned() -> None:
    ids = torch.empty(0, dtype=torch.int64, device=KERNEL_DEVICE)
    assert gpu_reduce.keyed_dropout(torch.empty(0, 4, device=KERNEL_DEVICE), 0.5, 1, ids).shape == (0, 4)
    assert gpu_reduce.keyed_dropout(torch.empty(2, 0, device=KERNEL_DEVICE), 0.5, 1, ids.new_zeros(2)).shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_dropping_does_not_wait_for_the_device() -> None:
    x = torch.ones(9, 5, device="cuda", requires_grad=True)
    ids = torch.arange(9).cuda()
    key = torch.ones(1).long().cuda()
    gpu_reduce.keyed_dropout(x, 0.5, key, ids).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = gpu_reduce.keyed_dropout(x, 0.5, key, ids)
        out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * out.detach())  # of ones, twice: the factors themselves
