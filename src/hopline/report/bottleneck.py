"""The bottleneck of an epoch: which stage decides its time, and what to change.

Stages are of two kinds. Threads can *prepare* batches while training computes; training takes one batch
after the other.

    threads    | sample gather | sample gather | sample gather | ...
    training                   | forward backward | forward backward | ...

`explain` takes the seconds that each stage took in an epoch. It computes how much of the epoch training
waited, how long all stages take without overlap, and how short overlap could make the epoch (`bound_of`).
`_Facts` turns these numbers into a verdict: one bottleneck, and one setting to type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hopline.util.config import CHANGES_TRAINING

PREPARING_STAGES = ("sample", "gather", "divide", "move")
"""Stages that threads can run before training needs the batch, in the order of a batch.

"divide" plans the micro-batches of a batch that would not fit the budget.
"""
TRAINING_STAGES = ("forward", "backward", "step", "optimizer", "exchange", "refresh", "checkpoint")

# ---- shares from which on something is called the bottleneck. Rules of thumb.

MIN_SHARE = 0.1
"""Of an epoch, with preparing threads: time in which training waits for batches.

Of the work, without them: the stages that prepare batches.
"""
MIN_REST = 0.5
"""Of an epoch: time in no stage."""
MIN_GPU_SHARE = 0.5
"""Of the work: a stage of preparation that runs on the GPU."""
MIN_IDLE = 0.3
"""Of the time of preparing threads: they have nothing to do, because they may not prepare more batches."""
REST = "between the stages"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run is set up.

    Advice depends on it, so that it names only settings that this run can change.
    """

    workers: int = 0
    """Threads that prepare batches. 0: the thread that trains does."""
    look_ahead: int = 1
    max_workers: int = 0
    """Most threads that may prepare batches."""
    planned: bool = False
    """Whether a plan has changed the method's settings to keep to a budget."""
    num_cores: int = 1
    sampled: bool = False
    """Whether batches are sampled. Smaller fan-outs then make them smaller."""
    on_gpu: bool = False
    drawn_on_gpu: bool = False
    """Whether a GPU prepares the batches."""
    bf16: bool = False
    gpu_free: bool = False
    """Whether the host has a GPU, but the CPU trains."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why one epoch, or several epochs together, took as long as they did."""

    num_batches: int
    seconds: float
    stages: dict[str, float]
    """Seconds of each stage. Time without a core is left out, as far as it is known."""
    shares: dict[str, float]
    """Each stage as a share of `serial_s`."""
    serial_s: float
    """Seconds of all stages together: an epoch without overlap."""
    bound: float
    """The shortest epoch with perfect overlap, as a share of `serial_s`."""
    achieved: float
    """The measured epoch, as a share of `serial_s`."""
    waited: float
    bottleneck: str
    """The stage that decides, or "look_ahead", "cores" or `REST`."""
    sentence: str
    """The bottleneck, how much of the time or work it is, and what to change. At most 96 characters."""
    advice: str
    """What to change. "" if nothing can be done about it."""


def bound_of(prepared: float, trained: float, num_batches: int, workers: int = 1) -> float:
    """The least ratio of pipelined to serial time.

    Let N be `num_batches`, and let the shares be of the serial time, so that a batch is 1/N of it. The
    first batch goes through all stages: 1/N. Each of the other N - 1 leaves the pipeline one step of its
    slower half later:

        bound  =  1/N  +  (N - 1)/N * max(prepared / workers, trained)

    prepared: Share of the stages that threads run. Several threads divide it.
    trained: Share of the stages of training.
    """
    slowest = max(prepared / max(1, workers), trained)
    return 1 / num_batches + (num_batches - 1) / num_batches * slowest


