"""One public function per operation, run where its ids are. Definitions: `hopline.ops.reference`.

Read `reference` first: every operation in plain torch, the oracle of the tests. `random` is the keyed generator, the
same in Python, torch, Numba and Triton. `cpu/` and `gpu/` hold the kernels, `tree_slots` numbers the slots of a tree,
`gather_tiers` reads rows from two tiers. A new kernel is a function here, its definition in `reference`, and a twin
in `cpu/` or `gpu/`. Kernels may change freely while they equal the reference; draws must stay the same to the bit,
since checkpoints, tests and users' results rely on them. It stands on nothing else of the library.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu import linear as cpu_linear
from hopline.ops.cpu import page_cache as cpu_page_cache
from hopline.ops.cpu import reduce as cpu_reduce
from hopline.ops.cpu import runtime as cpu_runtime
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.cpu.runtime import serial_here, start_threads
from hopline.ops.cpu.sampling import IdMap
from hopline.ops.random import another_key, derive_key, layer_key, permutation, purpose_key
from hopline.ops.reference import Children, Neighbors, SortedIdMap
from hopline.ops.tree_slots import Slots

__all__ = [
    "AnyIdMap",
    "Children",
    "IdMap",
    "Neighbors",
    "Slots",
    "add_rows",
    "another_key",
    "check_device_errors",
    "cross_entropy",
    "derive_key",
    "gather_rows",
    "gpu_kernels",
    "group_edges",
    "is_cold",
    "is_first_time",
    "kernel_cache",
    "keyed_dropout",
    "keyed_dropout_stored",
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
    "row_positions",
    "sample_neighbors",
    "sample_tree",
    "self_loops",
    "serial_here",
    "start_threads",
]

REDUCTIONS = ("sum", "mean", "max")
AnyIdMap = IdMap | SortedIdMap
"""A map from node ids to consecutive ones, on some device: `add`, `ids`, `clear`, `size`."""


def sample_neighbors(
    indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int | Tensor, replace: bool = False
) -> Neighbors:
    """Up to `fanout` in-edges of each node, drawn from its keyed sequence; -1 takes all of them in order.

    For nodes on a GPU the graph may be there too or in pinned host memory, which is read in place.
    """
    module = _twin(nodes, cpu_sampling, "sampling")
    return module.sample_neighbors(indptr, indices, nodes, fanout, _key(nodes, key), replace)


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int | Tensor,
    replace: bool = False,
    with_edges: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(nodes, counts, edge_ids) of the trees of `seeds`: see `core.batch.Tree`. A seed of -1 has an empty tree."""
    module = _twin(seeds, cpu_sampling, "tree")
    return module.sample_tree(indptr, indices, seeds, slots, _key(seeds, key), replace, with_edges)


def row_positions(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr, positions) of all entries of the given rows of a CSR structure, row after row."""
    return _twin(nodes, cpu_sampling, "sampling").row_positions(indptr, nodes)


def relabel(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, idx): the distinct nodes, seeds first, then by first occurrence; and each neighbour's place there."""
    return _twin(neighbors, cpu_sampling, "sampling").relabel(seeds, neighbors)


def gather_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids] for any dtype; for ids on a GPU an id out of range raises later, by `check_device_errors`."""
    return _twin(ids, cpu_sampling, "sampling").gather_rows(rows, ids)


def put_rows(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """table[ids] = rows; each id once.

    With ids on a GPU and the table in pinned host memory, the GPU writes the rows itself, on its current stream. The
    host finds them in the table after it has waited for that stream.
    """
    if _gpu_writes(table, ids):
        gpu_kernels("tiers").put_aside(table, ids, rows)
    else:
        table[ids] = rows


def add_rows(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """table[ids] += rows; each id once. The rows are brought to where the table is and to its dtype.

    With ids on a GPU and the table in pinned host memory, the GPU adds the rows itself, as in `put_rows`.
    """
    if _gpu_writes(table, ids):
        gpu_kernels("tiers").put_aside(table, ids, rows.to(table.dtype), add=True)
    else:
        table.index_add_(0, ids.to(table.device), rows.to(table.device, table.dtype))


def new_id_map(num_nodes: int, device: torch.device) -> AnyIdMap:
    """A map for the node ids of one thread's batches on a device."""
    if device.type == "cpu":
        return IdMap(num_nodes)
    if device.type == "cuda" and _has_triton():
        return gpu_kernels("sampling").DeviceIdMap(num_nodes, device)
    return SortedIdMap(num_nodes, device)


def check_device_errors() -> None:
    """Raise what GPU kernels found wrong (an id out of range) since somebody looked; waits for the device.

    Kernels cannot raise and never follow such an id. Sampling looks too, since it waits for the device anyway.
    """
    if errors := sys.modules.get("hopline.ops.gpu.runtime"):
        errors.check_device_errors()


