"""Full-batch training over virtual shards against plain PyG on the CPU: peak tensor bytes and time.

    python benchmarks/full_batch.py [--nodes 20000] [--edges 1500000] [--width 64] [--shards 1,8,32] [--json FILE]
    python benchmarks/full_batch.py --ranks 1,2,4

Every row is one forward and backward of two layers. Times are the best of `--repeats`, without the meter; peaks are
what lives at most of what torch allocates, above the graph, the rows and the weights. With `--ranks`, shards are
processes that exchange rows by gloo, and the peak is the largest of any rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hopline.core.graph import Graph
from hopline.core.partition import Partition
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.shards.convs.runner import ShardConvs, run_conv
from hopline.shards.layout import contiguous_layout, shard_layouts
from hopline.shards.transports import LocalTransport, P2PTransport

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "GAT": lambda width: pyg.GATConv(width, width),
    "SAGE-max": lambda width: pyg.SAGEConv(width, width, aggr="max"),
    "SAGE-mean": lambda width: pyg.SAGEConv(width, width),
    "GATv2": lambda width: pyg.GATv2Conv(width, width),
}


class Meter(TorchDispatchMode):
    """Bytes of the tensors that are made within, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += self.live[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.live.pop(key)


def made_up(num_nodes: int, num_edges: int) -> Graph:
    generator = torch.Generator().manual_seed(0)
    dst = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    src = torch.randint(0, num_nodes, (num_edges,), generator=generator, dtype=torch.int32)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(dst, minlength=num_nodes), 0, out=indptr[1:])
    return Graph(indptr, src)


def trained(convs: nn.ModuleList, x: Tensor, layer: Callable[[nn.Module, Tensor], Tensor]) -> None:
    convs.zero_grad()
    layer(convs[1], layer(convs[0], x).relu()).square().mean().backward()


def measured(step: Callable[[], None], repeats: int) -> tuple[float, int]:
    """(seconds, peak bytes)"""
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    gc.collect()
    with Meter() as meter:
        step()
    return min(times), meter.peak


def compare(name: str, graph: Graph, width: int, shards: list[int], repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    convs = nn.ModuleList([MODELS[name](width), MODELS[name](width)])
    x, edge_index = torch.randn(graph.num_nodes, width), graph.edge_index()
    seconds, peak = measured(lambda: trained(convs, x, lambda conv, h: conv(h, edge_index)), repeats)
    expected = [p.grad.clone() for p in convs.parameters() if p.grad is not None]
    rows = [{"model": name, "shards": "plain PyG", "seconds": seconds, "peak_bytes": peak, "difference": 0.0}]
    for num_shards in shards:
        ptr = torch.linspace(0, graph.num_nodes, num_shards + 1).long()
        over = ShardConvs.of(contiguous_layout(graph, ptr))
        s, b = measured(lambda: trained(convs, x, lambda conv, h: run_conv(conv, h, over)), repeats)  # noqa: B023
        found = [p.grad for p in convs.parameters() if p.grad is not None]
        worst = max(float((a - e).norm() / e.norm()) for a, e in zip(found, expected, strict=True))
        rows.append({"model": name, "shards": num_shards, "seconds": s, "peak_bytes": b, "difference": worst})
    for row in rows:
        row |= {"time_ratio": row["seconds"] / seconds, "memory_ratio": row["peak_bytes"] / peak}
    return rows


def on_rank(world: World, name: str, num_nodes: int, num_edges: int, width: int, repeats: int) -> dict[str, Any]:
    """One rank's part: the slowest time and the largest peak of all ranks, and what they sent in one step."""
    graph = made_up(num_nodes, num_edges)
    part_of = (torch.arange(num_nodes) * world.size // num_nodes).int()
    layout = shard_layouts(graph, Partition(part_of, world.size))[world.rank]
    torch.manual_seed(0)
    convs = nn.ModuleList([MODELS[name](width), MODELS[name](width)])
    x = torch.randn(num_nodes, width)[layout.own_ids]
    transport = LocalTransport(layout) if world.size == 1 else P2PTransport(layout)
    over = ShardConvs.of(layout, transport)
    del graph
    seconds, peak = measured(lambda: trained(convs, x, lambda conv, h: run_conv(conv, h, over)), repeats)
    transport.traffic.clear()
    trained(convs, x, lambda conv, h: run_conv(conv, h, over))
    sent = {kind: world.sum([transport.traffic[kind]])[0] for kind in ("forward", "refetch", "gradient")}
    seconds, peak = world.max([seconds, float(peak)])
    return {"model": name, "shards": f"{world.size} ranks", "seconds": seconds, "peak_bytes": peak, "sent_bytes": sent}


def scale(name: str, ranks: list[int], *sizes: int) -> list[dict[str, Any]]:
    """Rows of a table: each number of ranks against the one before."""
    rows: list[dict[str, Any]] = []
    for num_ranks in ranks:
        row = run(on_rank, LaunchSettings(devices=num_ranks, timeout_s=120), name, *sizes)
        before = rows[-1] if rows else row
        ratios = {f"{k}_ratio": row[v] / before[v] for k, v in (("time", "seconds"), ("memory", "peak_bytes"))}
        rows.append({**row, **ratios})
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:>10} {row['shards']:>10} {row['seconds']:8.2f} {row['time_ratio']:9.2f} "
        f"{row['peak_bytes'] / 1e6:8.1f} {row['memory_ratio']:9.3f} "
        + (f"{row['difference']:11.1e}" if "difference" in row else str(row["sent_bytes"]))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=1_500_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--shards", default="1,8,32")
    parser.add_argument("--ranks")
    parser.add_argument("--models", default="GAT,SAGE-max")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    of, last = ("of before", "sent in a step") if args.ranks else ("of plain", "difference")
    print(f"{'model':>10} {'shards':>10} {'seconds':>8} {of:>9} {'peak MB':>8} {of:>9} {last:>11}")
    rows = []
    for name in args.models.split(","):
        if args.ranks:
            ranks = [int(n) for n in args.ranks.split(",")]
            rows += scale(name, ranks, args.nodes, args.edges, args.width, args.repeats)
        else:
            shards = [int(n) for n in args.shards.split(",")]
            rows += compare(name, made_up(args.nodes, args.edges), args.width, shards, args.repeats)
    for row in rows:
        show(row)
    print(json.dumps(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
