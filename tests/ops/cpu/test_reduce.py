"""The Numba reductions and keyed dropout against the reference, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu import reduce as cpu_reduce
from tests.support.grids import parametrize_pairwise
from tests.support.helpers import assert_close, randint, randn, torch_threads

REDUCTIONS = ["sum", "mean", "max"]


def edges(num_dst: int = 30, num_rows: int = 25, num_edges: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(indptr, src_idx) with destinations that have no edges, one, and many."""
    counts = torch.bincount(randint(0, num_dst, num_edges, seed), minlength=num_dst)
    counts[3] += counts[4]
    counts[4] = 0
    counts[0] += counts[-1]
    counts[-1] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return indptr, randint(0, num_rows, num_edges, seed + 1).int()


def run_both(
    rows: Tensor, reduce: str, weight: Tensor | None = None, indptr_src: tuple[Tensor, Tensor] | None = None
) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """(output, gradient of rows, gradient of weights) of the kernel and of the reference."""
    indptr, src_idx = indptr_src or edges()
    results = []
    for module in (cpu_reduce, reference):
        r = rows.detach().clone().requires_grad_()
        w = None if weight is None else weight.detach().clone().requires_grad_()
        out = module.reduce_edges(r, indptr, src_idx, reduce, w)
        (out * randn(*out.shape, seed=5, dtype=out.dtype)).sum().backward()
        results.append((out.detach(), r.grad, None if w is None else w.grad))
    return results


