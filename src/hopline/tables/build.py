"""`table`: one call that builds a table in tiers.

    device_cache    hottest rows, on the device         TieredTable
    host_cache      next hottest rows, in RAM           CachedTable, only for rows in a file
    all rows        in memory, or a mapped file         TensorTable

For a GPU without a RAM cache, all rows are pinned where they lie, and the GPU reads cold rows by zero-copy.
With a RAM cache, the host reads the cold rows. `below` is the table under the copies of hot rows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.device import pinned
from hopline.device.meter import find_device
from hopline.tables.base import Table
from hopline.tables.gpu_cache import TieredTable
from hopline.tables.hot_rows import access_probability, hottest, out_degrees
from hopline.tables.memory import TensorTable
from hopline.tables.ram_cache import CachedTable
from hopline.util.config import parse_size

ORDERS = ("degree", "access", "observed")


def table(
    x: Table | Tensor | np.ndarray | str | os.PathLike[str],
    *,
    device_cache: str | int = 0,
    host_cache: str | int | None = None,
    order: Literal["degree", "access", "observed"] | Tensor = "degree",
    device: torch.device | str | int | None = None,
    devices: Sequence[torch.device | str | int] | None = None,
    graph: Graph | None = None,
    fanouts: Sequence[int] | None = None,
    train_ids: Tensor | None = None,
    batch_size: int = 1024,
) -> TieredTable:
    """Make a table in tiers: copies of the hottest rows on the device, all rows where they are.

    Rows in memory are pinned where they lie, not copied.

    Args:
        x: [num_nodes, ...]: the rows, as a tensor, an array (which may be a memory map), the path of an
            .npy file, or a table.
        device_cache: Size of the copies on the device: "0.1G", "200M", bytes, "20%" or "all".
        host_cache: Size of a cache in RAM for rows in a file, such as "2G". It holds the rows that are
            hottest after those of the device. "all" copies the whole file into RAM.
        order: Which rows are hot. "degree": those that are the source of most edges; needs graph. "access":
            those that a batch most probably reads; needs graph, fanouts and train_ids. "observed": those
            that were read most in the first epoch (until then by degree, if there is a graph). Or ids, the
            hottest first.
        device: The device of the copies. Default: a GPU if there is one.
        devices: GPUs of several processes, such as [0, 1], if the table will be sent to each process. The
            rows are put into memory that the processes share, and each process fills copies of its own.
        graph: The graph, for `order`.
        fanouts: In-edges drawn per node and layer, the seeds' layer first. For order="access".
        train_ids: [n] int64: the training nodes. For order="access".
        batch_size: Seeds per batch. For order="access".

    Returns:
        A table of the shape and dtype of `x`, to be used as tables={"x": ...} of a dataset.

    Raises:
        ValueError: A size, an order or a device does not exist, or what `order` needs is missing.

    Example:
        >>> rows = hl.table(torch.eye(4), device_cache="50%", order=torch.tensor([2, 0]), device="cpu")
        >>> rows.num_hot
        2
        >>> rows[torch.tensor([3])].tolist()
        [[0.0, 0.0, 0.0, 1.0]]
    """
    target = _device(device, devices)
    below = _as_table(x)
    if host_cache == "all":
        below = TensorTable(_in_memory(below))
    if devices is not None and len(devices) > 1 and isinstance(below, TensorTable):
        below.share_arrays("rows")  # moves the rows, so before they are pinned
    num_rows = len(below)
    row_bytes = _row_bytes(below)
    num_device_rows = _num_rows("device_cache", device_cache, num_rows, row_bytes)
    has_host_cache = host_cache not in (None, "all")
    num_host_rows = _num_rows("host_cache", host_cache, num_rows, row_bytes) if has_host_cache else 0
    num_host_rows = min(num_host_rows, num_rows - num_device_rows)
    if num_device_rows == num_rows:
        return TieredTable(below, hot_ids=None, device=target)
    ids = _hottest(order, num_device_rows + num_host_rows, num_rows, graph, fanouts, train_ids, batch_size)
    if has_host_cache:
        below = CachedTable(below, ids[num_device_rows:], counter="rows.host")
    storage = below.storage()
    if target.type == "cuda" and storage is not None:
        pinned.pin(storage)  # at once, so that a failure shows here and not at the first read
    # `order` may be a tensor of ids, which must not be compared with a string.
    observe = isinstance(order, str) and order == "observed"
    # A copy, because the ids may be the user's tensor.
    return TieredTable(below, ids[:num_device_rows].clone(), target, observe=observe)


def _device(device: Any, devices: Sequence[Any] | None) -> torch.device:
    """The device of the table's copies, from the arguments `device` and `devices` of `table`."""
    if devices is not None and not devices:
        raise ValueError("devices is empty: name the GPUs, for example devices=[0, 1]")
    if device is not None and devices is not None:
        raise ValueError("give device= or devices=, not both")
    names = devices or ([] if device is None else [device])
    targets = [find_device(f"cuda:{name}" if isinstance(name, int) else str(name)) for name in names]
    if len({target.type for target in targets}) > 1:
        raise ValueError(f"devices={list(devices or [])} are of several kinds: name GPUs only, or ['cpu']")
    if len(targets) == 1:
        return targets[0]
    if targets:
        return torch.device(targets[0].type)  # without an index: each process reads on its own GPU
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _as_table(x: Any) -> Table:
    """The rows `x` as a table, without a copy. A file is mapped."""
    if isinstance(x, Table):
        return x
    if isinstance(x, str | os.PathLike):
        if not Path(x).is_file():
            raise ValueError(f"there is no file {x}: give the path of an .npy file, or the rows themselves")
        x = np.load(x, mmap_mode="r", allow_pickle=False)
    # torch cannot mark a tensor as read-only and warns instead. The table refuses writes itself.
    read_only = isinstance(x, np.ndarray) and not x.flags.writeable
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        rows = torch.as_tensor(x)
    if rows.device.type != "cpu":
        raise ValueError(f"the rows are on {rows.device} already: use hl.extend.TensorTable(x), or pass x.cpu()")
    if rows.dim() < 1:
        raise ValueError("a table needs rows: give an array with one row per node")
    return TensorTable(rows.contiguous(), read_only=read_only)


