"""Neighbour sampling and feature tables for other frameworks, with their arrays in and out.

A training loop in NumPy, CuPy, JAX, TensorFlow or Paddle uses two objects:

    seeds --> Sampler.sample --> edges of each layer -----------------+--> the framework's model
                             --> n_id --> Features[n_id] --> rows ----+

Arrays are not copied: `dlpack` makes a framework's array over the memory of a tensor, and back. `Sampler`
and `Features` can be sent to other processes of the host. Their pickle is a handle, and all processes read
the same memory (`shared`).

Arguments and shapes are public, so change them with care. The folder imports from `budget` and the layers
below it.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hopline import ops
from hopline.core.batch import Batch, Block, Part
from hopline.core.graph import Graph
from hopline.core.row_handles import as_tensor
from hopline.core.sampler import NeighborSampler, check_ids
from hopline.device.meter import with_index
from hopline.distributed.shared_memory import SharedArray, release, share
from hopline.interop.dlpack import (
    FRAMEWORKS,
    aligned,
    converter,
    from_any,
    to,
    to_cupy,
    to_jax,
    to_numpy,
    to_paddle,
    to_tensorflow,
)
from hopline.tables import SparseTable, Table, TensorTable
from hopline.util.config import check_fanouts

# TensorFlow and Triton each bring an LLVM. Triton's ends the process if it is loaded second. So it is
# loaded here, unless TensorFlow came before.
if "tensorflow" not in sys.modules and all(importlib.util.find_spec(name) for name in ("tensorflow", "triton")):
    importlib.import_module("triton._C.libtriton")

__all__ = [
    "FRAMEWORKS",
    "Adj",
    "Features",
    "Sample",
    "Sampler",
    "batch_to",
    "from_any",
    "graph",
    "graph_from_edges",
    "release",
    "shared",
    "table",
    "to",
    "to_cupy",
    "to_jax",
    "to_numpy",
    "to_paddle",
    "to_tensorflow",
]


EDGE_IDS = "e_id"
"""The edge array with the positions of a graph's edges in the `edge_index` that it was made from."""


