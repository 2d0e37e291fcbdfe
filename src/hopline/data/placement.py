"""`place`: puts a dataset on the device, in pinned host memory or on the host, by the free device memory.

    DataBytes.of     how large graph, features and labels are
    make_layout      decides what goes where, within `SHARE` of the free device memory
    apply_layout     copies and pins

Device memory goes to the graph first, which is read more often than any row, then to labels, then to
features. Features that do not fit are pinned, and the GPU reads them by zero-copy. Copies of the rows that
batches read most fill the device memory that is left (`tables.TieredTable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.data.placement_settings import Placement
from hopline.device import pinned
from hopline.device.meter import find_device, free_bytes, with_index
from hopline.tables import SparseTable, Table, TieredTable
from hopline.tables.build import table as make_table
from hopline.util.config import format_size, parse_size
from hopline.util.host import host_memory

SHARE = 0.8
"""Share of the free device memory that data may take. The rest is for model and batches."""
HOST_SHARE = 0.7
"""Share of the free host memory that copies of rows may take."""
MAIN = "x"
"""The table that models read, whose place is planned. Other tables go to the device if there is memory left."""


@dataclass(frozen=True, kw_only=True)
class DataBytes:
    """Bytes of the parts of a dataset."""

    graph: int
    """Bytes of the whole graph, `indptr` included."""
    indptr: int
    """Bytes of `indptr`, which is on the device even if the edges are pinned."""
    features: int
    hot_slots: int
    """Bytes of the index of a cache: for each node an int32 on the device, its row in the cache or -1."""
    labels: int
    can_cache: bool = True
    """Whether rows of "x" can be cached one by one. Those of a sparse table cannot."""

    @classmethod
    def of(cls, data: Dataset) -> DataBytes:
        """The sizes of a dataset, whatever place its arrays are in."""
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
    """Where the parts of a dataset lie: a `Placement` with every "auto" decided."""

    graph: Literal["device", "pinned", "host"]
    """Place of the edges. With "pinned", `indptr` is on the device."""
    features: Literal["device", "pinned", "host"]
    cache: int
    """Bytes of pinned rows that are copied to the device."""
    labels: bool
    spare_bytes: int
    """Bytes of device memory that other tables may take."""


def make_layout(sizes: DataBytes, device_free_bytes: int, placement: Placement) -> Layout:
    """Decide where graph, labels and features lie, on a device with `device_free_bytes` free.

    A part that the user has placed on the device may exceed `SHARE`, but not the free memory.
    """
    spare_bytes = int(SHARE * device_free_bytes)

    graph = placement.graph
    if graph == "auto":
        graph = "device" if sizes.graph <= spare_bytes else "pinned"
    graph_bytes = {"device": sizes.graph, "pinned": sizes.indptr, "host": 0}[graph]
    # If even `indptr` does not fit, "auto" is no advice: it takes "pinned" too.
    advice = "set graph=pinned, or leave it at auto" if graph == "device" else "set graph=host"
    _check_fits("graph", graph_bytes, device_free_bytes, advice=advice)
    spare_bytes -= graph_bytes

    labels = sizes.labels <= spare_bytes
    if labels:
        spare_bytes -= sizes.labels

    features = placement.features
    if features == "auto":
        # A user who sets the size of the cache wants pinned features.
        if sizes.features <= spare_bytes and placement.cache == "auto":
            features = "device"
        else:
            features = "pinned" if sizes.can_cache else "host"

    cache = 0
    if features == "device":
        advice = "set features=pinned, or leave it at auto"
        _check_fits("features", sizes.features, device_free_bytes, advice=advice)
        spare_bytes -= sizes.features
    elif features == "pinned" and placement.cache == "auto":
        cache = max(0, spare_bytes - sizes.hot_slots)
        spare_bytes = 0
    elif features == "pinned":
        cache = parse_size(placement.cache)
        cache_bytes = min(cache, sizes.features) + sizes.hot_slots
        _check_fits("cache", cache_bytes, device_free_bytes, advice="make it smaller, or leave it at auto")
        spare_bytes -= cache_bytes
    return Layout(graph=graph, features=features, cache=cache, labels=labels, spare_bytes=max(0, spare_bytes))


def _check_fits(setting: str, needed_bytes: int, device_free_bytes: int, *, advice: str) -> None:
    if needed_bytes > device_free_bytes:
        raise ValueError(
            f"{setting} needs {format_size(needed_bytes)} on the device, which has {format_size(device_free_bytes)} "
            f"free: {advice}"
        )


def place(
    data: Dataset,
    placement: Placement = Placement(),
    device: torch.device | str = "cuda",
    *,
    fanouts: Sequence[int] | None = None,
    train_ids: Tensor | None = None,
    batch_size: int = 1024,
) -> Dataset:
    """A dataset whose arrays lie where the placement says. For the CPU it is the dataset itself.

    fanouts, train_ids, batch_size: How batches will be sampled, by which the rows to cache are chosen.
        Default of `train_ids`: the training split.
    """
    target = torch.device(device)
    if target.type != "cuda":
        return data
    target = with_index(find_device(str(target)))
    layout = make_layout(DataBytes.of(data), free_bytes(target), placement)
    train_ids = data.splits.get("train") if train_ids is None else train_ids
    return apply_layout(data, layout, target, fanouts, train_ids, batch_size)


def apply_layout(
    data: Dataset,
    layout: Layout,
    device: torch.device,
    fanouts: Sequence[int] | None = None,
    train_ids: Tensor | None = None,
    batch_size: int = 1024,
) -> Dataset:
    """A dataset whose arrays lie where `layout` says. Arrays that need not move are shared with `data`.

    fanouts, train_ids, batch_size: as in `place`.
    """
    graph = data.graph
    if layout.graph != "host":
        graph = graph.to(device) if layout.graph == "device" else graph.pinned(device, copy=True)
    # Of the three orders of `make_table`, "access" had the best hit rates (docs/measurements/gpu.md). It must
    # know how batches are sampled.
    order = "degree" if fanouts is None or train_ids is None else "access"

    tables = dict(data.tables)
    spare_bytes = layout.spare_bytes
    for name, table in data.tables.items():
        if name != MAIN:
            if _all_bytes(table) <= spare_bytes:
                tables[name] = _copy_to_device(table, device)
                spare_bytes -= _all_bytes(table)
        elif layout.features == "device":
            tables[name] = _copy_to_device(table, device)
        elif layout.features == "pinned" and not isinstance(table, SparseTable):
            tables[name] = make_table(
                table,
                device_cache=layout.cache,
                host_cache=_host_cache(table, device),
                order=order,
                device=device,
                graph=graph,
                fanouts=fanouts,
                train_ids=train_ids,
                batch_size=batch_size,
            )

    y = data.y.to(device) if data.y is not None and layout.labels else data.y
    return replace(data, graph=graph, tables=tables, y=y)


def _copy_to_device(table: Table, device: torch.device) -> Table:
    if isinstance(table, SparseTable):
        return table.to(device)
    copy = make_table(table, device_cache="all", device=device)
    copy.tiers()  # copies the rows now, not in the first step
    return copy


def _host_cache(x: Table, device: torch.device) -> str | int | None:
    """`host_cache` of `make_table`: how rows get into host memory that the device can read.

    None if they can stay: on a CPU, or if their memory could be pinned. "all" copies all rows into memory.
    If they do not fit into `HOST_SHARE` of the free memory, it is the bytes of a cache.
    """
    if device.type != "cuda":
        return None
    storage = x.storage()
    # `register` pins the memory. If it cannot, it returns the reason.
    if storage is not None and pinned.register(storage) is None:
        return None
    max_bytes = int(HOST_SHARE * host_memory().available)
    return "all" if _all_bytes(x) <= max_bytes else max_bytes


def _all_bytes(table: Table) -> int:
    """Bytes of all rows, even if the table itself holds copies of some rows only."""
    if isinstance(table, SparseTable):
        return table.num_bytes
    return torch.Size(table.shape).numel() * table.dtype.itemsize


def describe(data: Dataset) -> str:
    """A line that says where the graph, all tables and the labels are, with their sizes."""
    parts = [f"graph {format_size(data.graph.num_bytes)} {_graph_location(data.graph)}"]
    for name, table in data.tables.items():
        parts.append(f"{name} {format_size(_all_bytes(table))} {_table_location(table)}")
    if data.y is not None:
        parts.append(f"labels {format_size(data.y.nbytes)} {_tensor_location(data.y)}")
    return "; ".join(parts)


def _tensor_location(tensor: Tensor) -> str:
    return "on the host" if tensor.device.type == "cpu" else f"on {tensor.device}"


def _graph_location(graph: Graph) -> str:
    return f"pinned for {graph.device}" if graph.is_pinned else _tensor_location(graph.indices)


def _table_location(table: Table) -> str:
    """Words for the place of a table's rows, with the share that is cached on a device."""
    if isinstance(table, SparseTable):
        return _tensor_location(table.values)
    if not isinstance(table, TieredTable):
        storage = table.storage()
        return "on the host" if storage is None else _tensor_location(storage)
    if table.num_hot == len(table):
        return f"on {table.device}"
    # `below` holds all rows in one pinned tensor, or is a cache on the host, which has no single tensor.
    kind = "pinned" if table.below.storage() is not None else "behind a cache on the host"
    share = 100 * table.num_hot / max(1, len(table))
    return f"{kind}, with {format_size(table.num_hot * table.row_bytes)} ({share:.0f}% of the rows) on {table.device}"
