"""Operations on graphs and rows: one public function each, which runs on the device of its ids.

Read `reference` first: every operation in plain torch, which is the definition and the oracle of the tests.
`hops` defines sampling over several relations, a node expanded once.
`random` is the keyed generator, the same in Python, torch, Numba and Triton. `cpu/` and `gpu/` hold the
kernels. `tree_slots` numbers the slots of the tree layout. `gather_tiers` reads rows from fast and slow
memory. This folder imports nothing else of the library.

    ids on the CPU                  ->  Numba kernels of `cpu/`
    ids on a GPU, with Triton       ->  Triton kernels of `gpu/`, imported by the first call
    ids on any other device         ->  `reference`

A new operation is a function here, its definition in `reference`, and a kernel of the same name in `cpu/` or
`gpu/`. Kernels may change freely while they equal the reference. Draws must stay the same bit for bit, since
checkpoints, tests and users' results rely on them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline.ops import hops, reference
from hopline.ops.cpu import hops as cpu_hops
from hopline.ops.cpu import linear as cpu_linear
from hopline.ops.cpu import page_cache as cpu_page_cache
from hopline.ops.cpu import reduce as cpu_reduce
from hopline.ops.cpu import runtime as cpu_runtime
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.cpu.runtime import serial_here, start_threads
from hopline.ops.cpu.sampling import IdMap
from hopline.ops.hops import Edges, Relation, Rows
from hopline.ops.random import another_key, derive_key, draw_ids, layer_key, permutation, purpose_key
from hopline.ops.reference import (
    LARGEST_WEIGHT,
    SMALLEST_WEIGHT,
    Children,
    Neighbors,
    SortedIdMap,
    WeightedNeighbors,
)
from hopline.ops.tree_slots import Slots

__all__ = [
    "LARGEST_WEIGHT",
    "SMALLEST_WEIGHT",
    "AnyIdMap",
    "Children",
    "Edges",
    "IdMap",
    "Neighbors",
    "Relation",
    "Rows",
    "Slots",
    "WeightedNeighbors",
    "add_rows",
    "another_key",
    "check_device_errors",
    "cross_entropy",
    "derive_key",
    "draw_ids",
    "edge_copies",
    "gather_rows",
    "gpu_kernels",
    "group_by_key",
    "is_cold",
    "is_first_time",
    "kernel_cache",
    "keyed_dropout",
    "keyed_dropout_sparse",
    "layer_key",
    "new_id_map",
    "optimizer_class",
    "own_threads",
    "permutation",
    "purpose_key",
    "put_rows",
    "reduce_edges",
    "relabel",
    "relu_dropout",
    "row_entries",
    "sample_hops",
    "sample_labor",
    "sample_neighbors",
    "sample_tree",
    "sample_weighted",
    "self_loops",
    "serial_here",
    "start_threads",
]

REDUCTIONS = ("sum", "mean", "max")
"""Values of `reduce` in `reduce_edges`."""
AnyIdMap = IdMap | SortedIdMap
"""A map from global ids to local ids, on some device. Both classes have `add`, `ids`, `clear` and `size`."""


def sample_neighbors(
    indptr: Tensor,
    indices: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int | Tensor,
    replace: bool = False,
    draw_ids: Tensor | None = None,
) -> Neighbors:
    """Up to `fanout` in-edges of each node. Its draws depend on (key, node id) alone, see `random`.

    fanout: -1 takes all in-edges, in order. draw_ids: [n] int64, the ids by which the nodes draw, if not by
    their own (`draw_ids`).
    nodes: [n]. indptr: [num_nodes + 1] int64 and indices: [num_edges], the graph in CSC form. If the nodes
    are on a GPU, the graph is on it too or in pinned host memory, which the GPU reads directly.
    """
    module = _twin(nodes, cpu_sampling, "sampling")
    return module.sample_neighbors(indptr, indices, nodes, fanout, _key(nodes, key), replace, draw_ids)


def sample_weighted(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int | Tensor,
    draw_ids: Tensor | None = None,
) -> WeightedNeighbors:
    """Up to `fanout` in-edges of each node by weight, without replacement. An edge of weight 0 is never drawn.

    The chance of the next edge is its weight over the weights of those left. fanout: -1 takes all in-edges, those of
    weight 0 too. weight: [num_edges] float32 or float64, where the graph is. The others as in `sample_neighbors`.

    Raises ValueError if a weight of one of the nodes' edges is negative, NaN or infinite, or beyond
    `SMALLEST_WEIGHT` .. `LARGEST_WEIGHT`.
    """
    if weight.shape != indices.shape or weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"the weights of draws must be float32 or float64 and [{indices.numel()}], one per edge, not "
            f"{list(weight.shape)} {weight.dtype}"
        )
    module = _twin(nodes, cpu_sampling, "sampling")
    return module.sample_weighted(indptr, indices, weight, nodes, fanout, _key(nodes, key), draw_ids)


def sample_labor(
    indptr: Tensor,
    indices: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int | Tensor,
    copies: Tensor | None = None,
) -> Neighbors:
    """Up to `fanout` in-edges of each node by LABOR: nodes with sources in common draw the same ones.

    A draw depends on (key, source). fanout: -1 takes all in-edges. copies: `edge_copies` of the graph, where it is.
    The others as in `sample_neighbors`.
    """
    module = _twin(nodes, cpu_sampling, "sampling")
    return module.sample_labor(indptr, indices, nodes, fanout, _key(nodes, key), copies)


def edge_copies(indptr: Tensor, indices: Tensor) -> Tensor | None:
    """[num_edges] int32: how many earlier in-edges of its node have the source of each edge. None if none has any."""
    return _twin(indices, cpu_sampling, "sampling").edge_copies(indptr, indices)


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int | Tensor,
    replace: bool = False,
    with_edges: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(nodes, counts, edge_ids) of the trees of `seeds`, as `reference.sample_tree` defines them.

    seeds: [slots.num_seeds]. A seed of -1 has an empty tree. edge_ids: None unless `with_edges`.
    """
    module = _twin(seeds, cpu_sampling, "tree")
    return module.sample_tree(indptr, indices, seeds, slots, _key(seeds, key), replace, with_edges)


