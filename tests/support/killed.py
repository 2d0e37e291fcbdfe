"""Training in child processes that are killed at random moments and resumed, until enough kills have happened.

    python -m tests.support.killed FOLDER KIND NUMBER_OF_KILLS [SIGKILL|SIGINT|SIGTERM|SIGHUP]

`test_8_resumed.py` starts it as a process of its own. The parent only imports, so it has no threads, and a child that
is forked from it starts at once. Results of every resumed run must equal those of one never interrupted, and no
process may be left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch_geometric.nn import GATConv, SAGEConv

import hopline as hl
from hopline.distributed import launch
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.util.signals import Interrupted
from tests.support.helpers import random_graph

KINDS = ("sage", "gat", "historical", "ranks")
"""What is trained: sampled SAGE or GAT, historical SAGE, or sampled SAGE over two processes."""


def train(folder: Path, kind: str) -> None:
    """Train a kind in a folder, resuming what is in it."""
    if kind == "ranks":
        launch.run(train_rank, LaunchSettings(devices=2, timeout_s=60), str(folder), "sage")
    else:
        train_rank(World.alone(), str(folder), kind)


def train_rank(world: World, folder: str, kind: str) -> None:
    """Train in one rank, with much state: dropout, batch norm, a plateau schedule, accumulation."""
    graph = random_graph(300, 3000)
    random_rows = torch.Generator().manual_seed(0)
    data = hl.Dataset(
        name="small",
        graph=graph,
        tables={"x": hl.extend.TensorTable(torch.randn(300, 8, generator=random_rows))},
        y=torch.randint(0, 3, (300,), generator=random_rows),
        splits={"train": torch.arange(200), "valid": torch.arange(200, 250), "test": torch.arange(250, 300)},
        num_classes=3,
    )
    torch.manual_seed(1)
    # GAT's dropout inside the conv is drawn from torch's own generator, which a checkpoint has to keep.
    convs = [GATConv(8, 8, dropout=0.3), GATConv(8, 3)] if kind == "gat" else [SAGEConv(8, 8), SAGEConv(8, 3)]
    model = hl.nn.GNN(convs, dropout=0.5, norm="batch")
    method: hl.extend.Method = hl.Sampled(fanouts=(4, 3), batch_size=16, workers=2)
    if kind == "historical":
        method = hl.Historical(num_parts=12, parts_per_batch=1, partition="random", compensate=True, lag=1)
    schedule = hl.Schedule(name="plateau", every=0, warmup=1)
    settings = {"epochs": 5, "accumulate": 2, "schedule": schedule, "patience": 4, "clip_norm": 1.0}
    options = {"out": Path(folder), "show": False, "resume": True, "checkpoint_s": 0.0, "world": world}
    hl.Trainer(model, data, method, **options, **settings).fit()  # type: ignore[arg-type]


def train_in_child(
    folder: Path,
    kind: str,
    kill_after_s: float | None,
    train: Callable[[Path, str], None] = train,
    number: int = signal.SIGKILL,
) -> bool:
    """Train in a forked child, and send it a signal after some seconds; None: never.

    Returns whether the child reached the end of training.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()  # a session of its own, by which its ranks are found
            train(folder, kind)
            status = 0
        except Interrupted as interruption:
            status = 128 + interruption.number
        except KeyboardInterrupt:  # before the trainer handles signals
            status = 128 + signal.SIGINT
        finally:
            os._exit(status)
    if kill_after_s is not None:
        if kind == "ranks":  # starting ranks takes longer than training: count from the first checkpoint
            _wait_for_checkpoint(folder / "checkpoint.pt", child)
        time.sleep(kill_after_s)
        os.kill(child, number)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -number, 128 + number):
        raise SystemExit(f"training failed in {folder} with {code}: see above")
    family = [process for process in psutil.process_iter() if _session_of(process.pid) == child]
    if psutil.wait_procs(family, timeout=20)[1]:
        raise SystemExit(f"left behind: {family}")
    return code == 0


def _session_of(pid: int) -> int:
    """The session of a process; -1 if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _wait_for_checkpoint(path: Path, child: int) -> None:
    """Wait until there is a new checkpoint, or the child has ended."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    while not path.exists() or path.stat().st_mtime_ns == before:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.005)


def results(folder: Path) -> dict[str, object]:
    """Losses, metrics and weights of a run, to be compared bit for bit."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [[r["epoch"], r["loss"]] for r in records if r["event"] == "epoch"]  # each of them once
    metrics = [[r["epoch"], r["split"], r["metrics"]] for r in records if r["event"] == "evaluate"]
    weights = {}
    for name in ("best.pt", "last.pt"):
        state = torch.load(folder / name, weights_only=True)
        weights[name] = {key: tensor.double().tolist() for key, tensor in state.items()}
    return {"losses": losses, "metrics": metrics, "weights": weights}


def main() -> None:
    """Train once without a kill, then with kills, and compare."""
    if len(sys.argv) not in (4, 5) or sys.argv[2] not in KINDS or not sys.argv[3].isdigit():
        raise SystemExit(f"usage: python -m tests.support.killed FOLDER {'|'.join(KINDS)} NUMBER_OF_KILLS [SIGNAL]")
    home = Path(sys.argv[1])
    kind = sys.argv[2]
    num_wanted = int(sys.argv[3])
    number = signal.Signals[sys.argv[4]] if len(sys.argv) == 5 else signal.SIGKILL
    start_s = time.perf_counter()
    train_in_child(home / "whole", kind, None)
    whole_s = time.perf_counter() - start_s
    expected = results(home / "whole")
    random_times = random.Random(7)
    num_kills = 0
    num_runs = 0
    while num_kills < num_wanted:
        num_runs += 1
        longest_s = 0.3 if kind == "ranks" else 0.8 * whole_s
        run = home / f"run{num_runs}"
        while not train_in_child(run, kind, random_times.uniform(0.05, 1) * longest_s, number=number):
            num_kills += 1
        if results(home / f"run{num_runs}") != expected:
            raise SystemExit(f"run {num_runs} differs from the one that was never interrupted")
        leftovers = [p.name for p in (home / f"run{num_runs}").iterdir() if "unfinished" in p.name]
        if leftovers:
            raise SystemExit(f"left behind: {leftovers}")
    print(json.dumps({"kills": num_kills, "runs": num_runs, "losses": len(expected["losses"])}))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
