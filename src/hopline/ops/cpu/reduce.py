"""Numba kernels that aggregate messages over edges, and kernels for keyed dropout. Both have gradients.

PyG gathers a row per edge, multiplies by weights, and scatters the messages to destinations. The kernels
here do all three at once and never build a matrix with a row per edge:

    out[d] = sum, mean or max over the edges e into d of (weight[e] *) rows[src_idx[e]]
    with `own`: out[d] = (the above | rows[own[d]]), twice as wide; both inputs of a SAGE layer in one matrix

Keyed dropout draws its mask from (key, node id, column) instead of a generator. `reference.py` defines both
operations in plain torch.

Memory layout
    rows      [num_rows, width]      float32 or float64, row-major; half types are summed in float32
    indptr    [num_dst + 1] int64    edges are sorted by destination (CSC)
    src_idx   [num_edges]            int32 or int64: the row of each edge's source
    weight    [num_edges]            of the dtype of rows; an empty array means no weights
    own       [num_dst]              int32 or int64: the row of each destination; empty: no own rows
    out       [num_dst, width]       or [num_dst, 2 * width] with `own`

How the work is divided. Threads own ranges start .. stop - 1 of destinations in the forward pass, and
ranges of sources in the backward pass. So no two threads write the same number, and every sum runs in the
order of the edges. Results are the same bits for any number of threads.

Gradients. The gradient of a gather is a scatter-add, which in threads would need atomics. Instead, edges
are sorted by source, and the gradients of rows are sums over each source's out-edges:

    sum       grad_rows[s]   = sum over the edges e from s of weight[e] * grad_out[dst(e)]
    mean      as sum, with grad_out[d] divided by the in-degree of d first
    max       grad_rows[s]   = sum of grad_out[dst(e)] / ties[dst(e)] over those edges e from s that reach the
                               maximum of their destination; ties[d] is the number of edges that reach it
    weights   grad_weight[e] = dot(rows[src_idx[e]], grad_out[dst(e)]), with the same division for mean

Second derivatives of reductions are not supported. Weighted maxima are left to `reference.py`.

Loops over columns run on views of rows: `row[c]` and not `rows[s, c]`. In Numba an index such as s may be
negative, which would keep the compiler from vectorising the loop.

Bad input. An edge whose source is not a row raises an IndexError, and so does an indptr that does not fit the
edges. Both are checked before any kernel reads a row.
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
from hopline.ops.random import dropout_numbers

EDGES_AHEAD = 16
"""Edges between the prefetch of a source row and its use."""
NODES_AHEAD = 4
"""Destinations between the prefetch of an own row and its use."""

_NO_WEIGHT = np.empty(0, dtype=np.float32)
"""An empty array, which stands for None as the weight of a kernel."""
_NO_OWN = np.empty(0, dtype=np.int64)
"""An empty array, which stands for None as the own rows of a kernel."""
_U16 = np.uint64(16)
"""Bits of a draw that decide about one column of dropout."""
_LANE = np.uint64(0xFFFF)
"""The mask of the 16 bits of a draw that decide about one column of dropout."""


@kernel
def _prefetch_row(rows, row):
    first = row * rows.shape[1]
    for c in range(0, rows.shape[1], max(1, 64 // rows.itemsize)):
        prefetch(rows, first + c)


@kernel
def _edges_fit(indptr, src_idx, num_rows):
    """Whether indptr ascends within the edges, and every edge's source is one of the rows."""
    is_valid = indptr.shape[0] > 0 and indptr[0] >= 0 and indptr[-1] <= src_idx.shape[0]
    for d in range(indptr.shape[0] - 1):
        is_valid &= indptr[d] <= indptr[d + 1]
    for e in range(src_idx.shape[0]):
        is_valid &= (src_idx[e] >= 0) & (src_idx[e] < num_rows)
    return is_valid


@kernel
def _copy_own(rows, own, d, out):
    """out[d, width:] = rows[own[d]]."""
    if d + NODES_AHEAD < own.shape[0]:
        _prefetch_row(rows, own[d + NODES_AHEAD])
    right = out[d][rows.shape[1] :]
    row = rows[own[d]]
    for c in range(row.shape[0]):
        right[c] = row[c]