def is_cold(rows: Tensor, ids: Tensor) -> bool:
    """Whether rows of `ids` have to come from the disk: `gather_rows` reads them in the order of the file."""
    return _on_cpu(ids) and rows.is_contiguous() and cpu_page_cache.is_cold(rows, ids.numpy())


def group_edges(keys: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(indptr, order): a stable grouping of edges by key."""
    return _twin(keys, cpu_sampling, "sampling").group_edges(keys, num_groups)


def self_loops(indptr: Tensor, indices: Tensor) -> Tensor:
    """Positions, in `indices`, of the edges from a node to itself."""
    return _twin(indices, cpu_sampling, "sampling").self_loops(indptr, indices)


def reduce_edges(
    rows: Tensor,
    indptr: Tensor,
    src_idx: Tensor,
    reduce: str,
    weight: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Sum, mean or max over each destination's edges of (weight *) rows[src_idx], differentiable.

    `rows` may be a whole feature table and `src_idx` global ids: the rows are read straight into the reduction.
    With `own` [num_dst], rows[own] stand to the right of the reduced ones: [num_dst, 2 * width].
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    return _twin(src_idx, cpu_reduce, "reduce").reduce_edges(rows, indptr, src_idx, reduce, weight, own)


def keyed_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    """Dropout whose mask depends on (key, node id, column) alone, drawn again in backward."""
    return _twin(x, cpu_reduce, "reduce").keyed_dropout(x, p, _key(x, key), ids)


def relu_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    """`keyed_dropout` of what a ReLU leaves; on a GPU in one kernel, which keeps one tensor for backward, not two."""
    if x.is_cuda and _has_triton():
        return gpu_kernels("reduce").relu_dropout(x, p, key, ids)
    return keyed_dropout(torch.relu(x), p, key, ids)


def keyed_dropout_stored(
    values: Tensor, indptr: Tensor, columns: Tensor, p: float, key: int | Tensor, ids: Tensor
) -> Tensor:
    """What `keyed_dropout` leaves of rows stored in CSR form, of which it is given the values; not differentiable."""
    module: Any = cpu_reduce if _on_cpu(values) else reference
    return module.keyed_dropout_stored(values, indptr, columns, p, _key(values, key), ids)


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of scores [n, classes] of any precision."""
    if scores.device.type == "cuda" and _has_triton() and scores.dtype != torch.float64:
        kernels = gpu_kernels("loss_and_adam")
        if 0 < scores.size(1) <= kernels.MAX_CLASSES and scores.size(0):
            return kernels.cross_entropy(scores, labels)
    exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(exact, labels)


def optimizer_class(name: str, device: torch.device) -> type[torch.optim.Optimizer]:
    """torch's optimizer of that name, on a GPU with a step in one kernel."""
    if device.type == "cuda" and _has_triton() and name in ("Adam", "AdamW"):
        return getattr(gpu_kernels("loss_and_adam"), name)
    return getattr(torch.optim, name)


@contextmanager
def own_threads(threads: int) -> Generator[None, None, None]:
    """Within, our kernels and every linear layer use `threads` threads of ours; torch's other ops stay in this one.

    No result depends on the number. For models whose long ops are these; others are better left to torch's threads.
    """
    with cpu_runtime.own_threads(threads), cpu_linear.SpreadLinear():
        yield


def kernel_cache() -> Path:
    """The folder in which Numba keeps this package's compiled kernels."""
    return Path(str(cpu_sampling._take.stats.cache_path))


_had_cache = any(kernel_cache().glob("*.nbi"))  # Python keeps its own files there too


def is_first_time() -> bool:
    """Whether kernels are compiled in this process, since no earlier one has kept them; asked again, no."""
    global _had_cache
    first, _had_cache = not _had_cache, True
    return first


def gpu_kernels(module: str) -> Any:
    """A module of `ops/gpu`. Triton is imported by the first call, so that machines without a GPU need none."""
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        raise ValueError(
            "TensorFlow was imported before Triton, whose LLVM would then end this process: write `import "
            "hopline.interop` before `import tensorflow`"
        )
    return importlib.import_module(f"hopline.ops.gpu.{module}")


def _twin(ids: Tensor, on_cpu: Any, on_gpu: str) -> Any:
    """The module whose functions work where the ids are."""
    if _on_cpu(ids):
        return on_cpu
    return gpu_kernels(on_gpu) if ids.is_cuda and _has_triton() else reference


def _gpu_writes(table: Tensor, ids: Tensor) -> bool:
    """Whether a kernel where the ids are writes into a table in host memory."""
    return ids.is_cuda and table.device.type == "cpu" and _has_triton() and table.is_pinned()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _key(ids: Tensor, key: int | Tensor) -> int | Tensor:
    """Numba takes keys as numbers; asking a GPU for one would wait for it."""
    return int(key) if _on_cpu(ids) else key


def _on_cpu(ids: Tensor) -> bool:
    return ids.device.type == "cpu"
