"""The bound on an epoch's time against a simulated pipeline, and advice that fits the machine."""

from __future__ import annotations

import heapq
import itertools
import re
from typing import Any

import pytest

from hopline.report.bottleneck import REST, Explanation, Setup, bound_of, explain


def simulate_pipeline_s(prepare_s: float, train_s: float, num_batches: int, workers: int) -> float:
    """Seconds of a pipeline with an unbounded queue, whose threads begin one after the other."""
    free = [prepare_s * i / workers for i in range(workers)]
    now = 0.0
    for _ in range(num_batches):
        ready = heapq.heappop(free) + prepare_s
        heapq.heappush(free, ready)
        now = max(now, ready) + train_s
    return now


@pytest.mark.parametrize("num_batches", [1, 2, 7, 400])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_bound_is_what_a_pipeline_takes_that_nothing_holds_up(num_batches: int, workers: int):
    for prepare_s, train_s in itertools.product((0.5, 2.0, 9.0), (1.0, 4.0)):
        serial_s = prepare_s + train_s
        bound = bound_of(prepare_s / serial_s, train_s / serial_s, num_batches, workers)
        assert bound == pytest.approx(
            simulate_pipeline_s(prepare_s, train_s, num_batches, workers) / (num_batches * serial_s)
        )


TWO_CORES = Setup(workers=2, look_ahead=4, max_workers=2, num_cores=2, sampled=True)


def explain_epoch(setup: Setup = TWO_CORES, working_s: Any = None, **stages: float) -> Explanation:
    """The explanation of an epoch of 10 s and 20 batches."""
    explanation = explain(stages, 10.0, 20, setup, working_s)
    assert explanation is not None
    return explanation


def change_setup(**changes: Any) -> Setup:
    return Setup(**{**vars(TWO_CORES), **changes})


def test_shares_are_of_the_serial_sum_and_the_ratio_is_the_epochs():
    explanation = explain_epoch(sample=30.0, gather=1.0, wait=0.5, forward=4.0, backward=5.0, working_s={"sample": 6.0})
    assert explanation.stages == {"sample": 6.0, "gather": 1.0, "forward": 4.0, "backward": 5.0}, "waiting is no work"
    assert explanation.serial_s == 16.0
    assert explanation.shares["sample"] == pytest.approx(6 / 16)
    assert sum(explanation.shares.values()) == pytest.approx(1)
    assert explanation.achieved == pytest.approx(10 / 16)
    assert explanation.bound == pytest.approx(1 / 20 + 19 / 20 * 9 / 16), (
        "training is longer than a half of the preparation"
    )
    assert explanation.waited == pytest.approx(0.05)


def test_nothing_timed_is_nothing_explained():
    assert explain({}, 10.0, 20, TWO_CORES) is None
    assert explain({"wait": 1.0, "evaluate": 2.0}, 10.0, 20, TWO_CORES) is None
    assert explain({"forward": 1.0}, 0.0, 20, TWO_CORES) is None


SLOW = {"sample": 12.0, "gather": 6.0, "wait": 6.0, "forward": 2.0, "backward": 2.0}
QUICK = {"sample": 1.0, "gather": 2.0, "wait": 0.1, "forward": 4.0, "backward": 5.5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_workers": 16, "num_cores": 16}, "^sample, waited for 60% of the time: set method.workers=5$"),
        ({"workers": 4, "look_ahead": 8, "max_workers": 16}, "method.workers=5$"),
        ({"max_workers": 3}, "method.workers=3$"),
        ({}, r"set smaller method.fanouts \(changes the training\)$"),
        ({"gpu_free": True}, "set device=cuda$"),
        ({"on_gpu": True}, "set placement.graph=pinned placement.features=pinned$"),
        ({"workers": 4, "look_ahead": 2}, "prefetch too short, .*: set method.look_ahead=8$"),
        ({"workers": 4, "look_ahead": 2, "planned": True}, "prefetch too short, .*: raise budget=$"),
        ({"workers": 1, "max_workers": 1, "sampled": False}, "^sample, waited for 60% of the time$"),
    ],
)
def test_training_that_waits_is_told_what_to_change(changes: dict[str, Any], words: str):
    explanation = explain_epoch(change_setup(**changes), **SLOW)
    assert explanation.bottleneck == ("look_ahead" if "prefetch" in words else "sample")
    assert re.search(words, explanation.sentence), explanation.sentence


