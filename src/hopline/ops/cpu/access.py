"""Numba kernel that sends a number from every node to the sources of its in-edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from hopline.ops.cpu.runtime import kernel, over_ranges, prefetch

AHEAD = 24
"""Edges ahead of their use whose cache lines are asked for."""


@intrinsic
def _atomic_add(typingctx, array, index, value):
    """array[index] += value, whole, also where other threads add to the same place."""
    signature = types.void(array, index, array.dtype)

    def codegen(context, builder, signature, args):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        position = context.cast(builder, args[1], signature.args[1], types.intp)
        builder.atomic_rmw("add", builder.gep(data, [position]), args[2], "monotonic")
        return context.get_dummy_value()

    return signature, codegen


atomic_add: Any = _atomic_add  # Numba supplies the first argument, which type checkers cannot know


@kernel
def _add(indptr, indices, values, out, first, last):
    """False if an edge leads out of the graph."""
    num_nodes, num_edges = out.shape[0], indices.shape[0]
    for node in range(first, last):
        value = values[node]
        if value == 0:
            continue
        for e in range(indptr[node], indptr[node + 1]):
            if e + AHEAD < num_edges:
                prefetch(out, indices[e + AHEAD])
            source = indices[e]
            if source < 0 or source >= num_nodes:
                return False
            atomic_add(out, source, value)
    return True


def add_to_sources(indptr: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """[num_nodes] int64: at each node the sum of `values` [num_nodes] int64 over the nodes that its out-edges reach.

    Sums of integers are the same in any order, so the threads need not agree on one.
    """
    starts, sources, amounts = indptr.numpy(), indices.numpy(), values.numpy()
    out = np.zeros(values.numel(), dtype=np.int64)
    inside = []
    # Cut by edges and not by nodes: a few nodes may have most of them.
    over_ranges(
        lambda a, b: inside.append(_add(starts, sources, amounts, out, *_nodes(starts, a, b))),
        indices.numel(),
        indices.numel(),
    )
    if not all(inside):
        raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
    return torch.from_numpy(out)


def _nodes(indptr: np.ndarray, first_edge: int, last_edge: int) -> tuple[int, int]:
    """The nodes whose in-edges begin in a range of edges."""
    first, last = np.searchsorted(indptr[:-1], [first_edge, last_edge], side="left")
    return int(first), int(last)
