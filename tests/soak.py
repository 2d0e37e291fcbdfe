"""300 epochs in one process, and again with random kills: memory, files and threads must not grow; `make test-soak`."""

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
from tests.killed import in_child, results
from tests.runs import sage, small

EPOCHS = 300
SETTLED = 50
WINDOW = 20
GROWTH = 1.02


class Watch(Callback):
    """What the process holds, at the end of every epoch."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.process = psutil.Process()

    def on_epoch_end(self, trainer: hl.Trainer, epoch: EpochEnd) -> None:
        held = {
            "epoch": epoch.epoch,
            "pid": os.getpid(),
            "rss": self.process.memory_info().rss,
            "files": self.process.num_fds(),
            "threads": self.process.num_threads(),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(held) + "\n")


def train(folder: Path, kind: str) -> None:
    data = small(num_nodes=2000, num_edges=20_000, num_train=1000)
    method = hl.Sampled(fanouts=(5, 5), batch_size=100, workers=2)
    callbacks = [Watch(folder.with_suffix(".held"))]
    settings = {"epochs": EPOCHS, "show": False, "resume": True, "checkpoint_s": 0.05, "evaluate_every": 10}
    hl.Trainer(sage(data, dropout=0.5), data, method, out=folder, callbacks=callbacks, **settings).fit()


def held(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in folder.with_suffix(".held").read_text().splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        whole = Path(home) / "whole"
        cut = Path(home) / "cut"
        started = time.perf_counter()
        in_child(whole, "", None, train)
        whole_s = time.perf_counter() - started
        seen = held(whole)
        early = seen[SETTLED : SETTLED + WINDOW]
        late = seen[-WINDOW:]
        rss = [statistics.median(entry["rss"] for entry in part) for part in (early, late)]
        growth = rss[1] / rss[0]
        sizes = " -> ".join(f"{size / 2**20:.1f}" for size in rss)
        print(f"{EPOCHS} epochs in {whole_s:.0f} s: resident {sizes} MiB ({growth:.3f})")
        for what in ("files", "threads"):
            print(f"{what}: {sorted({entry[what] for entry in seen[SETTLED:]})}")
        moments = random.Random(3)
        kills = 0
        while not in_child(cut, "", moments.uniform(0.02, 0.2) * whole_s, train):
            kills += 1
        same = results(cut) == results(whole)
        processes = {entry["pid"] for entry in held(cut)}
        print(f"{kills} kills, {len(processes)} processes: {'the same' if same else 'other'} losses and weights")
        settled = [{entry[what] for entry in seen[SETTLED:]} for what in ("files", "threads")]
        if growth > GROWTH or not same or any(len(kinds) > 1 for kinds in settled):
            sys.exit("the soak failed: see above")


if __name__ == "__main__":
    main()