@kernel
def _sum(rows, indptr, src_idx, weight, mean, own, out, start, stop):
    """out[d, :width] = sum or mean of (weight[e] *) rows[src_idx[e]] over the edges e of d.

    Destinations are d = start .. stop - 1. A destination without edges gets zeros. With `own`, the
    destination's own row follows to the right.
    """
    num_edges = src_idx.shape[0]
    for d in range(start, stop):
        total = out[d][: rows.shape[1]]
        total[:] = 0
        for e in range(indptr[d], indptr[d + 1]):
            if e + EDGES_AHEAD < num_edges:
                _prefetch_row(rows, np.int64(src_idx[e + EDGES_AHEAD]))
            row = rows[src_idx[e]]
            if weight.shape[0]:
                edge_weight = weight[e]
                for c in range(total.shape[0]):
                    total[c] += edge_weight * row[c]
            else:
                for c in range(total.shape[0]):
                    total[c] += row[c]
        if mean and indptr[d + 1] - indptr[d] > 1:
            degree = out.dtype.type(indptr[d + 1] - indptr[d])
            for c in range(total.shape[0]):
                total[c] /= degree
        if own.shape[0]:
            _copy_own(rows, own, d, out)


@kernel
def _weight_backward(rows, grad_out, indptr, src_idx, grad_weight, start, stop):
    """grad_weight[e] = dot(rows[src_idx[e]], grad_out[d]) for the edges e of d = start .. stop - 1."""
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
    """out[d, :width] = the maximum of rows[src_idx[e]] over the edges e of d, by column.

    Destinations are d = start .. stop - 1. A destination without edges gets zeros. With `own`, the
    destination's own row follows to the right.
    """
    num_edges = src_idx.shape[0]
    for d in range(start, stop):
        maximum = out[d][: rows.shape[1]]
        first = indptr[d]
        if first == indptr[d + 1]:
            maximum[:] = 0
        for e in range(first, indptr[d + 1]):
            if e + EDGES_AHEAD < num_edges:
                _prefetch_row(rows, np.int64(src_idx[e + EDGES_AHEAD]))
            row = rows[src_idx[e]]
            if e == first:
                for c in range(row.shape[0]):
                    maximum[c] = row[c]
            else:
                for c in range(row.shape[0]):
                    value = row[c]
                    # A NaN becomes the maximum, as in torch: `value != value` is true for NaN alone. It
                    # stays the maximum, since no value compares as greater than NaN.
                    maximum[c] = value if value > maximum[c] or value != value else maximum[c]
        if own.shape[0]:
            _copy_own(rows, own, d, out)


@kernel
def _max_shares(rows, indptr, src_idx, out, grad_out, shares, start, stop):
    """shares[d] = grad_out[d] / ties[d]: the gradient of each edge that reaches the maximum of d, by column.

    The rule is that of torch's `scatter_reduce`: all edges that reach the maximum share its gradient
    evenly. If the maximum is 0, the initial 0 of the output counts as one more tie, and its share is lost.

    out: [num_dst, width], the maxima; ties: [width], for the current destination.
    """
    ties = np.empty(rows.shape[1], dtype=rows.dtype)
    for d in range(start, stop):
        maximum = out[d]
        grad = grad_out[d]
        share = shares[d]
        for c in range(ties.shape[0]):
            ties[c] = 1 if maximum[c] == 0 else 0
        for e in range(indptr[d], indptr[d + 1]):
            row = rows[src_idx[e]]
            for c in range(ties.shape[0]):
                ties[c] += 1 if row[c] == maximum[c] else 0
        for c in range(ties.shape[0]):
            share[c] = grad[c] / ties[c]


@kernel
def _max_backward(rows, out, shares, src_indptr, dst_idx, grad_rows, start, stop):
    """grad_rows[s] = the sum of shares[d] over the edges from s to d where rows[s] == out[d], by column.

    src_indptr, dst_idx: the edges sorted by source; s is in start .. stop - 1.
    """
    for s in range(start, stop):
        row = rows[s]
        grad = grad_rows[s]
        grad[:] = 0
        for e in range(src_indptr[s], src_indptr[s + 1]):
            maximum = out[dst_idx[e]]
            share = shares[dst_idx[e]]
            for c in range(row.shape[0]):
                grad[c] += share[c] if row[c] == maximum[c] else 0