def explain(
    stages: Mapping[str, float],
    seconds: float,
    num_batches: int,
    setup: Setup,
    working_s: Mapping[str, float] | None = None,
) -> Explanation | None:
    """Explain an epoch by the times of its stages. None if no stage was timed.

    stages: Seconds in spans of each stage, summed over threads. "wait" is the time in which training
        waited.
    seconds: Seconds of the epoch.
    num_batches: Batches of the epoch.
    setup: How the run is set up.
    working_s: Seconds of some stages without the time in which their threads had no core. They replace the
        seconds of `stages` in `serial_s` and in shares of the work, not in shares of the epoch.
    """
    times = dict(stages) | dict(working_s or {})
    work_s = {name: times[name] for name in (*PREPARING_STAGES, *TRAINING_STAGES) if times.get(name, 0) > 0}
    serial_s = sum(work_s.values())
    if not work_s or seconds <= 0 or num_batches < 1:
        return None

    facts = _Facts(setup, work_s, stages, seconds)
    verdict = facts.find_verdict()
    return Explanation(
        num_batches=num_batches,
        seconds=seconds,
        stages=work_s,
        shares=facts.shares,
        serial_s=serial_s,
        bound=bound_of(facts.prepared, 1 - facts.prepared, num_batches, setup.workers),
        achieved=seconds / serial_s,
        waited=facts.waited,
        bottleneck=verdict.bottleneck,
        sentence=f"{verdict.extent}: {verdict.advice}" if verdict.advice else verdict.extent,
        advice=verdict.advice,
    )


class _Verdict(NamedTuple):
    """The bottleneck, and what to do about it."""

    bottleneck: str
    extent: str
    """The bottleneck and its share of the time or of the work, for people."""
    advice: str


