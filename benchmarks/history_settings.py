"""Which setting makes historical training end below full batch: one changed at a time, on amazon_photo.

    PYTHONPATH=src python benchmarks/history_settings.py --data ../shared/data            # some 20 minutes
    PYTHONPATH=src python benchmarks/history_settings.py --data ../shared/data --only "2 of 8 parts,full batch"

A GCN of two layers (hidden 64, dropout 0.5) trains for 60 epochs on the split of the file: 20 nodes of each class. Rows
change one setting, or two, of a run that fails (8 METIS parts, 2 a batch, lr 0.03; full batch is unstable at this lr
too). Beside the test accuracy stand the training loss of the last epoch, and what the report measures: how far rows
move while they wait in the tables, and how many steps that is.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GCNConv

import hopline as hl
from hopline.training.report_callbacks import WatchHistory

WHOLE: dict[str, Any] = {"num_parts": 1, "parts_per_batch": 1, "partition": "range"}
"""One part is the full batch: it has no neighbours outside."""


@dataclass(frozen=True)
class Row:
    """What a run changes of the one that fails."""

    method: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


DEFAULTS = {"num_parts": 40, "parts_per_batch": 10}
ROWS = {
    "full batch": Row(method=WHOLE),
    "2 of 8 parts": Row(),
    "`refresh_every=1`": Row(method={"refresh_every": 1}),
    "`clip_norm=1`": Row(train={"clip_norm": 1.0}),
    "`accumulate=4`": Row(train={"accumulate": 4}),
    "`parts_per_batch=4`": Row(method={"parts_per_batch": 4}),
    "`partition=random`": Row(method={"partition": "random"}),
    "16 of 32 parts, as in the recipe": Row(method={"num_parts": 32, "parts_per_batch": 16}),
    "10 of 40 parts, the default": Row(method=DEFAULTS),
    "`lr=0.01`": Row(train={"lr": 0.01}),
    "`lr=0.003`, the default": Row(train={"lr": 0.003}),
    "`lr=0.003`, 10 of 40 parts": Row(method=DEFAULTS, train={"lr": 0.003}),
    "`lr=0.003`, full batch": Row(method=WHOLE, train={"lr": 0.003}),
}


def fit(row: Row, folder: Path, seed: int) -> tuple[float, float, dict[str, Any]]:
    data = hl.from_npz(folder / "amazon_photo.npz")
    torch.manual_seed(seed)
    model = hl.nn.GNN([GCNConv(data.num_features, 64), GCNConv(64, data.num_classes)], dropout=0.5)
    parts: dict[str, Any] = {"num_parts": 8, "parts_per_batch": 2}
    method = hl.Historical(**(parts | row.method))
    train: dict[str, Any] = {"epochs": 60, "lr": 0.03, "evaluate_every": 3, "seed": seed, "show": False} | row.train
    watch = WatchHistory()
    run = hl.Trainer(model, data, method, callbacks=[watch], **train).fit()
    return 100 * run.test, run.history[-1].loss, watch.staleness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the .npz files")
    parser.add_argument("--only", help="some rows, by their names, with commas between")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| changed | test accuracy, % | by seed | loss | drift | age, steps |")
    print("|---|---|---|---|---|---|")
    for name, row in ROWS.items():
        if args.only and not any(only in name for only in args.only.split(",")):
            continue
        found = [fit(row, args.data, seed) for seed in range(args.seeds)]
        accuracies, losses, states = zip(*found, strict=True)
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        known = [state for state in states if state]
        drift = " to ".join(f"{ends(state['drift'] for state in known):.2f}" for ends in (min, max)) if known else ""
        age = f"{statistics.fmean(state['age'] for state in known):.1f}" if known else ""
        each = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
        print(
            f"| {name} | {statistics.fmean(accuracies):.1f} ± {spread:.1f} | {each} | {statistics.fmean(losses):.2f} | "
            f"{drift} | {age} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
