"""A historical batch in pieces: what it takes and how long, at shares of what it takes whole.

    PYTHONPATH=src python benchmarks/history_budget.py --data ../shared/data/coauthor_physics.npz --json budget.json

GCN on coauthor_physics, two batches of two METIS parts an epoch, half of the nodes train. "whole" is the largest step
without a limit, as the meter has it. Each limit first learns for some epochs, whose steps count for the peak; then all
take turns, some epochs each, so that whatever else the machine does meets all of them. The time is an epoch's median
over that of training without a limit, which the meter does not slow down.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GATConv, GCNConv

import hopline as hl
from hopline.budget.guard import BudgetGuard
from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget
from hopline.nn import GNN

CONVS = {"gcn": GCNConv, "gat": lambda a, b: GATConv(a, b // 8, heads=8) if b % 8 == 0 else GATConv(a, b)}
EVERYTHING = 1 << 50
LEARNING, TIMED = 3, 4
"""Epochs of learning, and of a turn, of which the first does not count."""


class CallingConvention:
    """Training within a limit; without one, without a guard."""

    def __init__(self, data: hl.Dataset, conv: str, layers: int, hidden: int, limit: int | None) -> None:
        self.data, self.limit, self.widths = (
            data,
            limit,
            [data.num_features, *[hidden] * (layers - 1), data.num_classes],
        )
        self.conv = CONVS[conv]
        self.guard: BudgetGuard | None = None
        self.seconds: list[float] = []
        self.peak = self.promised = self.over = self.pieces = self.batches = 0

    def run(self, epochs: int, timed: bool) -> None:
        torch.manual_seed(0)
        model = GNN([self.conv(a, b) for a, b in pairwise(self.widths)], dropout=0.5)
        method = hl.Historical(num_parts=4, parts_per_batch=2, groups="fixed")
        trainer = hl.Trainer(model, self.data, method, epochs=epochs, evaluate_every=epochs, show=False)
        if self.limit is not None:
            known = None if self.guard is None else self.guard.predictor
            self.guard = trainer.guard = BudgetGuard(trainer.job, Budget(), self.limit, predictor=known)
            plan = method.plan(RunOutline(job=trainer.job), Budget())
            trainer.work = trainer.work.guarded(self.guard, plan)
        history = trainer.fit().history
        if self.guard is not None:
            self.peak = max(self.peak, self.guard.ledger.peak_bytes)
            self.promised = max(self.promised, int(self.guard.ledger.promised_bytes))
            self.over += sum(int(epoch.counters.get("budget.steps_over", 0)) for epoch in history)
        last: Any = history[-1].counters
        self.pieces, self.batches = int(last.get("budget.pieces", 0)), int(last.get("budget.batches_split", 0))
        if timed:
            self.seconds += [epoch.seconds for epoch in history][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--conv", choices=[*CONVS], default="gcn")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="more of them wait for each other on a busy machine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = hl.from_npz(args.data)
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    train, test = order[: data.num_nodes // 2].sort().values, order[data.num_nodes // 2 :].sort().values
    data = dataclasses.replace(data, splits={"train": train, "valid": test[:100], "test": test[:100]}, alternatives=())
    free, whole = (CallingConvention(data, args.conv, args.layers, args.hidden, limit) for limit in (None, EVERYTHING))
    whole.run(1, timed=False)
    limits = {
        f"{share:.0%}": CallingConvention(data, args.conv, args.layers, args.hidden, int(share * whole.peak))
        for share in args.shares
    }
    for share, way in [*limits.items()]:
        try:
            way.run(LEARNING, timed=False)
        except ValueError as error:
            print(f"{share}: refused, {error}")
            del limits[share]
    for _ in range(args.rounds):
        for way in (free, whole, *limits.values()):
            way.run(TIMED, timed=True)
    base = statistics.median(free.seconds)
    print(f"whole: {whole.peak / 1e6:.1f} MB, {1000 * base:.0f} ms an epoch\n")
    print("| limit | pieces of a batch | promised, MB | peak, MB | peak / whole | steps over | time |")
    print("|---|---|---|---|---|---|---|")
    figures: dict[str, Any] = {"without a meter": base}
    for name, way in {"none": whole, **limits}.items():
        pieces = way.pieces / way.batches if way.batches else "whole"
        time = statistics.median(way.seconds) / base
        figures[name] = {**{k: getattr(way, k) for k in ("limit", "peak", "promised", "over", "seconds")}, "time": time}
        print(
            f"| {name} | {pieces} | {way.promised / 1e6:.1f} | {way.peak / 1e6:.1f} | {way.peak / whole.peak:.2f} | "
            f"{way.over} | {time:.2f} |"
        )
    if args.json is not None:
        about = {"torch": torch.__version__, "layers": args.layers, "hidden": args.hidden}
        args.json.write_text(json.dumps(about | {"ways": figures}, indent=1, default=str))


if __name__ == "__main__":
    main()
