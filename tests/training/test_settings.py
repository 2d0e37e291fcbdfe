"""Settings of training are checked where they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

import hopline as hl


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": "3"}, "epochs must be a whole number, not '3'"),
        ({"precision": "fp16"}, "precision must be 'float32' or 'bf16', not 'fp16'"),
        ({"inference": "smapled"}, "inference must be 'exact' or 'sampled'"),
        ({"optimizer": "lamb"}, "optimizer must be 'adam' or 'adamw' or 'sgd'"),
        ({"schedule": "cosin"}, "schedule.name=cosin is not valid.*Did you mean 'cosine'"),
        ({"resume": True, "overwrite": True}, "resume= continues the run that overwrite= would replace"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1"),
        ({"lr": math.inf}, "lr must be a finite number, not inf"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"weight_decay_rest": math.nan}, "weight_decay_rest must be a finite number, not nan"),
        ({"checkpoint_s": math.inf}, "checkpoint_s must be a finite number, not inf"),
        ({"checkpoint_s": -1.0}, "checkpoint_s must be at least 0"),
        ({"seed": 1 << 70}, "seed must be between 0 and"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"evaluate": "later"}, "evaluate must be 'blocking' or 'async', not 'later'"),
        ({"evaluate": "async", "schedule": hl.Schedule(name="plateau")}, "plateau needs each evaluation before"),
    ],
    ids=str,
)
def test_a_setting_that_means_nothing_is_refused(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        hl.extend.TrainSettings(**wrong)


def test_defaults_are_valid():
    assert hl.extend.TrainSettings().epochs == 10
