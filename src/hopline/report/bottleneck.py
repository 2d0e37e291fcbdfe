"""Why an epoch takes as long as it does: its stages, what their overlap can gain at most, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREPARED = ("sample", "gather", "divide", "move")
"""Stages that threads can take ahead of training,"""
TRAINED = ("forward", "backward", "step", "optimizer", "exchange", "refresh", "checkpoint")
"""and those that come in order, one batch after the other."""
MUCH = 0.1
"""A share of an epoch that is worth a change."""
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
    known = dict(stages) | dict(alone or {})
    found = {name: known[name] for name in (*PREPARED, *TRAINED) if known.get(name, 0) > 0}
    serial_s = sum(found.values())
    if not found or seconds <= 0 or num_batches < 1:
        return None
    shares = {name: value / serial_s for name, value in found.items()}
    prepared = sum(shares.get(name, 0.0) for name in PREPARED)
    idle = 1 - min(1.0, sum(stages.get(name, 0.0) for name in PREPARED) / (max(1, setup.workers) * seconds))
    spent = sum(stages.get(name, 0.0) for name in (*TRAINED, *(() if setup.workers else PREPARED)))
    free = max(0.0, 1 - spent / seconds)
    waited = min(free, stages.get("wait", 0.0) / seconds)  # a host that waits while its GPU is busy holds up nothing
    rest = free - waited
    facts = _Facts(setup, shares, prepared, waited, idle, rest, found, stages)
    bottleneck, what, advice = facts.verdict()
    return Explanation(
        num_batches=num_batches,
        seconds=seconds,
        stages=found,
        shares=shares,
        serial_s=serial_s,
        bound=bound_of(prepared, 1 - prepared, num_batches, setup.workers),
        achieved=seconds / serial_s,
        waited=waited,
        bottleneck=bottleneck,
        sentence=f"{what}: {advice}" if advice else what,
        advice=advice,
    )


@dataclass(frozen=True)
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
    alone: Mapping[str, float]
    spans: Mapping[str, float]

    def verdict(self) -> tuple[str, str, str]:
        """(the bottleneck, how much of an epoch it is, what to change about it)."""
        setup = self.setup
        if setup.workers and self.waited >= MUCH:
            return self._prepared_too_slowly()
        if not setup.workers and self.prepared >= MUCH:
            return self._prepared_in_line()
        if self.rest >= 0.5:
            what = "launch overhead" if setup.on_gpu else "work around the steps"
            advice = "set a larger method.batch_size" if setup.sampled else "make callbacks or your own sampler faster"
            advice = "raise budget=" if setup.planned else advice
            return REST, f"{what}, {self.rest:.0%} of an epoch", advice
        return self._trained_too_slowly()

    def _worst(self, names: tuple[str, ...]) -> str:
        return max(names, key=lambda name: self.shares.get(name, 0.0))

    def _share(self, stage: str) -> str:
        return f"{stage}, {self.shares.get(stage, 0.0):.0%} of the work"

    def _prepared_too_slowly(self) -> tuple[str, str, str]:
        setup, worst = self.setup, self._worst(PREPARED)
        share = f"{min(self.waited, 0.99):.0%} of the time"
        trained_s = sum(s for name, s in self.alone.items() if name in TRAINED)
        prepared_s = sum(s for name, s in self.alone.items() if name in PREPARED)
        spans_s = sum(self.spans.get(name, 0.0) for name in PREPARED)
        if self.idle >= 0.3 and setup.look_ahead < 2 * setup.workers:
            advice = "raise budget=" if setup.planned else f"set method.look_ahead={2 * setup.workers}"
            return "look_ahead", f"prefetch too short, training waits {share}", advice
        if spans_s > 2 * prepared_s:
            return "cores", f"too few cores ({setup.num_cores}), training waits {share}", self._less_work(worst)
        if setup.workers < setup.max_workers:
            needed = -(-prepared_s // max(trained_s, 1e-9))
            workers = int(min(setup.max_workers, max(setup.workers + 1, needed)))
            return worst, f"{worst}, waited for {share}", f"set method.workers={workers}"
        return worst, f"{worst}, waited for {share}", self._less_work(worst)

    def _prepared_in_line(self) -> tuple[str, str, str]:
        setup, worst = self.setup, self._worst(PREPARED)
        if setup.drawn_on_gpu and self.shares[worst] < 0.5:
            return self._trained_too_slowly()
        if setup.drawn_on_gpu:
            return worst, self._share(worst), self._less_work(worst)
        what = f"preparing batches without prefetch, {self.prepared:.0%} of the work"
        if setup.planned:
            return worst, what, "raise budget="
        if setup.max_workers and (setup.on_gpu or setup.num_cores > 1):
            return worst, what, "set method.workers=auto"
        return worst, what, self._less_work(worst)

    def _less_work(self, worst: str) -> str:
        """What makes preparing less work for those who do it."""
        setup = self.setup
        if setup.drawn_on_gpu and worst != "sample":
            return "set placement.features=pinned"  # the GPU then reads rows itself
        if setup.on_gpu and not setup.drawn_on_gpu and setup.max_workers:
            return "set placement.graph=pinned placement.features=pinned"  # it then samples itself, too
        if setup.sampled:
            return "set smaller method.fanouts" + (", or device=cuda" if setup.gpu_free else "")
        return ""

    def _trained_too_slowly(self) -> tuple[str, str, str]:
        """Training is the work that the user asked for, so there is little to advise but where it runs."""
        setup, worst = self.setup, self._worst(TRAINED)
        if worst == "exchange":
            advice = "set a larger method.batch_size or accumulate="
        elif worst == "checkpoint":
            advice = "set a larger checkpoint_s=, or out= on a faster disk"
        elif setup.gpu_free:
            advice = "set device=cuda"
        elif setup.on_gpu and not setup.bf16:
            advice = "try precision=bf16"
        else:
            advice = ""
        return worst, self._share(worst), advice
