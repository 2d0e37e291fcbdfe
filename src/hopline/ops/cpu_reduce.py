"""Numba kernels for reductions over destination-sorted edges and for keyed dropout, with their gradients.

No kernel builds a matrix with a row per edge. Forward runs in threads over destinations, backward over columns, so
that no two threads write the same number and the order of every sum is that of the edges, for any number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.cpu_core import GOLDEN, kernel, mix, over_ranges, prefetch

EDGES_AHEAD = 8
"""How many edges ahead of their use the source rows are asked for."""

_NO_WEIGHT = np.empty(0, dtype=np.float32)
_U16, _LANE = np.uint64(16), np.uint64(0xFFFF)


@kernel
def _prefetch_row(rows, row, width):
    for c in range(0, width, max(1, 64 // rows.itemsize)):
        prefetch(rows, row * width + c)


@kernel
def _edges_fit(indptr, src_idx, num_rows):
    """Whether every destination's edges are among the edges, and every edge's source among the rows."""
    fit = indptr.shape[0] > 0 and indptr[0] >= 0 and indptr[-1] <= src_idx.shape[0]
    for d in range(indptr.shape[0] - 1):
        fit &= indptr[d] <= indptr[d + 1]
    for e in range(src_idx.shape[0]):
        fit &= (src_idx[e] >= 0) & (src_idx[e] < num_rows)
    return fit


@kernel
def _sum(rows, width, indptr, src_idx, weight, mean, out, start, stop):
    num_edges = src_idx.shape[0]
    for d in range(start, stop):
        for c in range(width):
            out[d, c] = 0
        for e in range(indptr[d], indptr[d + 1]):
            if e + EDGES_AHEAD < num_edges:
                _prefetch_row(rows, src_idx[e + EDGES_AHEAD], width)
            row = np.int64(src_idx[e]) * width
            if weight.shape[0]:
                w = weight[e]
                for c in range(width):
                    out[d, c] += w * rows[row + c]
            else:
                for c in range(width):
                    out[d, c] += rows[row + c]
        if mean and indptr[d + 1] - indptr[d] > 1:
            degree = out.dtype.type(indptr[d + 1] - indptr[d])
            for c in range(width):
                out[d, c] /= degree


@kernel
def _sum_backward(grad_out, indptr, src_idx, weight, mean, grad_rows, start, stop):
    for d in range(indptr.shape[0] - 1):
        degree = grad_out.dtype.type(indptr[d + 1] - indptr[d] if mean else 1)
        for e in range(indptr[d], indptr[d + 1]):
            row = src_idx[e]
            if weight.shape[0]:
                w = weight[e]
                for c in range(start, stop):
                    grad_rows[row, c] += w * (grad_out[d, c] / degree)
            elif degree > 1:
                for c in range(start, stop):
                    grad_rows[row, c] += grad_out[d, c] / degree
            else:
                for c in range(start, stop):
                    grad_rows[row, c] += grad_out[d, c]


@kernel
def _weight_backward(rows, width, grad_out, indptr, src_idx, mean, grad_weight, start, stop):
    for d in range(start, stop):
        degree = indptr[d + 1] - indptr[d] if mean else 1
        for e in range(indptr[d], indptr[d + 1]):
            row = np.int64(src_idx[e]) * width
            total = 0.0
            for c in range(width):
                total += grad_out[d, c] * rows[row + c]
            grad_weight[e] = total / degree


@kernel
def _max(rows, width, indptr, src_idx, out, start, stop):
    num_edges = src_idx.shape[0]
    for d in range(start, stop):
        first = indptr[d]
        for e in range(first, indptr[d + 1]):
            if e + EDGES_AHEAD < num_edges:
                _prefetch_row(rows, src_idx[e + EDGES_AHEAD], width)
            row = np.int64(src_idx[e]) * width
            if e == first:
                for c in range(width):
                    out[d, c] = rows[row + c]
            else:
                for c in range(width):
                    value = rows[row + c]
                    # NaN must come through, as it does in torch.
                    out[d, c] = value if value > out[d, c] or value != value else out[d, c]
        if first == indptr[d + 1]:
            for c in range(width):
                out[d, c] = 0


@kernel
def _max_backward(rows, width, out, grad_out, indptr, src_idx, grad_rows, start, stop):
    """torch's rule: the edges that reach the maximum share its gradient, with the initial 0 if the maximum is 0."""
    ties = np.empty(width, dtype=np.int64)
    for d in range(indptr.shape[0] - 1):
        for c in range(start, stop):
            ties[c] = 1 if out[d, c] == 0 else 0
        for e in range(indptr[d], indptr[d + 1]):
            row = np.int64(src_idx[e]) * width
            for c in range(start, stop):
                ties[c] += rows[row + c] == out[d, c]
        for e in range(indptr[d], indptr[d + 1]):
            row = np.int64(src_idx[e]) * width
            for c in range(start, stop):
                if rows[row + c] == out[d, c]:
                    grad_rows[src_idx[e], c] += grad_out[d, c] / ties[c]