def test_threads_that_mostly_wait_for_cores_would_gain_nothing_by_more_threads():
    explanation = explain_epoch(
        change_setup(max_workers=8, num_cores=2), working_s={"sample": 3.0, "gather": 1.0}, **SLOW
    )
    assert explanation.bottleneck == "cores"
    assert "too few cores (2)" in explanation.sentence
    assert "method.workers" not in explanation.sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "^backward, 44% of the work$"),
        ({"gpu_free": True}, "work: set device=cuda$"),
        ({"on_gpu": True}, r"work: try precision=bf16 \(changes the training\)$"),
        ({"on_gpu": True, "bf16": True}, "work$"),
        ({"sampled": False}, "work$"),
    ],
)
def test_training_that_never_waits_is_told_how_to_compute_faster(changes: dict[str, Any], words: str):
    explanation = explain_epoch(change_setup(**changes), **QUICK)
    assert explanation.bottleneck == "backward"
    assert re.search(words, explanation.sentence), explanation.sentence


def test_a_host_that_waits_while_its_gpu_is_busy_holds_up_nothing():
    explanation = explain_epoch(change_setup(on_gpu=True), sample=12.0, gather=6.0, wait=7.0, forward=4.0, backward=5.6)
    assert explanation.waited == pytest.approx(0.04)
    assert explanation.bottleneck == "backward"


def test_stages_of_the_training_thread_are_named():
    assert "accumulate=" in explain_epoch(sample=1.0, forward=1.0, backward=2.0, exchange=6.5).sentence
    assert "checkpoint_s=" in explain_epoch(sample=1.0, forward=1.0, backward=2.0, checkpoint=6.5).sentence
    assert explain_epoch(sample=1.0, forward=1.0, backward=1.5).bottleneck == REST
    on_gpu = explain_epoch(change_setup(on_gpu=True), sample=1.0, forward=1.0, backward=1.5)
    assert on_gpu.sentence == "launch overhead, 75% of an epoch: set a larger method.batch_size (changes the training)"


def test_without_prefetch_the_largest_stage_is_the_bottleneck():
    stages = {"sample": 3.0, "gather": 2.0, "forward": 2.0, "backward": 2.5}
    explanation = explain_epoch(change_setup(workers=0), **stages)
    assert explanation.sentence == "sample, 32% of the work, preparing without prefetch 53%: set method.workers=auto"
    assert "raise budget=" in explain_epoch(change_setup(workers=0, planned=True), **stages).sentence
    one_core = explain_epoch(change_setup(workers=0, num_cores=1), **stages)
    assert one_core.sentence.endswith("prefetch 53%: set smaller method.fanouts (changes the training)")
    gpu = change_setup(workers=0, on_gpu=True, drawn_on_gpu=True, max_workers=0)
    assert (
        explain_epoch(gpu, **stages).sentence == "backward, 26% of the work: try precision=bf16 (changes the training)"
    )
    sampling = explain_epoch(gpu, sample=6.0, forward=2.0, backward=1.5)
    assert sampling.sentence == "sample, 63% of the work: set smaller method.fanouts (changes the training)"
    gathering = explain_epoch(gpu, gather=6.0, forward=2.0, backward=1.5)
    assert "placement.features=pinned" in gathering.sentence


def test_a_verdict_is_short_and_advises_only_what_can_be_done():
    """Whatever the stages and the machine."""
    flags = ("planned", "sampled", "on_gpu", "drawn_on_gpu", "bf16", "gpu_free")
    timed: list[dict[str, float]] = [SLOW, QUICK, {"sample": 1.0, "forward": 1.0}, {"move": 40.0, "wait": 10.0}]
    timed += [{"forward": 1.0, name: 9.0} for name in ("exchange", "checkpoint", "divide", "gather")]
    setups = [
        change_setup(workers=workers, max_workers=16, **dict(zip(flags, values, strict=True)))
        for workers, *values in itertools.product((0, 1, 16), *[(False, True)] * len(flags))
    ]
    for stages, setup in itertools.product(timed, setups):
        explanation = explain_epoch(setup, **stages)
        assert len(explanation.sentence) <= 96, explanation.sentence
        assert explanation.sentence.endswith(explanation.advice)
        assert "model" not in explanation.advice
        changes = any(word in explanation.advice for word in ("fanouts", "batch_size", "accumulate", "precision"))
        assert ("(changes the training)" in explanation.advice) == changes
        # One stage after the other: the bottleneck is the largest share in the report's table.
        if not setup.workers and not setup.drawn_on_gpu and explanation.bottleneck != REST:
            assert explanation.bottleneck == max(explanation.shares, key=lambda name: explanation.shares[name])