class Adj(NamedTuple):
    """The edges of one layer, an item of `Sample.adjs`."""

    edge_index: Any
    """[2, E]: sources, then destinations, as positions in `n_id`. Sorted by destination."""
    e_id: Any
    """[E]: the position of each edge in the `edge_index` that `graph_from_edges` was given, as in PyG.

    In a graph of `indptr` and `indices`, or of a dataset, its position in `indices` and in the edge arrays.
    """
    size: tuple[int, int]
    """(number of sources, number of destinations). The destinations are the first of the sources."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Adj:
        """The edges on a device, for samples of torch tensors.

        Raises:
            ValueError: The arrays are of another framework.
        """
        if not isinstance(self.edge_index, Tensor):
            kind = type(self.edge_index).__name__
            raise ValueError(f"adj.to(device) moves torch tensors, and these are {kind}: give Sampler to='torch'")
        edge_index = self.edge_index.to(device, non_blocking=non_blocking)
        return Adj(edge_index, self.e_id.to(device, non_blocking=non_blocking), self.size)


class Sample(NamedTuple):
    """A sampled batch, in the form of PyG's old NeighborSampler and of torch-quiver.

    Example:
        >>> graph = hl.interop.graph_from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> n_id, batch_size, adjs = hl.interop.Sampler(graph, [2]).sample(torch.tensor([1]))
        >>> n_id.tolist(), batch_size, adjs[0].edge_index.tolist()
        ([1, 0], 1, [[1], [0]])
    """

    n_id: Any
    """[N]: global ids of all nodes whose rows are needed, the seeds first. Each once, but for repeated seeds."""
    batch_size: int
    """Number of seeds."""
    adjs: list[Adj]
    """The edges of each layer, in the order of computation: the outermost hop first."""

    def to(self, framework: str) -> Sample:
        """The sample with arrays of another framework, over the same memory."""

        def convert(array: Any) -> Any:
            return to(from_any(array), framework)

        adjs = [Adj(convert(adj.edge_index), convert(adj.e_id), adj.size) for adj in self.adjs]
        return Sample(convert(self.n_id), self.batch_size, adjs)


class Sampler:
    """Samples neighbours of seeds, for a training loop of your own. Many threads may call it.

    Every call draws new neighbours. Equal `seed` and `step` draw the same ones.

    Its pickle is a handle: processes that get it share the graph. They start at the same step, so give each
    its own `seed`.

    Args:
        data: A graph or a dataset.
        fanouts: In-edges drawn per node and hop, those of the seeds first. -1: all.
        seed: Key of the random draws, together with `step`.
        replace: Draw neighbours with replacement.
        device: Where to sample. Default: where the graph is.
        to: Framework of the samples: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".
        index_dtype: Type of all ids in a sample. JAX needs torch.int32, unless it is set to 64 bits.
        pad: Pad samples to a shape that depends only on the number of seeds, for compilers. Nodes are
            padded with node 0, and edges with edges from source 0 to a destination behind the last one.
        pinned: Leave the edges in pinned host memory, where the GPU reads them.

    Raises:
        TypeError: `data` is no graph.
        ValueError: A fan-out, framework, dtype or device is not possible.

    Example:
        >>> graph = hl.interop.graph_from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> sampler = hl.interop.Sampler(graph, [2, 2], to="numpy")
        >>> sample = sampler.sample([1])
        >>> sample.n_id, [adj.size for adj in sample.adjs]
        (array([1, 0, 2]), [(3, 2), (2, 1)])
    """

    def __init__(
        self,
        data: Any,
        fanouts: Sequence[int],
        *,
        seed: int = 0,
        replace: bool = False,
        device: torch.device | str | None = None,
        to: str = "torch",
        index_dtype: torch.dtype = torch.int64,
        pad: bool = False,
        pinned: bool = False,
    ) -> None:
        graph = data if isinstance(data, Graph) else getattr(data, "graph", None)
        if not isinstance(graph, Graph):
            raise TypeError(f"a Sampler takes a graph or a dataset, not {type(data).__name__}: see interop.graph")
        _check_fanouts(fanouts, replace, pad)
        converter(to)  # raises a ValueError if there is no such framework
        _check_index_dtype(index_dtype, graph)
        self.graph: Graph = graph
        self.seed = seed
        self.step = 0
        """Number of samples drawn so far. May be set."""
        self.device = _find_device(device, graph)
        self.framework = to
        self.index_dtype = index_dtype
        self._replace = replace
        self._pad = pad
        self._pinned = pinned or graph.is_pinned
        self._fanouts = tuple(fanouts)
        self._neighbor_sampler: NeighborSampler | None = None  # made by the first `sample`
        self._lock = threading.Lock()

    @property
    def fanouts(self) -> tuple[int, ...]:
        """In-edges drawn per node and hop, those of the seeds first. May be set between calls."""
        return self._fanouts

    @fanouts.setter
    def fanouts(self, fanouts: Sequence[int]) -> None:
        _check_fanouts(fanouts, self._replace, self._pad)
        with self._lock:
            self._fanouts = tuple(fanouts)
            if self._neighbor_sampler is not None:
                self._neighbor_sampler.fanouts = self._fanouts

    def sample(self, seeds: Any) -> Sample:
        """Sample the neighbourhood of seeds.

        Args:
            seeds: [n] node ids, an array of any framework. A repeated seed is a row of its own, with the
                same in-edges. With `pad`, seeds must be distinct.

        Raises:
            ValueError: A seed is no node of the graph, or comes twice with `pad`.
        """
        ids = from_any(seeds).to(self.device)
        # The lock guards the step and the sampler. Sampling itself runs outside of it, in several threads
        # at once.
        with self._lock:
            step = self.step
            self.step += 1
            if self._neighbor_sampler is None:
                graph = self._graph_on_device()
                # A padded sample has no room for more rows than the graph has nodes.
                self._neighbor_sampler = NeighborSampler(
                    graph, self._fanouts, replace=self._replace, edge_ids=True, repeats=not self._pad
                )
            sampler = self._neighbor_sampler

        blocks = sampler.sample(ids, ops.derive_key(self.seed, step))
        # `aligned` copies an array whose address some framework would refuse.
        n_id = aligned(blocks[0].src_ids.to(self.index_dtype))
        sample = Sample(n_id=n_id, batch_size=ids.numel(), adjs=[self._make_adj(block) for block in blocks])
        if self._pad:
            sample = _pad_sample(sample, sampler.fanouts, self.graph.num_nodes)
        return sample.to(self.framework)

    def _graph_on_device(self) -> Graph:
        """The graph on the device that samples. Its edges stay in pinned host memory if `pinned` is set."""
        if self.graph.device == self.device:
            return self.graph
        return self.graph.pinned(self.device, copy=True) if self._pinned else self.graph.to(self.device)

    def _make_adj(self, block: Block) -> Adj:
        """The edges of a block, with ids of `index_dtype`."""
        part = block.part
        edge_ids = _edge_ids_of(part)
        assert edge_ids is not None
        return Adj(
            # Not by `aligned`: torch has allocated this tensor just now, and aligns what it allocates.
            edge_index=part.edge_index.to(self.index_dtype),
            e_id=aligned(edge_ids.to(self.index_dtype)),
            size=(block.num_src, block.num_dst),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            # On the host, this sampler changes over to the shared graph too, so that there is one copy in
            # memory.
            twin = shared(self.graph)
            if self.graph is not twin and self.graph.device.type == "cpu":
                self.graph = twin
                self._neighbor_sampler = None
        settings = {
            "seed": self.seed,
            "replace": self._replace,
            "device": str(self.device),
            "to": self.framework,
            "index_dtype": self.index_dtype,
            "pad": self._pad,
            "pinned": self._pinned,
        }
        return _open_sampler, (twin, self._fanouts, self.step, settings)


def _edge_ids_of(part: Part) -> Tensor | None:
    """[E]: the ids of edges, as the user counts them. None if the sampler was not asked for them."""
    return part.edge.get(EDGE_IDS, part.edge_ids)


def _open_sampler(graph: Graph, fanouts: Sequence[int], step: int, settings: dict[str, Any]) -> Sampler:
    """Unpickle a sampler. settings: keyword arguments of `Sampler`."""
    sampler = Sampler(graph, fanouts, **settings)
    sampler.step = step
    return sampler


def _pad_sample(sample: Sample, fanouts: Sequence[int], num_nodes: int) -> Sample:
    """Pad a sample to the largest sizes that its fan-outs allow.

    Let d be the number of destinations of a hop and f its fan-out. The hop has at most d * f edges, and at
    most d * (1 + f) sources, since destinations are sources too. There are never more nodes than in the
    graph. The sources of a hop are the destinations of the next.

    Nodes are padded with node 0. Edges are padded with edges from source 0 to destination d, one behind the
    last. JAX's segment ops leave these out. Elsewhere, give the segment op one destination more and drop
    it.
    """
    num_dst = sample.batch_size
    adjs: list[Adj] = []
    for fanout, adj in zip(fanouts, reversed(sample.adjs), strict=True):  # from the seeds outwards
        num_src = min(num_dst * (1 + fanout), num_nodes)
        padding = (0, num_dst * fanout - adj.e_id.numel())  # entries before the array, and after it
        source, target = adj.edge_index
        edge_index = torch.stack([pad(source, padding), pad(target, padding, value=num_dst)])
        adjs.append(Adj(edge_index=edge_index, e_id=pad(adj.e_id, padding), size=(num_src, num_dst)))
        num_dst = num_src
    node_padding = (0, num_dst - sample.n_id.numel())
    return Sample(n_id=pad(sample.n_id, node_padding), batch_size=sample.batch_size, adjs=adjs[::-1])


def _check_fanouts(fanouts: Sequence[int], replace: bool, pad: bool) -> None:
    """Refuse fan-outs that cannot be sampled, or not with `pad`."""
    check_fanouts(fanouts, replace)
    if pad and -1 in fanouts:
        raise ValueError("pad=True needs to know how many neighbours there can be: give a number in place of -1")


def _check_index_dtype(dtype: torch.dtype, graph: Graph) -> None:
    """Refuse a type that is no index, or that cannot hold the ids of the graph's nodes and edges."""
    if dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index_dtype is torch.int64 or torch.int32, not {dtype}")
    if dtype == torch.int32 and max(graph.num_nodes, graph.num_edges) >= 2**31:
        raise ValueError("the ids of this graph do not fit 32 bits: use index_dtype=torch.int64")


