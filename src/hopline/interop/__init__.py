"""Other frameworks: a sampler and a feature store that stand alone, with arrays in and out without a copy.

`dlpack` turns tensors into arrays of NumPy, CuPy, JAX, TensorFlow and Paddle over the same memory, and back.
Arguments and shapes of `Sampler` and `Features` are public, and the examples in `examples/` are their tests. It
stands on `budget` and below. Triton is loaded before TensorFlow here, since the other order ends the process.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hopline import ops
from hopline.core.batch import Batch, Block
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

# TensorFlow and Triton each bring an LLVM. Triton's ends the process if it is loaded second.
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


class Adj(NamedTuple):
    """One layer's edges, an item of `Sample.adjs`."""

    edge_index: Any
    """[2, E], sources first: positions in `n_id`, sorted by destination."""
    e_id: Any
    """[E] each edge's position in the graph's `indices` and edge arrays."""
    size: tuple[int, int]
    """(sources, destinations); the destinations are the first of the sources."""


class Sample(NamedTuple):
    """What a sampler gives, as PyG's old NeighborSampler and torch-quiver do: `n_id, batch_size, adjs = sample`.

    Example:
        >>> graph = hl.interop.graph_from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> n_id, batch_size, adjs = hl.interop.Sampler(graph, [2]).sample(torch.tensor([1]))
        >>> n_id.tolist(), batch_size, adjs[0].edge_index.tolist()
        ([1, 0], 1, [[1], [0]])
    """

    n_id: Any
    """[N] the nodes whose rows are needed, the seeds first."""
    batch_size: int
    """How many seeds there are."""
    adjs: list[Adj]
    """One per layer, outermost first: the order of computation."""

    def to(self, framework: str) -> Sample:
        """The same in the framework's arrays, without a copy."""

        def convert(array: Any) -> Any:
            return to(from_any(array), framework)

        adjs = [Adj(convert(adj.edge_index), convert(adj.e_id), adj.size) for adj in self.adjs]
        return Sample(convert(self.n_id), self.batch_size, adjs)


