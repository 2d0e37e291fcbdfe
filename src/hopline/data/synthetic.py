"""Built-in graphs from a seed: planted communities with power-law degrees.

In-degrees: the node of rank r gets a share of the edges that falls as r^-0.65, so P(degree > d) falls as
d^-1.54 over the upper part of the distribution; the 1% best-connected nodes receive about 24% of all edges,
and the largest in-degree is a few hundred times the mean. Sources are drawn with a preference for low ranks
too, so out-degrees have a heavy tail as well. Repeated edges are possible, self-loops are not.
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
"""Ranks below a fraction t of the nodes get about t^TAIL of the edges."""
CUT = 3e-5
"""Flattens the very top, which bounds the largest degree."""
FLOOR = 0.02
"""Share of the edges that is spread evenly, so that degrees fall smoothly to the last rank."""
CHUNK_NODES = 1 << 18
"""Nodes generated at a time."""
DEVICE_CHUNK_NODES = 1 << 24
"""Nodes whose splits are found at a time on a GPU."""


def planted_partition(
    settings: PlantedPartition | None = None,
    *,
    name: str = "planted",
    folder: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    **changes: Any,
) -> Dataset:
    """A planted graph in memory, or written in chunks into a folder; `changes` are fields of `PlantedPartition`.

    With device="cuda" the same graph is made on the GPU and stays there, but for its splits; symmetric ones are moved.
    """
    settings = replace(settings or PlantedPartition(), **changes) if changes else settings or PlantedPartition()
    if folder is not None and device != "cpu":
        raise ValueError(f"A folder is written from the CPU: leave out device={device!r} or folder=.")
    place = find_device(device)
    meta = {"origin": "synthetic", "settings": {k: v for k, v in vars(settings).items() if v is not None}}
    if settings.symmetric:
        dataset = _symmetric(settings, name, meta)
        if folder is None:
            return dataset if place.type == "cpu" else _moved(dataset, place)
        dataset.save(folder)
        return open_folder(folder)
    if folder is not None:
        _write(settings, name, folder, meta)
        return open_folder(folder)
    arrays = _joined(_chunks(settings)) if place.type == "cpu" else make_on(place, settings)
    return Dataset(
        name=name,
        graph=Graph(arrays["indptr"], arrays["indices"]),
        tables={"x": TensorTable(arrays["table.x"])},
        y=arrays["y"],
        splits={key: arrays[f"split.0.{key}"] for key in ("train", "valid", "test")},
        num_classes=settings.num_classes,
        meta=meta,
    )


def _joined(chunks: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for chunk in chunks:
        for array, rows in chunk.items():
            parts.setdefault(array, []).append(rows)
    return {array: torch.cat(rows) for array, rows in parts.items()}


def _moved(dataset: Dataset, device: torch.device) -> Dataset:
    graph, x = dataset.graph, dataset.x.storage()
    assert x is not None
    return replace(
        dataset,
        graph=Graph(graph.indptr.to(device), graph.indices.to(device)),
        tables={"x": TensorTable(x.to(device))},
        y=dataset.labels.to(device),
    )


def _symmetric(settings: PlantedPartition, name: str, meta: dict[str, Any]) -> Dataset:
    half = planted_partition(replace(settings, symmetric=False, num_edges=settings.num_edges // 2))
    both = from_edges(half.graph.edge_index(), num_nodes=settings.num_nodes, symmetrize=True)
    return replace(half, name=name, graph=both.graph, meta=meta)


def _write(settings: PlantedPartition, name: str, folder: str | os.PathLike[str], meta: dict[str, Any]) -> None:
    with FolderWriter(folder) as out, progress(f"making {name}", settings.num_edges, "edges") as bar:
        for number, chunk in enumerate(_chunks(settings)):
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


def _chunks(settings: PlantedPartition) -> Iterator[dict[str, Tensor]]:
    """All arrays of the dataset, a range of nodes at a time, by the names they have in a folder."""
    total = 0
    for first in range(0, settings.num_nodes, CHUNK_NODES):
        count = min(CHUNK_NODES, settings.num_nodes - first)
        chunk = _chunk(settings, first, count, total)
        total = int(chunk["indptr"][-1])
        yield chunk
    assert total == settings.num_edges, (total, settings.num_edges)


def _chunk(settings: PlantedPartition, first: int, count: int, num_edges_before: int) -> dict[str, Tensor]:
    from hopline.ops.cpu import synthetic as kernels
    from hopline.ops.cpu.runtime import over_ranges

    n, classes = settings.num_nodes, settings.num_classes
    rank_key, edge_key, feature_key, split_key = (np.uint64(key % 2**64) for key in _keys(settings))
    half = np.uint64(_half_bits(n))
    ranks, places, degrees = (np.empty(count, dtype=np.int64) for _ in range(3))
    rows = np.empty((count, settings.num_features), dtype=np.float32)
    means = _class_means(settings)

    def per_node(a: int, b: int) -> None:
        kernels.fill_ranks(first + a, rank_key, half, n, ranks[a:b])
        kernels.fill_ranks(first + a, split_key, half, n, places[a:b])
        kernels.fill_degrees(ranks[a:b], n, settings.num_edges, TAIL, CUT, FLOOR, degrees[a:b])
        kernels.fill_features(first + a, ranks[a:b] % classes, means, 1.0, feature_key, rows[a:b])

    over_ranges(per_node, count, rows.size)
    indptr = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(degrees, out=indptr[1:])
    sources = torch.empty(int(indptr[-1]), dtype=index_dtype(n))
    out = sources.numpy()

    def per_edge(a: int, b: int) -> None:
        kernels.fill_sources(
            first + a, ranks[a:b], indptr[a : b + 1], rank_key, edge_key, half, n, classes,
            settings.homophily, out[indptr[a] : indptr[b]],
        )  # fmt: skip

    over_ranges(per_edge, count, sources.numel())
    ends = torch.from_numpy(indptr) + num_edges_before
    chunk = {
        "indptr": ends if first == 0 else ends[1:],
        "indices": sources,
        "table.x": torch.from_numpy(rows).to(DTYPES[settings.dtype]),
        "y": torch.from_numpy(ranks % classes),
    }
    return chunk | _splits(settings, first, torch.from_numpy(places))


def make_on(device: torch.device, settings: PlantedPartition) -> dict[str, Tensor]:
    """The arrays that all chunks together have, made by the kernels of `ops.gpu.synthetic` on their device."""
    from hopline.ops.gpu import synthetic as kernels

    n, half = settings.num_nodes, _half_bits(settings.num_nodes)
    rank_key, edge_key, feature_key, split_key = _keys(settings)
    with torch.cuda.device(device if device.type == "cuda" else -1):  # Triton launches on the current one
        ranks = kernels.ranks(0, n, rank_key, half, n, device)
        indptr = torch.zeros(n + 1, dtype=torch.int64, device=device)
        torch.index_select(_degrees_by_rank(settings).to(device), 0, ranks, out=indptr[1:])
        indptr[1:].cumsum_(0)
        sources = kernels.sources(
            indptr, ranks, rank_key, edge_key, half, settings.num_classes, settings.homophily, index_dtype(n)
        )
        assert sources.numel() == settings.num_edges, (sources.numel(), settings.num_edges)
        y = ranks.remainder_(settings.num_classes)
        means = torch.from_numpy(_class_means(settings)).to(device)
        rows = kernels.features(y, means, feature_key, DTYPES[settings.dtype])
        splits = []
        for first in range(0, n, DEVICE_CHUNK_NODES):
            count = min(DEVICE_CHUNK_NODES, n - first)
            splits.append(_splits(settings, first, kernels.ranks(first, count, split_key, half, n, device)))
    return {"indptr": indptr, "indices": sources, "table.x": rows, "y": y, **_joined(splits)}


def _degrees_by_rank(settings: PlantedPartition) -> Tensor:
    """[num_nodes] int64, on the CPU: float64 powers may differ in their last bit elsewhere."""
    from hopline.ops.cpu import synthetic as kernels
    from hopline.ops.cpu.runtime import over_ranges

    n = settings.num_nodes
    degrees = np.empty(n, dtype=np.int64)

    def fill(a: int, b: int) -> None:
        kernels.fill_degrees(np.arange(a, b), n, settings.num_edges, TAIL, CUT, FLOOR, degrees[a:b])

    over_ranges(fill, n, n)
    return torch.from_numpy(degrees)


def _splits(settings: PlantedPartition, first: int, places: Tensor) -> dict[str, Tensor]:
    """Which of the nodes from `first` on are in each split, by their places in the splits' keyed order; on the CPU."""
    splits, low = {}, 0
    for name, size in zip(("train", "valid", "test"), settings.split_sizes, strict=True):
        chosen = (places >= low) & (places < low + size)
        splits[f"split.0.{name}"] = chosen.nonzero().view(-1).cpu() + first
        low += size
    return splits


def _keys(settings: PlantedPartition) -> list[int]:
    """The keys of the ranks, the edges, the features and the splits."""
    return [derive_key(settings.seed, purpose) for purpose in range(4)]


def _half_bits(num_nodes: int) -> int:
    """Half the width of the numbers that the keyed order shuffles: 4**half >= num_nodes."""
    return max(1, -(-(num_nodes - 1).bit_length() // 2))


def _class_means(settings: PlantedPartition) -> np.ndarray:
    """[num_classes, num_features]: a random direction per class, of the settings' length."""
    generator = torch.Generator().manual_seed(derive_key(settings.seed, 4) % 2**63)
    means = torch.randn(settings.num_classes, settings.num_features, generator=generator)
    return (settings.signal * means / means.norm(dim=1, keepdim=True)).numpy()
