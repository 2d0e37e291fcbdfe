"""Numba kernels for reductions over destination-sorted edges and for keyed dropout, with their gradients.

No kernel builds a matrix with a row per edge. Forward runs in threads over destinations, backward over sources, so
that no two threads write the same number and the order of every sum is that of the edges, for any number of threads.
Loops over columns run on row views: indices that may be negative would keep the compiler from vectorising them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops import reference
from hopline.ops.cpu.runtime import GOLDEN, kernel, mix, over_ranges, prefetch

EDGES_AHEAD, NODES_AHEAD = 16, 4
"""How far ahead of their use the rows of sources and of destinations are asked for."""

_NO_WEIGHT, _NO_OWN = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
_U16, _LANE = np.uint64(16), np.uint64(0xFFFF)


@kernel
def _prefetch_row(rows, row):
    first = row * rows.shape[1]
    for c in range(0, rows.shape[1], max(1, 64 // rows.itemsize)):
        prefetch(rows, first + c)


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
def _put_own(rows, own, d, out):
    """Destination d's own row, to the right of its reduced ones."""
    if d + NODES_AHEAD < own.shape[0]:
        _prefetch_row(rows, own[d + NODES_AHEAD])
    right, row = out[d][rows.shape[1] :], rows[own[d]]
    for c in range(row.shape[0]):
        right[c] = row[c]


@kernel
def _sum(rows, indptr, src_idx, weight, mean, own, out, start, stop):
    num_edges = src_idx.shape[0]
    for d in range(start, stop):
        total = out[d][: rows.shape[1]]
        total[:] = 0
        for e in range(indptr[d], indptr[d + 1]):
            if e + EDGES_AHEAD < num_edges:
                _prefetch_row(rows, np.int64(src_idx[e + EDGES_AHEAD]))
            row = rows[src_idx[e]]
            if weight.shape[0]:
                w = weight[e]
                for c in range(total.shape[0]):
                    total[c] += w * row[c]
            else:
                for c in range(total.shape[0]):
                    total[c] += row[c]
        if mean and indptr[d + 1] - indptr[d] > 1:
            degree = out.dtype.type(indptr[d + 1] - indptr[d])
            for c in range(total.shape[0]):
                total[c] /= degree
        if own.shape[0]:
            _put_own(rows, own, d, out)


@kernel
def _weight_backward(rows, grad_out, indptr, src_idx, grad_weight, start, stop):
    for d in range(start, stop):
        grad = grad_out[d]
        for e in range(indptr[d], indptr[d + 1]):
            row = rows[src_idx[e]]
            total = 0.0
            for c in range(row.shape[0]):
                total += grad[c] * row[c]
            grad_weight[e] = total


@kernel
def _max(rows, indptr, src_idx, own, out, start, stop):
    num_edges = src_idx.shape[0]
    for d in range(start, stop):
        most = out[d][: rows.shape[1]]
        first = indptr[d]
        if first == indptr[d + 1]:
            most[:] = 0
        for e in range(first, indptr[d + 1]):
            if e + EDGES_AHEAD < num_edges:
                _prefetch_row(rows, np.int64(src_idx[e + EDGES_AHEAD]))
            row = rows[src_idx[e]]
            if e == first:
                for c in range(row.shape[0]):
                    most[c] = row[c]
            else:
                for c in range(row.shape[0]):
                    value = row[c]
                    # NaN must come through, as it does in torch.
                    most[c] = value if value > most[c] or value != value else most[c]
        if own.shape[0]:
            _put_own(rows, own, d, out)


@kernel
def _max_shares(rows, indptr, src_idx, out, grad_out, shares, start, stop):
    """torch's rule: the edges that reach the maximum share its gradient, with the initial 0 if the maximum is 0."""
    ties = np.empty(rows.shape[1], dtype=rows.dtype)
    for d in range(start, stop):
        most, grad, share = out[d], grad_out[d], shares[d]
        for c in range(ties.shape[0]):
            ties[c] = 1 if most[c] == 0 else 0
        for e in range(indptr[d], indptr[d + 1]):
            row = rows[src_idx[e]]
            for c in range(ties.shape[0]):
                ties[c] += 1 if row[c] == most[c] else 0
        for c in range(ties.shape[0]):
            share[c] = grad[c] / ties[c]


@kernel
def _max_backward(rows, out, shares, src_indptr, dst_idx, grad_rows, start, stop):
    for s in range(start, stop):
        row, grad = rows[s], grad_rows[s]
        grad[:] = 0
        for e in range(src_indptr[s], src_indptr[s + 1]):
            most, share = out[dst_idx[e]], shares[dst_idx[e]]
            for c in range(row.shape[0]):
                grad[c] += share[c] if row[c] == most[c] else 0


