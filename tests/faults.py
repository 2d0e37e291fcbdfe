"""Faults injected into runs of the command: what is lost, and how long recovery takes. `make test-faults`.

Writes the table of docs/measurements/faults.md. Every run is compared with one never interrupted: the losses of
all epochs and the last weights, bit for bit. Where fewer ranks resume (`hosts/elastic.sh`), the losses up to the
fault and the number of seeds are compared.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measurements" / "faults.md"
BEGIN = "<!-- made by make test-faults -->"
END = "<!-- end -->"
EPOCHS = 30
SETTINGS = [f"epochs={EPOCHS}", "model.hidden=16", "method.batch_size=256", f"evaluate_every={EPOCHS}"]

Fault = Callable[[psutil.Process], None]


def send(number: int) -> Fault:
    """A fault that sends a signal."""
    return lambda process: process.send_signal(number)


def kill_a_rank(process: psutil.Process) -> None:
    """Kill the youngest child: ranks are spawned in order, so it is the last rank."""
    ranks = [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]
    max(ranks, key=lambda child: child.create_time()).kill()


FAULTS: dict[str, tuple[int, Fault]] = {
    "`kill -9`": (1, send(signal.SIGKILL)),
    "Ctrl-C": (1, send(signal.SIGINT)),
    "SIGTERM": (1, send(signal.SIGTERM)),
    "SIGHUP (a closed terminal)": (1, send(signal.SIGHUP)),
    "SIGUSR1 (Slurm's notice)": (1, send(signal.SIGUSR1)),
    "`kill -9` of one of 2 ranks": (2, kill_a_rank),
    "`kill -9` of the parent of 2 ranks": (2, send(signal.SIGKILL)),
    "SIGTERM to the parent of 2 ranks": (2, send(signal.SIGTERM)),
}
"""Name of a fault -> (number of ranks, the fault), injected in the middle of an epoch."""
ELASTIC = "`kill -9` of one of two agents of `torchrun --nnodes 1:2`"


def start(out: Path, ranks: int) -> subprocess.Popen[str]:
    """Start, or resume, a run by the command line."""
    command = [sys.executable, "-W", "ignore", "-m", "hopline", "train", "demo", *SETTINGS]
    command += ["timeout_s=20", "checkpoint_s=0.2", "resume=true", f"devices={ranks}", f"out={out}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def results(out: Path) -> dict[str, Any]:
    """Losses by epoch and last weights of a run."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    weights = torch.load(out / "last.pt", weights_only=True)
    return {
        "losses": {line["epoch"]: line["loss"] for line in lines if line["event"] == "epoch"},
        "weights": {name: tensor.tolist() for name, tensor in weights.items()},
    }


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str], what: str) -> float:
    """The seconds until a condition holds; ends the program after two minutes."""
    start_s = time.monotonic()
    while not holds():
        if process.poll() is not None and not holds():
            raise SystemExit(f"the run ended before {what}: {process.communicate()[1][-2000:]}")
        if time.monotonic() - start_s > 120:
            process.kill()
            raise SystemExit(f"{what} took over two minutes")
        time.sleep(0.02)
    return time.monotonic() - start_s


def count(file: Path, text: str) -> int:
    """How often a text occurs in a file that may not exist yet."""
    return file.read_text().count(text) if file.exists() else 0


def inject(name: str, ranks: int, fault: Fault, out: Path, expected: dict[str, Any]) -> str:
    """One row of the table: run, inject the fault after five epochs, resume, and compare."""
    run = start(out, ranks)
    wait_until(lambda: count(out / "metrics.jsonl", '"event": "epoch"') >= 5, run, "five epochs")
    time.sleep(0.05)
    processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    fault(processes[0])
    start_s = time.monotonic()
    _, errors = run.communicate(timeout=60)
    psutil.wait_procs(processes, timeout=20)
    ended_s = time.monotonic() - start_s
    still_running = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    if still_running or run.returncode == 0:
        raise SystemExit(f"{name}: {still_running} still run, status {run.returncode}")
    num_resumes = count(out / "run.log", "resuming from")
    resumed_run = start(out, ranks)
    resume_s = wait_until(lambda: count(out / "run.log", "resuming from") > num_resumes, resumed_run, "going on")
    if resumed_run.wait(timeout=180):
        raise SystemExit(f"{name}: the second start failed: {resumed_run.communicate()[1]}")
    if results(out) != expected:
        raise SystemExit(f"{name}: the run that went on differs from one that was never interrupted")
    message = (errors.strip().splitlines() or ["nothing"])[-1].removeprefix("error: ").split(":")[0]
    print(f"{name}: ended after {ended_s:.1f} s, went on after {resume_s:.1f} s", flush=True)
    return f"| {name} | {run.returncode} | {message} | {ended_s:.1f} | nothing | {resume_s:.1f} |"


def lose_a_host() -> str:
    """The row of a host that is lost under torchrun, which restarts the run by itself: tests/hosts/elastic.sh."""
    script = ["bash", str(ROOT / "tests" / "hosts" / "elastic.sh")]
    done = subprocess.run(script, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    times = re.search(r"ended after ([\d.]+) s, and went on alone after ([\d.]+) s", done.stdout)
    if done.returncode or times is None:
        raise SystemExit(f"tests/hosts/elastic.sh failed: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    print(f"{ELASTIC}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return f"| {ELASTIC} | 0 | rank 1 stopped answering | {times[1]} | nothing | {times[2]} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        expected_by_ranks = {}
        rows = []
        for number, (name, (ranks, fault)) in enumerate(FAULTS.items()):
            if ranks not in expected_by_ranks:
                run = start(home / f"whole{ranks}", ranks)
                if run.wait(timeout=180):
                    raise SystemExit(f"the run without a fault failed: {run.communicate()[1]}")
                expected_by_ranks[ranks] = results(home / f"whole{ranks}")
            rows.append(inject(name, ranks, fault, home / f"run{number}", expected_by_ranks[ranks]))
    rows.append(lose_a_host())
    titles = ["fault, in the middle of an epoch", "status", "it says", "all processes gone after, s", "lost"]
    head = f"| {' | '.join([*titles, 'resumed after, s'])} |"
    table = "\n".join([BEGIN, "", head, "|---|---|---|---|---|---|", *rows, "", END])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + table + rest.partition(END)[2])
    print(f"written to {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
