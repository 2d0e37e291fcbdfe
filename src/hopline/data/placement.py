"""Where a dataset lies while a GPU trains on it: on the device, pinned on the host and read from there, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.data.placement_settings import Placement
from hopline.device import pinned
from hopline.device.meter import free_bytes, with_index
from hopline.tables import SparseTable, Table, TieredTable
from hopline.tables.build import check_cuda, table
from hopline.util.config import format_size, parse_size

SHARE = 0.8
"""The part of the free device memory that data may take; the rest is for the model and its batches."""
HOST_SHARE = 0.7
"""The part of the free host memory that rows of a file may take."""
MAIN = "x"
"""The table that models read, whose place is planned; others go to the device where there is room left."""


@dataclass(frozen=True, kw_only=True)
class DataBytes:
    """Bytes of the parts of a dataset."""

    graph: int
    indptr: int
    """The part of the graph that is on the device also where its edges are pinned."""
    features: int
    hot_slots: int
    """What the device keeps beside cached rows: where each row is."""
    labels: int
    can_cache: bool = True
    """Whether rows can be cached one by one; those of a sparse table cannot."""

    @classmethod
    def of(cls, data: Dataset) -> DataBytes:
        x = data.tables.get(MAIN)
        return cls(
            graph=data.graph.num_bytes,
            indptr=data.graph.indptr.nbytes,
            features=0 if x is None else _all_bytes(x),
            hot_slots=4 * data.num_nodes,
            labels=0 if data.y is None else data.y.nbytes,
            can_cache=not isinstance(x, SparseTable),
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A placement with every "auto" replaced."""

    graph: Literal["device", "pinned", "host"]
    features: Literal["device", "pinned", "host"]
    cache: int
    """Bytes of pinned features that are cached on the device."""
    labels: bool
    """Whether the labels are on the device."""
    room: int
    """Bytes that are left for other tables."""


def make_layout(sizes: DataBytes, free: int, placement: Placement) -> Layout:
    """What goes where on a device with `free` bytes: the graph first, which is read more often than any row."""
    room = int(SHARE * free)
    graph = placement.graph
    if graph == "auto":
        graph = "device" if sizes.graph <= room else "pinned"
    room -= _taken("graph", {"device": sizes.graph, "pinned": sizes.indptr, "host": 0}[graph], room, free)
    labels = sizes.labels <= room
    room -= sizes.labels if labels else 0
    features = placement.features
    if features == "auto":
        fits = sizes.features <= room and placement.cache == "auto"
        features = "device" if fits else "pinned" if sizes.can_cache else "host"
    cache = 0
    if features == "device":
        room -= _taken("features", sizes.features, room, free)
    elif features == "pinned" and placement.cache == "auto":
        cache = max(0, room - sizes.hot_slots)
        room = 0
    elif features == "pinned":
        cache = parse_size(placement.cache)
        room -= _taken("cache", min(cache, sizes.features) + sizes.hot_slots, room, free)
    return Layout(graph=graph, features=features, cache=cache, labels=labels, room=max(0, room))


def _taken(what: str, needed: int, room: int, free: int) -> int:
    if needed > max(room, free):
        raise ValueError(
            f"{what} needs {format_size(needed)} on the device, which has {format_size(free)} free: "
            f"{'make it smaller' if what == 'cache' else f'set {what}=pinned'}, or leave it at auto"
        )
    return needed


def place(
    data: Dataset,
    placement: Placement = Placement(),
    device: torch.device | str = "cuda",
    *,
    fanouts: Sequence[int] | None = None,
    train_ids: Tensor | None = None,
    batch_size: int = 1024,
) -> Dataset:
    """The same dataset, lying where the placement says; on the CPU, the dataset itself. `describe` tells what is where.

    fanouts, train_ids, batch_size: how it will be sampled, from which follows which rows are worth a cache.
    """
    target = torch.device(device)
    if target.type != "cuda":
        return data
    check_cuda(target)
    target = with_index(target)
    layout = make_layout(DataBytes.of(data), free_bytes(target), placement)
    train_ids = data.splits.get("train") if train_ids is None else train_ids
    return carry_out(data, layout, target, fanouts, train_ids, batch_size)