@kernel
def _by_source(indptr, src_idx, src_indptr, dst_idx, edge_idx):
    """Edges sorted by destination, sorted by source instead; those of one source keep their order."""
    for e in range(src_idx.shape[0]):
        src_indptr[src_idx[e] + 1] += 1
    for s in range(src_indptr.shape[0] - 1):
        src_indptr[s + 1] += src_indptr[s]
    place = src_indptr.copy()
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            at = place[src_idx[e]]
            place[src_idx[e]] = at + 1
            dst_idx[at] = d
            if edge_idx.shape[0]:
                edge_idx[at] = e


@kernel
def _add_to_rows(rows, ids, added):
    for d in range(ids.shape[0]):
        row, more = rows[ids[d]], added[d]
        for c in range(row.shape[0]):
            row[c] += more[c]


class _ReduceEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        indptr: Tensor,
        src_idx: Tensor,
        reduce: str,
        weight: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        flat = _as_matrix(rows)
        num_dst, width = indptr.numel() - 1, flat.shape[1]
        # Allocated in its final shape: torch forbids in-place work on a view made inside a Function.
        shape = rows.shape[1:] if own is None else (2 * width,)
        out = torch.empty(num_dst, *shape, dtype=rows.dtype)
        target = out.view(num_dst, math.prod(shape)).numpy()
        edges, work = (indptr.numpy(), src_idx.numpy()), src_idx.numel() * width
        beside = _NO_OWN if own is None else own.numpy()
        if reduce == "max":
            over_ranges(lambda a, b: _max(flat, *edges, beside, target, a, b), num_dst, work)
        else:
            scale, mean = _as_numpy(weight), reduce == "mean"
            over_ranges(lambda a, b: _sum(flat, *edges, scale, mean, beside, target, a, b), num_dst, work)
        ctx.reduce, ctx.shape = reduce, rows.shape
        needs_rows = reduce == "max" or (weight is not None and weight.requires_grad)
        maxima = out if reduce == "max" else None
        ctx.save_for_backward(rows if needs_rows else None, indptr, src_idx, weight, own, maxima)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        rows, indptr, src_idx, weight, own, out = ctx.saved_tensors
        width = math.prod(ctx.shape[1:])
        grad = grad.reshape(grad.size(0), width if own is None else 2 * width)
        of_own, grad = grad[:, width:], grad[:, :width]
        if ctx.reduce == "mean":
            grad = grad / indptr.diff().clamp(min=1).to(grad.dtype)[:, None]
        grad_out, edges = _as_matrix(grad), (indptr.numpy(), src_idx.numpy())
        flat = None if rows is None else _as_matrix(rows)
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty(ctx.shape, dtype=grad.dtype)
            spread = grad_rows.view(ctx.shape[0], width)
            if ctx.reduce == "max":
                assert flat is not None
                _spread_max(
                    flat,
                    _as_matrix(out.view(grad.size(0), math.prod(out.shape[1:]))[:, :width]),
                    grad_out,
                    edges,
                    spread.numpy(),
                )
            else:
                _spread_sum(grad_out, edges, weight, spread.numpy())
            if own is not None:
                _add_to_rows(spread.numpy(), own.numpy(), _as_matrix(of_own))
        if weight is not None and ctx.needs_input_grad[4]:
            grad_weight = torch.zeros_like(weight)
            dots = (flat, grad_out, *edges, grad_weight.numpy())
            over_ranges(lambda a, b: _weight_backward(*dots, a, b), grad.size(0), src_idx.numel() * width)
        return grad_rows, None, None, None, grad_weight, None


def _spread_sum(
    grad_out: np.ndarray, edges: tuple[np.ndarray, np.ndarray], weight: Tensor | None, target: np.ndarray
) -> None:
    """The gradient of sums: each source's is the sum over its edges' destinations."""
    src_indptr, dst_idx, edge_idx = _sorted_by_source(edges, target.shape[0], with_edges=weight is not None)
    scale = _as_numpy(None if weight is None else weight[torch.from_numpy(edge_idx)])
    args = (grad_out, src_indptr, dst_idx, scale, False, _NO_OWN, target)
    over_ranges(lambda a, b: _sum(*args, a, b), target.shape[0], dst_idx.size * target.shape[1])