def sample_hops(
    relations: Sequence[Relation],
    seeds: Sequence[tuple[int, Tensor]],
    num_types: int,
    replace: bool = False,
    is_disjoint: bool = False,
    bounds: Tensor | None = None,
    only_last: bool = False,
) -> tuple[list[Rows], list[Edges]]:
    """(rows by type, edges by relation) sampled hop by hop, each node expanded once: as `hops.sample_hops` defines it.

    Raises ValueError for ids outside the graph, and for times that do not ascend.
    """
    module = cpu_hops if all(_is_on_cpu(ids) for _, ids in seeds) else hops
    return module.sample_hops(relations, seeds, num_types, replace, is_disjoint, bounds, only_last)


def row_entries(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr, positions) of all entries of the rows `nodes` of a CSR structure, row after row. Both are int64."""
    return _twin(nodes, cpu_sampling, "sampling").row_entries(indptr, nodes)


def relabel(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, idx): global ids by local id, and the local id of each neighbour.

    ids: [num_distinct] int64, the distinct nodes: seeds first, then neighbours by first occurrence.
    idx: [len(neighbors)] int32, so that ids[idx] equals `neighbors`.
    """
    return _twin(neighbors, cpu_sampling, "sampling").relabel(seeds, neighbors)


def gather_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids] for rows of any dtype, on the device of the ids.

    An id out of range raises IndexError on the CPU. On a GPU it raises later, at the latest in
    `check_device_errors`.
    """
    return _twin(ids, cpu_sampling, "sampling").gather_rows(rows, ids)


def put_rows(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """table[ids] = rows. Each id may occur once.

    With ids on a GPU and the table in pinned host memory, the GPU writes the rows itself, on its current
    stream. The host must synchronise with that stream before it reads them.
    """
    if _gpu_writes(table, ids):
        gpu_kernels("tiers").put_host_rows(table, ids, rows)
    else:
        table[ids] = rows


def add_rows(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """table[ids] += rows. Each id may occur once. The rows are moved to the table's device and dtype.

    With ids on a GPU and the table in pinned host memory, the GPU adds the rows itself, on its current
    stream. The host must synchronise with that stream before it reads them.
    """
    if _gpu_writes(table, ids):
        gpu_kernels("tiers").put_host_rows(table, ids, rows.to(table.dtype), add=True)
    else:
        table.index_add_(0, ids.to(table.device), rows.to(table.device, table.dtype))


def new_id_map(num_nodes: int, device: torch.device) -> AnyIdMap:
    """A map from global ids to local ids, for batches on `device`. Only one thread at a time may use it."""
    if device.type == "cpu":
        return IdMap(num_nodes)
    if device.type == "cuda" and _has_triton():
        return gpu_kernels("sampling").DeviceIdMap(num_nodes, device)
    return SortedIdMap(num_nodes, device)


def check_device_errors() -> None:
    """Raise the errors (an id out of range) that GPU kernels have reported since the last check.

    Synchronises.

    A kernel cannot raise; it sets a flag and never follows such an id. Sampling checks the flags too, since
    it synchronises anyway. Without GPU kernels in this process there is nothing to check.
    """
    runtime = sys.modules.get("hopline.ops.gpu.runtime")
    if runtime is not None:
        runtime.check_device_errors()


def is_cold(rows: Tensor, ids: Tensor) -> bool:
    """Whether rows of `ids` must come from the disk. `gather_rows` then reads them in the order of the file."""
    return _is_on_cpu(ids) and rows.is_contiguous() and cpu_page_cache.is_cold(rows, ids.numpy())


def group_by_key(keys: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(indptr, order): the edges grouped by key, in their old order within a group.

    keys: [num_edges] in 0 .. num_groups - 1. indptr: [num_groups + 1] int64, offsets of the groups in
    `order`.
    order: [num_edges] int64, edge positions.
    """
    return _twin(keys, cpu_sampling, "sampling").group_by_key(keys, num_groups)


