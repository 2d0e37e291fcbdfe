"""Tuning threads and look-ahead from epoch to epoch, on simulated machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hopline.pipeline.stages import Load
from hopline.pipeline.tuning import Tuning

BATCHES = 1000


def make_load(num_results: int, wall_s: float, waited_s: float, stages: dict[str, float]) -> Load:
    return Load(workers=1, look_ahead=2, num_results=num_results, wall_s=wall_s, waited_s=waited_s, stages=stages)


def simulate_machine(prepare_s: float, train_s: float, cores: int = 99) -> Callable[[int], Load]:
    """The load of an epoch, by number of threads.

    A batch takes the longer of preparing, by as many threads as there are cores, and training.
    """

    def epoch(workers: int) -> Load:
        batch_s = max(prepare_s / min(workers, cores), train_s)
        worked_s = BATCHES * prepare_s
        waited_s = BATCHES * (batch_s - train_s)
        stages = {"sample": 0.7 * worked_s, "gather": 0.3 * worked_s}
        return make_load(BATCHES, BATCHES * batch_s, waited_s, stages)

    return epoch


def tune(epoch: Callable[[int], Load], epochs: int = 12, *, cores: int = 16, max_look_ahead: int = 16) -> Tuning:
    start = min(8, cores)
    tuning = Tuning(start, min(2 * start, max_look_ahead), cores, max_look_ahead)
    for _ in range(epochs):
        tuning.learn(epoch(tuning.workers))
        assert 1 <= tuning.workers <= cores
        assert tuning.look_ahead <= max_look_ahead
    return tuning


@pytest.mark.parametrize(("prepare_s", "enough"), [(0.01, 1), (0.4, 1), (0.6, 2), (1.3, 3), (2.9, 6)])
def test_training_that_never_waits_keeps_twice_the_threads_it_needs(prepare_s: float, enough: int):
    tuning = tune(simulate_machine(prepare_s, 1.0))
    assert tuning.threads == (enough, 2 * enough)
    assert not tuning.settled


def test_training_that_waits_gets_more_threads_within_the_cores_and_the_bound():
    assert tune(simulate_machine(30.0, 1.0)).threads == (16, 16)
    assert tune(simulate_machine(30.0, 1.0), cores=64).threads == (16, 16), (
        "more threads than batches ahead would be idle"
    )
    assert tune(simulate_machine(30.0, 1.0), cores=64, max_look_ahead=40).threads == (32, 40)
    assert tune(simulate_machine(90.0, 1.0), cores=64, max_look_ahead=40).threads == (40, 40)
    assert tune(simulate_machine(30.0, 1.0), cores=4).threads == (4, 8)
    assert tune(simulate_machine(30.0, 1.0), cores=16, max_look_ahead=3).threads == (8, 3)


def test_the_first_epoch_and_short_ones_change_nothing():
    epoch = simulate_machine(0.1, 1.0)
    assert tune(epoch, 1).threads == (8, 16)
    assert tune(epoch, 2).threads == (1, 2)
    short = make_load(63, 63.0, 0.0, {"sample": 1.0})
    assert tune(lambda _: short).threads == (8, 16)


def test_more_threads_that_gain_nothing_are_taken_back():
    tuning = tune(simulate_machine(30.0, 1.0, cores=8))  # their cores are others'
    assert tuning.threads == (8, 16)
    assert tuning.settled


def test_fewer_threads_that_cost_time_are_taken_back():
    def epoch(workers: int) -> Load:
        return make_load(BATCHES, 1000.0 if workers == 8 else 1040.0, 0.0, {"sample": 100.0})

    tuning = tune(epoch)
    assert tuning.threads == (8, 16)
    assert tuning.settled


def test_threads_that_wait_for_cores_or_a_little_are_left_alone():
    queued = make_load(BATCHES, 1000.0, 400.0, {"sample": 900.0})
    assert tune(lambda _: queued).threads == (8, 16), "they work a tenth of the time, so more would not help"
    little = make_load(BATCHES, 1000.0, 50.0, {"sample": 900.0})
    assert tune(lambda _: little).threads == (8, 16)
