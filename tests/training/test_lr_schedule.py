"""Learning-rate schedules: the exact rate of every epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hopline.training.lr_schedule import Scheduler
from hopline.training.settings import Schedule


def rates_of_run(
    spec: Schedule, epochs: int, values: Sequence[float] | None = None, every: int = 1, lr: float = 1.0
) -> list[float]:
    """The rate of each epoch.

    values: the metric after each epoch. Only every `every`-th epoch is evaluated.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = Scheduler(spec, optimizer, epochs)
    rate_by_epoch = []
    for epoch in range(1, epochs + 1):
        rate_by_epoch.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(values[epoch - 1] if values else 0.0, evaluated=epoch % every == 0)
    return rate_by_epoch


def cosine_rate(step: int, steps: int, floor: float = 0.0) -> float:
    return floor + (1 - floor) * (1 + math.cos(math.pi * step / steps)) / 2


def test_a_constant_schedule_keeps_its_rate():
    assert rates_of_run(Schedule(), 4, lr=0.3) == [0.3] * 4


def test_cosine_falls_from_the_rate_towards_the_floor():
    ours = rates_of_run(Schedule(name="cosine", floor=0.1), 5)
    assert ours == pytest.approx([cosine_rate(step, 5, 0.1) for step in range(5)])
    assert ours[0] == 1.0
    assert ours[-1] > 0.1


def test_step_lowers_every_few_epochs_down_to_the_floor():
    ours = rates_of_run(Schedule(name="step", every=2, factor=0.1, floor=0.05), 7)
    assert ours == pytest.approx([1, 1, 0.1, 0.1, 0.05, 0.05, 0.05])


def test_plateau_acts_after_its_patience_and_begins_to_count_again():
    spec = Schedule(name="plateau", every=1, factor=0.5)
    ours = rates_of_run(spec, 8, values=[0.1, 0.2, 0.2, 0.1, 0.2, 0.2, 0.3, 0.3])
    assert ours == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_plateau_counts_evaluations_and_not_epochs():
    spec = Schedule(name="plateau", every=1, factor=0.5)
    assert rates_of_run(spec, 9, values=[0.5] * 9, every=3) == [1] * 9
    assert rates_of_run(spec, 10, values=[0.5] * 10, every=3) == [1] * 9 + [0.5]


def test_plateau_looks_only_at_values_that_were_evaluated():
    spec = Schedule(name="plateau", every=0, factor=0.5)
    assert rates_of_run(spec, 7, values=[9, 0.1, 9, 0.2, 9, 0.3, 9], every=2) == [1] * 7


def test_plateau_stops_at_the_floor():
    spec = Schedule(name="plateau", every=0, factor=0.1, floor=0.02)
    assert rates_of_run(spec, 5, values=[1.0] * 5) == pytest.approx([1, 1, 0.1, 0.02, 0.02])


@pytest.mark.parametrize(
    ("spec", "after"),
    [
        (Schedule(warmup=3), [1, 1, 1]),
        (Schedule(name="cosine", warmup=3), [cosine_rate(step, 3) for step in range(3)]),
        (Schedule(name="step", warmup=3, every=2), [1, 1, 0.5]),
        (Schedule(name="plateau", warmup=3, every=0), [1, 1, 0.5]),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_warmup_rises_linearly_and_then_the_schedule_begins(spec: Schedule, after: list[float]):
    assert rates_of_run(spec, 6, values=[0.5] * 6) == pytest.approx([1 / 4, 2 / 4, 3 / 4, *after])


def test_a_warmup_longer_than_the_run_just_rises():
    assert rates_of_run(Schedule(name="cosine", warmup=9), 3) == pytest.approx([0.1, 0.2, 0.3])


def test_groups_keep_their_ratio():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    scheduler = Scheduler(Schedule(name="cosine", warmup=1), optimizer, 5)
    for _ in range(4):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(first / 10)
        optimizer.step()
        scheduler.step(0.0, evaluated=True)


def rates_of_resumed_run(spec: Schedule, epochs: int, at: int, then: int, values: Sequence[float]) -> list[float]:
    """The rate of each epoch of a run planned for `epochs`, stopped after `at` and resumed up to `then`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = Scheduler(spec, optimizer, epochs)
    rate_by_epoch = []
    for epoch in range(1, then + 1):
        if epoch == at + 1:
            state = optimizer.state_dict(), scheduler.state_dict()
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            scheduler = Scheduler(spec, optimizer, then)
            optimizer.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        rate_by_epoch.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(values[epoch - 1], evaluated=True)
    return rate_by_epoch


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("name", ["constant", "cosine", "step", "plateau"])
def test_a_run_resumed_with_another_number_of_epochs_has_the_rates_of_a_run_of_that_many(name: Any, warmup: int):
    spec = Schedule(name=name, warmup=warmup, every=0 if name == "plateau" else 2, floor=0.01)
    values = [0.1, 0.3, 0.2, 0.2] * 3
    for epochs, then in [(6, 12), (6, 7), (12, 6), (6, 6), (12, 9)]:
        expected = rates_of_run(spec, then, values)
        for at in range(1, min(epochs, then) + 1):
            ours = rates_of_resumed_run(spec, epochs, at, then, values)
            assert ours[at:] == pytest.approx(expected[at:], rel=1e-12), f"{epochs} epochs, {at} done, then {then}"


def test_every_is_10_epochs_of_step_and_5_evaluations_of_plateau_by_default():
    assert rates_of_run(Schedule(name="step"), 12) == [1] * 10 + [0.5] * 2
    assert rates_of_run(Schedule(name="plateau"), 8, values=[0.5] * 8) == [1] * 7 + [0.5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"factor": 1.0}, {"factor": 0.0}, {"every": 0}, {"every": 0, "name": "step"}, {"every": -1, "name": "plateau"},
        {"warmup": -1},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="schedule"):
        Schedule(**wrong)