def _in_memory(below: Table) -> Tensor:
    """[num_rows, ...]: a copy of all rows in memory."""
    storage = below.storage()
    return below.read(torch.arange(len(below))) if storage is None else storage.clone()


def _row_bytes(below: Table) -> int:
    """Bytes of a row; at least 1, so that it can be divided by."""
    return max(1, int(np.prod(below.shape[1:])) * below.dtype.itemsize)


def _num_rows(name: str, size: str | int | None, num_rows: int, row_bytes: int) -> int:
    """The number of rows that fit into a size. name: the argument, for the error message."""
    text = str(size).strip().lower()
    try:
        if text == "all":
            return num_rows
        if text.endswith("%"):
            return int(num_rows * min(100.0, max(0.0, float(text[:-1]))) / 100)
        return min(num_rows, parse_size(size if isinstance(size, int) else text) // row_bytes)
    except ValueError:
        raise ValueError(
            f"{name}={size!r} is not a size: write it as '0.1G', '200M', '3GB', '20%', 'all' or bytes"
        ) from None


def _hottest(
    order: str | Tensor,
    count: int,
    num_rows: int,
    graph: Graph | None,
    fanouts: Sequence[int] | None,
    train_ids: Tensor | None,
    batch_size: int,
) -> Tensor:
    """[count] int64 on the host: ids of the hottest rows, the hottest first. Fewer if `order` names fewer."""
    if not isinstance(order, str):
        ids = torch.as_tensor(order).cpu().long()
        is_distinct = ids.unique().numel() == ids.numel()
        is_in_range = not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < num_rows
        if not is_distinct or not is_in_range:
            raise ValueError(f"order must name rows 0 .. {num_rows - 1}, each at most once")
        return ids[:count]
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: choose one of {', '.join(ORDERS)}, or give ids, the hottest first")
    # Without a graph, nothing is known before the first epoch: any rows will do.
    if not count or (order == "observed" and graph is None):
        return torch.arange(count)
    if graph is None:
        raise ValueError(f"order={order!r} needs the graph: pass graph=data.graph, or use order='observed'")
    if graph.num_nodes != num_rows:
        raise ValueError(
            f"the table has {num_rows} rows for the {graph.num_nodes} nodes of the graph: give the right one"
        )
    if order != "access":
        return hottest(out_degrees(graph), count).cpu()
    if fanouts is None or train_ids is None:
        raise ValueError(
            "order='access' needs fanouts and train_ids: pass fanouts=(15, 10, 5), train_ids=splits['train']"
        )
    return hottest(access_probability(graph, fanouts, train_ids, batch_size), count).cpu()
