"""Historical training on a GPU: its memory beside full batch, and what tables in host memory cost.

    PYTHONPATH=src python benchmarks/history_gpu.py --json results.json        # about two minutes on one H200
    PYTHONPATH=src python benchmarks/history_gpu.py --device cpu --scale 0.002 # whether it runs at all, without a GPU

A planted graph of products' size whose 40 communities are the parts, a batch being one of them; GCN of 4 layers, hidden
256, float32. Full batch is one step over the whole graph with the same fused convs. The I/O overhead is (epoch with
tables in host memory - epoch with tables on the device) / the latter, with rows moved beside the computation (one step
of lag where none is named), over graphs whose communities have ever more edges among themselves.
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

import hopline as hl
from hopline.core.batch import Batch, Block, Part
from hopline.data.synthetic import planted_partition

NUM_NODES, NUM_EDGES, NUM_PARTS, NUM_FEATURES, HIDDEN, LAYERS = 2_449_029, 123_718_280, 40, 100, 256, 4
WAYS = {
    "tables on the device": {"tables": "device"},
    "pinned, beside the computation": {"tables": "pinned"},
    "pinned as bf16, beside the computation": {"tables": "pinned", "storage": "bf16"},
    "host, through 4 pinned buffers": {"tables": "host"},
    "tables on the device, lag=0": {"tables": "device", "lag": 0},
    "pinned, beside the computation, lag=0": {"tables": "pinned", "lag": 0},
    "host, through 4 pinned buffers, lag=0": {"tables": "host", "lag": 0},
}


def graph(homophily: float, scale: float, device: torch.device) -> tuple[hl.Dataset, float]:
    """(data on the host, where batches are made, nodes of a batch's halo over its own on average)."""
    sizes: dict[str, Any] = {"num_nodes": round(NUM_NODES * scale), "num_edges": round(NUM_EDGES * scale)}
    hist_batch = planted_partition(
        **sizes, num_classes=NUM_PARTS, num_features=NUM_FEATURES, homophily=homophily, device=str(device), seed=1
    )
    x = hist_batch.x.storage()
    assert x is not None
    assert hist_batch.y is not None
    src, dst = hist_batch.graph.edge_index()
    outside = hist_batch.y[src] != hist_batch.y[dst]
    halo = (
        hist_batch.y[dst[outside]].long() * hist_batch.num_nodes + src[outside]
    ).unique().numel() / hist_batch.num_nodes
    y = hist_batch.y.cpu()
    return replace(
        hist_batch, graph=hist_batch.graph.to("cpu"), tables={"x": hl.extend.TensorTable(x.cpu())}, y=y
    ), halo


def model() -> hl.nn.GNN:
    torch.manual_seed(0)
    widths = [NUM_FEATURES, *[HIDDEN] * (LAYERS - 1), NUM_PARTS]
    return hl.nn.GNN([pyg.GCNConv(i, o) for i, o in itertools.pairwise(widths)], dropout=0.5)


def peak(device: torch.device) -> float:
    """GiB, since it was reset."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def full_batch(data: hl.Dataset, device: torch.device) -> tuple[float, float]:
    """(peak GiB, seconds) of a step over the whole graph."""
    forget_peak(device)
    on = data.graph.to(device)
    assert data.y is not None
    ids = torch.arange(data.num_nodes, device=device)
    block = Block(ids, data.num_nodes, (Part(on.indptr, on.indices),), on, 1)
    x = data.x.storage()
    assert x is not None
    train = data.splits["train"].to(device)
    batch = Batch(ids, (block,) * LAYERS, x.to(device), data.y.to(device)[train], key=1, output_idx=train)
    net = model().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(2):
        started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(batch), batch.labels).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return peak(device), time.perf_counter() - started


def historical(
    data: hl.Dataset, parts: dict[str, Any], device: torch.device, epochs: int, **settings: Any
) -> tuple[float, float]:
    """(peak GiB, seconds of the fastest epoch but the first, which makes the batches)."""
    forget_peak(device)
    parts_of = {"num_parts": NUM_PARTS, "parts_per_batch": 1, "partition": "labels", "groups": "fixed"}
    method = hl.Historical(**({**parts_of, "lag": 1, "warm_up": False} | settings))
    plain = replace(data, splits={"train": data.splits["train"]})
    ends: list[float] = []

    class Watch(hl.Callback):
        def on_epoch_end(self, trainer: hl.Trainer, ended: hl.extend.EpochEnd) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ends.append(time.perf_counter())

    hl.Trainer(
        model(),
        plain,
        method,
        epochs=epochs,
        device=str(device),
        show=False,
        evaluate_every=epochs,
        callbacks=[Watch()],
    ).fit()
    return peak(device), min(b - a for a, b in itertools.pairwise(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the graph, as a share")
    parser.add_argument("--homophily", default="0.8,0.95,0.99", help="shares of edges within communities, by commas")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    for share in map(float, args.homophily.split(",")):
        started = time.perf_counter()
        data, halo = graph(share, args.scale, device)
        print(f"homophily {share}: made in {time.perf_counter() - started:.1f} s", flush=True)
        if not rows:
            most, seconds = full_batch(data, device)
            print(f"  full batch: {most:.2f} GiB, {seconds:.3f} s a step", flush=True)
            rows.append({"way": "full batch", "homophily": share, "peak_gib": most, "seconds": seconds})
        near, parts = None, {}
        for name, settings in WAYS.items():
            most, seconds = historical(data, parts, device, args.epochs, **settings)
            near = near or seconds
            row = {"way": name, "homophily": share, "peak_gib": most, "seconds": seconds}
            row |= {"overhead": seconds / near - 1, "halo_ratio": halo}
            rows.append(row)
            print(f"  {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float)), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
