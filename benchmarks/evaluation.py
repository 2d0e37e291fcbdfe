"""Wall time of a run that is evaluated after every epoch: training waits for it, or it goes on beside.

    .venv/bin/python benchmarks/evaluation.py [key=value ...]

Keys: nodes, edges, epochs, rounds, device, data (where graph and features are, such as device, host, or host,device),
case. Exact evaluation over the whole graph, GraphSAGE
(3 layers of 128), batches of 1024 with fan-outs (10, 5, 5); so many training nodes that an epoch takes about as long as
an evaluation (even), a third of it (evaluation longer) or three times it (training longer). Both runs of a pair are in
this process, in turns, median of the rounds; that their metrics and weights are equal to the bit is checked. `larger`
is an epoch of the async run over the longer of its two parts, as the blocking run has
them, when it has begun: without the first epochs, in which kernels are compiled and steps recorded. `kernels` is the
time in which the GPU computes in such an epoch, training and evaluation, over the same: no run on one GPU takes less,
but where kernels of both leave room for each other. `GiB` is the peak that torch's allocator reserved on the GPU in the
blocking and in the async run, the largest of the rounds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torch.autograd import DeviceType
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.data.synthetic import planted_partition

CASES = {"evaluation longer": 1 / 3, "even": 1.0, "training longer": 3.0}
BEGIN = 3
"""Epochs after which a run has begun."""


class Loop(hl.Callback):
    """When epochs were trained, and evaluated."""

    def on_fit_start(self, trainer: hl.Trainer) -> None:
        self.started = time.perf_counter()
        self.trained: list[float] = []

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        self.trained.append(time.perf_counter() - self.started)

    def on_evaluate_end(self, trainer: hl.Trainer, evaluation: hl.extend.Evaluation) -> None:
        if evaluation.split == "valid":
            self.evaluated = time.perf_counter() - self.started

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch with its evaluation, once the run has begun."""
        return (self.evaluated - self.trained[BEGIN - 1]) / (len(self.trained) - BEGIN)


class Kernels(hl.Callback):
    """Seconds in which the GPU computes in an epoch and in the evaluation before it, over `epochs` of them."""

    epochs = 4

    def __init__(self) -> None:
        self.count, self.profile = 0, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        self.count += 1
        if self.count in (BEGIN, BEGIN + self.epochs):
            torch.cuda.synchronize()
            (self.profile.start if self.count == BEGIN else self.profile.stop)()

    @property
    def epoch_s(self) -> float:
        events = [e.time_range for e in self.profile.events() or () if e.device_type == DeviceType.CUDA]
        busy_us = end = 0.0
        for span in sorted(events, key=lambda span: span.start):
            busy_us += max(0.0, span.end - max(end, span.start))
            end = max(end, span.end)
        return busy_us / 1e6 / self.epochs


def fit(
    data: hl.Dataset,
    epochs: int,
    device: str,
    how: str,
    at: str = "auto",
    callbacks: Sequence[hl.Callback] = (),
) -> tuple[hl.Run, dict[str, torch.Tensor], float, Loop]:
    """(run, weights, seconds in all, when what was done)."""
    if device != "cpu":  # so that the peak is that of this run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(100, 128), SAGEConv(128, 128), SAGEConv(128, data.num_classes)], dropout=0.5)
    loop, method = Loop(), hl.Sampled(fanouts=(10, 5, 5))
    started = time.perf_counter()
    trainer = hl.Trainer(
        model,
        data,
        method,
        epochs=epochs,
        evaluate=how,
        device=device,
        callbacks=[loop, *callbacks],
        placement=hl.Placement(graph=at.split(",")[0], features=at.split(",")[-1]),  # type: ignore[arg-type]
        show=False,
        lr=0.01,
    )
    run = trainer.fit()
    return run, model.state_dict(), time.perf_counter() - started, loop


def parts_of(run: hl.Run) -> tuple[float, float]:
    """Seconds of training and of evaluation in an epoch, once the run has begun."""
    evaluations = [e.seconds for e in run.evaluations if e.split == "valid"][BEGIN:]
    return statistics.fmean(e.seconds for e in run.history[BEGIN:]), statistics.fmean(evaluations)


def same(one: hl.Run, other: hl.Run) -> bool:
    pairs = zip(one.evaluations, other.evaluations, strict=True)
    return all(a.metrics == b.metrics for a, b in pairs)


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    numbers = {"nodes": 100_000, "edges": 2_000_000, "epochs": 20, "rounds": 3}
    nodes, edges, epochs, rounds = (int(given.get(key, default)) for key, default in numbers.items())
    device = given.get("device", "cpu")
    at = given.get("data", "auto")
    data = planted_partition(
        num_nodes=nodes, num_edges=edges, num_classes=16, num_features=100, num_train=nodes // 10, num_valid=2000
    )
    train_s, evaluate_s = parts_of(fit(data, BEGIN + 2, device, "blocking", at=at)[0])
    print(f"{data!r}; {torch.get_num_threads()} threads; {epochs} epochs, median of {rounds}", flush=True)
    print(
        f"{'case':<18} {'train s':>8} {'eval s':>7} {'blocking s':>11} {'async s':>8} {'ratio':>6} {'larger':>7} "
        f"{'kernels':>8} {'loop ends s':>12} {'GiB':>11}"
    )
    others = torch.cat([data.splits["train"], data.splits["test"]])
    for case, share in CASES.items() if "case" not in given else [(given["case"], CASES[given["case"]])]:
        count = min(others.numel() // 2, max(64, int(data.splits["train"].numel() * share * evaluate_s / train_s)))
        splits = {
            "train": others[:count].sort().values,
            "valid": data.splits["valid"],
            "test": others[count:].sort()[0],
        }
        part = dataclasses.replace(data, splits=splits)
        seconds: dict[str, list[float]] = {"blocking": [], "async": []}
        peaks = dict.fromkeys(seconds, 0)
        ends, per_epoch, found = [], [], {}
        for _ in range(rounds):
            for how in seconds:
                run, weights, total, loop = fit(part, epochs, device, how, at)
                seconds[how].append(total)
                peaks[how] = max(peaks[how], run.peak_bytes.get("device", 0))
                found[how] = (run, weights)
                if how == "async":
                    ends.append(loop.trained[-1])
                    per_epoch.append(loop.epoch_s)
        (waited, ours), (went_on, theirs) = found["blocking"], found["async"]
        assert same(waited, went_on)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        trained = sum(epoch.seconds for epoch in waited.history)
        evaluated = sum(e.seconds for e in waited.evaluations)
        kernels = Kernels()
        if device != "cpu":
            fit(part, BEGIN + Kernels.epochs, device, "blocking", at, [kernels])
        larger = max(parts_of(waited))
        first, second = (statistics.median(seconds[how]) for how in seconds)
        reserved = " / ".join(f"{num_bytes / 2**30:.1f}" for num_bytes in peaks.values()) if device != "cpu" else "-"
        print(
            f"{case:<18} {trained:8.1f} {evaluated:7.1f} {first:11.1f} {second:8.1f} {second / first:6.2f} "
            f"{statistics.median(per_epoch) / larger:7.2f} "
            f"{kernels.epoch_s / larger if kernels.count else math.nan:8.2f} {statistics.median(ends):12.1f} "
            f"{reserved:>11}",
            flush=True,
        )


if __name__ == "__main__":
    main()
