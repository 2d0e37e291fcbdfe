"""The Triton kernel for keyed dropout: the mask is drawn in the kernel, and again in backward, and never stored."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops.gpu_core import GOLDEN, first_state, is_interpreted, key_on, launching, mix

TILE = 2048
"""Numbers per program."""


@triton.jit(do_not_specialize=["num"])
def _dropout_kernel(
    x, ids, key, out, num,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """A draw serves four columns with 16 bits each: [ROWS, DRAWS, 4] numbers."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * DRAWS + tl.arange(0, DRAWS)
    lane = tl.arange(0, 4)
    state = first_state(tl.load(key), tl.load(ids + i, mask=i < num, other=0).to(tl.int64))
    raw = mix(state[:, None] + (word + 1).to(tl.uint64)[None, :] * GOLDEN)
    bits = (raw[:, :, None] >> (16 * lane).to(tl.uint64)[None, None, :]) & 0xFFFF
    # SCALE is a constant: as a float argument it would be a float32 also where the numbers are not.
    factor = tl.where(bits >= THRESHOLD, tl.full((1, 1, 1), SCALE, ACC), tl.full((1, 1, 1), 0.0, ACC))
    column = word[:, None] * 4 + lane[None, :]
    mask = (i < num)[:, None, None] & (column < WIDTH)[None, :, :]
    place = i.to(tl.int64)[:, None, None] * WIDTH + column[None, :, :]
    tl.store(out + place, tl.load(x + place, mask=mask, other=0).to(ACC) * factor, mask=mask)


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor, ids: Tensor) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(key, ids)
        return _apply(x, p, key, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return keyed_dropout(grad, ctx.p, *ctx.saved_tensors), None, None, None


def _apply(x: Tensor, p: float, key: Tensor, ids: Tensor) -> Tensor:
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    num, width, threshold = x.size(0), math.prod(x.shape[1:]), round(p * 65536)
    draws = min(triton.next_power_of_2(triton.cdiv(width, 4)), TILE // 4)
    rows = max(1, (16 if is_interpreted() else 1) * TILE // (4 * draws))
    with launching(x.device):
        _dropout_kernel[(triton.cdiv(num, rows), triton.cdiv(width, 4 * draws))](
            *(x, ids, key, out, num),
            THRESHOLD=threshold,
            SCALE=65536 / (65536 - threshold) if threshold < 65536 else 0.0,
            WIDTH=width,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            ROWS=rows,
            DRAWS=draws,
        )
    return out


def keyed_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    assert ids.numel() == x.size(0), "one node id per row"
    out = _KeyedDropout.apply(x, p, key_on(x.device, key), ids.contiguous())
    assert isinstance(out, Tensor)
    return out
