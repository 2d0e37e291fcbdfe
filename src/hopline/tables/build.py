"""`table`: one call that puts rows where they are read fastest."""

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
from hopline.tables.base import Table
from hopline.tables.cache import CachedTable
from hopline.tables.hot_rows import access_probability, hottest, out_degrees
from hopline.tables.memory import TensorTable
from hopline.tables.tiered import TieredTable
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
    """Make a table of rows in tiers: the hottest rows on the device, the rest where they are.

    Rows in memory are pinned where they lie, not copied.

    Args:
        x: [num_nodes, ...] rows: a tensor, an array (which may be a memory map), the path of an .npy file, or a table.
        device_cache: How much of them the device keeps: "0.1G", "200M", bytes, "20%" or "all".
        host_cache: For rows in a file. "2G" keeps as many of the next hottest in RAM, "all" copies the file into RAM.
        order: Which rows are hot. "degree": those that are the source of most edges; needs graph. "access": those that
            a batch most probably reads; needs graph, fanouts and train_ids. "observed": those that were read most in
            the first epoch (until then by degree, if there is a graph). Or ids, the hottest first.
        device: Where the cache is. Default: a GPU if there is one.
        devices: GPUs of several processes, such as [0, 1], to each of which the table will be sent. The rows are put
            into memory that they share, and each fills a cache of its own.
        graph: Of `order`.
        fanouts: In-edges drawn per node and layer, the seeds' own first; of order="access".
        train_ids: [n] int64 training nodes; of order="access".
        batch_size: Seeds per batch; of order="access".

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
        below.share_arrays("rows")  # now: pinned memory cannot move
    num_rows, row_bytes = len(below), _row_bytes(below)
    num_device = _num_rows("device_cache", device_cache, num_rows, row_bytes)
    num_host = 0 if host_cache in (None, "all") else _num_rows("host_cache", host_cache, num_rows, row_bytes)
    num_host = min(num_host, num_rows - num_device)
    if num_device == num_rows:
        return TieredTable(below, None, target)
    ids = _hottest(order, num_device + num_host, num_rows, graph, fanouts, train_ids, batch_size)
    if host_cache not in (None, "all"):
        below = CachedTable(below, ids[num_device:], counter="rows.host")
    storage = below.storage()
    if target.type == "cuda" and storage is not None:
        pinned.pin(storage)  # now, so that one hears of it here if it cannot be
    return TieredTable(below, ids[:num_device].clone(), target, observe=order_is(order, "observed"))


def order_is(order: str | Tensor, name: str) -> bool:
    return isinstance(order, str) and order == name


def check_cuda(device: torch.device) -> None:
    """Refuse a GPU that is not there."""
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but there is no CUDA device here: use device='cpu'")
    if device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={str(device)!r}, but there are {count} GPUs here: choose from 0 to {count - 1}")


def _device(device: Any, devices: Sequence[Any] | None) -> torch.device:
    if devices is not None and not devices:
        raise ValueError("devices is empty: name the GPUs, for example devices=[0, 1]")
    if device is not None and devices is not None:
        raise ValueError("give device= or devices=, not both")
    named = [_one_device(d) for d in devices or ([] if device is None else [device])]
    for one in named:
        check_cuda(one)
    if len({one.type for one in named}) > 1:
        raise ValueError(f"devices={list(devices or [])} are of several kinds: name GPUs only, or ['cpu']")
    if len(named) == 1:
        return named[0]
    if named:
        return torch.device(named[0].type)  # of several, the one on which rows are first asked for
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _one_device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _as_table(x: Any) -> Table:
    if isinstance(x, Table):
        return x
    if isinstance(x, str | os.PathLike):
        if not Path(x).is_file():
            raise ValueError(f"there is no file {x}: give the path of an .npy file, or the rows themselves")
        x = np.load(x, mmap_mode="r", allow_pickle=False)
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
    storage = below.storage()
    return below.read(torch.arange(len(below))) if storage is None else storage.clone()


def _row_bytes(below: Table) -> int:
    return max(1, int(np.prod(below.shape[1:])) * below.dtype.itemsize)


def _num_rows(name: str, size: str | int | None, num_rows: int, row_bytes: int) -> int:
    """How many rows a size has room for."""
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
    """[count] int64 on the host: the rows to keep near, the hottest first."""
    if not isinstance(order, str):
        ids = torch.as_tensor(order).cpu().long()
        if ids.unique().numel() != ids.numel() or (
            ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows
        ):
            raise ValueError(f"order must name rows 0 .. {num_rows - 1}, each at most once")
        return ids[:count]
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: choose one of {', '.join(ORDERS)}, or give ids, the hottest first")
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