def self_loops(indptr: Tensor, indices: Tensor) -> Tensor:
    """int64 positions, in `indices`, of the edges from a node to itself."""
    return _twin(indices, cpu_sampling, "sampling").self_loops(indptr, indices)


def reduce_edges(
    rows: Tensor,
    indptr: Tensor,
    src_idx: Tensor,
    reduce: str,
    weight: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Sum, mean or max of the messages of each destination's edges: [num_dst, ...]. Differentiable.

    Edge e of destination d, with indptr[d] <= e < indptr[d + 1], has the message
    weight[e] * rows[src_idx[e]]. Kernels do not materialise messages: `rows` may be a whole feature table
    and `src_idx` global ids.
    own: [num_dst] row ids. With them the result is [num_dst, 2 * width], and rows[own] is its right half.
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    return _twin(src_idx, cpu_reduce, "reduce").reduce_edges(rows, indptr, src_idx, reduce, weight, own)


def keyed_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    """Dropout whose mask depends on (key, node id, column) alone. ids: [n], one for each row of x [n, ...].

    The mask is not kept for the backward pass, which draws it again.
    """
    return _twin(x, cpu_reduce, "reduce").keyed_dropout(x, p, _key(x, key), ids)


def relu_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    """`keyed_dropout` of relu(x). On a GPU it is one kernel, which saves one tensor for backward, not two."""
    if x.is_cuda and _has_triton():
        return gpu_kernels("reduce").relu_dropout(x, p, key, ids)
    return keyed_dropout(torch.relu(x), p, key, ids)


def keyed_dropout_sparse(
    values: Tensor, indptr: Tensor, columns: Tensor, p: float, key: int | Tensor, ids: Tensor
) -> Tensor:
    """`keyed_dropout` of rows in CSR form: [num_stored], the new values. Not differentiable.

    values, columns: [num_stored], row after row. indptr: [n + 1]. ids: [n], the node of each row.
    """
    module: Any = cpu_reduce if _is_on_cpu(values) else reference
    return module.keyed_dropout_sparse(values, indptr, columns, p, _key(values, key), ids)


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of scores [n, num_classes]. Half types are computed in float32.

    labels: [n] int64. A kernel on a GPU computes it for up to `MAX_CLASSES` classes; otherwise torch does.
    """
    if scores.device.type == "cuda" and _has_triton() and scores.dtype != torch.float64:
        kernels = gpu_kernels("loss_and_adam")
        if 0 < scores.size(1) <= kernels.MAX_CLASSES and scores.size(0):
            return kernels.cross_entropy(scores, labels)
    exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(exact, labels)


def optimizer_class(name: str, device: torch.device) -> type[torch.optim.Optimizer]:
    """torch's optimizer class of that name. On a GPU, Adam and AdamW are subclasses whose step is one kernel."""
    if device.type == "cuda" and _has_triton() and name in ("Adam", "AdamW"):
        return getattr(gpu_kernels("loss_and_adam"), name)
    return getattr(torch.optim, name)


@contextmanager
def own_threads(threads: int) -> Generator[None, None, None]:
    """Inside the block, CPU kernels and every linear layer run on `threads` threads of hopline's own.

    torch's other operations stay in the calling thread. No result depends on the number of threads. Meant
    for models that spend their time in these kernels and linear layers; others are better left to torch's
    threads.
    """
    with cpu_runtime.own_threads(threads), cpu_linear.SpreadLinear():
        yield


def kernel_cache() -> Path | None:
    """The folder of the compiled kernels of this package. None if no folder could be written."""
    # Any kernel would do: all are in `ops/cpu`, so Numba gives them one folder.
    path = cpu_sampling._take.stats.cache_path
    return None if path is None else Path(path)


# Whether an earlier process has compiled kernels. Only "*.nbc" are compiled kernels: Python keeps its own files
# in this folder too.
_cache_folder = kernel_cache()
_had_cache = _cache_folder is not None and any(_cache_folder.glob("*.nbc"))


def is_first_time() -> bool:
    """Whether this process must compile the CPU kernels, since no earlier process has cached them.

    True at most once in a process, so that a message about it is shown once.
    """
    global _had_cache
    is_first = not _had_cache
    _had_cache = True
    return is_first


def gpu_kernels(module: str) -> Any:
    """The module of that name in `ops/gpu`. The first call imports Triton: machines without a GPU do not need it."""
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        raise ValueError(
            "TensorFlow was imported before Triton, whose LLVM would then end this process: write `import "
            "hopline.interop` before `import tensorflow`"
        )
    return importlib.import_module(f"hopline.ops.gpu.{module}")


def _twin(ids: Tensor, on_cpu: Any, on_gpu: str) -> Any:
    """The module whose functions run on the device of `ids`: `on_cpu`, `ops.gpu.<on_gpu>`, or `reference`."""
    if _is_on_cpu(ids):
        return on_cpu
    return gpu_kernels(on_gpu) if ids.is_cuda and _has_triton() else reference


def _gpu_writes(table: Tensor, ids: Tensor) -> bool:
    """Whether a GPU kernel writes into the table: ids on a GPU, the table in pinned host memory."""
    return ids.is_cuda and table.device.type == "cpu" and _has_triton() and table.is_pinned()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


def _key(ids: Tensor, key: int | Tensor) -> int | Tensor:
    """The key as the kernels for `ids` take it: a number for Numba, else unchanged.

    Reading a key from a GPU would synchronise, so kernels there read it from device memory.
    """
    return int(key) if _is_on_cpu(ids) else key


def _is_on_cpu(ids: Tensor) -> bool:
    return ids.device.type == "cpu"
