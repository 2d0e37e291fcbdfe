"""Why an epoch takes as long as it does: its stages, what their overlap can gain at most, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

PREPARED = ("sample", "gather", "divide", "move")
"""Stages that threads can take ahead of training,"""
TRAINED = ("forward", "backward", "step", "optimizer", "exchange", "refresh", "checkpoint")
"""and those that come in order, one batch after the other."""
MIN_SHARE = 0.1
"""A share of an epoch that is worth a change. A rule of thumb."""
MIN_REST = 0.5
"""The share of an epoch from which on what is in no stage is the bottleneck. A rule of thumb."""
MIN_GPU_SHARE = 0.5
"""The share of the work from which on a stage that a GPU prepares is the bottleneck. A rule of thumb."""
MIN_IDLE = 0.3
"""The idle share of preparing threads from which on more prefetched batches would help. A rule of thumb."""
REST = "everything else"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an explanation needs to know, so that it advises only what this run can change."""

    workers: int = 0
    """Threads that prepare batches; with 0 whoever trains does."""
    look_ahead: int = 1
    """Batches that may be prepared ahead."""
    max_workers: int = 0
    """How many threads there can be at most."""
    planned: bool = False
    """Whether a plan within a budget has set these."""
    num_cores: int = 1
    sampled: bool = False
    """Whether batches are samples, which smaller fan-outs make smaller."""
    on_gpu: bool = False
    """Whether a GPU trains,"""
    drawn_on_gpu: bool = False
    """and whether it prepares its batches itself."""
    bf16: bool = False
    gpu_free: bool = False
    """Whether there is a GPU, and the CPU trains."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One epoch, or several together."""

    num_batches: int
    seconds: float
    """What it took."""
    stages: dict[str, float]
    """Seconds of each stage alone: without waiting for cores, as far as that is known."""
    shares: dict[str, float]
    """The same as parts of `serial_s`."""
    serial_s: float
    """What all stages take one after the other."""
    bound: float
    """The least part of `serial_s` that overlap can make of it."""
    achieved: float
    """The part of it that it took."""
    waited: float
    """The part of the epoch in which training waited for batches."""
    bottleneck: str
    """The stage that decides."""
    sentence: str
    """What it is, and what to change: at most 88 characters."""
    advice: str
    """What to change; empty where nothing can be done about it."""


def bound_of(prepared: float, trained: float, num_batches: int, workers: int = 1) -> float:
    """The least ratio of pipelined to serial time: 1/N + (N-1)/N * the larger share, for N batches.

    The first batch goes through all stages, and from then on one leaves each time that the slowest stage takes.
    prepared, trained: shares of the two stages that run side by side; several threads divide the first.
    """
    slowest = max(prepared / max(1, workers), trained)
    return 1 / num_batches + (num_batches - 1) / num_batches * slowest


def explain(
    stages: Mapping[str, float],
    seconds: float,
    num_batches: int,
    setup: Setup,
    alone: Mapping[str, float] | None = None,
) -> Explanation | None:
    """Explain an epoch of `seconds` by the spans of its stages; None where none was timed.

    alone: seconds of stages whose spans hold times in which their threads had no core.
    """
    times = dict(stages) | dict(alone or {})
    alone_s = {name: times[name] for name in (*PREPARED, *TRAINED) if times.get(name, 0) > 0}
    serial_s = sum(alone_s.values())
    if not alone_s or seconds <= 0 or num_batches < 1:
        return None

    shares = {name: value / serial_s for name, value in alone_s.items()}
    prepared = sum(shares.get(name, 0.0) for name in PREPARED)
    preparing_s = sum(stages.get(name, 0.0) for name in PREPARED)
    idle = 1 - min(1.0, preparing_s / (max(1, setup.workers) * seconds))
    # Without threads that prepare, the thread that trains goes through all stages.
    stages_of_trainer = TRAINED if setup.workers else (*TRAINED, *PREPARED)
    trainer_s = sum(stages.get(name, 0.0) for name in stages_of_trainer)
    free = max(0.0, 1 - trainer_s / seconds)
    waited = min(free, stages.get("wait", 0.0) / seconds)  # a host that waits while its GPU is busy holds up nothing
    facts = _Facts(
        setup=setup,
        shares=shares,
        prepared=prepared,
        waited=waited,
        idle=idle,
        rest=free - waited,
        alone_s=alone_s,
        spans_s=stages,
    )
    verdict = facts.find_verdict()
    return Explanation(
        num_batches=num_batches,
        seconds=seconds,
        stages=alone_s,
        shares=shares,
        serial_s=serial_s,
        bound=bound_of(prepared, 1 - prepared, num_batches, setup.workers),
        achieved=seconds / serial_s,
        waited=waited,
        bottleneck=verdict.bottleneck,
        sentence=f"{verdict.extent}: {verdict.advice}" if verdict.advice else verdict.extent,
        advice=verdict.advice,
    )