def _find_device(device: torch.device | str | None, graph: Graph) -> torch.device:
    """The device with its number. None: that of the graph."""
    requested = graph.device if device is None else torch.device(device)
    if requested.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(requested)!r}, but torch sees no CUDA device here: use device='cpu'")
    return with_index(requested)


def batch_to(batch: Batch | Sample, framework: str) -> dict[str, Any] | Sample:
    """Return a batch as a plain dict of a framework's arrays. A `Sample` stays a `Sample`.

    Args:
        batch: A batch of a `Loader`, or a sample of a `Sampler`.
        framework: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".

    Returns:
        "seeds" [num_seeds], "n_id" [num_input], "x" [num_input, num_features], "y", the other tables, and
        "blocks": a dict per layer with "edge_index" [2, num_edges], "size" (sources, destinations), "edge"
        and, if the batch has edge ids, "e_id" [num_edges].

    Raises:
        ValueError: There is no such framework, or it cannot share an array.
        ImportError: The framework is not installed.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]), x=torch.ones(3, 2))
        >>> (batch,) = hl.Sampled(fanouts=(2,)).loader(data, torch.tensor([1]))
        >>> arrays = hl.interop.batch_to(batch, "numpy")
        >>> arrays["n_id"], arrays["x"].shape, arrays["blocks"][0]["size"]
        (array([1, 0]), (2, 2), (2, 1))
    """
    if isinstance(batch, Sample):
        return batch.to(framework)
    convert = converter(framework)

    def convert_block(block: Block) -> dict[str, Any]:
        part = block.part
        arrays = {
            "edge_index": convert(part.edge_index),
            "size": (block.num_src, block.num_dst),
            "edge": {name: convert(aligned(rows)) for name, rows in part.edge.items() if name != EDGE_IDS},
        }
        edge_ids = _edge_ids_of(part)
        if edge_ids is not None:
            arrays["e_id"] = convert(aligned(edge_ids))
        return arrays

    arrays = {"seeds": convert(aligned(batch.seeds)), "n_id": convert(aligned(batch.input_ids))}
    for name, rows in {"x": batch.x, "y": batch.y, **batch.tables}.items():
        if rows is not None:
            arrays[name] = convert(aligned(as_tensor(rows)))
    arrays["blocks"] = [convert_block(block) for block in batch.blocks]
    return arrays


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


class Features(Table):
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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.below.shape

    def size(self, dim: int | None = None) -> Any:
        """The shape, or its entry `dim`, as of a tensor."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions, as of a tensor."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.below.dtype

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

    @property
    def version(self) -> int | None:
        return self.below.version

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
    """A graph in shared memory.

    Its pickle is a handle, and the process that unpickles it reads the same memory.
    """

    arrays: Mapping[str, SharedArray] = field(default_factory=dict, repr=False)
    """The shared arrays: "indptr", "indices" and "edge.NAME" of each edge array."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _open_graph, (dict(self.arrays),)


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
    return _open_graph({name: share(rows) for name, rows in arrays.items()})


def _open_graph(arrays: Mapping[str, SharedArray]) -> SharedGraph:
    """A graph over shared arrays. arrays: as `SharedGraph.arrays`."""
    edge = {name.removeprefix("edge."): array.tensor for name, array in arrays.items() if name.startswith("edge.")}
    return SharedGraph(arrays["indptr"].tensor, arrays["indices"].tensor, edge, arrays)
