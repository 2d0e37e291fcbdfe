"""The probe before a run measures steps of growing size, and ends by sizes and bytes, never by time."""

from __future__ import annotations

import pytest

from hopline.budget import probe
from hopline.budget.probe import MAX_PROBE_SEEDS, measure_steps
from hopline.core.batch import Batch
from hopline.methods.plan_within import PROBED_FANOUT
from hopline.methods.sampled.memory_plan import draw_batches
from hopline.methods.sampled.settings import Sampled
from tests.run.test_compare_methods import outline_of


def probed_seeds() -> list[int]:
    """The seeds of each step that the probe runs for a model of two layers."""
    outline = outline_of()
    num_seeds_of_steps: list[int] = []

    def draw(num_seeds: int) -> Batch:
        num_seeds_of_steps.append(num_seeds)
        return next(draw_batches(Sampled(fanouts=(PROBED_FANOUT,) * 2), outline, num_seeds))

    measure_steps(outline.predictor(2), outline, draw)
    return num_seeds_of_steps


def test_steps_double_up_to_all_training_nodes_or_the_largest_step():
    num_train = outline_of().train_ids.numel()
    ours = probed_seeds()
    # The first step is run twice: the copy of the model tries its convs out in it.
    expected = [1, *(min(2**i, num_train) for i in range(len(ours) - 1))]
    assert ours == expected
    assert ours[-1] >= min(MAX_PROBE_SEEDS, num_train)


def test_a_step_of_many_bytes_is_the_last_once_the_predictor_is_sure(monkeypatch: pytest.MonkeyPatch):
    all_steps = probed_seeds()
    monkeypatch.setattr(probe, "LARGE_STEP_BYTES", 0)
    assert len(probed_seeds()) < len(all_steps)