class _Verdict(NamedTuple):
    """What an epoch waits for, and what to do about it."""

    bottleneck: str
    """The stage that decides, or a word for what is no stage: "look_ahead", "cores", `REST`."""
    extent: str
    """The bottleneck and how much of an epoch or of the work it is, for people."""
    advice: str
    """What to change; "" where nothing can be done about it."""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the verdict is made of."""

    setup: Setup
    shares: Mapping[str, float]
    prepared: float
    """The share of what is prepared."""
    waited: float
    idle: float
    """The part of the epoch in which preparing threads had nothing to do."""
    rest: float
    """The part of the epoch that is in no stage."""
    alone_s: Mapping[str, float]
    """Seconds of each stage alone, as `Explanation.stages`."""
    spans_s: Mapping[str, float]
    """Seconds of the spans of each stage, in which its threads may have had no core."""

    def find_verdict(self) -> _Verdict:
        """The first of these that holds: batches come too slowly, no stage does the work, training takes long."""
        setup = self.setup
        if setup.workers and self.waited >= MIN_SHARE:
            return self._blame_prefetch()
        if not setup.workers and self.prepared >= MIN_SHARE:
            return self._blame_preparation()
        if self.rest >= MIN_REST:
            name = "launch overhead" if setup.on_gpu else "work around the steps"
            if setup.planned:
                advice = "raise budget="
            elif setup.sampled:
                advice = "set a larger method.batch_size"
            else:
                advice = "make callbacks or your own sampler faster"
            return _Verdict(REST, f"{name}, {self.rest:.0%} of an epoch", advice)
        return self._blame_training()

    def _slowest(self, stages: tuple[str, ...]) -> str:
        return max(stages, key=lambda name: self.shares.get(name, 0.0))

    def _share_of(self, stage: str) -> str:
        return f"{stage}, {self.shares.get(stage, 0.0):.0%} of the work"

    def _blame_prefetch(self) -> _Verdict:
        setup = self.setup
        slowest = self._slowest(PREPARED)
        share = f"{min(self.waited, 0.99):.0%} of the time"
        trained_s = sum(s for name, s in self.alone_s.items() if name in TRAINED)
        prepared_s = sum(s for name, s in self.alone_s.items() if name in PREPARED)
        prepared_spans_s = sum(self.spans_s.get(name, 0.0) for name in PREPARED)

        if self.idle >= MIN_IDLE and setup.look_ahead < 2 * setup.workers:
            advice = "raise budget=" if setup.planned else f"set method.look_ahead={2 * setup.workers}"
            return _Verdict("look_ahead", f"prefetch too short, training waits {share}", advice)
        if prepared_spans_s > 2 * prepared_s:
            extent = f"too few cores ({setup.num_cores}), training waits {share}"
            return _Verdict("cores", extent, self._advise_less_work(slowest))
        extent = f"{slowest}, waited for {share}"
        if setup.workers < setup.max_workers:
            needed_workers = -(-prepared_s // max(trained_s, 1e-9))
            workers = int(min(setup.max_workers, max(setup.workers + 1, needed_workers)))
            return _Verdict(slowest, extent, f"set method.workers={workers}")
        return _Verdict(slowest, extent, self._advise_less_work(slowest))

    def _blame_preparation(self) -> _Verdict:
        setup = self.setup
        slowest = self._slowest(PREPARED)
        if setup.drawn_on_gpu and self.shares[slowest] < MIN_GPU_SHARE:
            return self._blame_training()
        if setup.drawn_on_gpu:
            return _Verdict(slowest, self._share_of(slowest), self._advise_less_work(slowest))

        extent = f"preparing batches without prefetch, {self.prepared:.0%} of the work"
        if setup.planned:
            return _Verdict(slowest, extent, "raise budget=")
        if setup.max_workers and (setup.on_gpu or setup.num_cores > 1):
            return _Verdict(slowest, extent, "set method.workers=auto")
        return _Verdict(slowest, extent, self._advise_less_work(slowest))

    def _advise_less_work(self, slowest: str) -> str:
        """What makes preparing less work for those who do it."""
        setup = self.setup
        if setup.drawn_on_gpu and slowest != "sample":
            return "set placement.features=pinned"  # the GPU then reads rows itself
        if setup.on_gpu and not setup.drawn_on_gpu and setup.max_workers:
            return "set placement.graph=pinned placement.features=pinned"  # it then samples itself, too
        if setup.sampled:
            return "set smaller method.fanouts" + (", or device=cuda" if setup.gpu_free else "")
        return ""

    def _blame_training(self) -> _Verdict:
        """Training is the work that the user asked for, so there is little to advise but where it runs."""
        setup = self.setup
        slowest = self._slowest(TRAINED)
        if slowest == "exchange":
            advice = "set a larger method.batch_size or accumulate="
        elif slowest == "checkpoint":
            advice = "set a larger checkpoint_s=, or out= on a faster disk"
        elif setup.gpu_free:
            advice = "set device=cuda"
        elif setup.on_gpu and not setup.bf16:
            advice = "try precision=bf16"
        else:
            advice = ""
        return _Verdict(slowest, self._share_of(slowest), advice)