@kernel
def _sort_by_source(indptr, src_idx, src_indptr, dst_idx, edge_idx):
    """Sort edges by source, with a counting sort. Edges of one source keep their order.

    Only the edges indptr[0] .. indptr[-1] - 1 are sorted: the others have no destination, and no gradient.

    src_indptr: [num_rows + 1] int64, zeros at first, filled.
    dst_idx: [indptr[-1] - indptr[0]] int32, filled: the destination of each edge.
    edge_idx: [indptr[-1] - indptr[0]] int64, filled: the position of each edge in `src_idx`. Empty if not
    needed.
    """
    for e in range(indptr[0], indptr[-1]):
        src_indptr[src_idx[e] + 1] += 1
    for s in range(src_indptr.shape[0] - 1):
        src_indptr[s + 1] += src_indptr[s]
    cursor = src_indptr.copy()
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            position = cursor[src_idx[e]]
            cursor[src_idx[e]] = position + 1
            dst_idx[position] = d
            if edge_idx.shape[0]:
                edge_idx[position] = e


@kernel
def _add_to_rows(rows, ids, added):
    """rows[ids[d]] += added[d], one after the other: ids may repeat."""
    for d in range(ids.shape[0]):
        row = rows[ids[d]]
        addend = added[d]
        for c in range(row.shape[0]):
            row[c] += addend[c]


