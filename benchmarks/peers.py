"""Peers beside hopline on one graph file: workers started, asked in turn, and compared by medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from hopline import ops
from hopline.util.progress import progress

ROOT = Path(__file__).resolve().parents[1]
LONG_S = 15
"""A library that needs longer for its warm-up round is measured in one round only."""
PYTHONS = {
    "hopline": Path(sys.executable),
    "dgl": ROOT / ".venv-dgl" / "bin" / "python",
    "graphbolt": ROOT / ".venv-dgl" / "bin" / "python",
    "pyg": ROOT / ".venv-pyg" / "bin" / "python",
}
"""Which Python runs which library; `make bench-peers` makes the environments."""


def rmat_folder(folder: Path, num_nodes: int = 500_000, num_edges: int = 12_000_000, num_seeds: int = 50_000) -> Path:
    """The benchmark's graph: RMAT (0.50/0.20/0.20/0.10), symmetrised, 100 float32 features; made once."""
    if (folder / "seeds.npy").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    src, dst = (np.zeros(num_edges // 2, dtype=np.int64) for _ in range(2))
    for _ in range((num_nodes - 1).bit_length()):
        draw = random.random(num_edges // 2)
        src = (src << 1) | (draw >= 0.7)
        dst = (dst << 1) | (((draw >= 0.5) & (draw < 0.7)) | (draw >= 0.9))
    src, dst = src % num_nodes, dst % num_nodes
    keys = torch.from_numpy(np.concatenate([dst, src]))
    indptr, order = ops.group_by_key(keys, num_nodes)
    arrays = {
        "indptr": indptr.numpy(),
        "indices": np.concatenate([src, dst])[order.numpy()].astype(np.int32),
        "x": random.standard_normal((num_nodes, 100), dtype=np.float32),
        "y": random.integers(0, 47, num_nodes),
        "seeds": random.permutation(num_nodes)[:num_seeds],  # last: its presence says that all is written
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


class Worker:
    """A library in its own process and environment."""

    def __init__(self, library: str, folder: Path, threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "DGLBACKEND": "pytorch"}
        command = [str(PYTHONS[library]), "-W", "ignore", str(ROOT / "benchmarks" / "peer_worker.py")]
        self.process = subprocess.Popen(
            [*command, library, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._answer()

    def run(self, task: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{task}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended without an answer: run it by hand to see why")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()


def compare(task: str, threads: int, folder: Path, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Median seconds (and sampled edges) of each library that is installed, after one run to warm up; interleaved."""
    libraries = [name for name, python in PYTHONS.items() if python.exists()]
    slow: set[str] = set()
    workers = {name: Worker(name, folder, threads) for name in libraries}
    seconds: dict[str, list[float]] = {name: [] for name in libraries}
    edges: dict[str, float] = {}
    try:
        with progress(f"{task}, {threads} threads", rounds + 1, "rounds", brief=True) as bar:
            for number in range(rounds + 1):
                for name, worker in workers.items():
                    if number > 1 and name in slow:
                        continue
                    answer = worker.run(task)
                    edges[name] = answer["edges"]
                    if number:
                        seconds[name].append(answer["seconds"])
                    elif answer["seconds"] > LONG_S:
                        slow.add(name)
                bar.advance()
    finally:
        for worker in workers.values():
            worker.__exit__(None, None, None)
    return {name: {"seconds": statistics.median(seconds[name]), "edges": edges[name]} for name in libraries}


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    """One block of the table: each library's time, and how many times faster hopline is."""
    ours = results["hopline"]["seconds"]
    for name, result in results.items():
        rate = f"{result['edges'] / result['seconds'] / 1e6:8.1f}" if result["edges"] else " " * 8
        print(f"{title:<24} {name:<10} {result['seconds']:8.2f} {rate} {result['seconds'] / ours:8.2f}", flush=True)
