"""Training by any method is what a loop in plain torch and PyG does: losses of every step, rates, and final weights.

The loops are in reference_loops.py, the graph, methods and scenarios in training_cases.py. docs/same_as_pyg.md is the
table for users.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.equivalence import reference_loops as plain
from tests.equivalence.training_cases import (
    MODELS,
    SCENARIOS,
    WAYS,
    Scenario,
    Steps,
    Way,
    assert_same,
    assert_same_weights,
    epochs_of,
    make,
    plain_twin,
    reference_of,
    trainer_of,
)

CELLS = [(name, way) for name, scenario in SCENARIOS.items() for way in WAYS if way not in scenario.without]


def compare(scenario: Scenario, way: Way, **options: Any) -> None:
    """Train by hopline and by the reference loop, from the same weights and with the same seeds."""
    model = make(scenario.model)
    other, steps = plain_twin(model), Steps(scenario.after_step)
    for one in (model, other) if scenario.prepare is not None else ():
        scenario.prepare(one)
    trainer = trainer_of(scenario, way, model, callbacks=[steps], **options)
    trainer.fit()
    expected = reference_of(scenario, way, other, epochs_of(trainer, way, trainer.settings.epochs))
    assert len(steps.losses) >= 5
    assert_same(steps.trained, expected)
    assert_same_weights(model, other)


@pytest.mark.parametrize(("name", "way"), CELLS, ids=str)
def test_scenarios(name: str, way: str) -> None:
    compare(SCENARIOS[name], WAYS[way])
