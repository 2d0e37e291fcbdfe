"""Reductions over edges and keyed dropout on the GPU (or in Triton's interpreter) against the reference."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.gpu import reduce as gpu_reduce
from hopline.ops.gpu import runtime as gpu_runtime
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, assert_close, randint, randn

pytestmark = RUNS_ON_GPU
CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
gpu_only = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
REDUCTIONS = ["sum", "mean", "max"]
Results = tuple[Tensor, Tensor | None, Tensor | None]


def edges(num_dst: int = 30, num_rows: int = 25, num_edges: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(indptr, src_idx) with destinations that have no edges, one, and many; the last two rows are no source."""
    counts = torch.bincount(randint(0, num_dst, num_edges, seed), minlength=num_dst)
    counts[3] += counts[4] + counts[-1]
    counts[4] = counts[-1] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return indptr, randint(0, num_rows - 2, num_edges, seed + 1).int()


def run(
    module: ModuleType,
    rows: Tensor,
    indptr: Tensor,
    src_idx: Tensor,
    reduce: str,
    weight: Tensor | None = None,
    own: Tensor | None = None,
) -> Results:
    """(output, gradient of rows, gradient of weights), all on the CPU."""
    device = torch.device("cpu" if module is reference else KERNEL_DEVICE)
    r = rows.to(device).clone().requires_grad_()
    w = None if weight is None else weight.to(device).clone().requires_grad_()
    own = None if own is None else own.to(device)
    out = module.reduce_edges(r, indptr.to(device), src_idx.to(device), reduce, w, own)
    assert out.device.type == device.type
    (out * randn(*out.shape, seed=5, dtype=out.dtype).to(device)).sum().backward()
    assert r.grad is not None
    return out.detach().cpu(), r.grad.cpu(), None if w is None or w.grad is None else w.grad.cpu()


def assert_same_results(ours: Results, expected: Results, tolerance: float) -> None:
    for our_tensor, expected_tensor in zip(ours, expected, strict=True):
        assert (our_tensor is None) == (expected_tensor is None)
        if our_tensor is not None and expected_tensor is not None:
            assert our_tensor.dtype == expected_tensor.dtype
            assert_close(our_tensor, expected_tensor, tolerance)


@parametrize_kernel(
    [
        ("sum", False, (300,)),
        ("sum", True, (7,)),
        ("mean", False, (2, 5)),
        ("mean", True, (300,)),
        ("max", False, (7,)),
        ("max", True, ()),
    ],
    reduce=REDUCTIONS,
    weighted=[False, True],
    shape=[(), (1,), (7,), (300,), (2, 5)],
)
def test_equals_the_reference_in_float64(reduce: str, weighted: bool, shape: tuple[int, ...]) -> None:
    weight = randn(200, seed=3) if weighted else None
    arguments = (randn(25, *shape), *edges(), reduce, weight)
    assert_same_results(run(gpu_reduce, *arguments), run(reference, *arguments), 1e-12)


@parametrize_kernel([("mean", True), ("max", False)], reduce=REDUCTIONS, weighted=[False, True])
def test_equals_the_reference_in_float32(reduce: str, weighted: bool) -> None:
    weight = randn(200, seed=3, dtype=torch.float32) if weighted else None
    arguments = (randn(25, 33, dtype=torch.float32), *edges(), reduce, weight)
    assert_same_results(run(gpu_reduce, *arguments), run(reference, *arguments), 1e-5)


@parametrize_kernel(
    [
        (torch.float16, "mean", False),
        (torch.float16, "max", True),
        (torch.bfloat16, "sum", True),
        (torch.bfloat16, "max", False),
    ],
    dtype=[torch.float16, torch.bfloat16],
    reduce=REDUCTIONS,
    weighted=[False, True],
)
def test_half_types_are_reduced_in_float32_and_rounded_once(dtype: torch.dtype, reduce: str, weighted: bool) -> None:
    indptr, src_idx = edges()
    weight = randn(200, seed=3, dtype=dtype) if weighted else None
    rows = randn(25, 8, dtype=dtype)
    exact = reference.reduce_edges(rows.float(), indptr, src_idx, reduce, None if weight is None else weight.float())
    ours, _, _ = run(gpu_reduce, rows, indptr, src_idx, reduce, weight)
    assert ours.dtype == dtype
    assert_close(ours.float(), exact.to(dtype).float(), torch.finfo(dtype).eps)


