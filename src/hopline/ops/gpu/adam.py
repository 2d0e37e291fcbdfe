"""Adam as one kernel over all parameters: graph models are small, and a launch each would take longer than the work.

The state is torch's own, so checkpoints go from one to the other.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
"""Elements of a program."""
MOST_TABLES = 8
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
            while len(known) >= MOST_TABLES:
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
