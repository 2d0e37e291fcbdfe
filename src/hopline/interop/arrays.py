"""Graphs and feature tables of other frameworks' arrays, and the same in memory that processes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.core.sampler import check_ids
from hopline.distributed.shared_memory import SharedArray, share
from hopline.interop.dlpack import aligned, converter, from_any, to
from hopline.tables import SparseTable, Table, TensorTable
from hopline.tables.base import WrappedTable

EDGE_IDS = "e_id"
"""The edge array with the positions of a graph's edges in the `edge_index` that it was made from."""


def graph(indptr: Any, indices: Any = None, edge: Mapping[str, Any] | None = None) -> Graph:
    """Make a graph over any framework's arrays.

    The in-neighbours of node v are `indices[indptr[v]:indptr[v + 1]]`.

    Args:
        indptr: [num_nodes + 1] integers, copied only if they are not int64. Or a square SciPy matrix whose
            entry (i, j) is the edge from i to j. The indices of a CSC matrix are not copied; other forms
            are converted.
        indices: [num_edges] int32 or int64 sources, not copied.
        edge: Edge arrays by name, with a row per edge in the order of `indices`.

    Raises:
        ValueError: The matrix is not square, `indices` is missing, or the arrays do not fit together.

    Example:
        >>> import numpy as np
        >>> hl.interop.graph(np.array([0, 1, 2]), np.array([1, 0]))
        Graph(2 nodes, 2 edges, cpu)
    """
    if hasattr(indptr, "tocsc"):
        matrix = indptr.tocsc()
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a graph's matrix is square, [num_nodes, num_nodes], not {list(matrix.shape)}")
        indptr = matrix.indptr
        indices = matrix.indices
    if indices is None:
        raise ValueError("give indptr and indices, or one SciPy matrix; for edges [2, E], graph_from_edges(edges)")
    arrays = {name: from_any(rows) for name, rows in (edge or {}).items()}
    return Graph(from_any(indptr).long(), from_any(indices), arrays)


def graph_from_edges(edge_index: Any, num_nodes: int | None = None, edge: Mapping[str, Any] | None = None) -> Graph:
    """Make a graph from a list of edges of any framework.

    The edges are copied, since they are sorted by destination. If they were not, the edge array "e_id" has
    their positions in `edge_index` (4 bytes per edge).

    Args:
        edge_index: [2, num_edges] int64 or int32, sources first.
        num_nodes: Default: one more than the largest id.
        edge: Edge arrays by name, with a row per edge in the order of `edge_index`.

    Raises:
        ValueError: The edges have another shape or dtype, an id is no node, or an edge array is called "e_id".

    Example:
        >>> graph = hl.interop.graph_from_edges(torch.tensor([[2, 0, 1], [0, 1, 2]]))
        >>> graph.indptr.tolist(), graph.indices.tolist()
        ([0, 1, 2, 3], [2, 0, 1])
    """
    edges = from_any(edge_index).cpu()
    if edges.dim() != 2 or edges.size(0) != 2 or edges.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"edges must be int64 or int32 [2, E], sources first, not {list(edges.shape)} {edges.dtype}")
    if num_nodes is None:
        num_nodes = int(edges.max()) + 1 if edges.numel() else 0
    check_ids(edges.reshape(-1), num_nodes)
    if edge and EDGE_IDS in edge:
        raise ValueError(f"the edge array {EDGE_IDS!r} has the positions of edges in edge_index: use another name")
    indptr, order = ops.group_by_key(edges[1].contiguous(), num_nodes)
    arrays = {name: from_any(rows).cpu()[order] for name, rows in (edge or {}).items()}
    if bool((edges[1, 1:] < edges[1, :-1]).any()):
        # An edge array is drawn, moved, shared and pickled with the edges.
        arrays[EDGE_IDS] = order.to(torch.int32 if order.numel() < 2**31 else torch.int64)
    return Graph(indptr, edges[0][order].to(torch.int32 if num_nodes < 2**31 else torch.int64), arrays)


