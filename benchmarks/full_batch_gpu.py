"""Full-batch training of a graph whose messages no GPU holds: peak device memory and time against shards.

    PYTHONPATH=src python benchmarks/full_batch_gpu.py --json results.json --plot results.svg   # some minutes, one H200
    PYTHONPATH=src python benchmarks/full_batch_gpu.py --device cpu --scale 0.001               # whether it runs at all

A planted graph of products' size (2.4 million nodes, 124 million edges, 100 features, 47 classes) whose nodes are in
the order of 160 communities, so that ranges of them are good parts; GAT of 3 layers, 4 heads, hidden 128, float32, one
optimizer step per epoch. Plain PyG is one step of the same convs over the whole edge_index. Peaks are those of the
allocator with all that lives there; times are the fastest epoch but the first, which cuts the graph. With `--check`,
losses of the first epochs are compared with plain PyG's, where that fits.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from svg_file import svg_file

import hopline as hl
from hopline.data.synthetic import planted_partition

NUM_NODES, NUM_EDGES, NUM_FEATURES, CLASSES, COMMUNITIES = 2_449_029, 123_718_280, 100, 47, 160
HEADS, HIDDEN, LAYERS = 4, 128, 3
GIB = 2**30


def graph(homophily: float, scale: float, device: torch.device) -> hl.Dataset:
    """On the host, nodes in the order of their communities."""
    made = planted_partition(
        num_nodes=round(NUM_NODES * scale),
        num_edges=round(NUM_EDGES * scale),
        num_classes=COMMUNITIES,
        num_features=NUM_FEATURES,
        homophily=homophily,
        device=str(device),
        seed=1,
    )
    x, y = made.x.storage(), made.y
    assert x is not None
    assert y is not None
    order = y.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(made.num_nodes, device=device)
    src, dst = (position[ends] for ends in made.graph.edge_index())
    dst, by_dst = dst.sort(stable=True)
    indptr = torch.zeros(made.num_nodes + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(dst, minlength=made.num_nodes), 0, out=indptr[1:])
    moved = hl.Graph(indptr, src[by_dst].int()).to("cpu")
    train = position[made.splits["train"].to(device)].sort().values.cpu()
    return replace(
        made,
        graph=moved,
        tables={"x": hl.extend.TensorTable(x[order].cpu())},
        y=y[order].cpu() % CLASSES,
        splits={"train": train},
        num_classes=CLASSES,
    )


def model(hidden: int) -> hl.nn.GNN:
    torch.manual_seed(0)
    widths = [NUM_FEATURES, *[hidden] * (LAYERS - 1)]
    convs = [pyg.GATConv(i, hidden // HEADS, heads=HEADS) for i in widths[:-1]]
    return hl.nn.GNN([*convs, pyg.GATConv(widths[-1], CLASSES, heads=HEADS, concat=False)], act="elu")


class Memory:
    """What the device has allocated at most since this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def peak_gib(self) -> float:
        return torch.cuda.max_memory_allocated(self.device) / GIB if self.device.type == "cuda" else 0.0


def plain(data: hl.Dataset, hidden: int, device: torch.device, epochs: int) -> dict[str, Any]:
    """Plain PyG, or how far it came."""
    memory, losses, times = Memory(device), [], []
    net = model(hidden).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x, train = data.x.storage(), data.splits["train"].to(device)
    assert x is not None
    assert data.y is not None
    try:
        h0, labels = x.to(device), data.y.to(device)[train]
        edge_index = data.graph.to(device).edge_index()
        for _ in range(epochs):
            started, h = time.perf_counter(), h0
            optimizer.zero_grad()
            for l, conv in enumerate(net.convs):
                h = conv(torch.nn.functional.elu(h) if l else h, edge_index)
            loss = torch.nn.functional.cross_entropy(h[train], labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            times.append(time.perf_counter() - started)
    except torch.OutOfMemoryError as error:
        said = " ".join(str(error).split())[:160]
        return {"way": "plain PyG", "failed": said, "peak_gib": memory.peak_gib, "losses": losses}
    return {"way": "plain PyG", "peak_gib": memory.peak_gib, "seconds": min(times[1:]), "losses": losses}


class Watch(hl.Callback):
    """When epochs ended, and their losses."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        self.ends.append(time.perf_counter())
        self.losses.append(epoch.loss)


def sharded(
    data: hl.Dataset, hidden: int, device: torch.device, epochs: int, num_shards: int, **settings: Any
) -> dict[str, Any]:
    memory, watch = Memory(device), Watch()
    method = hl.FullBatch(num_shards=num_shards, partition="range", **settings)
    trainer = hl.Trainer(
        model(hidden), data, method, epochs=epochs, lr=0.01, device=str(device), show=False, callbacks=[watch]
    )
    trainer.fit()
    seconds = min(b - a for a, b in itertools.pairwise(watch.ends))
    return {"shards": num_shards, "peak_gib": memory.peak_gib, "seconds": seconds, "losses": watch.losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the graph, as a share")
    parser.add_argument("--homophily", type=float, default=0.8)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--shards", default="10,20,40,80,160")
    parser.add_argument(
        "--ways", default="sweep device,sweep pinned,sequential", help="and where tables are, by commas"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    data = graph(args.homophily, args.scale, device)
    print(f"{data!r}", flush=True)
    rows = [plain(data, args.hidden, device, args.epochs)]
    print(rows[0], flush=True)
    print(f"{'way':>16} {'shards':>6} {'peak GiB':>9} {'s a step':>9}  losses")
    for way, num_shards in itertools.product(args.ways.split(","), map(int, args.shards.split(","))):
        aggregation, _, tables = way.partition(" ")
        settings = {"aggregation": aggregation} | ({"tables": tables} if tables else {})
        try:
            row = sharded(data, args.hidden, device, args.epochs, num_shards, **settings)
        except torch.OutOfMemoryError as error:
            row = {"shards": num_shards, "failed": " ".join(str(error).split())[:160]}
        rows.append({"way": way, **row})
        if "failed" in row:
            print(f"{way:>16} {num_shards:6} {row['failed']}", flush=True)
        else:
            losses = " ".join(f"{loss:.5f}" for loss in row["losses"])
            print(f"{way:>16} {num_shards:6} {row['peak_gib']:9.2f} {row['seconds']:9.2f}  {losses}", flush=True)
        if args.check and rows[0]["losses"] and "failed" not in row:
            pairs = zip(row["losses"], rows[0]["losses"], strict=False)
            assert all(abs(a - b) < 1e-4 * abs(b) for a, b in pairs), rows[0]["losses"]
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    if args.plot:
        draw_batches = {
            f"{way}, {text}": [(row["shards"], row[key]) for row in rows if row["way"] == way and "failed" not in row]
            for way in args.ways.split(",")
            for key, text in (("peak_gib", "GiB at most"), ("seconds", "seconds a step"))
        }
        args.plot.write_text(
            svg_file({name: points for name, points in draw_batches.items() if points}, "shards", always_shown=0.0)
        )


if __name__ == "__main__":
    main()
