"""Generates the built-in graphs from a seed: planted communities with power-law degrees.

Every node has a *rank*, its number in a random order of all nodes. The rank decides the in-degree, and the
rank modulo num_classes is the class.

In-degrees: the node of rank r gets a share of the edges that falls as r^-0.65. So P(degree > d) falls as
d^-1.54 over the upper part of the distribution. The 1% best-connected nodes receive about 24% of all edges,
and the largest in-degree is a few hundred times the mean. Sources are drawn with a preference for low ranks
too, so out-degrees have a heavy tail as well. Repeated edges are possible, self-loops are not.

All draws of a node are hashes of (key, node). So ranges of nodes can be made in any order and by any number
of threads. The CPU (`ops.cpu.synthetic`) and a GPU (`ops.gpu.synthetic`) make the same graph. The CPU makes
`CHUNK_NODES` nodes at a time. A graph that is written to a folder is never in memory as a whole, except a
symmetric one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.arrays import DTYPES
from hopline.data.built_in import PlantedPartition
from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.edges import index_dtype
from hopline.data.store import open_folder
from hopline.data.writer import FolderWriter
from hopline.device.meter import find_device
from hopline.ops import derive_key
from hopline.tables import TensorTable
from hopline.util.progress import progress

TAIL = 0.35
"""Exponent of the in-degrees: ranks below a fraction t of the nodes get about t^TAIL of the edges."""
CUT = 3e-5
"""Offset of the fraction t that limits the largest degree: (t + CUT)^(TAIL - 1) is finite at t = 0."""
FLOOR = 0.02
"""Share of the edges that is spread evenly, so that degrees fall smoothly to the last rank."""
CHUNK_NODES = 1 << 18
"""Nodes that are generated at a time on the CPU, which limits memory."""
DEVICE_CHUNK_NODES = 1 << 24
"""Nodes whose splits are determined at a time on a GPU, which limits temporary memory."""


def planted_partition(
    settings: PlantedPartition | None = None,
    *,
    name: str = "planted",
    folder: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    **changes: Any,
) -> Dataset:
    """Generate a graph of planted communities, in memory or in a folder.

    settings: Default: those of `PlantedPartition()`.
    name: Name of the dataset.
    folder: Write the graph to this folder and open it. Default: keep it in memory.
    device: "cuda" generates the same graph on the GPU. It stays there, except its splits, which are on the
        host. A symmetric graph is generated on the host and moved.
    changes: Fields of `PlantedPartition` that differ from `settings`.
    """
    settings = settings or PlantedPartition()
    if changes:
        settings = replace(settings, **changes)
    if folder is not None and device != "cpu":
        raise ValueError(f"A folder is written from the CPU: leave out device={device!r} or folder=.")
    target = find_device(device)
    without_none = {field: value for field, value in vars(settings).items() if value is not None}
    meta = {"origin": "synthetic", "settings": without_none}

    if settings.symmetric:
        dataset = _make_symmetric(settings, name, meta)
        if folder is None:
            return dataset if target.type == "cpu" else _move_to_device(dataset, target)
        dataset.save(folder)
        return open_folder(folder)

    if folder is not None:
        _write_folder(settings, name, folder, meta)
        return open_folder(folder)
    arrays = _join_chunks(_make_chunks(settings)) if target.type == "cpu" else make_on(target, settings)
    return Dataset(
        name=name,
        graph=Graph(arrays["indptr"], arrays["indices"]),
        tables={"x": TensorTable(arrays["table.x"])},
        y=arrays["y"],
        splits={key: arrays[f"split.0.{key}"] for key in ("train", "valid", "test")},
        num_classes=settings.num_classes,
        meta=meta,
    )


def _join_chunks(chunks: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    chunks_by_array: dict[str, list[Tensor]] = {}
    for chunk in chunks:
        for array, rows in chunk.items():
            chunks_by_array.setdefault(array, []).append(rows)
    return {array: torch.cat(rows) for array, rows in chunks_by_array.items()}


def _move_to_device(dataset: Dataset, device: torch.device) -> Dataset:
    """The dataset with graph, features and labels on a device. Splits stay on the host."""
    x = dataset.x.storage()
    assert x is not None
    return replace(
        dataset,
        graph=dataset.graph.to(device),
        tables={"x": TensorTable(x.to(device))},
        y=dataset.labels.to(device),
    )


def _make_symmetric(settings: PlantedPartition, name: str, meta: dict[str, Any]) -> Dataset:
    half = planted_partition(replace(settings, symmetric=False, num_edges=settings.num_edges // 2))
    both = from_edges(half.graph.edge_index(), num_nodes=settings.num_nodes, symmetrize=True)
    return replace(half, name=name, graph=both.graph, meta=meta)


def _write_folder(settings: PlantedPartition, name: str, folder: str | os.PathLike[str], meta: dict[str, Any]) -> None:
    """Write a graph to a folder chunk by chunk, so that it is never in memory as a whole."""
    with FolderWriter(folder) as out, progress(f"making {name}", settings.num_edges, "edges") as bar:
        for number, chunk in enumerate(_make_chunks(settings)):
            for array, rows in chunk.items():
                if number == 0:
                    out.array(array, rows.dtype, tuple(rows.shape[1:]))
                out.append(array, rows)
            bar.advance(chunk["indices"].numel())
        out.commit(
            name=name,
            num_nodes=settings.num_nodes,
            num_edges=settings.num_edges,
            task="single",
            num_classes=settings.num_classes,
            num_splits=1,
            tables={"x": -1},
            meta=meta,
        )


def _make_chunks(settings: PlantedPartition) -> Iterator[dict[str, Tensor]]:
    """The rows of all arrays for consecutive ranges of nodes, by the names of the arrays in a folder."""
    num_edges = 0
    for first in range(0, settings.num_nodes, CHUNK_NODES):
        count = min(CHUNK_NODES, settings.num_nodes - first)
        chunk = _make_chunk(settings, first, count, num_edges)
        num_edges = int(chunk["indptr"][-1])
        yield chunk
    assert num_edges == settings.num_edges, (num_edges, settings.num_edges)


def _make_chunk(settings: PlantedPartition, first: int, count: int, num_edges_before: int) -> dict[str, Tensor]:
    """The rows of all arrays for `count` nodes from `first` on. num_edges_before: of the nodes before `first`."""
    from hopline.ops.cpu import synthetic as kernels
    from hopline.ops.cpu.runtime import over_ranges

    n = settings.num_nodes
    num_classes = settings.num_classes
    rank_key, edge_key, feature_key, split_key = (np.uint64(key % 2**64) for key in _keys(settings))
    half_bits = np.uint64(_half_bits(n))
    means = _class_means(settings)

    ranks = np.empty(count, dtype=np.int64)
    split_ranks = np.empty(count, dtype=np.int64)
    degrees = np.empty(count, dtype=np.int64)
    features = np.empty((count, settings.num_features), dtype=np.float32)
    noise = 1.0  # standard deviation of the features around their mean

    def fill_nodes(start: int, stop: int) -> None:
        nodes = slice(start, stop)
        kernels.fill_ranks(first + start, rank_key, half_bits, n, ranks[nodes])
        kernels.fill_ranks(first + start, split_key, half_bits, n, split_ranks[nodes])
        kernels.fill_degrees(ranks[nodes], n, settings.num_edges, TAIL, CUT, FLOOR, degrees[nodes])
        kernels.fill_features(first + start, ranks[nodes] % num_classes, means, noise, feature_key, features[nodes])

    over_ranges(fill_nodes, count, work=features.size)
    indptr = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(degrees, out=indptr[1:])
    sources = torch.empty(int(indptr[-1]), dtype=index_dtype(n))
    sources_numpy = sources.numpy()

    def fill_edges(start: int, stop: int) -> None:
        kernels.fill_sources(
            first + start, ranks[start:stop], indptr[start : stop + 1], rank_key, edge_key, half_bits, n, num_classes,
            settings.homophily, sources_numpy[indptr[start] : indptr[stop]],
        )  # fmt: skip

    over_ranges(fill_edges, count, work=sources.numel())
    global_indptr = torch.from_numpy(indptr) + num_edges_before
    chunk = {
        # The first entry of a later chunk is the last one of the chunk before.
        "indptr": global_indptr if first == 0 else global_indptr[1:],
        "indices": sources,
        "table.x": torch.from_numpy(features).to(DTYPES[settings.dtype]),
        "y": torch.from_numpy(ranks % num_classes),
    }
    return chunk | _splits(settings, first, torch.from_numpy(split_ranks))


def make_on(device: torch.device, settings: PlantedPartition) -> dict[str, Tensor]:
    """All arrays as a whole, made on `device` by the kernels of `ops.gpu.synthetic`. Splits are on the host."""
    from hopline.ops.gpu import synthetic as kernels

    n = settings.num_nodes
    half_bits = _half_bits(n)
    rank_key, edge_key, feature_key, split_key = _keys(settings)
    # Triton launches on the current device. -1 changes nothing: tests run the kernels on the CPU.
    with torch.cuda.device(device if device.type == "cuda" else -1):
        ranks = kernels.ranks(0, n, rank_key, half_bits, n, device)
        indptr = torch.zeros(n + 1, dtype=torch.int64, device=device)
        torch.index_select(_degrees_by_rank(settings).to(device), 0, ranks, out=indptr[1:])
        indptr[1:].cumsum_(0)
        sources = kernels.sources(
            indptr, ranks, rank_key, edge_key, half_bits, settings.num_classes, settings.homophily, index_dtype(n)
        )
        assert sources.numel() == settings.num_edges, (sources.numel(), settings.num_edges)

        y = ranks.remainder_(settings.num_classes)  # in place: the ranks are not needed any more
        means = torch.from_numpy(_class_means(settings)).to(device)
        features = kernels.features(y, means, feature_key, DTYPES[settings.dtype])

        split_chunks = []
        for first in range(0, n, DEVICE_CHUNK_NODES):
            count = min(DEVICE_CHUNK_NODES, n - first)
            split_ranks = kernels.ranks(first, count, split_key, half_bits, n, device)
            split_chunks.append(_splits(settings, first, split_ranks))
    return {"indptr": indptr, "indices": sources, "table.x": features, "y": y, **_join_chunks(split_chunks)}


def _degrees_by_rank(settings: PlantedPartition) -> Tensor:
    """[num_nodes] int64 on the CPU: the in-degree of every rank.

    Not computed on the GPU, where powers of float64 numbers may differ in their last bit.
    """
    from hopline.ops.cpu import synthetic as kernels
    from hopline.ops.cpu.runtime import over_ranges

    n = settings.num_nodes
    degrees = np.empty(n, dtype=np.int64)

    def fill(start: int, stop: int) -> None:
        kernels.fill_degrees(np.arange(start, stop), n, settings.num_edges, TAIL, CUT, FLOOR, degrees[start:stop])

    over_ranges(fill, n, work=n)
    return torch.from_numpy(degrees)


def _splits(settings: PlantedPartition, first: int, split_ranks: Tensor) -> dict[str, Tensor]:
    """[n] int64 on the CPU: the node ids of each split among the nodes from `first` on, by array name.

    split_ranks: [count] int64: the ranks of these nodes in a random order of all nodes, which is another
        one than that of the degrees. The first ranks are training nodes, the next validation nodes, then
        test nodes.
    """
    splits: dict[str, Tensor] = {}
    start = 0
    for name, size in zip(("train", "valid", "test"), settings.split_sizes, strict=True):
        is_in_split = (split_ranks >= start) & (split_ranks < start + size)
        splits[f"split.0.{name}"] = is_in_split.nonzero().view(-1).cpu() + first
        start += size
    return splits


def _keys(settings: PlantedPartition) -> list[int]:
    return [derive_key(settings.seed, purpose) for purpose in range(4)]


def _half_bits(num_nodes: int) -> int:
    """Half the bits of the numbers that the random order permutes: 4**half >= num_nodes.

    The order is a Feistel network, which works on two halves of a number.
    """
    num_bits = (num_nodes - 1).bit_length()
    return max(1, -(-num_bits // 2))


def _class_means(settings: PlantedPartition) -> np.ndarray:
    """[num_classes, num_features] float32: mean features by class, of length `signal` in random directions."""
    # Purpose 4: `_keys` has 0 to 3.
    generator = torch.Generator().manual_seed(derive_key(settings.seed, 4) % 2**63)
    means = torch.randn(settings.num_classes, settings.num_features, generator=generator)
    return (settings.signal * means / means.norm(dim=1, keepdim=True)).numpy()
