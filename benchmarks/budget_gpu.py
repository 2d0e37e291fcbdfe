"""A GPU that is made small: the run without a budget dies, the one with a budget finishes under the cap.

    PYTHONPATH=src python benchmarks/budget_gpu.py [--models SAGE,GCN,GAT] [--shares 0.8,0.5,0.35] [--json FILE]

Three layers of width 256 on a planted graph (500,000 nodes, 10 million edges, 128 features), fan-outs (15, 10, 5),
batches of 2048 drawn on the host. First a run without any limit, whose peak is taken from the allocator; then, for each
share of that peak, the same run in a process that may allocate no more
(`torch.cuda.set_per_process_memory_fraction`), without a budget and with `budget=` the same. `over` counts steps over
what the plan left for one, `oom` times that memory ran out and the step went on in smaller pieces.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import hopline as hl
from hopline.data.synthetic import planted_partition
from hopline.tables import TensorTable

CONVS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "SAGE": SAGEConv,
    "GCN": GCNConv,
    "GAT": lambda a, b: GATConv(a, b // 4, heads=4),
}
WIDTH, FANOUTS, BATCH = 256, (15, 10, 5), 2048
MIB = 2**20


class Peak(hl.Callback):
    """The most bytes that were allocated at any time: guarded steps begin CUDA's own count anew."""

    most_bytes = 0

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if trainer.device.type == "cuda":
            self.most_bytes = max(self.most_bytes, torch.cuda.max_memory_allocated())


COUNTED = {
    "over": "budget.steps_over",
    "oom": "budget.out_of_memory",
    "split": "budget.batches_split",
    "pieces": "budget.pieces",
}


def trained(data: hl.Dataset, name: str, device: str, epochs: int, budget: str | None, layout: str) -> dict[str, Any]:
    torch.manual_seed(0)
    # A run may pin the features where they lie, for as long as they are there: each gets its own.
    data = replace(data, tables={"x": TensorTable(data.x.read(torch.arange(data.num_nodes)))})
    conv = CONVS[name]
    convs = [conv(data.num_features, WIDTH), conv(WIDTH, WIDTH), conv(WIDTH, WIDTH)]
    model = hl.nn.GNN(convs, dropout=0.5, head=torch.nn.Linear(WIDTH, data.num_classes))
    peak, on_gpu = Peak(), device != "cpu"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        trainer = hl.Trainer(
            model,
            data,
            hl.Sampled(fanouts=FANOUTS, batch_size=BATCH, layout=layout),  # type: ignore[arg-type]
            epochs=epochs,
            device=device,
            lr=0.005,
            show=False,
            budget=budget,
            callbacks=[peak],
            placement=hl.Placement(graph="host", features="host") if budget is None and on_gpu else None,
        )
        run = trainer.fit()
    except torch.OutOfMemoryError as error:
        return {"died": " ".join(str(error).split())[:120]}
    except ValueError as error:
        return {"refused": str(error)[:300]}
    found: dict[str, Any] = {"seconds": time.perf_counter() - began, "test": 100 * run.test}
    found |= {name: sum(e.counters.get(key, 0) for e in run.history) for name, key in COUNTED.items()}
    if on_gpu:
        found["peak_mib"] = peak.most_bytes / MIB
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONVS))
    parser.add_argument("--shares", default="0.8,0.5,0.35")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--layout", default="block")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = planted_partition(
        num_nodes=round(500_000 * args.scale),
        num_edges=round(10_000_000 * args.scale),
        num_features=128,
        num_train=round(40_000 * args.scale),
        num_valid=round(10_000 * args.scale),
        num_test=round(10_000 * args.scale),
    )
    rows = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))

    for name in args.models.split(","):
        run = (data, name, args.device, args.epochs)
        trained(data, name, args.device, 1, None, args.layout)  # compiles
        free = trained(*run, None, args.layout)
        show({"model": name, "way": "no limit", **free})
        if args.device == "cpu":
            show({"model": name, "way": "budget", **trained(*run, "2GiB", args.layout)})
            continue
        total = torch.cuda.get_device_properties(0).total_memory
        for share in map(float, args.shares.split(",")):
            limit = int(share * free["peak_mib"] * MIB)
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(limit / total)
            show({"model": name, "share": share, "way": "no budget", **trained(*run, None, args.layout)})
            trained(data, name, args.device, 1, str(limit), args.layout)  # compiles what pieces need
            show({"model": name, "share": share, "way": "budget", **trained(*run, str(limit), args.layout)})
            torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
