"""Triton kernels of the end of a step: cross entropy, and Adam over all parameters at once.

Cross entropy reads logits of any precision once, in float32. Adam is one kernel, since graph models are small and a
launch per parameter would take longer than the work. Its state is torch's own, so checkpoints go from one to the other.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.runtime import is_interpreted

MAX_CLASSES = 4096
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


CHUNK = 1024
"""Elements of a program."""
MAX_TABLES = 8
"""Tables kept: gradients are in the same few places, or somewhere else every time."""
COLUMNS = tl.constexpr(7)
"""Of the table that says where a program finds its elements."""


@triton.jit
def _adam_kernel(table, lr, log2_beta1, log2_beta2, new1, new2, eps, decay, DECOUPLED: tl.constexpr, T: tl.constexpr):
    """table: by program the addresses of parameter, gradient, both moments and step, the first element, the count.

    new1, new2: 1 - beta, which float32 would spoil. The moments move by that share of the gradient.
    """
    row = table + tl.program_id(0) * COLUMNS
    parameter = tl.load(row).to(tl.pointer_type(tl.float32))
    gradient = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    first_moment = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    second_moment = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    step = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
    i = tl.load(row + 5) + tl.arange(0, T)
    inside = i < tl.load(row + 6)
    rate = tl.load(lr)
    p = tl.load(parameter + i, mask=inside, other=0)
    g = tl.load(gradient + i, mask=inside, other=0)
    if DECOUPLED:
        p = p * (1 - rate * decay)
    else:
        g += decay * p
    m = tl.load(first_moment + i, mask=inside, other=0)
    v = tl.load(second_moment + i, mask=inside, other=0)
    m += (g - m) * new1
    v += (g * g - v) * new2
    unbiased1 = 1 - tl.exp2(step * log2_beta1)
    unbiased2 = 1 - tl.exp2(step * log2_beta2)
    p -= rate / unbiased1 * m / (tl.sqrt(v) / tl.sqrt(unbiased2) + eps)
    tl.store(parameter + i, p, mask=inside)
    tl.store(first_moment + i, m, mask=inside)
    tl.store(second_moment + i, v, mask=inside)


class _OneKernel:
    """What the two optimizers share; both are torch's in everything but `step`."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]
    decoupled: bool

    def _tables(self) -> list[tuple[dict[str, Any], Tensor, list[Tensor]]] | None:
        """By group where everything is, or None where the kernel cannot be used."""
        found = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state.get(p) for p in parameters]
            if not parameters or any(not s for s in states) or not isinstance(group["lr"], Tensor):
                return None
            rows = [
                (p, p.grad, s["exp_avg"], s["exp_avg_sq"], s["step"])
                for p, s in zip(parameters, states, strict=True)
                if s
            ]
            if any(t.dtype != torch.float32 or not t.is_contiguous() for row in rows for t in row):
                return None
            table = self._table_of(rows)
            if table is None:
                return None
            found.append((group, table, [row[4] for row in rows]))
        return found

    def _table_of(self, rows: list[tuple[Tensor, ...]]) -> Tensor | None:
        """The table of these addresses; None where a graph is being captured, which would copy a new one every time."""
        known: dict[tuple[int, ...], Tensor] = self.__dict__.setdefault("_known", {})
        captured: list[Tensor] = self.__dict__.setdefault("_captured", [])
        key = tuple(t.data_ptr() for row in rows for t in row)
        if _is_capturing(rows[0][0]):
            if key in known:
                captured.append(known[key])  # the graph reads it as long as it lives
            return known.get(key)
        if key not in known:
            while len(known) >= MAX_TABLES:
                del known[next(iter(known))]
            known[key] = _table(rows)
        return known[key]

    def prepare(self) -> None:
        """Before a graph is captured: have the tables of the gradients that are there, which it cannot copy itself.

        Without them its kernel would be torch's, whose results differ in the last bits.
        """
        self._tables()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self._tables() if closure is None else None
        if groups is None:
            return super().step(closure)  # type: ignore[misc]
        for group, table, steps in groups:
            torch._foreach_add_(steps, 1)
            beta1, beta2 = group["betas"]
            _adam_kernel[(table.size(0),)](
                table, group["lr"], math.log2(beta1), math.log2(beta2), 1 - beta1, 1 - beta2, group["eps"],
                group["weight_decay"], self.decoupled, CHUNK,
            )  # fmt: skip
        return None


class Adam(_OneKernel, torch.optim.Adam):
    """torch's Adam; its first step, which makes the state, is torch's too."""

    decoupled = False


class AdamW(_OneKernel, torch.optim.AdamW):
    """torch's AdamW."""

    decoupled = True


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _table(rows: list[tuple[Tensor, ...]]) -> Tensor:
    """[programs, 7] int64 on the device; the copy waits for nothing."""
    entries = [
        [*(t.data_ptr() for t in row), start, row[0].numel()]
        for row in rows
        for start in range(0, row[0].numel(), CHUNK)
    ]
    device = rows[0][0].device
    if device.type != "cuda":
        return torch.tensor(entries, dtype=torch.int64)
    return torch.tensor(entries, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
