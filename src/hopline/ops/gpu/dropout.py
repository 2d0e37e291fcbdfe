"""Triton kernels for keyed dropout: the mask is drawn in the kernel, and again in backward, and never stored.

After a ReLU it need not even be drawn again: what is above zero in the end says where a gradient passes.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops.gpu.runtime import GOLDEN, first_state, is_interpreted, key_on, launching, mix

TILE = 2048
"""Numbers per program."""


@triton.jit(do_not_specialize=["num"])
def _dropout_kernel(
    x, ids, key, out, num,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr,
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
    value = tl.load(x + place, mask=mask, other=0).to(ACC)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # so that what is no number stays
    tl.store(out + place, value * factor, mask=mask)


@triton.jit(do_not_specialize=["num"])
def _passed_kernel(grad, out, passed, num, SCALE: tl.constexpr, ACC: tl.constexpr, T: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    value = tl.load(grad + i, mask=i < num, other=0).to(ACC) * tl.full((1,), SCALE, ACC)
    tl.store(passed + i, tl.where(tl.load(out + i, mask=i < num, other=0) <= 0, 0.0, value), mask=i < num)


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor, ids: Tensor) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(key, ids)
        return _apply(x, p, key, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return keyed_dropout(grad, ctx.p, *ctx.saved_tensors), None, None, None


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor, ids: Tensor) -> Tensor:
        ctx.p, out = p, _apply(x, p, key, ids, relu=True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return _Passed.apply(grad, ctx.saved_tensors[0], ctx.p), None, None, None


class _Passed(torch.autograd.Function):
    """The gradient where it passes, which is linear in it."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, out: Tensor, p: float) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(out)
        grad, passed = grad.contiguous(), torch.empty_like(out)
        tile = (16 if is_interpreted() else 1) * TILE
        if out.numel():
            with launching(out.device):
                _passed_kernel[(triton.cdiv(out.numel(), tile),)](
                    *(grad, out, passed, out.numel()), SCALE=dropout_numbers(p)[1], ACC=_precision(out), T=tile
                )
        return passed

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return _Passed.apply(grad, ctx.saved_tensors[0].detach(), ctx.p), None, None


def dropout_numbers(p: float) -> tuple[int, float]:
    """(threshold, scale): a column is kept where its 16 bits reach the threshold."""
    threshold = round(p * 65536)
    return threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0


def _precision(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _apply(x: Tensor, p: float, key: Tensor, ids: Tensor, relu: bool = False) -> Tensor:
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    num, width, (threshold, scale) = x.size(0), math.prod(x.shape[1:]), dropout_numbers(p)
    draws = min(triton.next_power_of_2(triton.cdiv(width, 4)), TILE // 4)
    rows = max(1, (16 if is_interpreted() else 1) * TILE // (4 * draws))
    with launching(x.device):
        _dropout_kernel[(triton.cdiv(num, rows), triton.cdiv(width, 4 * draws))](
            *(x, ids, key, out, num),
            THRESHOLD=threshold,
            SCALE=scale,
            WIDTH=width,
            ACC=_precision(x),
            RELU=relu,
            ROWS=rows,
            DRAWS=draws,
        )
    return out


def relu_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    assert ids.numel() == x.size(0), "one node id per row"
    out = _ReluDropout.apply(x, p, key_on(x.device, key), ids.contiguous())
    assert isinstance(out, Tensor)
    return out


def keyed_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    assert ids.numel() == x.size(0), "one node id per row"
    out = _KeyedDropout.apply(x, p, key_on(x.device, key), ids.contiguous())
    assert isinstance(out, Tensor)
    return out
