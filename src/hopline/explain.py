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
    most_workers: int = 0
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
    """What it is, and what to change."""


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
    bottleneck, sentence = facts.verdict()
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
        sentence=sentence,
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

    def verdict(self) -> tuple[str, str]:
        """(the stage that decides, the sentence)."""
        setup = self.setup
        if setup.workers and self.waited >= MUCH:
            return self._prepared_too_slowly()
        if not setup.workers and self.prepared >= MUCH:
            return self._prepared_in_line()
        if self.rest >= 0.5:
            what = "larger batches (method.batch_size)" if setup.sampled else "fewer or faster callbacks"
            if setup.on_gpu:
                return REST, f"the host gives the GPU its work too slowly, {self.rest:.0%} of an epoch: try {what}"
            return REST, f"{self.rest:.0%} of an epoch is spent in no stage, around the steps: try {what}"
        return self._trained_too_slowly()

    def _worst(self, names: tuple[str, ...]) -> str:
        return max(names, key=lambda name: self.shares.get(name, 0.0))

    def _prepared_too_slowly(self) -> tuple[str, str]:
        setup, worst = self.setup, self._worst(PREPARED)
        wait = f"training waits for batches {self.waited:.0%} of an epoch"
        trained_s = sum(s for name, s in self.alone.items() if name in TRAINED)
        prepared_s = sum(s for name, s in self.alone.items() if name in PREPARED)
        spans_s = sum(self.spans.get(name, 0.0) for name in PREPARED)
        if self.idle >= 0.3 and setup.look_ahead < 2 * setup.workers:
            cure = "give a larger budget=" if setup.planned else f"set method.look_ahead={2 * setup.workers}"
            return "look_ahead", f"{wait} though the threads are idle: {cure}"
        share = self.shares.get(worst, 0.0)
        why = f"batches are prepared too slowly: {wait}, and {worst} takes {share:.0%} of the work"
        if spans_s > 2 * prepared_s:
            return "cores", f"there are too few cores ({setup.num_cores}): {wait}: {self._smaller(worst)}"
        if setup.workers < setup.most_workers:
            needed = -(-prepared_s // max(trained_s, 1e-9))
            workers = int(min(setup.most_workers, max(setup.workers + 1, needed)))
            return worst, f"{why}: set method.workers={workers}"
        return worst, f"{why}: {self._smaller(worst)}"

    def _prepared_in_line(self) -> tuple[str, str]:
        setup, worst = self.setup, self._worst(PREPARED)
        if setup.drawn_on_gpu and self.shares[worst] < 0.5:
            return self._trained_too_slowly()
        share = f"{worst} takes {self.shares[worst]:.0%} of the work"
        if setup.drawn_on_gpu:
            return worst, f"the GPU prepares its batches itself, and {share}: {self._smaller(worst)}"
        why = f"batches are prepared by the thread that trains, {self.prepared:.0%} of the work"
        if setup.planned:
            return worst, f"{why}, since the budget leaves no room for batches ahead: give a larger budget="
        if setup.most_workers and (setup.on_gpu or setup.num_cores > 1):
            return worst, f"{why}, so nothing overlaps: set method.workers=auto"
        return worst, f"{why}: {self._smaller(worst)}"

    def _smaller(self, worst: str) -> str:
        """What makes preparing less work."""
        setup = self.setup
        if setup.drawn_on_gpu and worst != "sample":
            return "set placement.features=pinned, so that the GPU reads rows itself"
        if setup.on_gpu and not setup.drawn_on_gpu and setup.most_workers:
            return (
                "set placement.graph=pinned and placement.features=pinned, so that the GPU samples and reads rows "
                "itself, or smaller method.fanouts"
            )
        if setup.sampled:
            return "set smaller method.fanouts" + (", or device=cuda" if setup.gpu_free else "")
        return "fewer features would help" if worst == "gather" else "smaller batches would help"

    def _trained_too_slowly(self) -> tuple[str, str]:
        setup, worst = self.setup, self._worst(TRAINED)
        waits = f", and training waits for batches {self.waited:.0%} of an epoch" if setup.workers else ""
        why = f"training itself is the bottleneck: {worst} takes {self.shares.get(worst, 0.0):.0%} of the work{waits}"
        if worst == "exchange":
            return worst, f"{why}: set larger method.batch_size or accumulate=, so that ranks meet less often"
        if worst == "checkpoint":
            return worst, f"{why}: set a larger checkpoint_s=, or where epochs are shorter, out= on a faster disk"
        ways = ["a smaller model"]
        if setup.sampled:
            ways.append("smaller method.fanouts")
        if setup.on_gpu and not setup.bf16:
            ways.append("precision=bf16")
        if setup.gpu_free:
            ways.append("device=cuda")
        return worst, f"{why}: {', '.join(ways[:-1]) + ' or ' * (len(ways) > 1) + ways[-1]} would help"
