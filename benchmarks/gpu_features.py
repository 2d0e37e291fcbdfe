"""Sections of `gpu.py`: reading rows from the device and from pinned memory, and epochs with a part of them cached."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
from gpu_lab import FANOUTS, Lab, batch_size, sage, seconds_per_call, timed_epochs
from torch import Tensor

import hopline as hl
from hopline import ops
from hopline.device import pinned
from hopline.ops.gather_tiers import gather_tiers
from hopline.tables.hot_rows import access_probability, hottest, out_degrees

NUM_ROWS, WIDTH = 4_000_000, 128
SHARES = (1.0, 0.2, 0.05, 0.0)
"""Shares of the rows that are cached on the device."""


def gather(lab: Lab) -> None:
    """Rows of 256 bytes beside plain copies of as many."""
    lab.attempt("gather on the device", partial(_device_gather, lab))
    lab.attempt("gather from pinned memory", partial(_pinned_gather, lab))


def _num_rows(lab: Lab) -> int:
    return NUM_ROWS if lab.on_gpu else 20_000


def _device_gather(lab: Lab) -> None:
    num, repeats = _num_rows(lab), 20 if lab.on_gpu else 2
    rows = torch.randn(num, WIDTH, device=lab.device, dtype=torch.bfloat16)
    ids = torch.randint(num, (num,), device=lab.device)
    other = torch.empty_like(rows)
    moved = 2 * rows.nbytes / 1e9  # read and written
    copied = moved / seconds_per_call(lab, lambda: other.copy_(rows), repeats)
    gathered = moved / seconds_per_call(lab, lambda: ops.gather_rows(rows, ids), repeats)
    lab.row("device copy", copied, "GB/s", note="bytes read and written")
    lab.row(
        "device gather", gathered, "GB/s", 0.7 * copied, at_least=True, note=f"{100 * gathered / copied:.0f}% of it"
    )


def _pinned_gather(lab: Lab) -> None:
    num, repeats = _num_rows(lab), 5 if lab.on_gpu else 2
    rows = torch.randn(num, WIDTH).bfloat16()
    if lab.on_gpu:
        pinned.pin(rows)
    there = torch.empty_like(rows, device=lab.device)
    copied = rows.nbytes / 1e9 / seconds_per_call(lab, lambda: there.copy_(rows, non_blocking=True), repeats)
    lab.row("copy from pinned memory", copied, "GB/s")
    shuffled = torch.randperm(num, device=lab.device)[: num // 10]
    hot = torch.empty(0, WIDTH, dtype=rows.dtype, device=lab.device)
    hot_slot = torch.full((num,), -1, dtype=torch.int32, device=lab.device)
    size = shuffled.numel() * rows[0].nbytes / 1e9

    def rate(ids: Tensor) -> float:
        return size / seconds_per_call(lab, lambda: gather_tiers(hot, rows, hot_slot, ids), 4 * repeats)

    name = "gather of a tenth of the rows from pinned memory"
    lab.row(f"{name}, sorted", rate(shuffled.sort().values), "GB/s", 45.0, at_least=True)
    lab.row(f"{name}, in no order", rate(shuffled), "GB/s")
    table = hl.table(rows, device_cache=0, device=lab.device)
    sorting = size / seconds_per_call(lab, lambda: table.read(shuffled), 4 * repeats)
    lab.row(f"{name}, by hl.table", sorting, "GB/s", note="in no order, sorted as it is read")


# ---- epochs with cached features


def cache(lab: Lab) -> None:
    """papers100m-shaped with its features in pinned host memory."""
    lab.attempt("features in host memory", partial(_cache, lab))
    lab.drop("papers100m")


def _cache(lab: Lab) -> None:
    data, rows = _on_host(lab)
    started = time.perf_counter()
    scores = access_probability(data.graph, FANOUTS, data.splits["train"], batch_size(data))
    most = max(share for share in SHARES if share < 1)
    by_access = hottest(scores, int(most * data.num_nodes)).cpu()
    del scores
    lab.row("papers100m: order by access", time.perf_counter() - started, "s", note="made once, before training")
    short = 100 if lab.quick else 250
    for share in SHARES:
        steps = None if share == 0.2 else short
        lab.attempt(
            f"papers100m: {share:.0%} cached", partial(_cached, lab, data, rows, by_access, share, "tree", steps)
        )
    lab.attempt("papers100m: 20% cached, block", partial(_cached, lab, data, rows, by_access, 0.2, "block", short))
    by_degree = hottest(out_degrees(data.graph), int(most * data.num_nodes)).cpu()
    lab.attempt("papers100m: 20% by degree", partial(_order, lab, data, rows, by_degree, "degree", short))
    steps = short if lab.quick else None  # what is read is observed over a whole epoch
    lab.attempt("papers100m: 20% as observed", partial(_order, lab, data, rows, by_degree, "observed", steps))


def _on_host(lab: Lab) -> tuple[hl.Dataset, hl.extend.TensorTable]:
    """The graph on the device, and its features in host memory that the device reads."""
    data = lab.shaped("papers100m")
    x = data.x.storage()
    assert x is not None
    started = time.perf_counter()
    rows = torch.empty(x.shape, dtype=x.dtype)
    if lab.on_gpu:
        rows.fill_(0)  # by several threads; pinning would touch the pages in one
        pinned.pin(rows)
    rows.copy_(x)
    lab.wait()
    lab.say(f"  {rows.nbytes / 2**30:.1f} GiB pinned and filled in {time.perf_counter() - started:.1f} s")
    without = replace(data, tables={})
    del data, x
    lab.drop("papers100m")
    return without, hl.extend.TensorTable(rows)


def _with_cache(
    lab: Lab, data: hl.Dataset, rows: hl.extend.TensorTable, ids: Tensor, observe: bool = False
) -> hl.Dataset:
    return replace(data, tables={"x": hl.extend.TieredTable(rows, ids, lab.device, observe=observe)})


def _cached(
    lab: Lab,
    data: hl.Dataset,
    rows: hl.extend.TensorTable,
    by_access: Tensor,
    share: float,
    layout: str,
    most_steps: int | None,
) -> None:
    if share == 1:
        placed = replace(data, tables={"x": hl.extend.TensorTable(rows.rows.to(lab.device))})
    else:
        placed = _with_cache(lab, data, rows, by_access[: int(share * len(rows))].clone())
    torch.manual_seed(0)
    found = timed_epochs(lab, placed, sage(placed), layout, 3 if most_steps is None else 2, most_steps)
    name = f"papers100m: {share:.0%} cached, {layout}"
    lab.row(f"{name}: epoch", found.seconds, "s", 2.2 if share == 0.2 else None, note=found.note)
    hits, misses = found.per_epoch("rows.cache_hit"), found.per_epoch("rows.cache_miss")
    if hits + misses:
        rate = 100 * hits / (hits + misses)
        lab.row(f"{name}: hit rate", rate, "%", 70.0 if share == 0.2 else None, at_least=True)
        if share:
            lab.row(f"{name}: skew", rate / 100 / share, "×", note="hit rate over the share of rows that is cached")
    lab.row(f"{name}: from host", found.per_epoch("bytes.from_host") / 1e9, "GB", note="in an epoch")
    lab.memory_row(name, found.peak_bytes, "with the graph")


def _order(
    lab: Lab, data: hl.Dataset, rows: hl.extend.TensorTable, ids: Tensor, order: str, most_steps: int | None
) -> None:
    placed = _with_cache(lab, data, rows, ids.clone(), observe=order == "observed")
    torch.manual_seed(0)
    found = timed_epochs(lab, placed, sage(placed), "tree", 2, most_steps)
    hits, misses = found.per_epoch("rows.cache_hit"), found.per_epoch("rows.cache_miss")
    name = f"papers100m: 20% cached by {order}"
    lab.row(f"{name}: epoch", found.seconds, "s", note=found.note)
    lab.row(f"{name}: hit rate", 100 * hits / max(1.0, hits + misses), "%")
