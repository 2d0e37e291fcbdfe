"""Threads that prepare batches beside none, and what a run says of its own pipeline.

    .venv/bin/python benchmarks/pipeline_cpu.py [--rounds 9] [--json]

GraphSAGE (whose long ops are ours, narrow and wide) and GAT (whose are torch's) on a power-law graph of 100k nodes and
2M edges, epochs of 8k seeds (GAT: 1k), batch 128, fan-outs (10, 10, 5). All settings in turns, epoch by epoch; medians,
and minima, since other work on the machine only adds. `auto` is workers=auto, `serial` an epoch with workers=0, `said`
the serial sum that the first reports of its stages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics

import torch
from torch_geometric.nn import GATConv, SAGEConv

import hopline as hl
from hopline.data.synthetic import planted_partition
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.work import SampledWork
from hopline.report.bottleneck import Explanation
from hopline.training.report_callbacks import WatchPipeline, setup_of

CASES = (("SAGE", SAGEConv, 64, 8192), ("SAGE", SAGEConv, 256, 8192), ("GAT", GATConv, 16, 1024))


class Keep(WatchPipeline):
    """Keeps what the last epoch was explained by."""

    found: Explanation | None = None

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        super().on_epoch_end(trainer, epoch)
        self.found = self.epochs[-1].explain(setup_of(trainer))


def measure(conv: type, hidden: int, seeds: int, rounds: int) -> dict[str, object]:
    data = planted_partition(
        num_nodes=100_000, num_edges=2_000_000, num_classes=16, num_features=100, num_train=seeds, num_valid=0
    )
    data.splits.pop("test", None)
    settings = {"auto": ("auto", "auto"), "serial": (0, 1)}
    trainers, keep = {}, Keep()
    for name, (threads, ahead) in settings.items():
        torch.manual_seed(0)
        model = hl.nn.GNN([conv(i, o) for i, o in itertools.pairwise((100, hidden, hidden, 16))])
        method = hl.Sampled(fanouts=(10, 10, 5), batch_size=128, workers=threads, look_ahead=ahead)  # type: ignore[arg-type]
        callbacks = [keep] if name == "auto" else []
        trainers[name] = hl.Trainer(model, data, method, epochs=1, show=False, callbacks=callbacks)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(rounds + 1):
        order = list(trainers) if number % 2 else list(reversed(trainers))
        for name in order:
            taken = trainers[name].fit().history[0].seconds
            if number:  # the first compiles
                seconds[name].append(taken)
    work, found = trainers["auto"].work, keep.found
    assert isinstance(work, SampledWork)
    assert isinstance(work.loader, Loader)
    assert found is not None
    return {
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "least_s": {name: min(values) for name, values in seconds.items()},
        "threads": list(work.loader.threads),
        "said_s": found.serial_s,
        "bound": found.bound,
        "achieved": found.achieved,
        "waited": found.waited,
        "sentence": found.sentence,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not given.json:
        print(f"{'model':<9} {'auto s':>15} {'serial s':>15} {'said s':>7} {'threads':<8} bound, took")
    for name, conv, hidden, seeds in CASES:
        row = measure(conv, hidden, seeds, given.rounds)
        if given.json:
            print(json.dumps({"model": name, "hidden": hidden, **row}), flush=True)
            continue
        median: dict = row["median_s"]  # type: ignore[assignment]
        least: dict = row["least_s"]  # type: ignore[assignment]
        cells = [f"{median[n]:7.2f} ({least[n]:5.2f})" for n in ("auto", "serial")]
        threads = "{0[0]}/{0[1]}".format(row["threads"])
        cells += [f"{row['said_s']:7.2f}", f"{threads:<8}", f"{row['bound']:.2f}, {row['achieved']:.2f}"]
        print(f"{name + ' ' + str(hidden):<9}", *cells, flush=True)
        print(f"          {row['sentence']}", flush=True)


if __name__ == "__main__":
    main()