def _spread_max(
    rows: np.ndarray,
    out: np.ndarray,
    grad_out: np.ndarray,
    edges: tuple[np.ndarray, np.ndarray],
    target: np.ndarray,
) -> None:
    src_indptr, dst_idx, _ = _sorted_by_source(edges, target.shape[0], with_edges=False)
    shares, work = np.empty_like(grad_out), dst_idx.size * target.shape[1]
    over_ranges(lambda a, b: _max_shares(rows, *edges, out, grad_out, shares, a, b), out.shape[0], work)
    args = (rows, out, shares, src_indptr, dst_idx, target)
    over_ranges(lambda a, b: _max_backward(*args, a, b), target.shape[0], work)


def _sorted_by_source(
    edges: tuple[np.ndarray, np.ndarray], num_rows: int, with_edges: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indptr by source, each edge's destination, its position before): what a gradient runs over."""
    src_indptr = np.zeros(num_rows + 1, dtype=np.int64)
    num_edges = edges[1].shape[0]
    dst_idx, edge_idx = np.empty(num_edges, dtype=np.int32), np.empty(num_edges if with_edges else 0, dtype=np.int64)
    _by_source(*edges, src_indptr, dst_idx, edge_idx)
    return src_indptr, dst_idx, edge_idx


def _as_matrix(rows: Tensor) -> np.ndarray:
    return rows.detach().reshape(rows.size(0), math.prod(rows.shape[1:])).contiguous().numpy()


def _as_numpy(weight: Tensor | None) -> np.ndarray:
    return _NO_WEIGHT if weight is None else weight.detach().numpy()


def reduce_edges(
    rows: Tensor,
    indptr: Tensor,
    src_idx: Tensor,
    reduce: str,
    weight: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    if not _edges_fit(indptr.numpy(), src_idx.numpy(), rows.size(0)):
        raise IndexError(f"an edge's source is outside 0 .. {rows.size(0) - 1}, or indptr does not fit the edges")
    if weight is not None and weight.shape != src_idx.shape:
        raise ValueError(f"there are {weight.numel()} weights for {src_idx.numel()} edges: give one per edge")
    if own is not None:
        check_own(rows, indptr, own)
    if rows.dtype not in (torch.float32, torch.float64):  # half types are summed in float32
        return reduce_edges(rows.float(), indptr, src_idx, reduce, weight, own).to(rows.dtype)
    if weight is not None:
        weight = weight.to(rows.dtype).contiguous()
    if weight is not None and reduce == "max":
        # Weighted maxima need every product for their gradient; no conv asks for them often enough to fuse.
        return reference.reduce_edges(rows, indptr, src_idx, reduce, weight, own)
    out = _ReduceEdges.apply(rows, indptr, src_idx, reduce, weight, own)
    assert isinstance(out, Tensor)
    return out


def check_own(rows: Tensor, indptr: Tensor, own: Tensor) -> None:
    if rows.dim() != 2 or own.shape != (indptr.numel() - 1,):
        raise ValueError("own rows stand beside a matrix's reduced ones: give one id per destination")
    if own.numel() and not 0 <= int(own.min()) <= int(own.max()) < rows.size(0):
        raise IndexError(f"an own row is outside 0 .. {rows.size(0) - 1}")


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


@kernel
def _dropout_stored(values, indptr, columns, ids, key, threshold, scale, out, start, stop):
    for i in range(start, stop):
        first = mix(np.uint64(key) ^ np.uint64(ids[i]))
        for e in range(indptr[i], indptr[i + 1]):
            column = np.uint64(columns[e])
            raw = mix(first + (column // np.uint64(4) + np.uint64(1)) * GOLDEN)
            keep = ((raw >> (_U16 * (column % np.uint64(4)))) & _LANE) >= threshold
            out[e] = values[e] * scale if keep else values[e] * 0


def keyed_dropout_stored(values: Tensor, indptr: Tensor, columns: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    if values.dtype not in (torch.float32, torch.float64):
        return keyed_dropout_stored(values.float(), indptr, columns, p, key, ids).to(values.dtype)
    values, out = values.contiguous(), torch.empty_like(values)
    threshold = round(p * 65536)
    scale = values.numpy().dtype.type(65536 / (65536 - threshold) if threshold < 65536 else 0.0)
    where = indptr.contiguous().numpy(), columns.contiguous().numpy(), ids.contiguous().numpy()
    draws = np.int64(key), np.uint64(threshold), scale
    over_ranges(
        lambda a, b: _dropout_stored(values.numpy(), *where, *draws, out.numpy(), a, b), ids.numel(), values.numel()
    )
    return out


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
