"""300 epochs in one process, and again with random kills: memory, files and threads must not grow. `make test-soak`."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

import hopline as hl
from hopline.training.callbacks import Callback, EpochEnd
from tests.support.killed import results, train_in_child
from tests.support.runs import sage, small

EPOCHS = 300
SETTLED = 50
"""The epoch from which on files and threads must not change: a rule of thumb."""
WINDOW = 20
"""Epochs whose median is compared, after `SETTLED` and at the end."""
GROWTH = 1.02
"""The largest ratio of the resident memory at the end to that after `SETTLED`."""


class RecordUsage(Callback):
    """Records memory, open files and threads of the process at the end of every epoch."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.process = psutil.Process()

    def on_epoch_end(self, trainer: hl.Trainer, epoch: EpochEnd) -> None:
        read_samples = {
            "epoch": epoch.epoch,
            "pid": os.getpid(),
            "rss": self.process.memory_info().rss,
            "files": self.process.num_fds(),
            "threads": self.process.num_threads(),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(read_samples) + "\n")


def train(folder: Path, kind: str) -> None:
    """Train 300 epochs in a folder, resuming what is in it. kind: unused, as `train_in_child` passes one."""
    data = small(num_nodes=2000, num_edges=20_000, num_train=1000)
    method = hl.Sampled(fanouts=(5, 5), batch_size=100, workers=2)
    callbacks = [RecordUsage(folder.with_suffix(".held"))]
    settings = {"epochs": EPOCHS, "show": False, "resume": True, "checkpoint_s": 0.05, "evaluate_every": 10}
    hl.Trainer(sage(data, dropout=0.5), data, method, out=folder, callbacks=callbacks, **settings).fit()


def read_samples(folder: Path) -> list[dict[str, int]]:
    """The records of `RecordUsage` for a folder, one per epoch."""
    return [json.loads(line) for line in folder.with_suffix(".held").read_text().splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        whole_folder = Path(home) / "whole"
        interrupted_folder = Path(home) / "cut"
        start_s = time.perf_counter()
        train_in_child(whole_folder, "", None, train)
        whole_s = time.perf_counter() - start_s
        samples = read_samples(whole_folder)
        early_samples = samples[SETTLED : SETTLED + WINDOW]
        late_samples = samples[-WINDOW:]
        rss = [statistics.median(entry["rss"] for entry in part) for part in (early_samples, late_samples)]
        growth = rss[1] / rss[0]
        sizes = " -> ".join(f"{size / 2**20:.1f}" for size in rss)
        print(f"{EPOCHS} epochs in {whole_s:.0f} s: resident {sizes} MiB ({growth:.3f})")
        for what in ("files", "threads"):
            print(f"{what}: {sorted({entry[what] for entry in samples[SETTLED:]})}")
        random_times = random.Random(3)
        num_kills = 0
        while not train_in_child(interrupted_folder, "", random_times.uniform(0.02, 0.2) * whole_s, train):
            num_kills += 1
        is_same = results(interrupted_folder) == results(whole_folder)
        processes = {entry["pid"] for entry in read_samples(interrupted_folder)}
        print(f"{num_kills} kills, {len(processes)} processes: {'the same' if is_same else 'other'} losses and weights")
        settled_counts = [{entry[what] for entry in samples[SETTLED:]} for what in ("files", "threads")]
        if growth > GROWTH or not is_same or any(len(kinds) > 1 for kinds in settled_counts):
            sys.exit("the soak failed: see above")


if __name__ == "__main__":
    main()