def carry_out(
    data: Dataset,
    layout: Layout,
    device: torch.device,
    fanouts: Sequence[int] | None = None,
    train_ids: Tensor | None = None,
    batch_size: int = 1024,
) -> Dataset:
    """The dataset as the layout has it."""
    graph = data.graph
    if layout.graph != "host":
        graph = graph.to(device) if layout.graph == "device" else graph.pinned(device, copy=True)
    # Of the three orders that `table` knows, "access" had the best hit rates (docs/gpu.md). It follows from how the
    # graph is sampled.
    order = "degree" if fanouts is None or train_ids is None else "access"

    def cached(x: Table) -> Table:
        return table(
            x,
            device_cache=layout.cache,
            host_cache=_host_cache(x, device),
            order=order,
            device=device,
            graph=graph,
            fanouts=fanouts,
            train_ids=train_ids,
            batch_size=batch_size,
        )

    tables, room = dict(data.tables), layout.room
    for name, rows in data.tables.items():
        if name == MAIN and layout.features == "pinned" and not isinstance(rows, SparseTable):
            tables[name] = cached(rows)
        elif (layout.features == "device") if name == MAIN else (_all_bytes(rows) <= room):
            tables[name] = _on_device(rows, device)
            room -= 0 if name == MAIN else _all_bytes(rows)
    y = data.y.to(device) if data.y is not None and layout.labels else data.y
    return replace(data, graph=graph, tables=tables, y=y)


def _on_device(rows: Table, device: torch.device) -> Table:
    if isinstance(rows, SparseTable):
        return rows.to(device)
    moved = table(rows, device_cache="all", device=device)
    moved.tiers()  # now, and not in the first step
    return moved


def _host_cache(x: Table, device: torch.device) -> str | int | None:
    """How rows come to lie in memory that the device reads: as they are, copied, or as many as there is room for."""
    storage = x.storage()
    if device.type != "cuda" or (storage is not None and pinned.register(storage) is None):
        return None
    free = int(HOST_SHARE * psutil.virtual_memory().available)
    return "all" if _all_bytes(x) <= free else free


def _all_bytes(rows: Table) -> int:
    """Bytes of all rows, also where the table keeps a part of them only."""
    if isinstance(rows, SparseTable):
        return rows.num_bytes
    return torch.Size(rows.shape).numel() * rows.dtype.itemsize


def describe(data: Dataset) -> str:
    """One line that says where the graph, the features and the labels are."""
    parts = [f"graph {format_size(data.graph.num_bytes)} {_where_graph(data.graph)}"]
    parts += [f"{name} {format_size(_all_bytes(rows))} {_where(rows)}" for name, rows in data.tables.items()]
    if data.y is not None:
        parts.append(f"labels {format_size(data.y.nbytes)} {_on(data.y)}")
    return "; ".join(parts)


def _on(tensor: Tensor) -> str:
    return "on the host" if tensor.device.type == "cpu" else f"on {tensor.device}"


def _where_graph(graph: Graph) -> str:
    return f"pinned for {graph.device}" if graph.is_pinned else _on(graph.indices)


def _where(rows: Table) -> str:
    if isinstance(rows, SparseTable):
        return _on(rows.values)
    if not isinstance(rows, TieredTable):
        storage = rows.storage()
        return "on the host" if storage is None else _on(storage)
    if rows.num_hot == len(rows):
        return f"on {rows.device}"
    kind = "pinned" if rows.below.storage() is not None else "behind a cache on the host"
    share = 100 * rows.num_hot / max(1, len(rows))
    return f"{kind}, with {format_size(rows.num_hot * rows.row_bytes)} ({share:.0f}% of the rows) on {rows.device}"