class Features(WrappedTable):
    """A table whose `features[ids]` takes ids of any framework and returns rows in a chosen one.

    `write` takes arrays of any framework too. All other methods are those of the table below, with tensors.

    Args:
        below: The table that holds the rows.
        to: Framework of the rows: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".

    Raises:
        ValueError: There is no such framework.

    Example:
        >>> features = hl.interop.Features(hl.extend.TensorTable(torch.eye(3)), to="numpy")
        >>> features[[2]]
        array([[0., 0., 1.]], dtype=float32)
    """

    def __init__(self, below: Table, to: str = "torch") -> None:
        converter(to)  # raises a ValueError if there is no such framework
        self.below = below
        self.framework = to

    def size(self, dim: int | None = None) -> Any:
        """The shape, or its entry `dim`, as of a tensor."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions, as of a tensor."""
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.below.num_bytes

    def __getitem__(self, ids: Any) -> Any:
        ids = from_any(ids).reshape(-1)
        storage = self.below.storage()
        if storage is not None and storage.is_cuda:  # a table on a GPU is read by ids on that GPU
            ids = ids.to(storage.device)
        return to(aligned(self.below.read(ids)), self.framework)

    def read(self, ids: Tensor) -> Tensor:
        return self.below.read(ids)

    def write(self, ids: Any, rows: Any) -> None:
        self.below.write(from_any(ids), from_any(rows))

    def storage(self) -> Tensor | None:
        return self.below.storage()

    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        return self.below.read_csr(ids)

    def tiers(self, device: torch.device | str | None = None) -> Any:
        return self.below.tiers(device)

    def concurrent_view(self) -> Table:
        return Features(self.below.concurrent_view(), self.framework)

    def end_epoch(self) -> None:
        self.below.end_epoch()

    def __reduce__(self) -> tuple[Any, ...]:
        return Features, (shared(self.below), self.framework)


def table(rows: Any, to: str = "torch") -> Features:
    """Make a feature table over any framework's rows.

    Args:
        rows: [num_nodes, ...] array (not copied), a SciPy matrix, or a table.
        to: Framework in which rows are read: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".

    Raises:
        TypeError: `rows` is no array.
        ValueError: There is no such framework, or the array cannot be shared with torch.

    Example:
        >>> import numpy as np
        >>> hl.interop.table(np.eye(3), to="numpy")[[0]]
        array([[1., 0., 0.]])
    """
    if hasattr(rows, "tocsr"):
        csr = rows.tocsr()
        sparse = SparseTable(from_any(csr.indptr).long(), from_any(csr.indices), from_any(csr.data), csr.shape[1])
        return Features(sparse, to)
    if isinstance(rows, Table):
        return Features(rows, to)
    # Torch has no read-only tensors, so the table refuses to write into a read-only array.
    read_only = isinstance(rows, np.ndarray) and not rows.flags.writeable
    return Features(TensorTable(from_any(rows), read_only=read_only), to)


@dataclass(frozen=True, eq=False, repr=False)
class SharedGraph(Graph):
    """A graph in shared memory. Its pickle is a handle, and the process that unpickles it reads the same memory."""

    arrays: Mapping[str, SharedArray] = field(default_factory=dict, repr=False)
    """The shared arrays: "indptr", "indices" and "edge.NAME" of each edge array."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _open_graph, (dict(self.arrays), self.other_fields)


def shared(what: Any) -> Any:
    """Return a graph or table in memory that processes of the host share.

    It is copied once, unless it is memory-mapped from a file already. For a graph, the result is a new graph,
    which the old one caches. For a table, the result is the table itself, whose rows have moved into shared
    memory. Pickling a table moves them too.

    Args:
        what: A `Graph` or a `Table`.

    Raises:
        TypeError: It is neither.

    Example:
        >>> graph = hl.interop.shared(hl.interop.graph_from_edges(torch.tensor([[0, 1], [1, 0]])))
        >>> graph.num_edges
        2
    """
    if isinstance(what, Table):
        what.__reduce__()  # moves the rows into shared memory; the handle that it returns is not needed
        return what
    if isinstance(what, SharedGraph):
        return what
    if not isinstance(what, Graph):
        raise TypeError(f"a {type(what).__name__} cannot be shared: pass a graph or a table")
    return what.get_cached("shared twin", partial(_make_shared_twin, what))


def _make_shared_twin(graph: Graph) -> SharedGraph:
    """The graph in shared memory: a copy, except for arrays that are memory-mapped already."""
    arrays = {"indptr": graph.indptr, "indices": graph.indices}
    arrays |= {f"edge.{name}": rows for name, rows in graph.edge.items()}
    return _open_graph({name: share(rows) for name, rows in arrays.items()}, graph.other_fields)


def _open_graph(arrays: Mapping[str, SharedArray], other_fields: Mapping[str, Any]) -> SharedGraph:
    """A graph over shared arrays. arrays: as `SharedGraph.arrays`. other_fields: as `Graph.other_fields`."""
    edge = {name.removeprefix("edge."): array.tensor for name, array in arrays.items() if name.startswith("edge.")}
    indptr = arrays["indptr"].tensor
    indices = arrays["indices"].tensor
    return SharedGraph(indptr, indices, edge, arrays=arrays, **other_fields)
