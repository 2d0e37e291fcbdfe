"""Linear layers on the CPU, divided by rows over hopline's own threads.

Inside `runtime.own_threads`, torch's own operations run in one thread. A linear layer would take too long in
one thread. So its rows are divided into ranges of `ROWS`, and hopline's threads take the ranges. Each range
is one call of torch's `mm` or `addmm`:

    forward    out[a:b]    = x[a:b] @ weight.T + bias
    backward   grad_x[a:b] = grad[a:b] @ weight
               grad_weight = sum over ranges of grad[a:b].T @ x[a:b]
               grad_bias   = sum over ranges of grad[a:b].sum(0)

Ranges do not depend on the number of threads, and neither does any result. The price is memory in the
backward pass: a gradient of the weight and of the bias for each range, until they are added up.

`SpreadLinear` puts `linear` in the place of `torch.nn.functional.linear`, so that models need not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hopline.ops.cpu.runtime import in_threads

ROWS = 2048
"""Rows of a range. More would leave threads idle, fewer would cost more calls of torch."""


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, in ranges of rows. x: [n, in_features]; weight: [out_features, in_features]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        weight_t = weight.t()
        out = torch.empty(x.size(0), weight.size(0), dtype=x.dtype)

        def run(a: int, b: int) -> None:
            if bias is None:
                torch.mm(x[a:b], weight_t, out=out[a:b])
            else:
                torch.addmm(bias, x[a:b], weight_t, out=out[a:b])

        _in_ranges(run, x.size(0))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        wants_bias = wants_bias and ctx.has_bias
        # Each range writes a gradient of its own, and these are added up at the end. If threads added to
        # one sum, the result would depend on which range is finished first.
        num_ranges = -(-x.size(0) // ROWS)  # rounded up
        grad_x = torch.empty_like(x) if wants_x else None
        weight_parts = torch.empty(num_ranges, *weight.shape, dtype=weight.dtype) if wants_weight else None
        bias_parts = torch.empty(num_ranges, weight.size(0), dtype=weight.dtype) if wants_bias else None

        def run(a: int, b: int) -> None:
            if grad_x is not None:
                torch.mm(grad[a:b], weight, out=grad_x[a:b])
            if weight_parts is not None:
                torch.mm(grad[a:b].t(), x[a:b], out=weight_parts[a // ROWS])
            if bias_parts is not None:
                torch.sum(grad[a:b], 0, out=bias_parts[a // ROWS])

        _in_ranges(run, x.size(0))
        grad_weight = None if weight_parts is None else weight_parts.sum(0)
        grad_bias = None if bias_parts is None else bias_parts.sum(0)
        return grad_x, grad_weight, grad_bias


def _in_ranges(run: Callable[[int, int], object], size: int) -> None:
    """Call run(a, b) for each range of `ROWS` rows of 0 .. size - 1, in threads."""

    def run_range(number: int) -> None:
        # Autograd must not record these products: `_Linear` has the gradient. Inference mode is a state of
        # a thread, so each thread enters it.
        # Dispatch modes, such as hopline's memory meter, need not see the products: these allocate no
        # tensor, but write into given ones. So the modes are off.
        with torch.inference_mode(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            run(number * ROWS, min((number + 1) * ROWS, size))

    in_threads(run_range, -(-size // ROWS))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, as `torch.nn.functional.linear`, in threads where that is possible and pays.

    torch's own function is called if there is only one range of rows, on a GPU, under autocast, and for
    mixed dtypes. It is also called if x has other than two dimensions.
    """
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    is_large_matrix = x.dim() == 2 and x.size(0) > ROWS
    if not is_large_matrix or len(dtypes) > 1 or x.is_cuda or torch.is_autocast_enabled("cpu"):
        # No endless recursion under `SpreadLinear`: torch turns a mode off while its `__torch_function__` runs.
        return torch.nn.functional.linear(x, weight, bias)
    out = _Linear.apply(x, weight, bias)
    assert isinstance(out, Tensor)
    return out


class SpreadLinear(TorchFunctionMode):
    """A mode in which every call of `torch.nn.functional.linear`, from any module, is a call of `linear`.

    It sees every call of torch: 190 in a step of two SAGE layers, at 1.5 us each. Binding `linear` to a model's
    own layers would save these 0.3 ms, but would write into users' modules, which other threads may run.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
