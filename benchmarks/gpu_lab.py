"""What the sections of `gpu.py` share: graphs, trainers, timing, and the rows of the table."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric import nn as pyg

import hopline as hl
from hopline.data.built_in import built_in
from hopline.data.synthetic import planted_partition

FANOUTS, BATCH_SIZE, HIDDEN, DROPOUT = (15, 10, 5), 1024, 256, 0.5
SHAPES = {"papers100m": ("papers100m-shaped", "bfloat16"), "products": ("products-shaped", "float32")}
"""The built-in graph and the dtype of its features."""


@dataclass(kw_only=True)
class Row:
    """One measurement."""

    name: str
    value: float | None
    """None where the measurement failed; the note says why."""
    unit: str
    target: float | None = None
    at_least: bool = False
    """Whether the target is the least value, and not the largest."""
    note: str = ""
    commit: str = ""
    device: str = ""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(kw_only=True)
class Lab:
    """One run of the benchmark: where it runs, how much of it, and what it found."""

    device: torch.device
    scale: float = 1.0
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    commit: str = field(default_factory=lambda: commit())
    started: float = field(default_factory=time.perf_counter)
    graphs: dict[tuple[str, str], hl.Dataset] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)

    def row(
        self, name: str, value: float, unit: str, target: float | None = None, *, at_least: bool = False, note: str = ""
    ) -> None:
        """Add a measurement to the table; targets are those of a GPU and of whole graphs."""
        target = target if self.on_gpu and self.scale == 1 else None
        self._add(Row(name=name, value=value, unit=unit, target=target, at_least=at_least, note=note))

    def memory_row(self, name: str, peak_bytes: int, note: str) -> None:
        if self.on_gpu:
            self.row(f"{name}: peak memory", peak_bytes / 2**30, "GiB", note=note)

    def _add(self, row: Row) -> None:
        row.commit, row.device = self.commit, self.device_name
        self.rows.append(row)
        self.say(f"  {row.name}: {number(row.value)} {row.unit} {row.note}".rstrip())

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Run a part whose failure leaves the others as they are, and free what it held."""
        try:
            work()
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._add(Row(name=name, value=None, unit="", note=reason))
        self.free()

    def free(self) -> None:
        gc.collect()
        if self.on_gpu:
            with contextlib.suppress(RuntimeError):  # of a device that failed; what was found is still written
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def shaped(self, shape: str, dtype: str | None = None) -> hl.Dataset:
        """A built-in graph on the device, with its training split only; made once."""
        name, usual = SHAPES[shape]
        key = (shape, dtype or usual)
        if key not in self.graphs:
            started = time.perf_counter()
            settings = built_in(name, {"scale": self.scale, "dtype": dtype or usual})
            made = planted_partition(settings, name=name, device=str(self.device))
            self.graphs[key] = replace(made, splits={"train": made.splits["train"]})
            self.wait()
            self.say(f"  made {self.graphs[key]!r} in {time.perf_counter() - started:.1f} s")
        return self.graphs[key]

    def drop(self, shape: str) -> None:
        """Forget a graph, so that its memory is free."""
        for key in [key for key in self.graphs if key[0] == shape]:
            del self.graphs[key]
        self.free()


# ---- models and training


def sage(data: hl.Dataset, hidden: int = HIDDEN) -> list[nn.Module]:
    widths = (data.num_features, hidden, hidden, data.num_classes)
    return [pyg.SAGEConv(widths[l], widths[l + 1]) for l in range(3)]


