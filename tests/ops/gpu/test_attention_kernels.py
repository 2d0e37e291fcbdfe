"""The parts of the attention kernels; what they compute together is tested with `gpu_attend`."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from hopline.ops import random
from hopline.ops.gpu import attention as kernels
from tests.support.grids import RUNS_ON_GPU
from tests.support.helpers import KERNEL_DEVICE

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)


@triton.jit
def _kept_kernel(key, ids, out, HEADS: tl.constexpr, THRESHOLD: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    d = tl.arange(0, R)
    e = tl.arange(0, E)
    states = kernels._load_states(key, ids, d, d < R, THRESHOLD)
    number = tl.broadcast_to(e[None, :], (R, E))
    for head in tl.static_range(HEADS):
        factors = kernels._dropout_factors(states, number, head, HEADS, THRESHOLD, 2.0, tl.float64)
        tl.store(out + (d[:, None] * E + e[None, :]) * HEADS + head, factors)


def test_every_edge_and_head_has_a_draw_of_its_own():
    key = random.derive_key(7)
    ids = torch.tensor([3, 1 << 41, 5, 9]).to(DEVICE)
    heads = 3
    edges = 16
    out = torch.empty(4, edges, heads, dtype=torch.float64, device=DEVICE)
    _kept_kernel[(1,)](torch.tensor([key], device=DEVICE), ids, out, heads, 1 << 15, 4, edges)
    number = torch.arange(edges * heads, device=DEVICE).view(1, edges, heads)
    raw = random.draw(key, ids.view(4, 1, 1), number)
    assert torch.equal(out, torch.where(raw < 0, 2.0, 0.0).double())  # the highest bit says whether half is reached


def test_without_dropout_nothing_is_scaled():
    ids = torch.arange(4, device=DEVICE)
    out = torch.empty(4, 2, 1, dtype=torch.float64, device=DEVICE)
    _kept_kernel[(1,)](ids, ids, out, 1, 0, 4, 2)
    assert (out == 1).all()
