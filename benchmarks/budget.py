"""Training under memory limits: sampled batches in pieces, beside the same run without a limit.

    PYTHONPATH=src python benchmarks/budget.py --data ../shared/data [--graphs power-law,amazon_photo,citation_dblp]
        [--models SAGE,GCN,GAT] [--shares 1,0.8,0.6,0.4,0.2] [--epochs 4] [--json FILE] [--plot FILE.svg]
    PYTHONPATH=src python benchmarks/budget.py --overhead [--models SAGE,GCN,GAT] [--epochs 4] [--rounds 7]

The first is a sweep: limits as shares of the largest step of the run without one. `over` counts steps above the limit,
`peak` is the largest step over the limit, `split` the share of batches that were split and `pieces` how many pieces
they came in, `edges` the share of edges kept, `points` the test accuracy above that of the run without a limit (same
seeds), `time` the seconds of the epochs over those without a limit, and `cpu` the same in seconds of all cores, which
others on the machine do not change.
With `--overhead`, the limit is such that a tenth of the batches are over it: seconds of epochs without a guard, with
one that has nothing to do (its meter alone), with pieces found by the threads that prepare batches, and with pieces
found in the training thread. All are taken in turn, round after round: medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from svg_file import svg_file
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import hopline as hl
from hopline.budget.guard import BudgetGuard
from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget
from hopline.budget.predictor import Predictor
from hopline.core.batch import Batch
from hopline.data.synthetic import planted_partition
from hopline.methods.sampled.work import SampledWork

CONVS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "SAGE": SAGEConv,
    "GCN": GCNConv,
    "GAT": lambda a, b: GATConv(a, b // 4, heads=4),
}
WIDTH = 128


@dataclass(frozen=True)
class Setting:
    """A graph, and how it is sampled."""

    data: hl.Dataset
    fanouts: tuple[int, ...]
    batch_size: int


def power_law(num_train: int, batch_size: int) -> Setting:
    return Setting(
        planted_partition(num_nodes=60_000, num_edges=1_200_000, num_train=num_train), (10, 10, 5), batch_size
    )


def setting_of(graph: str, folder: Path | None) -> Setting:
    if graph == "power-law":
        return power_law(num_train=4096, batch_size=1024)
    if folder is None:
        raise SystemExit(f"{graph} is a file: give the folder it is in by --data")
    data = hl.from_npz(folder / f"{graph}.npz").normalized()
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    train, valid, test = order.tensor_split([data.num_nodes // 2, 5 * data.num_nodes // 8])
    return Setting(replace(data, splits={"train": train, "valid": valid, "test": test}), (10, 10), 512)


class Late(BudgetGuard):
    """Finds pieces in the training thread."""

    def split_ahead(self, batch: Batch) -> Batch:
        return batch


class Tally(hl.Callback):
    """Seconds of epochs, on the clock and of all cores, without the evaluation that follows; and what a guard did."""

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0
        self.records: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: hl.Trainer) -> None:
        self.started = time.process_time()

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        self.seconds, self.cpu_s = self.seconds + epoch.seconds, time.process_time() - self.started
        if trainer.guard is not None:
            self.records.append(trainer.guard.take_record())

    def sum(self, name: str) -> int:
        return sum(record[name] for record in self.records)

    def all(self, name: str) -> list[float]:
        return [value for record in self.records for value in record[name]]


@dataclass(frozen=True)
class Outcome:
    tally: Tally
    test: float
    predictor: Predictor | None
    overhead_bytes: int
    """What is there beside a step."""


def trained(
    setting: Setting,
    name: str,
    epochs: int,
    limit: int | None,
    kind: type[BudgetGuard] = BudgetGuard,
    predictor: Predictor | None = None,
    measure_every: int = BudgetGuard.measure_every,
) -> Outcome:
    """A run under a limit; predictor: what is known already."""
    torch.manual_seed(0)
    data, tally = setting.data, Tally()
    widths = [data.num_features, *[WIDTH] * len(setting.fanouts)]
    convs = [CONVS[name](a, b) for a, b in pairwise(widths)]
    model = hl.nn.GNN(convs, dropout=0.3, head=torch.nn.Linear(WIDTH, data.num_classes))
    method = hl.Sampled(fanouts=setting.fanouts, batch_size=setting.batch_size)
    settings: dict[str, Any] = {"epochs": epochs, "lr": 0.01, "evaluate_every": epochs, "show": False}
    trainer = hl.Trainer(model, data, method, callbacks=[tally], **settings)
    assert isinstance(trainer.work, SampledWork)
    if limit is not None:
        trainer.guard = kind(trainer.job, Budget(), limit, predictor=predictor, measure_every=measure_every)
        trainer.work = trainer.work.guarded(trainer.guard, method.plan(RunOutline(job=trainer.job), Budget()))
    run = trainer.fit()
    guard, test = trainer.guard, 100 * (run.test or 0.0)
    return (
        Outcome(tally, test, None, 0)
        if guard is None
        else Outcome(tally, test, guard.predictor, guard.overhead_bytes())
    )


# ---- limits from all to a fifth


def sweep(graph: str, setting: Setting, name: str, shares: list[float], epochs: int) -> Iterator[dict[str, Any]]:
    trained(setting, name, 1, 1 << 60)  # kernels are compiled
    plain, free = trained(setting, name, epochs, None), trained(setting, name, epochs, 1 << 60, measure_every=1)
    peak = max(free.tally.all("after"))
    for share in shares:
        limit = int(share * peak)
        try:
            found = trained(setting, name, epochs, limit, measure_every=1)
        except ValueError as error:  # where not even a seed fits
            print(f"{graph:>18} {name:>5} {share:6} {limit / 1e6:8.1f} refused: {error}", flush=True)
            continue
        tally = found.tally
        steps, pieces, split = len(tally.all("after")), tally.sum("pieces"), tally.sum("split")
        yield {
            "graph": graph,
            "model": name,
            "share": share,
            "limit_mb": limit / 1e6,
            "steps": steps,
            "over": tally.sum("over"),
            "peak": max(tally.all("after")) / limit,
            "split": split / steps,
            "pieces": pieces / max(1, split),
            "edges": 100.0 if tally.sum("edges_cut") == 0 else float("nan"),
            "points": found.test - plain.test,
            "test": found.test,
            "time": tally.seconds / plain.tally.seconds,
            "cpu": tally.cpu_s / plain.tally.cpu_s,
        }


COLUMNS = ("over", "peak", "split", "pieces", "edges", "points", "time", "cpu")


def show(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = []
    for row in rows:
        numbers = " ".join(f"{row[column]:8.2f}" for column in COLUMNS)
        print(f"{row['graph']:>18} {row['model']:>5} {row['share']:6} {row['limit_mb']:8.1f} {numbers}", flush=True)
        shown.append(row)
    return shown


def plot(rows: list[dict[str, Any]]) -> str:
    """Time over that without a limit, by the limit, as an SVG file."""
    names = list(dict.fromkeys((row["graph"], row["model"]) for row in rows))
    series = {
        f"{model}, {graph}": [
            (100 * row["share"], row["cpu"]) for row in rows if (row["graph"], row["model"]) == (graph, model)
        ]
        for graph, model in names
    }
    return svg_file(series, "limit, % of the largest step without one", always_shown=1.0)


# ---- a tenth of the batches over the limit


def overhead(setting: Setting, name: str, epochs: int, rounds: int) -> dict[str, Any]:
    found, limit = trained(setting, name, epochs, 1 << 60), 1 << 60
    for _ in range(2):  # promises become tighter with the first runs, and pieces are known after a run that had some
        limit = int(np.quantile(found.tally.all("before"), 0.9)) + found.overhead_bytes
        found = trained(setting, name, epochs, limit, BudgetGuard, found.predictor)
    ways: dict[str, tuple[int | None, type[BudgetGuard]]] = {
        "plain": (None, BudgetGuard),
        "meter": (1 << 60, BudgetGuard),
        "threads": (limit, BudgetGuard),
        "training thread": (limit, Late),
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    batches = split = over = 0
    for _ in range(rounds):
        for way, (bytes_, kind) in ways.items():
            tally = trained(setting, name, epochs, bytes_, kind, found.predictor).tally
            taken[way].append((tally.seconds, tally.cpu_s))
            if way == "threads":
                split, over, batches = (
                    split + tally.sum("split"),
                    over + tally.sum("over"),
                    batches + len(tally.all("after")),
                )
    plain = np.array(taken["plain"])
    ratios = {way: np.median(np.array(taken[way]) / plain, axis=0).tolist() for way in ways}
    return {"model": name, "split": split / batches, "over": over, "plain_s": float(np.median(plain[:, 0])), **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the .npz files")
    parser.add_argument("--graphs", default="power-law,amazon_photo,citation_dblp")
    parser.add_argument("--models", default=",".join(CONVS))
    parser.add_argument("--shares", default="1,0.8,0.6,0.4,0.2")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    models, rows = args.models.split(","), []
    if args.overhead:
        setting = power_law(num_train=16_384, batch_size=2048)
        print("time over that without a guard, on the clock and of all cores")
        print(f"{'model':>6} {'split':>6} {'over':>5} {'meter':>13} {'threads':>13} {'training thread':>16}")
        for name in models:
            rows.append(overhead(setting, name, args.epochs, args.rounds))
            ways = [" ".join(f"{n:6.3f}" for n in rows[-1][way]) for way in ("meter", "threads", "training thread")]
            print(
                f"{name:>6} {rows[-1]['split']:6.2f} {rows[-1]['over']:5} {ways[0]} {ways[1]} {ways[2]:>16}", flush=True
            )
    else:
        print(f"{'graph':>18} {'model':>5} {'share':>6} {'MB':>8}", *[f"{column:>8}" for column in COLUMNS])
        for graph in args.graphs.split(","):
            setting = setting_of(graph, args.data)
            for name in models:
                rows += show(sweep(graph, setting, name, [float(s) for s in args.shares.split(",")], args.epochs))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.plot and not args.overhead:
        args.plot.write_text(plot(rows))


if __name__ == "__main__":
    main()
