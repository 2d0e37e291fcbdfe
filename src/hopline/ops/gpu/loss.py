"""Cross entropy in one kernel each way: logits in any precision are read once, in float32."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.runtime import is_interpreted

MOST_CLASSES = 4096
"""The widest row that one program takes."""


@triton.jit(do_not_specialize=["num"])
def _forward_kernel(scores, labels, losses, grads, num, CLASSES: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Each row's loss, and the gradient of the mean, which needs no second look at the scores."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, C)
    inside = row < num
    ok = inside[:, None] & (column < CLASSES)[None, :]
    at = row.to(tl.int64)[:, None] * CLASSES + column[None, :]
    score = tl.load(scores + at, mask=ok, other=-1e30).to(tl.float32)
    label = tl.load(labels + row, mask=inside, other=0)
    most = tl.max(score, 1)
    powers = tl.exp(score - most[:, None])
    total = tl.sum(powers, 1)
    is_label = column[None, :] == label[:, None]
    chosen = tl.sum(tl.where(is_label, score, 0.0), 1)
    tl.store(losses + row, (most + tl.log(total) - chosen) / num, mask=inside)
    gradient = (powers / total[:, None] - tl.where(is_label, 1.0, 0.0)) / num
    tl.store(grads + at, gradient.to(grads.dtype.element_ty), mask=ok)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> Tensor:
        num, classes = scores.shape
        losses = torch.empty(num, dtype=torch.float32, device=scores.device)
        # Kept in float32: the gradient of a mean over many rows is small, and is scaled before it is rounded.
        grads = torch.empty(num, classes, dtype=torch.float32, device=scores.device)
        columns = triton.next_power_of_2(classes)
        rows = 64 if is_interpreted() else max(1, 1024 // columns)
        _forward_kernel[(triton.cdiv(num, rows),)](scores, labels, losses, grads, num, classes, rows, columns)
        ctx.save_for_backward(grads)
        ctx.dtype = scores.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        (grads,) = ctx.saved_tensors
        return (grads * grad).to(ctx.dtype), None


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean of `torch.nn.functional.cross_entropy(scores, labels)`; labels must be classes."""
    out = _CrossEntropy.apply(scores.contiguous(), labels)
    assert isinstance(out, Tensor)
    return out
