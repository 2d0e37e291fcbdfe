"""`Graph`: the in-edges of every node, with named edge arrays. `PartialGraph`: the degrees of some nodes of a graph.

The arrays of a graph are in one of three memories:

    on the host       all in host memory
    on a GPU          all in GPU memory
    pinned            indptr on the GPU; indices and edge arrays in pinned host memory, for zero-copy reads

A graph also owns a cache of values computed from its edges (`Graph.get_cached`). Graphs are frozen, but a user may
change their tensors in place. So each cached value is stored with the versions of the tensors, and is computed again
after a change.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from hopline import ops
from hopline.device import pinned
from hopline.ops.random import mix

T = TypeVar("T")
EDGES_AT_ONCE = 1 << 22
"""Edges that are hashed at a time, which limits the memory of temporary arrays."""
_LOOPS_LOCK = threading.Lock()
"""Guards the search for self-loops: threads that prepare batches ask at the same time, and one pass is enough."""


CHUNK_BYTES = 1 << 24
"""Bytes of which `checksum` is computed at once, so that a tensor elsewhere is not copied whole."""


def checksum(tensor: Tensor, before: int = 0) -> int:
    """CRC-32 of a tensor's values, in their order. It reads about 2 GB a second.

    before: the checksum of the rows before these, to continue it.
    """
    row_bytes = tensor.dtype.itemsize * tensor.shape[1:].numel()
    for rows in tensor.detach().split(max(1, CHUNK_BYTES // max(1, row_bytes))):
        before = zlib.crc32(rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, before)
    return before


def version_of(tensor: Tensor) -> int:
    """A number that changes if torch changes a tensor in place: its version counter.

    Tensors made in `torch.inference_mode` have no counter. Theirs is a checksum, for which they are read whole.
    """
    return checksum(tensor) if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed graph as in-edges: node `v` receives from `indices[indptr[v]:indptr[v + 1]]`.

    This is the CSC form of the adjacency matrix, with `indptr` for PyG's `colptr` and `indices` for its `row`.

    Raises:
        ValueError: `indptr` or `indices` has the wrong dtype or shape, `indptr` does not run from 0 to the number of
            edges, or an edge array does not have one row per edge.

    Example:
        >>> graph = hl.Graph(indptr=torch.tensor([0, 0, 2, 3]), indices=torch.tensor([0, 2, 1]))
        >>> graph
        Graph(3 nodes, 3 edges, cpu)
        >>> graph.in_degrees().tolist()
        [0, 2, 1]
        >>> graph.edge_index().tolist()
        [[0, 2, 1], [1, 1, 2]]
    """

    indptr: Tensor
    """[num_nodes + 1] int64, non-decreasing, from 0 to num_edges."""
    indices: Tensor
    """[num_edges] int32 or int64: the source node of each in-edge."""
    edge: Mapping[str, Tensor] = field(default_factory=dict)
    """Arrays with one row per edge, in the order of `indices`: "weight" [E], "attr" [E, d], "time", "type"."""

    def __post_init__(self) -> None:
        if self.indptr.dtype != torch.int64 or self.indptr.dim() != 1 or self.indptr.numel() < 1:
            raise ValueError("Graph.indptr must be a 1-D int64 tensor with num_nodes + 1 entries")
        if self.indices.dtype not in (torch.int32, torch.int64) or self.indices.dim() != 1:
            raise ValueError("Graph.indices must be a 1-D int32 or int64 tensor with one entry per edge")
        if int(self.indptr[0]) != 0:
            raise ValueError(f"Graph.indptr starts at {int(self.indptr[0])}: its first entry must be 0")
        if int(self.indptr[-1]) != self.indices.numel():
            raise ValueError(f"Graph.indptr ends at {int(self.indptr[-1])} but there are {self.indices.numel()} edges")
        if "weight" in self.edge and self.edge["weight"].dim() != 1:
            shape = list(self.edge["weight"].shape)
            raise ValueError(f"edge array 'weight' must have one number per edge, not {shape}")
        for name, array in self.edge.items():
            if array.size(0) != self.indices.numel():
                raise ValueError(f"edge array {name!r} has {array.size(0)} rows for {self.num_edges} edges")

    def __repr__(self) -> str:
        arrays = f", edge arrays {', '.join(self.edge)}" if self.edge else ""
        return f"{type(self).__name__}({self.num_nodes:,} nodes, {self.num_edges:,} edges{arrays}, {self.device})"

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """The device whose kernels read the graph. The edges of a pinned graph are in host memory nevertheless."""
        return self.indptr.device

    @property
    def is_pinned(self) -> bool:
        """Whether the edges are in pinned host memory and `indptr` is on a GPU."""
        return self.indptr.device.type == "cuda" and self.indices.device.type == "cpu"

    @property
    def other_fields(self) -> dict[str, Any]:
        """The fields of `Graph` that are not arrays of its edges, by name."""
        # Asked of the class, so that a field added to it reaches every copy of a graph.
        return {f.name: getattr(self, f.name) for f in fields(Graph) if f.name not in ("indptr", "indices", "edge")}

    def with_arrays(self, indptr: Tensor, indices: Tensor, edge: Mapping[str, Tensor]) -> Graph:
        """A graph of other edges, or of the same edges elsewhere. It has all other fields of this one."""
        return Graph(indptr, indices, edge, **self.other_fields)

    def to(self, device: torch.device | str) -> Graph:
        """The graph with all its arrays on a device."""
        target = torch.device(device)
        with torch.inference_mode(False):  # so that copies have version counters
            edge = {name: array.to(target) for name, array in self.edge.items()}
            return self.with_arrays(self.indptr.to(target), self.indices.to(target), edge)

    def pinned(self, device: torch.device | str, *, copy: bool = False) -> Graph:
        """The graph for zero-copy reads by a GPU: edges and edge arrays are pinned on the host, `indptr` is copied.

        copy: whether to copy arrays that cannot be pinned, such as a memory-mapped file, into pinned RAM. Otherwise
        they are an error.
        """
        edge = {name: pinned.pin(array, copy=copy) for name, array in self.edge.items()}
        return self.with_arrays(self.indptr.to(device), pinned.pin(self.indices, copy=copy), edge)

    @property
    def num_bytes(self) -> int:
        """Bytes of `indptr`, `indices` and the edge arrays."""
        arrays = [self.indptr, self.indices, *self.edge.values()]
        return sum(a.numel() * a.element_size() for a in arrays)

    def in_degrees(self, ids: Tensor | None = None) -> Tensor:
        """[num_nodes] or [len(ids)] int64: the number of in-edges of each node, or of each node in `ids`."""
        if ids is None:
            return self.indptr[1:] - self.indptr[:-1]
        at = ids.to(self.indptr.device)
        return (self.indptr[at + 1] - self.indptr[at]).to(ids.device)

    def edge_index(self) -> Tensor:
        """[2, num_edges] int64 in PyG's convention (sources first), sorted by destination."""
        dst = torch.repeat_interleave(torch.arange(self.num_nodes, device=self.device), self.in_degrees())
        return torch.stack([self.indices.to(self.device).long(), dst])

    @property
    def is_symmetric(self) -> bool:
        """Whether every edge has its reverse, as often as itself. Reads all edges once; the answer is cached.

        A hash of (source, destination) is summed over all edges, and one of (destination, source). The sums are
        equal if the edges are symmetric. If they are not, the sums differ but for a chance of 2**-64.
        """
        return self.get_cached("is_symmetric", self._compare_directions)

    def _compare_directions(self) -> bool:
        difference = torch.zeros((), dtype=torch.int64, device=self.indices.device)
        ends = self.indptr.to(self.indices.device)
        for start in range(0, self.num_edges, EDGES_AT_ONCE):
            edges = torch.arange(start, min(start + EDGES_AT_ONCE, self.num_edges), device=ends.device)
            src = self.indices[edges].long()
            dst = torch.searchsorted(ends, edges, right=True) - 1
            difference += (mix(mix(src) + dst) - mix(mix(dst) + src)).sum()
        return not difference.item()

    @property
    def named_arrays(self) -> dict[str, Tensor]:
        """All arrays, by their names in messages."""
        edge = {f"edge array {name!r}": array for name, array in self.edge.items()}
        return {"indptr": self.indptr, "indices": self.indices, **edge}

    @property
    def versions(self) -> dict[str, int]:
        """The version of each array, by its name. A cached value is valid as long as none of them changes."""
        return {name: version_of(array) for name, array in self.named_arrays.items()}

    def get_cached(self, name: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute()`, cached in the graph until one of its arrays is changed in place.

        name: the key in the cache. Any thread may call this. There is no lock: threads that call at the same time may
        each compute the value, and get equal ones.
        """
        # Read before `compute`: if an array changes while it runs, the next call finds other versions and computes
        # the value again.
        versions = self.versions
        entry = self._cache.get(name)
        if entry is None or entry[0] != versions:
            entry = (versions, compute())
            self._cache[name] = entry
        return entry[1]

    @cached_property
    def _cache(self) -> dict[Hashable, tuple[dict[str, int], Any]]:
        """(versions of the arrays, the value computed from them) by name."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling and copying, without cached values. A copy computes them again when needed.

        They must not go into the copy: its tensors have version counters of their own, which may match by chance.
        """
        return {name: value for name, value in self.__dict__.items() if name not in ("_cache", "_loops")}

    @property
    def self_loops(self) -> Tensor:
        """[num_self_loops] int64: positions in `indices` of the edges from a node to itself; usually empty."""
        return self._find_loops()[0]

    @property
    def has_loop(self) -> Tensor | None:
        """[num_nodes] bool: whether each node has an edge to itself; None if no node has."""
        return self._find_loops()[1]

    def _find_loops(self) -> tuple[Tensor, Tensor | None]:
        """(`self_loops`, `has_loop`), found in one or two passes over the edges and cached."""
        # The version leaves edge arrays out: self-loops do not depend on them.
        version = version_of(self.indptr), version_of(self.indices)
        with _LOOPS_LOCK:
            if self._loops.get("version") != version:
                positions = ops.self_loops(self.indptr.to(self.indices.device), self.indices)
                has_loop = torch.zeros(self.num_nodes, dtype=torch.bool, device=self.indices.device)
                has_loop[self.indices[positions].long()] = True
                # `bool` synchronises, once per graph: threads read the result on streams of their own.
                found = has_loop.to(self.device) if bool(has_loop.any()) else None
                self._loops.update(version=version, found=(positions.to(self.device), found))
            return self._loops["found"]

    @cached_property
    def _loops(self) -> dict[str, Any]:
        """The cache of `_find_loops`: what was "found", and the "version" of `indptr` and `indices` that it is of."""
        return {}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PartialGraph(Graph):
    """Degrees and sums of edge weights in a graph that is not whole in this process, for some of its nodes.

    Convs that normalise by degree ask `Block.graph` for the full degrees, and get them from here. A partial graph
    from `of`, for a batch, has no edges: those are in the blocks. Inference over shards makes one with the in-edges
    of this rank's own nodes.
    """

    ids: Tensor
    """[n] int64: the nodes whose degrees are known, in any order."""
    degrees: Tensor
    """[n] int64: the number of in-edges in the whole graph of each node in `ids`."""
    has_loops: bool = False
    """Whether some node of the whole graph has an edge to itself."""
    weights: Tensor | None = None
    """[n, 3] float64, or None if the whole graph has neither weights nor self-loops. Column 0: the sum of the weights
    of a node's in-edges. Column 1: that sum without its self-loop. Column 2: the weight of the self-loop, or NaN."""

    @classmethod
    def of(
        cls, names: Mapping[str, Tensor], ids: Tensor, degrees: Tensor, has_loops: bool, weights: Tensor | None
    ) -> PartialGraph:
        """A partial graph without edges.

        names: edge arrays with the names, dtypes and row shapes of the whole graph's. Their rows are not used.
        """
        return cls(
            indptr=torch.zeros(1, dtype=torch.int64),
            indices=torch.zeros(0, dtype=torch.int64),
            edge={name: array[:0] for name, array in names.items()},
            ids=ids,
            degrees=degrees,
            has_loops=has_loops,
            weights=weights,
        )

    @cached_property
    def _sorted_ids(self) -> tuple[Tensor, Tensor]:
        """(ids in ascending order, their positions in `ids`), for lookups by binary search."""
        return torch.sort(self.ids)

    def _positions(self, ids: Tensor) -> Tensor:
        """[n] int64 on the host: the position in `self.ids` of each given node, which must be one of them."""
        sorted_ids, order = self._sorted_ids
        last = max(0, sorted_ids.numel() - 1)
        # The clamp keeps an id beyond the largest inside the array; the assertion below then refuses it.
        sorted_idx = torch.searchsorted(sorted_ids, ids.cpu()).clamp(max=last)
        assert torch.equal(sorted_ids[sorted_idx], ids.cpu()), "a node is not of this batch"
        return order[sorted_idx]

    def in_degrees(self, ids: Tensor | None = None) -> Tensor:
        """[n] int64: the number of in-edges in the whole graph of each node in `ids`, by default in `self.ids`."""
        return self.degrees if ids is None else self.degrees[self._positions(ids)].to(ids.device)

    def weight_sums(self, ids: Tensor, add_loops: bool, fill: float) -> tuple[Tensor, Tensor]:
        """([n], [n]) float64: the sum of each node's in-edge weights, and the weight of its self-loop.

        add_loops: whether the conv gives a self-loop to every node without one. If so, the sums leave self-loops
        out. If not, self-loops count in the sums like other edges, and the second result is 0.
        fill: the weight of a self-loop that the conv adds.
        """
        assert self.weights is not None
        total, without_loops, loop = self.weights[self._positions(ids)].to(ids.device).unbind(1)
        if not add_loops:
            return total, torch.zeros_like(total)
        return without_loops, torch.where(loop.isnan(), fill, loop)

    @property
    def self_loops(self) -> Tensor:
        """[1] or [0] int64: one entry if the whole graph has a self-loop.

        The entry is no position. Callers with a partial graph ask only whether there is one.
        """
        return torch.zeros(int(self.has_loops), dtype=torch.int64)
