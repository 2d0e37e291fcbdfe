"""Draws by weight and by source on the GPU (or in Triton's interpreter) against the reference."""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import math

import pytest
import torch

from hopline.ops import reference
from hopline.ops.gpu import sampling as gpu_sampling
from tests.ops.gpu.test_sampling import on_device
from tests.ops.test_laws import assert_same_draws, ugly_rows, ugly_weights
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint

pytestmark = RUNS_ON_GPU


@parametrize_kernel(
    [(torch.float32, 2), (torch.float64, 10), (torch.float64, 0), (torch.float32, -1)],
    dtype=[torch.float32, torch.float64],
    fanout=[0, 1, 2, 10, 70, -1],
)
def test_weighted_draws_are_those_of_the_reference(dtype: torch.dtype, fanout: int) -> None:
    indptr, indices = ugly_rows(torch.int32)
    weight = ugly_weights(indptr, dtype)
    nodes = torch.cat([torch.arange(80), torch.tensor([7, 7, 3])])
    draw_ids = None if fanout == 2 else randint(0, 10**12, nodes.numel())
    moved = [None if t is None else t.to(KERNEL_DEVICE) for t in (indptr, indices, weight, nodes)]
    ours = gpu_sampling.sample_weighted(*moved, fanout, 3, None if draw_ids is None else draw_ids.to(KERNEL_DEVICE))
    assert_same_draws(ours, reference.sample_weighted(indptr, indices, weight, nodes, fanout, 3, draw_ids))


@parametrize_kernel(
    [(torch.int32, 2), (torch.int64, 10), (torch.int64, 0), (torch.int32, -1)],
    dtype=[torch.int32, torch.int64],
    fanout=[0, 1, 2, 10, 70, -1],
)
def test_labor_draws_are_those_of_the_reference(dtype: torch.dtype, fanout: int) -> None:
    indptr, indices = ugly_rows(dtype)
    nodes = torch.cat([torch.arange(80), torch.tensor([7, 7, 3])])
    copies = None if fanout == 2 else reference.edge_copies(indptr, indices)
    moved = on_device(indptr, indices, nodes)
    ours = gpu_sampling.sample_labor(*moved, fanout, -5, None if copies is None else copies.to(KERNEL_DEVICE))
    assert_same_draws(ours, reference.sample_labor(indptr, indices, nodes, fanout, -5, copies))


def test_copies_of_edges_are_those_of_the_reference() -> None:
    indptr, indices = ugly_rows()
    assert_same_draws(
        (gpu_sampling.edge_copies(*on_device(indptr, indices)),), (reference.edge_copies(indptr, indices),)
    )


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 1e-310])
def test_a_weight_that_cannot_be_drawn_by_is_refused(bad: float) -> None:
    weight = torch.tensor([1.0, bad, 2.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="negative, NaN, infinite"):
        gpu_sampling.sample_weighted(
            *on_device(torch.tensor([0, 3]), torch.zeros(3).long(), weight, torch.tensor([0])), 1, 1
        )