class Sampler:
    """Neighbours of seeds of any framework, for a loop of your own. May be called from many threads.

    Every call draws anew; equal (seed, step) draw the same. Its pickle is a handle: processes that get it share the
    graph, and go on from the same step, so give each its own `seed`.

    Args:
        data: A graph or a dataset.
        fanouts: In-edges drawn per node and hop, those of the seeds first; -1 takes all.
        seed: Of every random draw, together with `step`.
        replace: Draw neighbours with replacement.
        device: Where to sample. Default: where the graph is.
        to: Framework of the samples: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".
        index_dtype: Of all ids in a sample. JAX takes torch.int32 as it is when it is not set to 64 bits.
        pad: Give all samples of as many seeds one shape, for compilers. Nodes are filled up with node 0, edges with
            ones from source 0 to a destination behind the last.
        pinned: Leave the edges in host memory and let the GPU read them there.

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
        converter(to)  # refuses a name that is no framework's
        _check_index_dtype(index_dtype, graph)
        self.graph: Graph = graph
        self.seed = seed
        self.step = 0
        """How many samples were drawn; may be set."""
        self.device = _find_device(device, graph)
        self.framework = to
        self.index_dtype = index_dtype
        self._replace = replace
        self._pad = pad
        is_pinned_already = graph.device.type == "cuda" and graph.indices.device.type == "cpu"
        self._pinned = pinned or is_pinned_already
        self._fanouts = tuple(fanouts)
        self._neighbors: NeighborSampler | None = None
        self._lock = threading.Lock()

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Neighbours per node and hop, those of the seeds first; may be set between calls."""
        return self._fanouts

    @fanouts.setter
    def fanouts(self, fanouts: Sequence[int]) -> None:
        _check_fanouts(fanouts, self._replace, self._pad)
        with self._lock:
            self._fanouts = tuple(fanouts)
            if self._neighbors is not None:
                self._neighbors.fanouts = self._fanouts

    def sample(self, seeds: Any) -> Sample:
        """Draw the nodes and edges that lead to the seeds.

        Args:
            seeds: [n] distinct node ids, of any framework.

        Raises:
            ValueError: A seed is no node of the graph, or is there twice.
        """
        ids = from_any(seeds).to(self.device)
        with self._lock:
            step = self.step
            self.step += 1
            if self._neighbors is None:
                graph = self._graph_on_device()
                self._neighbors = NeighborSampler(graph, self._fanouts, replace=self._replace, edge_ids=True)
            neighbors = self._neighbors

        blocks = neighbors.sample(ids, ops.derive_key(self.seed, step))
        n_id = aligned(blocks[0].src_ids.to(self.index_dtype))
        sample = Sample(n_id=n_id, batch_size=ids.numel(), adjs=[self._make_adj(block) for block in blocks])
        if self._pad:
            sample = _pad_sample(sample, neighbors.fanouts, self.graph.num_nodes)
        return sample.to(self.framework)

    def _graph_on_device(self) -> Graph:
        """The graph where it is sampled."""
        if self.graph.device == self.device:
            return self.graph
        return self.graph.pinned(self.device, copy=True) if self._pinned else self.graph.to(self.device)

    def _make_adj(self, block: Block) -> Adj:
        part = block.part
        assert part.edge_ids is not None
        return Adj(
            edge_index=part.edge_index.to(self.index_dtype),
            e_id=aligned(part.edge_ids.to(self.index_dtype)),
            size=(block.num_src, block.num_dst),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            twin = shared(self.graph)
            if self.graph is not twin and self.graph.device.type == "cpu":
                self.graph = twin
                self._neighbors = None
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


def _open_sampler(graph: Graph, fanouts: Sequence[int], step: int, settings: dict[str, Any]) -> Sampler:
    sampler = Sampler(graph, fanouts, **settings)
    sampler.step = step
    return sampler


def _pad_sample(sample: Sample, fanouts: Sequence[int], num_nodes: int) -> Sample:
    """The sample filled up to the most that its fan-outs allow.

    Nodes are filled up with node 0, and edges with ones from source 0 to a destination behind the last: JAX's segment
    ops leave those out, elsewhere give the segment op one destination more and drop it.
    """
    num_dst = sample.batch_size
    max_nodes = max(num_nodes, sample.batch_size)
    adjs: list[Adj] = []
    for fanout, adj in zip(fanouts, reversed(sample.adjs), strict=True):  # from the seeds outwards
        num_src = min(num_dst * (1 + fanout), max_nodes)
        missing = (0, num_dst * fanout - adj.e_id.numel())
        source, target = adj.edge_index
        edge_index = torch.stack([pad(source, missing), pad(target, missing, value=num_dst)])
        adjs.append(Adj(edge_index=edge_index, e_id=pad(adj.e_id, missing), size=(num_src, num_dst)))
        num_dst = num_src  # the sources of a hop are the destinations of the next
    missing_nodes = (0, num_dst - sample.n_id.numel())
    return Sample(n_id=pad(sample.n_id, missing_nodes), batch_size=sample.batch_size, adjs=adjs[::-1])


def _check_fanouts(fanouts: Sequence[int], replace: bool, pad: bool) -> None:
    check_fanouts(fanouts, replace)
    if pad and -1 in fanouts:
        raise ValueError("pad=True needs to know how many neighbours there can be: give a number in place of -1")


def _check_index_dtype(dtype: torch.dtype, graph: Graph) -> None:
    if dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index_dtype is torch.int64 or torch.int32, not {dtype}")
    if dtype == torch.int32 and max(graph.num_nodes, graph.num_edges) >= 2**31:
        raise ValueError("the ids of this graph do not fit 32 bits: use index_dtype=torch.int64")


def _find_device(device: torch.device | str | None, graph: Graph) -> torch.device:
    requested = graph.device if device is None else torch.device(device)
    if requested.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(requested)!r}, but torch sees no CUDA device here: use device='cpu'")
    return with_index(requested)


