"""Triton kernels for the end of a step: cross entropy, and Adam over all parameters at once.

Cross entropy. For n rows of scores s_i with labels y_i, the kernel computes in one pass, in float32,

    loss         = sum over i of (logsumexp(s_i) - s_i[y_i]) / n
    gradient_i   = (softmax(s_i) - onehot(y_i)) / n

The gradient is kept for backward, which only multiplies it by the gradient of the loss. Scores may have any
precision up to float32. A program owns R rows with all their columns.

Adam. Graph models are small, and a launch per parameter would take longer than its work. So one launch per
parameter group updates all parameters of the group. A kernel takes a fixed number of arguments, so the
addresses of the tensors are in a table in device memory, with one row per program:

    [programs, 7] int64
    parameter | gradient | exp_avg | exp_avg_sq | step | first element | elements of the whole parameter

    program p:  updates up to CHUNK elements of one parameter, from the first element of row p on

The optimizer's state is torch's own. So a checkpoint of torch's optimizer can be loaded into this one, and
the reverse.
Steps that the kernel cannot take are left to torch: see `_OneKernel._group_steps`.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.runtime import is_interpreted

MAX_CLASSES = 4096
"""Most classes for which `ops.cross_entropy` uses this kernel: a program holds whole rows.
With more classes the loss is torch's. A rule of thumb.
"""


@triton.jit(do_not_specialize=["num"])
def _forward_kernel(scores, labels, losses, grads, num, CLASSES: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """losses[i], [num]: row i's part of the mean loss. grads[i], [num, CLASSES]: the gradient of the mean.

    Both come from one read of the scores. C is CLASSES padded to a power of two. A label outside
    0 .. CLASSES - 1 makes its row's loss and gradient NaN: a kernel cannot raise, and any number would be a
    wrong one.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, C)
    is_row = row < num
    mask = is_row[:, None] & (column < CLASSES)[None, :]
    offset = row.to(tl.int64)[:, None] * CLASSES + column[None, :]
    # Padded columns get a score so low that its exponential is 0.
    score = tl.load(scores + offset, mask=mask, other=-1e30).to(tl.float32)
    label = tl.load(labels + row, mask=is_row, other=0)

    maximum = tl.max(score, 1)
    powers = tl.exp(score - maximum[:, None])
    total = tl.sum(powers, 1)
    is_label = column[None, :] == label[:, None]
    is_class = (label >= 0) & (label < CLASSES)
    label_score = tl.where(is_class, tl.sum(tl.where(is_label, score, 0.0), 1), float("nan"))
    tl.store(losses + row, (maximum + tl.log(total) - label_score) / num, mask=is_row)

    gradient = (powers / total[:, None] - tl.where(is_label, 1.0, 0.0)) / num
    gradient = tl.where(is_class[:, None], gradient, float("nan"))
    tl.store(grads + offset, gradient.to(grads.dtype.element_ty), mask=mask)


class _CrossEntropy(torch.autograd.Function):
    """`cross_entropy`. The gradient is computed in forward, so the scores are not saved. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> Tensor:
        num, classes = scores.shape
        losses = torch.empty(num, dtype=torch.float32, device=scores.device)
        # In float32, also for half types: the gradient of a mean over many rows is small. Backward scales
        # it by the loss's gradient before it rounds it to the precision of the scores.
        grads = torch.empty(num, classes, dtype=torch.float32, device=scores.device)
        columns = triton.next_power_of_2(classes)
        # On a GPU about 1024 numbers per program, a rule of thumb.
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
    """A scalar in float32: `torch.nn.functional.cross_entropy(scores, labels)`, the mean over rows.

    scores: [n, classes], with 0 < classes <= MAX_CLASSES and n > 0. labels: [n] integers in
    0 .. classes - 1; any other makes the loss NaN. There is no `ignore_index`.
    """
    out = _CrossEntropy.apply(scores.contiguous(), labels)
    assert isinstance(out, Tensor)
    return out


CHUNK = 1024
"""Elements of a parameter that one program of Adam updates."""
MAX_TABLES = 8
"""Most tables that an optimizer caches. A rule of thumb: either gradients alternate between a few
addresses, or they have new ones in every step, and then no cache helps.
"""
COLUMNS = tl.constexpr(7)
"""Columns of the table of addresses: five addresses, the first element, and the parameter's size."""


@triton.jit
def _adam_kernel(table, lr, log2_beta1, log2_beta2, new1, new2, eps, decay, DECOUPLED: tl.constexpr, T: tl.constexpr):
    """One step of Adam, or of AdamW if DECOUPLED, on T elements of one parameter.

    With gradient g and step number t:

        g  = g + decay * p                (Adam)        p = p - lr * decay * p          (AdamW)
        m  = m + new1 * (g - m)                         v = v + new2 * (g * g - v)
        p  = p - lr / (1 - beta1 ** t) * m / (sqrt(v) / sqrt(1 - beta2 ** t) + eps)

    table: [programs, 7] int64, see the head of this file. All tensors that it points to are float32 and
    contiguous.
    lr: one float32 in device memory, so that a captured step sees its changes.
    log2_beta1, log2_beta2: beta ** t is computed as exp2(t * log2(beta)).
    new1, new2: 1 - beta1 and 1 - beta2. The host computes them in float64: in float32 the difference loses
    digits.
    """
    row = table + tl.program_id(0) * COLUMNS
    parameter = tl.load(row).to(tl.pointer_type(tl.float32))
    gradient = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    first_moment = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    second_moment = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    step = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
    i = tl.load(row + 5) + tl.arange(0, T)
    is_element = i < tl.load(row + 6)

    rate = tl.load(lr)
    p = tl.load(parameter + i, mask=is_element, other=0)
    g = tl.load(gradient + i, mask=is_element, other=0)
    if DECOUPLED:
        p = p * (1 - rate * decay)
    else:
        g += decay * p

    m = tl.load(first_moment + i, mask=is_element, other=0)
    v = tl.load(second_moment + i, mask=is_element, other=0)
    m += (g - m) * new1
    v += (g * g - v) * new2
    bias_correction1 = 1 - tl.exp2(step * log2_beta1)
    bias_correction2 = 1 - tl.exp2(step * log2_beta2)
    p -= rate / bias_correction1 * m / (tl.sqrt(v) / tl.sqrt(bias_correction2) + eps)

    tl.store(parameter + i, p, mask=is_element)
    tl.store(first_moment + i, m, mask=is_element)
    tl.store(second_moment + i, v, mask=is_element)


