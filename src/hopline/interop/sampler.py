"""`Sampler`: neighbour sampling whose samples are another framework's arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hopline import ops
from hopline.core.batch import Batch, Block, Part
from hopline.core.graph import Graph
from hopline.core.row_handles import as_tensor
from hopline.core.sampler import NeighborSampler
from hopline.device.meter import with_index
from hopline.interop.arrays import EDGE_IDS, shared
from hopline.interop.dlpack import aligned, converter, from_any, to
from hopline.util.config import check_fanouts


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
    check_fanouts(fanouts, replace)
    if pad and -1 in fanouts:
        raise ValueError("pad=True needs to know how many neighbours there can be: give a number in place of -1")


def _check_index_dtype(dtype: torch.dtype, graph: Graph) -> None:
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
