"""What the kernels share: the generator and the shuffle against torch's version, and errors found on the device."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hopline.ops import random
from hopline.ops.gpu import runtime as gpu_runtime
from hopline.ops.gpu import sampling as gpu_sampling
from tests.support.grids import RUNS_ON_GPU
from tests.support.helpers import KERNEL_DEVICE, randint

pytestmark = RUNS_ON_GPU
CUDA = torch.cuda.is_available()


@triton.jit
def _draw_kernel(key, ids, limits, draws, scaled, T: tl.constexpr):
    i = tl.arange(0, T)
    state = gpu_runtime.first_state(tl.load(key), tl.load(ids + i))
    state += gpu_runtime.GOLDEN
    state += gpu_runtime.GOLDEN
    raw = gpu_runtime.mix(state)
    tl.store(draws + i, raw.to(tl.int64, bitcast=True))
    tl.store(scaled + i, gpu_runtime.bounded(raw, tl.load(limits + i)))


@triton.jit
def _shuffle_kernel(key, ids, degrees, out, FANOUT: tl.constexpr, T: tl.constexpr):
    i = tl.arange(0, T)
    picks = gpu_runtime.draw_distinct(
        gpu_runtime.first_state(tl.load(key), tl.load(ids + i)), tl.load(degrees + i), FANOUT
    )
    for j in tl.static_range(FANOUT):
        tl.store(out + i * FANOUT + j, picks[j])


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -(2**63), 123456789])
def test_draws_are_those_of_torch(key: int) -> None:
    ids = randint(0, 2**50, 64)
    limits = randint(1, 2**31, 64, seed=1)
    draws, scaled = torch.empty(2, 64, dtype=torch.int64, device=KERNEL_DEVICE)
    on_device = gpu_runtime.key_on(draws.device, key)
    _draw_kernel[(1,)](on_device, ids.to(KERNEL_DEVICE), limits.to(KERNEL_DEVICE), draws, scaled, T=64)
    expected = random.draw(key, ids, 1)
    assert torch.equal(draws.cpu(), expected)
    assert torch.equal(scaled.cpu(), random.bounded(expected, limits))


def test_a_shuffle_of_all_is_a_permutation_and_a_smaller_one_begins_it() -> None:
    ids = torch.arange(16, device=KERNEL_DEVICE)
    degrees = torch.full((16,), 6, device=KERNEL_DEVICE)
    picks = {}
    for fanout in (1, 4, 6):
        picks[fanout] = torch.empty(16, fanout, dtype=torch.int32, device=KERNEL_DEVICE)
        key = gpu_runtime.key_on(ids.device, 7)
        _shuffle_kernel[(1,)](key, ids, degrees.int(), picks[fanout], FANOUT=fanout, T=16)
    assert torch.equal(picks[6].sort(1).values.cpu(), torch.arange(6).int().expand(16, 6))
    assert torch.unique(picks[6], dim=0).size(0) > 10
    for fanout in (1, 4):
        assert torch.equal(picks[fanout], picks[6][:, :fanout])


def test_a_key_on_the_device_is_taken_as_it_is() -> None:
    key = torch.tensor([5], device=KERNEL_DEVICE)
    assert gpu_runtime.key_on(key.device, key).data_ptr() == key.data_ptr()


def test_interpreted_exactly_where_there_is_no_gpu() -> None:
    assert gpu_runtime.is_interpreted() == (not CUDA)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_kernels_read_device_and_pinned_memory_and_nothing_else() -> None:
    host = torch.ones(3)
    assert gpu_runtime.is_readable(host.cuda())
    assert gpu_runtime.is_readable(host.pin_memory())
    with pytest.raises(ValueError, match="pin it"):
        gpu_runtime.check_readable("the table", host)


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