def batch_to(batch: Batch | Sample, framework: str) -> dict[str, Any] | Sample:
    """Return a batch as a plain dict of the framework's arrays, its rows read; or a `Sample` as a `Sample` of them.

    Args:
        batch: Of a `Loader`, or of a `Sampler`.
        framework: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".

    Returns:
        "seeds" [num_seeds], "n_id" [num_input], "x" [num_input, num_features], "y", the other tables, and "blocks": a
        dict per layer with "edge_index" [2, num_edges], "size" and "edge".

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
            "edge": {name: convert(aligned(rows)) for name, rows in part.edge.items()},
        }
        if part.edge_ids is not None:
            arrays["e_id"] = convert(aligned(part.edge_ids))
        return arrays

    arrays = {"seeds": convert(aligned(batch.seeds)), "n_id": convert(aligned(batch.input_ids))}
    for name, rows in {"x": batch.x, "y": batch.y, **batch.tables}.items():
        if rows is not None:
            arrays[name] = convert(aligned(as_tensor(rows)))
    arrays["blocks"] = [convert_block(block) for block in batch.blocks]
    return arrays


def graph(indptr: Any, indices: Any = None, edge: Mapping[str, Any] | None = None) -> Graph:
    """Make a graph over any framework's arrays: node v receives from `indices[indptr[v]:indptr[v + 1]]`.

    Args:
        indptr: [num_nodes + 1] integers, copied only if they are not int64. Or a square SciPy matrix whose entry (i, j)
            is the edge from i to j; one in CSC form is shared, others are brought into it.
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
    """Make a graph from edges of any framework, grouped by destination, so they are copied.

    Args:
        edge_index: [2, num_edges] int64 or int32, sources first.
        num_nodes: Default: one more than the largest id.
        edge: Edge arrays by name, with a row per edge in the order of `edge_index`.

    Raises:
        ValueError: The edges have another shape or dtype, or an id is no node.

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
    indptr, order = ops.group_edges(edges[1].contiguous(), num_nodes)
    arrays = {name: from_any(rows).cpu()[order] for name, rows in (edge or {}).items()}
    return Graph(indptr, edges[0][order].to(torch.int32 if num_nodes < 2**31 else torch.int64), arrays)


class Features(Table):
    """A table whose `features[ids]` takes ids of any framework and gives rows in the one that is named.

    Args:
        below: The table that has the rows.
        to: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".

    Raises:
        ValueError: There is no such framework.

    Example:
        >>> features = hl.interop.Features(hl.extend.TensorTable(torch.eye(3)), to="numpy")
        >>> features[[2]]
        array([[0., 0., 1.]], dtype=float32)
    """

    def __init__(self, below: Table, to: str = "torch") -> None:
        converter(to)
        self.below = below
        self.framework = to

    @property
    def shape(self) -> tuple[int, ...]:
        return self.below.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.below.dtype

    @property
    def num_bytes(self) -> int:
        return self.below.num_bytes

    def __getitem__(self, ids: Any) -> Any:
        ids = from_any(ids).reshape(-1)
        storage = self.below.storage()
        if storage is not None and storage.is_cuda:
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

    def end_epoch(self) -> None:
        self.below.end_epoch()

    def __reduce__(self) -> tuple[Any, ...]:
        return Features, (shared(self.below), self.framework)


def table(rows: Any, to: str = "torch") -> Features:
    """Make a feature store over any framework's rows.

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
    return Features(rows if isinstance(rows, Table) else TensorTable(from_any(rows)), to)


@dataclass(frozen=True, eq=False, repr=False)
class SharedGraph(Graph):
    """A graph whose pickle is a handle: who opens it reads the same memory."""

    arrays: Mapping[str, SharedArray] = field(default_factory=dict, repr=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _open_graph, (dict(self.arrays),)


def shared(what: Any) -> Any:
    """Return the graph or table in memory that processes share: copied once, unless it is mapped from a file already.

    A graph gets a twin there; a table is the same one, with its rows there. Sending one does the same.

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
        what.__reduce__()
        return what
    if isinstance(what, SharedGraph):
        return what
    if not isinstance(what, Graph):
        raise TypeError(f"a {type(what).__name__} cannot be shared: pass a graph or a table")
    return what.get_cached("shared twin", partial(_make_shared_twin, what))


def _make_shared_twin(graph: Graph) -> SharedGraph:
    arrays = {"indptr": graph.indptr, "indices": graph.indices}
    arrays |= {f"edge.{name}": rows for name, rows in graph.edge.items()}
    return _open_graph({name: share(rows) for name, rows in arrays.items()})


def _open_graph(arrays: Mapping[str, SharedArray]) -> SharedGraph:
    edge = {name.removeprefix("edge."): array.tensor for name, array in arrays.items() if name.startswith("edge.")}
    return SharedGraph(arrays["indptr"].tensor, arrays["indices"].tensor, edge, arrays)