class _ReduceEdges(torch.autograd.Function):
    """Sum, mean or max over edges, as in the module's docstring. The input is valid: `reduce_edges` checks it."""

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
        num_dst = indptr.numel() - 1
        width = flat.shape[1]
        # Allocated in its final shape: torch forbids in-place work on a view made inside a Function.
        shape = rows.shape[1:] if own is None else (2 * width,)
        out = torch.empty(num_dst, *shape, dtype=rows.dtype)
        target = out.view(num_dst, math.prod(shape)).numpy()
        edges = (indptr.numpy(), src_idx.numpy())
        work = src_idx.numel() * width
        own_ids = _NO_OWN if own is None else own.numpy()
        if reduce == "max":
            over_ranges(lambda a, b: _max(flat, *edges, own_ids, target, a, b), num_dst, work)
        else:
            edge_weight = _as_numpy(weight)
            mean = reduce == "mean"
            over_ranges(lambda a, b: _sum(flat, *edges, edge_weight, mean, own_ids, target, a, b), num_dst, work)
        ctx.reduce = reduce
        ctx.shape = rows.shape
        # The gradient of a sum needs the edges alone. Rows are kept alive only if the gradient reads them.
        needs_rows = reduce == "max" or (weight is not None and weight.requires_grad)
        needs_out = reduce == "max"
        saved_rows = rows if needs_rows else None
        saved_out = out if needs_out else None
        ctx.save_for_backward(saved_rows, indptr, src_idx, weight, own, saved_out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        rows, indptr, src_idx, weight, own, out = ctx.saved_tensors
        needs_grad_rows, _, _, _, needs_grad_weight, _ = ctx.needs_input_grad
        width = math.prod(ctx.shape[1:])
        grad = grad.reshape(grad.size(0), width if own is None else 2 * width)
        grad_own = grad[:, width:]
        grad = grad[:, :width]
        if ctx.reduce == "mean":
            grad = grad / indptr.diff().clamp(min=1).to(grad.dtype)[:, None]

        grad_out = _as_matrix(grad)
        edges = (indptr.numpy(), src_idx.numpy())
        flat = None if rows is None else _as_matrix(rows)

        grad_rows = None
        if needs_grad_rows:
            grad_rows = torch.empty(ctx.shape, dtype=grad.dtype)
            target = grad_rows.view(ctx.shape[0], width)
            if ctx.reduce == "max":
                assert flat is not None
                maxima = _as_matrix(out.view(grad.size(0), math.prod(out.shape[1:]))[:, :width])
                _gradient_of_max(flat, maxima, grad_out, edges, target.numpy())
            else:
                _gradient_of_sum(grad_out, edges, weight, target.numpy())
            if own is not None:
                _add_to_rows(target.numpy(), own.numpy(), _as_matrix(grad_own))

        grad_weight = None
        if weight is not None and needs_grad_weight:
            grad_weight = torch.zeros_like(weight)
            args = (flat, grad_out, *edges, grad_weight.numpy())
            over_ranges(lambda a, b: _weight_backward(*args, a, b), grad.size(0), src_idx.numel() * width)
        return grad_rows, None, None, None, grad_weight, None


def _gradient_of_sum(
    grad_out: np.ndarray, edges: tuple[np.ndarray, np.ndarray], weight: Tensor | None, target: np.ndarray
) -> None:
    """target[s] = the sum of (weight[e] *) grad_out[dst(e)] over the edges e from s: the gradient of a sum.

    It is a sum over edges itself, with sources and destinations swapped. So the kernel of the forward pass
    does it.

    edges: (indptr, src_idx), sorted by destination; target: [num_rows, width].
    """
    src_indptr, dst_idx, edge_idx = _edges_by_source(edges, target.shape[0], with_edges=weight is not None)
    edge_weight = _as_numpy(None if weight is None else weight[torch.from_numpy(edge_idx)])
    mean = False  # for a mean, the caller has divided `grad_out` already
    args = (grad_out, src_indptr, dst_idx, edge_weight, mean, _NO_OWN, target)
    over_ranges(lambda a, b: _sum(*args, a, b), target.shape[0], dst_idx.size * target.shape[1])


def _gradient_of_max(
    rows: np.ndarray,
    out: np.ndarray,
    grad_out: np.ndarray,
    edges: tuple[np.ndarray, np.ndarray],
    target: np.ndarray,
) -> None:
    """Write the gradient of max to `target` [num_rows, width].

    One pass over destinations counts the ties, a second over sources adds up the shares.

    out: [num_dst, width], the maxima; edges: (indptr, src_idx), sorted by destination.
    """
    src_indptr, dst_idx, _ = _edges_by_source(edges, target.shape[0], with_edges=False)
    shares = np.empty_like(grad_out)
    work = dst_idx.size * target.shape[1]
    over_ranges(lambda a, b: _max_shares(rows, *edges, out, grad_out, shares, a, b), out.shape[0], work)
    args = (rows, out, shares, src_indptr, dst_idx, target)
    over_ranges(lambda a, b: _max_backward(*args, a, b), target.shape[0], work)


def _edges_by_source(
    edges: tuple[np.ndarray, np.ndarray], num_rows: int, with_edges: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(src_indptr, dst_idx, edge_idx): the edges sorted by source, see `_sort_by_source`.

    edges: (indptr, src_idx), sorted by destination; with_edges: whether `edge_idx` is filled; else it is
    empty.
    """
    indptr, src_idx = edges
    src_indptr = np.zeros(num_rows + 1, dtype=np.int64)
    num_edges = int(indptr[-1] - indptr[0])
    dst_idx = np.empty(num_edges, dtype=np.int32)
    edge_idx = np.empty(num_edges if with_edges else 0, dtype=np.int64)
    _sort_by_source(indptr, src_idx, src_indptr, dst_idx, edge_idx)
    return src_indptr, dst_idx, edge_idx


def _as_matrix(rows: Tensor) -> np.ndarray:
    """[num_rows, width], contiguous: the tensor as a matrix, with all dimensions after the first in one."""
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
    """The "sum", "mean" or "max" of (weight *) rows[src_idx] over each destination's edges, 0 without edges.

    With `own`, the result is [num_dst, 2 * width], with rows[own] on the right. The function is
    differentiable in `rows` and `weight`. It is defined in `reference.reduce_edges`.
    """
    if not _edges_fit(indptr.numpy(), src_idx.numpy(), rows.size(0)):
        raise IndexError(f"an edge's source is outside 0 .. {rows.size(0) - 1}, or indptr does not fit the edges")
    reference.check_shapes(rows, indptr, src_idx, weight, own)
    if own is not None and own.numel() and not 0 <= int(own.min()) <= int(own.max()) < rows.size(0):
        raise IndexError(f"an own row is outside 0 .. {rows.size(0) - 1}")
    if rows.dtype not in (torch.float32, torch.float64):  # half types are summed in float32
        return reduce_edges(rows.float(), indptr, src_idx, reduce, weight, own).to(rows.dtype)
    if weight is not None:
        weight = weight.to(rows.dtype).contiguous()
    if weight is not None and reduce == "max":
        # The gradient of a weighted maximum needs the product of every edge. Convs ask for it too rarely to
        # fuse it.
        return reference.reduce_edges(rows, indptr, src_idx, reduce, weight, own)
    out = _ReduceEdges.apply(rows, indptr, src_idx, reduce, weight, own)
    assert isinstance(out, Tensor)
    return out


@kernel
def _dropout(x, ids, key, threshold, scale, out, start, stop):
    """Drop elements of the rows start .. stop - 1, by draws from (key, node id, column).

    Reference:
        raw = draw(key, ids[i], c // 4)                      # 64 bits, for four columns
        lane = (raw >> (16 * (c % 4))) & 0xFFFF
        out[i, c] = x[i, c] * (scale if lane >= threshold else 0)

    A dropped element is multiplied by 0 and not set to it, so NaN and infinity become NaN.

    x, out: [n, width]; ids: [n], the node of each row; threshold: p * 2**16, rounded.
    """
    width = x.shape[1]
    for i in range(start, stop):
        state = mix(np.uint64(key) ^ np.uint64(ids[i]))
        for word in range((width + 3) // 4):
            state += GOLDEN
            raw = mix(state)
            for c in range(4 * word, min(4 * word + 4, width)):
                is_kept = (raw & _LANE) >= threshold
                raw >>= _U16
                out[i, c] = x[i, c] * scale if is_kept else x[i, c] * 0


@kernel
def _dropout_stored(values, indptr, columns, ids, key, threshold, scale, out, start, stop):
    """Drop stored elements of the sparse rows start .. stop - 1, by the draws of `_dropout`.

    The generator's state after k draws is its first state plus k * GOLDEN. So the draw of any column is
    computed directly, without those of the columns before it.

    values, columns: [num_stored], row after row; indptr: [n + 1] int64; ids: [n], the node of each row.
    """
    for i in range(start, stop):
        first = mix(np.uint64(key) ^ np.uint64(ids[i]))
        for e in range(indptr[i], indptr[i + 1]):
            column = np.uint64(columns[e])
            raw = mix(first + (column // np.uint64(4) + np.uint64(1)) * GOLDEN)
            is_kept = ((raw >> (_U16 * (column % np.uint64(4)))) & _LANE) >= threshold
            out[e] = values[e] * scale if is_kept else values[e] * 0


def keyed_dropout_sparse(values: Tensor, indptr: Tensor, columns: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """[num_stored]: as `reference.keyed_dropout_sparse`. It has no gradient."""
    if values.dtype not in (torch.float32, torch.float64):
        return keyed_dropout_sparse(values.float(), indptr, columns, p, key, ids).to(values.dtype)
    out = torch.empty_like(values)
    values = values.contiguous()
    threshold, scale = _threshold_and_scale(p, values.numpy().dtype)
    rows = (values.numpy(), indptr.contiguous().numpy(), columns.contiguous().numpy())
    args = (*rows, ids.contiguous().numpy(), np.int64(key), threshold, scale, out.numpy())
    over_ranges(lambda a, b: _dropout_stored(*args, a, b), ids.numel(), values.numel())
    return out


def _threshold_and_scale(p: float, dtype: np.dtype) -> tuple[np.uint64, np.floating]:
    threshold, scale = dropout_numbers(p)
    return np.uint64(threshold), dtype.type(scale)


class _KeyedDropout(torch.autograd.Function):
    """Keyed dropout with its gradient: the same mask on the gradient.

    The mask depends on the key, the node and the column alone, so the backward pass draws it again and no
    mask is stored. The backward pass is itself differentiable.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
        ctx.p = p
        ctx.key = key
        ctx.ids = ids
        return _apply_dropout(x, p, key, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return keyed_dropout(grad, ctx.p, ctx.key, ctx.ids), None, None, None


def _apply_dropout(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """Keyed dropout without a gradient, for rows of any shape. Half types are scaled in float32."""
    flat = x.detach().reshape(x.size(0), math.prod(x.shape[1:]))
    if flat.dtype not in (torch.float32, torch.float64):
        return _apply_dropout(x.float(), p, key, ids).to(x.dtype)
    flat = flat.contiguous()
    out = torch.empty_like(flat)
    threshold, scale = _threshold_and_scale(p, flat.numpy().dtype)
    args = (flat.numpy(), ids.numpy(), np.int64(key), threshold, scale, out.numpy())
    over_ranges(lambda a, b: _dropout(*args, a, b), flat.size(0), flat.numel())
    return out.view_as(x)


def keyed_dropout(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """Dropout of x [n, ...], defined by `reference.keyed_dropout`. Differentiable."""
    assert ids.numel() == x.size(0), "one node id per row"
    out = _KeyedDropout.apply(x, p, key, ids)
    assert isinstance(out, Tensor)
    return out