def assert_equal_results(results: list[tuple[Tensor, Tensor | None, Tensor | None]], tolerance: float) -> None:
    for ours, expected in zip(*results, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            assert ours.dtype == expected.dtype
            assert_close(ours, expected, tolerance)


@parametrize_pairwise(reduce=REDUCTIONS, weighted=[False, True], shape=[(), (1,), (7,), (64,), (2, 5)])
def test_equals_the_reference_in_float64(reduce: str, weighted: bool, shape: tuple[int, ...]) -> None:
    rows = randn(25, *shape)
    assert_equal_results(run_both(rows, reduce, randn(200, seed=3) if weighted else None), 1e-12)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_edges_that_indptr_leaves_out_have_no_gradient(reduce: str, weighted: bool) -> None:
    if reduce == "max" and weighted:
        pytest.skip("weighted maxima are the reference's")
    src_idx = torch.tensor([5, 0, 1, 1, 2, 4])
    indptr = torch.tensor([1, 3, 3, 5])  # edges 0 and 5 belong to no destination
    weight = randn(6, seed=3) if weighted else None

    rows = randn(6, 3).requires_grad_()
    found_weight = None if weight is None else weight.clone().requires_grad_()
    ours = cpu_reduce.reduce_edges(rows, indptr, src_idx, reduce, found_weight)
    (ours * randn(3, 3, seed=5)).sum().backward()

    expected_rows = rows.detach().clone().requires_grad_()
    expected_weight = None if weight is None else weight[1:5].clone().requires_grad_()
    expected = reference.reduce_edges(expected_rows, indptr - 1, src_idx[1:5], reduce, expected_weight)
    (expected * randn(3, 3, seed=5)).sum().backward()

    assert_close(ours, expected, 1e-12)
    assert rows.grad is not None
    assert expected_rows.grad is not None
    assert_close(rows.grad, expected_rows.grad, 1e-12)
    if found_weight is not None and expected_weight is not None:
        assert found_weight.grad is not None
        assert expected_weight.grad is not None
        assert_close(found_weight.grad[1:5], expected_weight.grad, 1e-12)
        assert found_weight.grad[[0, 5]].eq(0).all()


@parametrize_pairwise(dtype=[torch.bfloat16, torch.float16], reduce=REDUCTIONS, weighted=[False, True])
def test_half_types_are_summed_in_float32(dtype: torch.dtype, reduce: str, weighted: bool) -> None:
    rows = randn(25, 8, dtype=dtype)
    weight = torch.rand(200) if weighted else None
    indptr, src_idx = edges()
    ours = cpu_reduce.reduce_edges(rows, indptr, src_idx, reduce, weight)
    expected = reference.reduce_edges(rows.float(), indptr, src_idx, reduce, weight)
    assert ours.dtype == dtype
    assert_close(ours.float(), expected, torch.finfo(dtype).eps)


@pytest.mark.parametrize("values", [[0.0], [0.0, 1.0], [-1.0, 0.0], [-2.0, -1.0]], ids=str)
def test_max_shares_its_gradient_among_ties_as_torch_does(values: list[float]) -> None:
    rows = torch.tensor(values, dtype=torch.float64)[randint(0, len(values), 25 * 4, seed=2)].view(25, 4)
    assert_equal_results(run_both(rows, "max"), 1e-12)


def test_max_lets_nan_and_infinity_through() -> None:
    rows = randn(25, 3)
    rows[2, 0] = torch.nan
    rows[5, 1] = torch.inf
    rows[6, 2] = -torch.inf
    indptr, src_idx = edges()
    ours = cpu_reduce.reduce_edges(rows, indptr, src_idx, "max")
    expected = reference.reduce_edges(rows, indptr, src_idx, "max")
    assert bool(ours.isnan().any())
    assert_close(ours, expected, 0)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(
    "rows", [torch.zeros(0, 3), torch.zeros(4, 0), torch.zeros(0, 2, 2)], ids=lambda r: str(r.shape)
)
def test_without_edges_outputs_and_gradients_have_the_right_shapes(reduce: str, rows: Tensor) -> None:
    no_edges = torch.empty(0, dtype=torch.int32)
    for num_dst in (0, 2):
        r = rows.clone().requires_grad_()
        out = cpu_reduce.reduce_edges(r, torch.zeros(num_dst + 1, dtype=torch.int64), no_edges, reduce)
        assert out.shape == (num_dst, *rows.shape[1:])
        out.sum().backward()
        assert r.grad is not None
        assert r.grad.shape == rows.shape


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_views_and_int64_sources_give_the_same(reduce: str) -> None:
    indptr, src_idx = edges()
    wide = randn(50, 12)
    view = wide[::2, 3:9]
    expected = cpu_reduce.reduce_edges(view.clone(), indptr, src_idx, reduce)
    assert torch.equal(cpu_reduce.reduce_edges(view, indptr, src_idx.long(), reduce), expected)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_are_those_of_finite_differences(reduce: str) -> None:
    indptr, src_idx = edges(num_dst=6, num_rows=5, num_edges=14)
    rows = randn(5, 3).requires_grad_()
    weight = randn(14, seed=8).requires_grad_()
    torch.autograd.gradcheck(lambda r, w: cpu_reduce.reduce_edges(r, indptr, src_idx, reduce, w), (rows, weight))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_own_rows_stand_to_the_right_of_the_reduced_ones(reduce: str, weighted: bool) -> None:
    indptr, src_idx = edges()
    own_ids = randint(0, 25, 30, seed=7)  # some rows are the own row of several destinations
    results = []
    for module in (cpu_reduce, reference):
        rows = randn(25, 7).requires_grad_()
        weight = randn(200, seed=3).requires_grad_() if weighted else None
        out = module.reduce_edges(rows, indptr, src_idx, reduce, weight, own_ids)
        (out * randn(30, 14, seed=5)).sum().backward()
        results.append((out.detach(), rows.grad, None if weight is None else weight.grad))
    assert_equal_results(results, 1e-12)
    assert torch.equal(results[0][0][:, 7:], randn(25, 7)[own_ids])


@pytest.mark.parametrize(
    ("rows", "own_ids", "message"),
    [
        (randn(4, 3), [0], r"one row id per destination: expected shape \[2\], got \[1\]"),
        (randn(4, 3, 2), [0, 1], r"expected 2 dimensions, got shape \[4, 3, 2\]"),
        (randn(4), [0, 1], r"expected 2 dimensions, got shape \[4\]"),
    ],
)
def test_own_rows_that_do_not_fit_are_refused(rows: Tensor, own_ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu_reduce.reduce_edges(rows, torch.tensor([0, 1, 1]), torch.tensor([0]), "sum", None, torch.tensor(own_ids))


@pytest.mark.parametrize("own_ids", [[0, 4], [-1, 0]])
def test_own_rows_that_do_not_exist_are_refused(own_ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"outside 0 \.\. 3"):
        cpu_reduce.reduce_edges(
            randn(4, 3), torch.tensor([0, 1, 1]), torch.tensor([0]), "sum", None, torch.tensor(own_ids)
        )


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_number_of_threads_changes_no_bit(reduce: str, dtype: torch.dtype) -> None:
    pair = edges(num_dst=700, num_rows=500, num_edges=60000)
    rows = randn(500, 33, dtype=dtype)
    weight = None if reduce == "max" else randn(60000, seed=4, dtype=dtype)
    results = []
    for threads in (1, 2, 5):
        with torch_threads(threads):
            results.append(run_both(rows, reduce, weight, pair)[0])
    for other in results[1:]:
        for ours, expected in zip(other, results[0], strict=True):
            assert ours is expected is None or torch.equal(ours, expected)  # type: ignore[arg-type]


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    indptr, src_idx = edges()
    weight = randn(200, seed=3).requires_grad_()
    rows = randn(25, 4)
    cpu_reduce.reduce_edges(rows, indptr, src_idx, "sum", weight).sum().backward()
    assert rows.grad is None
    assert weight.grad is not None
    assert_close(weight.grad, rows.sum(1)[src_idx.long()], 1e-12)


# ---- keyed dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_keeps_the_expectation_and_drops_the_share(p: float) -> None:
    rows = 3000
    width = 101
    out = cpu_reduce.keyed_dropout(torch.ones(rows, width, dtype=torch.float64), p, 7, torch.arange(rows))
    spread = (p / (1 - p) / (rows * width)) ** 0.5
    assert abs(float(out.mean()) - 1) < 4 * spread
    per_column = (out == 0).double().mean(0)
    assert float((per_column - p).abs().max()) < 4.5 * (p * (1 - p) / rows) ** 0.5


def test_dropout_columns_and_neighbouring_nodes_are_independent() -> None:
    centred = (cpu_reduce.keyed_dropout(torch.ones(40000, 6), 0.5, 3, torch.arange(40000)) > 0).double() - 0.5
    # Values are +-0.5, so 40,000 of them have a sum of squares of 10,000 and these are correlations. Of independent
    # draws their standard error is 1 / sqrt(40,000) = 1 / 200; four of them are allowed.
    columns = centred.t() @ centred / 10000
    assert float((columns - torch.eye(6)).abs().max()) < 4 / 200
    assert float(((centred[1:] * centred[:-1]).mean(0) * 4).abs().max()) < 4 / 200


def test_dropout_backward_draws_the_same_mask_again() -> None:
    x = randn(12, 9).requires_grad_()
    ids = torch.arange(12)
    out = cpu_reduce.keyed_dropout(x, 0.4, 3, ids)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_close(out.detach(), (x * grad).detach(), 1e-15)
    torch.autograd.gradcheck(lambda v: cpu_reduce.keyed_dropout(v, 0.4, 3, ids), (x,))


def test_dropout_can_be_differentiated_twice() -> None:
    x = randn(3, 4).requires_grad_()
    ids = torch.arange(3)
    torch.autograd.gradgradcheck(lambda v: cpu_reduce.keyed_dropout(v**2, 0.4, 3, ids), (x,))


def test_dropout_needs_one_id_per_row() -> None:
    with pytest.raises(AssertionError, match="one node id per row"):
        cpu_reduce.keyed_dropout(torch.ones(4, 2), 0.5, 1, torch.arange(3))


def test_dropout_bits_do_not_depend_on_threads() -> None:
    x = randn(3000, 64, dtype=torch.float32)
    ids = torch.arange(3000)
    with torch_threads(1):
        alone = cpu_reduce.keyed_dropout(x, 0.5, 1, ids)
    with torch_threads(2):
        assert torch.equal(cpu_reduce.keyed_dropout(x, 0.5, 1, ids), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_of_stored_columns_is_that_of_whole_rows(p: float, dtype: torch.dtype) -> None:
    x = randn(50, 23).to(dtype)
    ids = randint(0, 10**12, 50)
    rows, columns = (x > 0.5).nonzero(as_tuple=True)
    indptr = torch.zeros(51, dtype=torch.int64)
    indptr[1:] = torch.bincount(rows, minlength=50).cumsum(0)
    expected = cpu_reduce.keyed_dropout(x, p, 9, ids)[rows, columns]
    for module in (cpu_reduce, reference):
        ours = module.keyed_dropout_sparse(x[rows, columns], indptr, columns.int(), p, 9, ids)
        torch.testing.assert_close(ours, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