@parametrize_kernel(
    [(torch.float16, "sum"), (torch.bfloat16, "mean"), (torch.bfloat16, "max")],
    dtype=[torch.float16, torch.bfloat16],
    reduce=REDUCTIONS,
)
def test_gradients_of_half_types_are_summed_in_float32(dtype: torch.dtype, reduce: str) -> None:
    arguments = (*edges(), reduce)
    rows = randn(25, 8, dtype=dtype)
    _, ours, _ = run(gpu_reduce, rows, *arguments)
    leaf = rows.float().requires_grad_()
    out = reference.reduce_edges(leaf, *arguments)
    (exact,) = torch.autograd.grad(out, leaf, randn(*out.shape, seed=5, dtype=dtype).float())
    assert ours is not None
    assert ours.dtype == dtype
    assert_close(ours.float(), exact.to(dtype).float(), 2 * torch.finfo(dtype).eps)


@parametrize_kernel(
    [("sum", True, "repeated"), ("mean", False, "first"), ("max", False, "repeated"), ("max", True, "first")],
    reduce=REDUCTIONS,
    weighted=[False, True],
    which=["first", "repeated"],
)
def test_own_rows_stand_to_the_right(reduce: str, weighted: bool, which: str) -> None:
    weight = randn(150, seed=3) if weighted else None
    own_ids = torch.arange(20) if which == "first" else randint(0, 25, 20, seed=9)
    arguments = (randn(25, 5), *edges(20, 25, 150), reduce, weight, own_ids)
    assert_same_results(run(gpu_reduce, *arguments), run(reference, *arguments), 1e-12)


def test_ties_and_the_initial_zero_share_the_gradient_of_a_maximum() -> None:
    rows = randint(-2, 1, 25 * 6).view(25, 6).double()  # many maxima are 0, many are reached twice
    arguments = (rows, *edges(), "max")
    assert_same_results(run(gpu_reduce, *arguments), run(reference, *arguments), 1e-12)


def test_nan_and_infinity_come_through_a_maximum() -> None:
    rows = randn(25, 3)
    rows[4, 0] = float("nan")
    rows[7, 1] = float("inf")
    rows[:, 2] = float("-inf")
    ours, expected = (run(m, rows, *edges(), "max")[0] for m in (gpu_reduce, reference))
    assert torch.equal(ours.isnan(), expected.isnan())
    assert_close(ours, expected)


@parametrize_kernel([("mean",), ("max",)], reduce=REDUCTIONS)
def test_a_destination_with_a_million_edges_equals_the_reference(reduce: str) -> None:
    indptr = torch.tensor([0, 2, 10**6, 10**6, 10**6 + 3])
    src_idx = randint(0, 9, 10**6 + 3)
    if not CUDA:  # interpreted loops are slow: the same row, shorter
        indptr = torch.tensor([0, 2, 1500, 1500, 1503])
        src_idx = src_idx[:1503]
    rows = randn(9, 3)
    out = gpu_reduce.reduce_edges(*(t.to(KERNEL_DEVICE) for t in (rows, indptr, src_idx)), reduce)
    assert_close(out.cpu(), reference.reduce_edges(rows, indptr, src_idx, reduce), 1e-9)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(("num_dst", "num_edges", "width"), [(0, 0, 4), (3, 0, 4), (3, 5, 0)], ids=str)
def test_no_edges_and_empty_rows_equal_the_reference(reduce: str, num_dst: int, num_edges: int, width: int) -> None:
    indptr = torch.tensor([0, *[num_edges] * num_dst])
    src_idx = torch.zeros(num_edges, dtype=torch.int32)
    weight = randn(num_edges)
    arguments = (randn(6, width), indptr, src_idx, reduce, weight if reduce != "max" else None)
    assert_same_results(run(gpu_reduce, *arguments), run(reference, *arguments), 0)


def test_a_table_of_which_few_rows_are_read_needs_no_gradient() -> None:
    table = randn(2000, 16, dtype=torch.bfloat16).to(KERNEL_DEVICE)
    indptr = torch.tensor([0, 3, 4]).to(KERNEL_DEVICE)
    ids = torch.tensor([1999, 0, 7, 7], device=KERNEL_DEVICE)
    out = gpu_reduce.reduce_edges(table, indptr, ids, "mean", own=ids[:2])
    assert not out.requires_grad
    assert torch.equal(out[1], torch.cat([table[7], table[0]]))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("bad", [-1, 25, 2**31 - 1])
def test_a_source_that_is_not_there_is_not_followed_and_reported(reduce: str, bad: int) -> None:
    indptr = torch.tensor([0, 2])
    src_idx = torch.tensor([3, bad], dtype=torch.int32)
    gpu_reduce.reduce_edges(*(t.to(KERNEL_DEVICE) for t in (randn(25, 4), indptr, src_idx)), reduce)
    with pytest.raises(IndexError, match="source"):
        gpu_runtime.check_device_errors()


@pytest.mark.parametrize("indptr", [[0, 3], [-1, 2], [2, 1]], ids=["beyond", "negative", "falls"])
def test_a_damaged_indptr_is_reported(indptr: list[int]) -> None:
    some = (randn(25, 4), torch.tensor(indptr), torch.tensor([1, 2]))
    gpu_reduce.reduce_edges(*(t.to(KERNEL_DEVICE) for t in some), "sum")
    with pytest.raises(IndexError, match="indptr"):
        gpu_runtime.check_device_errors()