class _Facts:
    """The measurements by which the verdict is found.

    work_s: Seconds of each stage without those in which it had no core. spans_s: with them. seconds: of the epoch.
    """

    def __init__(self, setup: Setup, work_s: Mapping[str, float], spans_s: Mapping[str, float], seconds: float) -> None:
        self.setup = setup
        self.work_s = work_s
        self.spans_s = spans_s
        self.shares = {name: value / sum(work_s.values()) for name, value in work_s.items()}
        self.prepared = sum(self.shares.get(name, 0.0) for name in PREPARING_STAGES)
        preparing_s = sum(spans_s.get(name, 0.0) for name in PREPARING_STAGES)
        self.idle = 1 - min(1.0, preparing_s / (max(1, setup.workers) * seconds))
        """Share of the time of preparing threads in which they had nothing to do."""
        # Without threads that prepare, the thread that trains runs all stages.
        stages_of_trainer = TRAINING_STAGES if setup.workers else (*TRAINING_STAGES, *PREPARING_STAGES)
        trainer_s = sum(spans_s.get(name, 0.0) for name in stages_of_trainer)
        # Share of the epoch in which training was in no stage. Waiting counts only within it: a host may wait
        # for a batch while its GPU is still busy with the last one, which holds up nothing.
        free = max(0.0, 1 - trainer_s / seconds)
        self.waited = min(free, spans_s.get("wait", 0.0) / seconds)
        self.rest = free - self.waited
        """Share of the epoch in which the thread that trains was in no stage and did not wait for batches."""

    def find_verdict(self) -> _Verdict:
        """Blame, in this order: preparation of batches, time in no stage, training itself."""
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
                advice = f"set a larger method.batch_size {CHANGES_TRAINING}"
            else:
                advice = "make callbacks or your own sampler faster"
            return _Verdict(REST, f"{name}, {self.rest:.0%} of an epoch", advice)
        return self._blame_training()

    def _slowest(self, stages: tuple[str, ...]) -> str:
        return max(stages, key=lambda name: self.shares.get(name, 0.0))

    def _share_of(self, stage: str) -> str:
        return f"{stage}, {self.shares.get(stage, 0.0):.0%} of the work"

    def _blame_prefetch(self) -> _Verdict:
        """The verdict if threads prepare batches, and training waits for them."""
        setup = self.setup
        slowest = self._slowest(PREPARING_STAGES)
        # At most 99%: rounded to 100%, it would read as if nothing was trained.
        share = f"{min(self.waited, 0.99):.0%} of the time"
        trained_s = sum(s for name, s in self.work_s.items() if name in TRAINING_STAGES)
        prepared_s = sum(s for name, s in self.work_s.items() if name in PREPARING_STAGES)
        prepared_spans_s = sum(self.spans_s.get(name, 0.0) for name in PREPARING_STAGES)

        # Threads are idle although training waits: at times they have prepared all batches that they may.
        if self.idle >= MIN_IDLE and setup.look_ahead < 2 * setup.workers:
            advice = "raise budget=" if setup.planned else f"set method.look_ahead={2 * setup.workers}"
            return _Verdict("look_ahead", f"prefetch too short, training waits {share}", advice)
        # More than half of the time in preparing stages is waiting for a core.
        if prepared_spans_s > 2 * prepared_s:
            extent = f"too few cores ({setup.num_cores}), training waits {share}"
            return _Verdict("cores", extent, self._advise_less_work(slowest))
        extent = f"{slowest}, waited for {share}"
        if setup.workers < setup.max_workers:
            # With this many threads, preparing a batch takes no longer than training it.
            needed_workers = -(-prepared_s // max(trained_s, 1e-9))
            workers = int(min(setup.max_workers, max(setup.workers + 1, needed_workers)))
            return _Verdict(slowest, extent, f"set method.workers={workers}")
        return _Verdict(slowest, extent, self._advise_less_work(slowest))

    def _blame_preparation(self) -> _Verdict:
        """The verdict if the thread that trains, or its GPU, prepares the batches."""
        setup = self.setup
        # One stage after the other: the stage with the largest share decides, whatever its kind.
        slowest = self._slowest((*PREPARING_STAGES, *TRAINING_STAGES))
        is_preparing = slowest in PREPARING_STAGES
        if setup.drawn_on_gpu:
            if not is_preparing or self.shares[slowest] < MIN_GPU_SHARE:
                return self._blame_training()
            return _Verdict(slowest, self._share_of(slowest), self._advise_less_work(slowest))

        extent = f"{self._share_of(slowest)}, preparing without prefetch {self.prepared:.0%}"
        if setup.planned:
            return _Verdict(slowest, extent, "raise budget=")
        if setup.max_workers and (setup.on_gpu or setup.num_cores > 1):
            return _Verdict(slowest, extent, "set method.workers=auto")
        if not is_preparing:
            return self._blame_training()
        return _Verdict(slowest, extent, self._advise_less_work(slowest))

    def _advise_less_work(self, slowest: str) -> str:
        """Advice that makes batches cheaper to prepare. "" if there is none. slowest: the slowest stage."""
        setup = self.setup
        if setup.drawn_on_gpu and slowest != "sample":
            return "set placement.features=pinned"  # the GPU then reads rows itself
        if setup.on_gpu and not setup.drawn_on_gpu and setup.max_workers:
            return "set placement.graph=pinned placement.features=pinned"  # it then samples itself, too
        if setup.sampled:
            return "set device=cuda" if setup.gpu_free else f"set smaller method.fanouts {CHANGES_TRAINING}"
        return ""

    def _blame_training(self) -> _Verdict:
        """The verdict if training itself decides.

        The user asked for this work, so there is little to advise.
        """
        setup = self.setup
        slowest = self._slowest(TRAINING_STAGES)
        if slowest == "exchange":
            advice = f"set a larger method.batch_size or accumulate= {CHANGES_TRAINING}"
        elif slowest == "checkpoint":
            advice = "set a larger checkpoint_s=, or out= on a faster disk"
        elif setup.gpu_free:
            advice = "set device=cuda"
        elif setup.on_gpu and not setup.bf16:
            advice = f"try precision=bf16 {CHANGES_TRAINING}"
        else:
            advice = ""
        return _Verdict(slowest, self._share_of(slowest), advice)