class _ReduceEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, indptr: Tensor, src_idx: Tensor, reduce: str, weight: Tensor | None):
        flat = rows.detach().reshape(rows.size(0), math.prod(rows.shape[1:])).contiguous()
        num_dst, width = indptr.numel() - 1, flat.size(1)
        # Allocated in its final shape: torch forbids in-place work on a view made inside a Function.
        out = torch.empty(num_dst, *rows.shape[1:], dtype=rows.dtype)
        target = out.view(num_dst, width).numpy()
        args = (flat.view(-1).numpy(), width, indptr.numpy(), src_idx.numpy())
        work = src_idx.numel() * width
        if reduce == "max":
            over_ranges(lambda a, b: _max(*args, target, a, b), num_dst, work)
        else:
            scale, mean = _as_numpy(weight), reduce == "mean"
            over_ranges(lambda a, b: _sum(*args, scale, mean, target, a, b), num_dst, work)
        ctx.reduce, ctx.shape = reduce, rows.shape
        needs_rows = reduce == "max" or (weight is not None and weight.requires_grad)
        ctx.save_for_backward(rows if needs_rows else None, indptr, src_idx, weight, out if reduce == "max" else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        rows, indptr, src_idx, weight, out = ctx.saved_tensors
        grad = grad.reshape(grad.size(0), math.prod(grad.shape[1:])).contiguous()
        width, mean = grad.size(1), ctx.reduce == "mean"
        edges, work = (indptr.numpy(), src_idx.numpy()), src_idx.numel() * grad.size(1)
        grad_rows = grad_weight = None
        flat = None if rows is None else rows.detach().contiguous().view(-1).numpy()
        if ctx.needs_input_grad[0]:
            grad_rows = torch.zeros(ctx.shape[0], width, dtype=grad.dtype)
            target = grad_rows.numpy()
            if ctx.reduce == "max":
                maxima = (flat, width, out.view(grad.shape).numpy(), grad.numpy(), *edges, target)
                over_ranges(lambda a, b: _max_backward(*maxima, a, b), width, work)
            else:
                sums = (grad.numpy(), *edges, _as_numpy(weight), mean, target)
                over_ranges(lambda a, b: _sum_backward(*sums, a, b), width, work)
            grad_rows = grad_rows.view(ctx.shape)
        if weight is not None and ctx.needs_input_grad[4]:
            grad_weight = torch.zeros_like(weight)
            dots = (flat, width, grad.numpy(), *edges, mean, grad_weight.numpy())
            over_ranges(lambda a, b: _weight_backward(*dots, a, b), grad.size(0), work)
        return grad_rows, None, None, None, grad_weight


def _as_numpy(weight: Tensor | None) -> np.ndarray:
    return _NO_WEIGHT if weight is None else weight.detach().numpy()


def reduce_edges(rows: Tensor, indptr: Tensor, src_idx: Tensor, reduce: str, weight: Tensor | None = None) -> Tensor:
    if not _edges_fit(indptr.numpy(), src_idx.numpy(), rows.size(0)):
        raise IndexError(f"an edge's source is outside 0 .. {rows.size(0) - 1}, or indptr does not fit the edges")
    if weight is not None and weight.shape != src_idx.shape:
        raise ValueError(f"there are {weight.numel()} weights for {src_idx.numel()} edges: give one per edge")
    if rows.dtype not in (torch.float32, torch.float64):  # half types are summed in float32
        return reduce_edges(rows.float(), indptr, src_idx, reduce, weight).to(rows.dtype)
    if weight is not None:
        weight = weight.to(rows.dtype).contiguous()
    if weight is not None and reduce == "max":
        # Weighted maxima need every product for their gradient; no conv asks for them often enough to fuse.
        from hopline.ops import reference

        return reference.reduce_edges(rows, indptr, src_idx, reduce, weight)
    out = _ReduceEdges.apply(rows, indptr, src_idx, reduce, weight)
    assert isinstance(out, Tensor)
    return out


@kernel
def _dropout(x, ids, key, threshold, scale, out, start, stop):
    width = x.shape[1]
    for i in range(start, stop):
        state = mix(np.uint64(key) ^ np.uint64(ids[i]))
        for word in range((width + 3) // 4):
            state += GOLDEN
            raw = mix(state)
            for c in range(4 * word, min(4 * word + 4, width)):
                keep = (raw & _LANE) >= threshold
                raw >>= _U16
                out[i, c] = x[i, c] * scale if keep else x[i, c] * 0


class _KeyedDropout(torch.autograd.Function):
    """The mask is drawn again in backward: nothing is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
        ctx.p, ctx.key, ctx.ids = p, key, ids
        return _apply_dropout(x, p, key, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return keyed_dropout(grad, ctx.p, ctx.key, ctx.ids), None, None, None


def _apply_dropout(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    flat = x.detach().reshape(x.size(0), math.prod(x.shape[1:]))
    if flat.dtype not in (torch.float32, torch.float64):
        return _apply_dropout(x.float(), p, key, ids).to(x.dtype)
    flat = flat.contiguous()
    out = torch.empty_like(flat)
    threshold = round(p * 65536)
    scale = flat.numpy().dtype.type(65536 / (65536 - threshold) if threshold < 65536 else 0.0)
    args = (flat.numpy(), ids.numpy(), np.int64(key), np.uint64(threshold), scale, out.numpy())
    over_ranges(lambda a, b: _dropout(*args, a, b), flat.size(0), flat.numel())
    return out.view_as(x)


def keyed_dropout(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    assert ids.numel() == x.size(0), "one node id per row"
    out = _KeyedDropout.apply(x, p, key, ids)
    assert isinstance(out, Tensor)
    return out