class _ParameterTensors(NamedTuple):
    """The tensors that a step of one parameter reads and writes, in the order of the table's columns."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """A scalar: the number of steps taken."""


class _GroupStep(NamedTuple):
    """One launch of `_adam_kernel`: the step of one parameter group."""

    group: dict[str, Any]
    """torch's parameter group, with its settings."""
    table: Tensor
    """[programs, 7] int64: the addresses, see the head of this file."""
    step_counters: list[Tensor]
    """`step` of each parameter of the group."""


class _OneKernel:
    """Base of `Adam` and `AdamW`: replaces `step`. Everything else is torch's.

    The optimizer owns a cache of address tables, `_cached_tables`. It also owns `_captured_tables`, the
    tables that captured CUDA graphs read. Both are made on first use and live in `__dict__`.
    """

    param_groups: list[dict[str, Any]]
    """torch's parameter groups, with their settings."""
    state: dict[Tensor, dict[str, Any]]
    """torch's state by parameter: `exp_avg`, `exp_avg_sq` and `step`."""
    decoupled: bool
    """Whether weight decay is applied to the parameter (AdamW), not to the gradient (Adam)."""

    def _group_steps(self) -> list[_GroupStep] | None:
        """The launch of each parameter group, or None if torch must take this step.

        The kernel needs in every group at least one gradient, the state that torch's first step creates, a
        learning rate in a tensor, and contiguous float32 tensors. It knows neither `amsgrad` nor
        `maximize`. While a graph is captured, it also needs tables that exist.
        """
        group_steps = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state.get(p) for p in parameters]
            if not parameters or any(not s for s in states) or not isinstance(group["lr"], Tensor):
                return None
            if group["amsgrad"] or group["maximize"]:
                return None
            rows = [
                _ParameterTensors(p, p.grad, s["exp_avg"], s["exp_avg_sq"], s["step"])
                for p, s in zip(parameters, states, strict=True)
                if s  # always true here; the type checker does not know
            ]
            if any(t.dtype != torch.float32 or not t.is_contiguous() for row in rows for t in row):
                return None
            table = self._table_of(rows)
            if table is None:
                return None
            group_steps.append(_GroupStep(group, table, [row.step for row in rows]))
        return group_steps

    def _table_of(self, rows: list[_ParameterTensors]) -> Tensor | None:
        """The table of these addresses, from the cache or new.

        None if a graph is being captured and has none.

        A table made during a capture would be part of the graph, and every replay would copy it to the
        device again. The addresses are a sufficient key: the sizes of an optimizer's parameters do not
        change.
        """
        cache: dict[tuple[int, ...], Tensor] = self.__dict__.setdefault("_cached_tables", {})
        captured: list[Tensor] = self.__dict__.setdefault("_captured_tables", [])
        key = tuple(t.data_ptr() for row in rows for t in row)
        if _is_capturing(rows[0].parameter):
            if key in cache:
                # Replays read it, so it must live longer than its entry in the cache.
                captured.append(cache[key])
            return cache.get(key)
        if key not in cache:
            # The oldest table goes first: a dict keeps the order of insertion.
            while len(cache) >= MAX_TABLES:
                del cache[next(iter(cache))]
            cache[key] = _make_table(rows)
        return cache[key]

    def prepare(self) -> None:
        """Make the tables for the gradients at their present addresses.

        Call it before a graph of `step` is captured.

        A capture cannot make them. Without them it would record torch's step, whose results differ in the
        last bits.
        """
        self._group_steps()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step: by one launch per group if possible, else by torch. A closure is always left to torch."""
        group_steps = self._group_steps() if closure is None else None
        if group_steps is None:
            return super().step(closure)  # type: ignore[misc]
        for group, table, step_counters in group_steps:
            torch._foreach_add_(step_counters, 1)
            beta1, beta2 = group["betas"]
            _adam_kernel[(table.size(0),)](
                table, group["lr"], math.log2(beta1), math.log2(beta2), 1 - beta1, 1 - beta2, group["eps"],
                group["weight_decay"], self.decoupled, CHUNK,
            )  # fmt: skip
        return None


class Adam(_OneKernel, torch.optim.Adam):
    """torch's Adam with a step of one launch per group. The first step, which creates the state, is torch's."""

    decoupled = False


class AdamW(_OneKernel, torch.optim.AdamW):
    """torch's AdamW with a step of one launch per group. The first step, which creates the state, is torch's."""

    decoupled = True


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _make_table(rows: list[_ParameterTensors]) -> Tensor:
    """[programs, 7] int64 on the device of the parameters: the table that `_adam_kernel` reads.

    The copy goes through pinned memory, so the host does not wait for it.
    """
    entries = []
    for row in rows:
        addresses = [t.data_ptr() for t in row]
        for start in range(0, row.parameter.numel(), CHUNK):
            entries.append([*addresses, start, row.parameter.numel()])
    device = rows[0].parameter.device
    if device.type != "cuda":
        return torch.tensor(entries, dtype=torch.int64)
    return torch.tensor(entries, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
