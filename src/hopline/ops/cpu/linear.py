"""A linear layer's products, in ranges of rows over our own threads; each product is torch's.

The ranges do not depend on the number of threads, and neither does any result.
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
"""Rows of a range: long enough for the product's own overhead, short enough to share out."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        rows, columns = x.detach(), weight.detach().t()
        add = None if bias is None else bias.detach()
        out = torch.empty(x.size(0), weight.size(0), dtype=x.dtype)

        def run(a: int, b: int) -> None:
            if add is None:
                torch.mm(rows[a:b], columns, out=out[a:b])
            else:
                torch.addmm(add, rows[a:b], columns, out=out[a:b])

        _in_ranges(run, x.size(0))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        wants_bias = wants_bias and ctx.has_bias
        num_ranges = -(-x.size(0) // ROWS)
        grad_x = torch.empty_like(x) if wants_x else None
        weights = torch.empty(num_ranges, *weight.shape, dtype=weight.dtype) if wants_weight else None
        biases = torch.empty(num_ranges, weight.size(0), dtype=weight.dtype) if wants_bias else None
        rows, columns, grad = x.detach(), weight.detach(), grad.detach()

        def run(a: int, b: int) -> None:
            if grad_x is not None:
                torch.mm(grad[a:b], columns, out=grad_x[a:b])
            if weights is not None:
                torch.mm(grad[a:b].t(), rows[a:b], out=weights[a // ROWS])
            if biases is not None:
                torch.sum(grad[a:b], 0, out=biases[a // ROWS])

        _in_ranges(run, x.size(0))
        return grad_x, None if weights is None else weights.sum(0), None if biases is None else biases.sum(0)


def _in_ranges(run: Callable[[int, int], object], size: int) -> None:
    def one(number: int) -> None:
        # A mode of the thread: the others do not know the caller's. And who watches torch's operations for what they
        # make, such as our meter, need not be told of these, which write where there is room already.
        with torch.inference_mode(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            run(number * ROWS, min((number + 1) * ROWS, size))

    in_threads(one, -(-size // ROWS))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    dtypes = {x.dtype, weight.dtype} | (set() if bias is None else {bias.dtype})
    if x.dim() != 2 or x.size(0) <= ROWS or len(dtypes) > 1 or x.is_cuda or torch.is_autocast_enabled("cpu"):
        return torch.nn.functional.linear(x, weight, bias)
    out = _Linear.apply(x, weight, bias)
    assert isinstance(out, Tensor)
    return out


class SpreadLinear(TorchFunctionMode):
    """Within, every linear layer's product, whichever module asks for it, is `linear` above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