def test_an_own_row_that_is_not_there_is_reported() -> None:
    arguments = (randn(25, 4), torch.tensor([0, 1]), torch.tensor([1]))
    own_ids = torch.tensor([25], device=KERNEL_DEVICE)
    gpu_reduce.reduce_edges(*(t.to(KERNEL_DEVICE) for t in arguments), "sum", own=own_ids)
    with pytest.raises(IndexError, match="outside the rows"):
        gpu_runtime.check_device_errors()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_arguments_that_are_not_contiguous_equal_the_reference(reduce: str) -> None:
    indptr, src_idx = edges(20, 25, 150)
    plain = (randn(25, 6), indptr, src_idx, reduce, None, torch.arange(20))
    spread = [torch.stack([t, t], -1)[..., 0] if isinstance(t, Tensor) else t for t in plain]
    assert_same_results(run(gpu_reduce, *spread), run(reference, *plain), 1e-12)


def test_weights_and_own_rows_must_fit() -> None:
    rows, indptr, src_idx = (t.to(KERNEL_DEVICE) for t in (randn(25, 4), torch.tensor([0, 1]), torch.tensor([1])))
    with pytest.raises(ValueError, match=r"shape \[1\], got \[2\]"):
        gpu_reduce.reduce_edges(rows, indptr, src_idx, "sum", rows[0, :2])
    with pytest.raises(ValueError, match="row id per destination"):
        gpu_reduce.reduce_edges(rows, indptr, src_idx, "sum", own=indptr)


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_hundred_runs_give_the_same_bits_without_waiting_for_the_device(reduce: str) -> None:
    indptr, src_idx = (t.cuda() for t in edges(3000, 2000, 100_000))
    rows = randn(2000, 64, dtype=torch.float32).cuda().requires_grad_()
    weight = None if reduce == "max" else randn(100_000, dtype=torch.float32).cuda().requires_grad_()
    own_ids = randint(0, 2000, 3000).cuda()
    leaves = [rows] if weight is None else [rows, weight]
    upstream = randn(3000, 128, dtype=torch.float32).cuda()

    def once() -> list[Tensor]:
        out = gpu_reduce.reduce_edges(rows, indptr, src_idx, reduce, weight, own_ids)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    first = once()
    runs = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [once() for _ in range(100)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for again in runs for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_in_pinned_host_memory_are_read_in_place(reduce: str) -> None:
    indptr, src_idx = edges()
    rows = randn(25, 33, dtype=torch.bfloat16)
    expected = gpu_reduce.reduce_edges(rows.cuda(), indptr.cuda(), src_idx.cuda(), reduce)
    ours = gpu_reduce.reduce_edges(rows.pin_memory(), indptr.cuda(), src_idx.cuda(), reduce)
    assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match="pin it"):
        gpu_reduce.reduce_edges(rows, indptr.cuda(), src_idx.cuda(), reduce)


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
def test_dropout_and_its_gradient_are_those_of_the_reference(
    dtype: torch.dtype, shape: tuple[int, ...], p: float
) -> None:
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


def test_dropout_of_wide_rows_and_a_key_on_the_device_equal_the_reference() -> None:
    x = randn(3, 2501, dtype=torch.float32)
    ids = torch.tensor([4, 0, 9], dtype=torch.int32)
    expected = reference.keyed_dropout(x, 0.5, 77, ids)
    key = torch.tensor([77], device=KERNEL_DEVICE)
    ours = gpu_reduce.keyed_dropout(x.to(KERNEL_DEVICE), 0.5, key, ids.to(KERNEL_DEVICE))
    assert torch.equal(ours.cpu(), expected)


def test_dropout_of_rows_that_are_not_contiguous_equal_the_reference() -> None:
    x = randn(6, 8).to(KERNEL_DEVICE)
    ids = torch.arange(8, device=KERNEL_DEVICE)
    assert torch.equal(
        gpu_reduce.keyed_dropout(x.t(), 0.5, 1, ids), gpu_reduce.keyed_dropout(x.t().contiguous(), 0.5, 1, ids)
    )


def test_dropout_of_no_elements_is_returned() -> None:
    ids = torch.empty(0, dtype=torch.int64, device=KERNEL_DEVICE)
    assert gpu_reduce.keyed_dropout(torch.empty(0, 4, device=KERNEL_DEVICE), 0.5, 1, ids).shape == (0, 4)
    assert gpu_reduce.keyed_dropout(torch.empty(2, 0, device=KERNEL_DEVICE), 0.5, 1, ids.new_zeros(2)).shape == (2, 0)


@pytest.mark.gpu
@gpu_only
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
