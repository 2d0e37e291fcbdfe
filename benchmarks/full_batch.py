"""Full-batch training over virtual shards against plain PyG on the CPU: peak tensor bytes and time.

    python benchmarks/full_batch.py [--nodes 20000] [--edges 1500000] [--width 64] [--shards 1,8,32] [--json FILE]

Every row is one forward and backward of two layers. Times are the best of `--repeats`, without the meter; peaks are
what lives at most of what torch allocates, above the graph, the rows and the weights.
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

from hopline.graph import Graph
from hopline.nn.shard_block import ShardBlock, run_conv
from hopline.sharded import slab_layout

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
        block = ShardBlock.of(slab_layout(graph, ptr))
        s, b = measured(lambda: trained(convs, x, lambda conv, h: run_conv(conv, h, block)), repeats)  # noqa: B023
        found = [p.grad for p in convs.parameters() if p.grad is not None]
        worst = max(float((a - e).norm() / e.norm()) for a, e in zip(found, expected, strict=True))
        rows.append({"model": name, "shards": num_shards, "seconds": s, "peak_bytes": b, "difference": worst})
    for row in rows:
        row |= {"time_ratio": row["seconds"] / seconds, "memory_ratio": row["peak_bytes"] / peak}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=1_500_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--shards", default="1,8,32")
    parser.add_argument("--models", default="GAT,SAGE-max")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    graph = made_up(args.nodes, args.edges)
    rows = []
    print(f"{'model':>10} {'shards':>10} {'seconds':>8} {'of plain':>9} {'peak MB':>8} {'of plain':>9} {'difference':>11}")
    for name in args.models.split(","):
        for row in compare(name, graph, args.width, [int(n) for n in args.shards.split(",")], args.repeats):
            rows.append(row)
            print(
                f"{row['model']:>10} {row['shards']:>10} {row['seconds']:8.2f} {row['time_ratio']:9.2f} "
                f"{row['peak_bytes'] / 1e6:8.1f} {row['memory_ratio']:9.3f} {row['difference']:11.1e}"
            )
    print(json.dumps(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