def batch_size(data: hl.Dataset) -> int:
    """The usual one, or on a small graph one that leaves a few steps in an epoch."""
    return min(BATCH_SIZE, max(8, data.splits["train"].numel() // 8))


def num_steps(data: hl.Dataset) -> int:
    return -(-data.splits["train"].numel() // batch_size(data))


class QuietTrainer(hl.Trainer):
    """A trainer that keeps what it has to say, such as why its steps are not captured."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.said: list[str] = []
        super().__init__(*args, **settings)

    def say(self, text: str) -> None:
        self.said.append(text)


def make_trainer(
    lab: Lab, data: hl.Dataset, convs: Sequence[nn.Module], layout: Any, size: int, **settings: Any
) -> QuietTrainer:
    fanouts = settings.pop("fanouts", FANOUTS)
    model = hl.nn.GNN(convs, dropout=DROPOUT)
    method = hl.Sampled(fanouts=fanouts, batch_size=size, layout=layout)
    return QuietTrainer(model, data, method, device=str(lab.device), show=False, **({"precision": "bf16"} | settings))


@dataclass
class Epochs:
    """What training for some epochs took."""

    seconds: float
    """Of an epoch: the median of those after the first, which warms up."""
    last: hl.extend.EpochEnd
    share: float
    """Of the training seeds that an epoch had."""
    peak_bytes: int
    note: str

    def per_epoch(self, counter: str) -> float:
        """A counter of the last epoch, scaled to all seeds."""
        return self.last.counters.get(counter, 0.0) / self.share


def timed_epochs(
    lab: Lab, data: hl.Dataset, convs: Sequence[nn.Module], layout: Any, epochs: int = 4, most_steps: int | None = None
) -> Epochs:
    """Train; where `most_steps` are fewer than an epoch has, on so many, and the seconds are scaled up."""
    size, ids = batch_size(data), data.splits["train"]
    total = ids.numel()
    if most_steps is not None and most_steps * size < total:
        chosen = torch.randperm(total, generator=torch.Generator().manual_seed(0))[: most_steps * size]
        data = replace(data, splits={"train": ids[chosen.sort().values]})
    lab.free()
    if lab.on_gpu:
        torch.cuda.reset_peak_memory_stats(lab.device)
    trainer = make_trainer(lab, data, convs, layout, size, epochs=epochs)
    run = trainer.fit()
    share = data.splits["train"].numel() / total
    seconds = statistics.median([epoch.seconds for epoch in run.history[1:]]) / share
    peak = torch.cuda.max_memory_allocated(lab.device) if lab.on_gpu else 0
    return Epochs(seconds, run.history[-1], share, peak, _how(trainer, share))


def _how(trainer: QuietTrainer, share: float) -> str:
    """The layout that was used, whether its steps were captured, and of what the time is a multiple."""
    loader = getattr(trainer.work, "loader", None)
    parts = [getattr(loader, "layout", "")]
    if getattr(trainer.work, "step", None) is not None:
        parts.append("captured")
    parts += [line for line in trainer.said if "not captured" in line]
    if share < 1:
        parts.append(f"scaled from {100 * share:.0f}% of the seeds")
    return ", ".join(filter(None, parts))


# ---- timing


def seconds_per_call(
    lab: Lab, call: Callable[[], Any], repeats: int, reset: Callable[[], None] | None = None, rounds: int = 3
) -> float:
    """Of a call among many: the median over rounds, by the device's own clock where it has one."""
    found = []
    for number in range(rounds + 1):  # the first warms up
        if reset is not None:
            reset()
        lab.wait()
        if lab.on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds = time.perf_counter() - started
        if number:
            found.append(seconds / repeats)
    return statistics.median(found)


def graphed(lab: Lab, call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` as a CUDA graph that is replayed; on the CPU, `call` itself."""
    if not lab.on_gpu:
        return call
    stream = torch.cuda.Stream(lab.device)
    stream.wait_stream(torch.cuda.current_stream(lab.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(lab.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# ---- the table


def number(value: float | None) -> str:
    """A value with four digits, without an exponent where it is readable."""
    if value is None:
        return "failed"
    return f"{value:.3g}" if value and abs(value) < 1e-3 else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def cells(row: Row) -> tuple[str, ...]:
    sign = "≥" if row.at_least else "≤"
    target = "" if row.target is None else f"{sign} {number(row.target)}"
    met = {True: "yes", False: "no", None: ""}[row.met]
    return row.name, number(row.value), row.unit, target, met, row.commit, row.note


HEAD = ("measurement", "value", "unit", "target", "met", "commit", "note")


def text_table(rows: Sequence[Row]) -> str:
    table = [HEAD, *map(cells, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEAD))]
    aligned = [
        "  ".join(c.rjust(w) if i == 1 else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    return "\n".join(line.rstrip() for line in aligned)


def markdown_table(rows: Sequence[Row]) -> str:
    """The same for a page, with the machine and without the notes of failed measurements."""
    lines = ["| measurement | value | target | met | note |", "|---|---|---|---|---|"]
    for row in rows:
        name, value, unit, target, met, _, note = cells(row)
        lines.append(f"| {name} | {value} {unit} | {target} | {met} | {note} |")
    commits = ", ".join(dict.fromkeys(f"`{row.commit}`" for row in rows))
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    return "\n".join([*lines, "", f"{devices}; commit {commits}."])


def write_json(file: Path, rows: Sequence[Row]) -> None:
    """Write the rows; a file that is there keeps its others, so that sections can be run one by one."""
    before = [row for row in read_json(file) if row.value is not None] if file.exists() else []
    known = {row.name: row for row in (*before, *rows)}
    file.write_text(json.dumps([{**asdict(row), "met": row.met} for row in known.values()], indent=1) + "\n")


def read_json(file: Path) -> list[Row]:
    return [Row(**{k: v for k, v in row.items() if k != "met"}) for row in json.loads(file.read_text())]


def commit() -> str:
    """The commit of this source tree, else what HOPLINE_COMMIT says."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("HOPLINE_COMMIT", "unknown")
