"""Which settings of a run count as changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hopline as hl
from hopline.budget.plan import Budget
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Sampled
from hopline.report.settings import changed_keys, flatten
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import RunConfig
from hopline.training.settings import Schedule
from hopline.util.config import to_dict
from tests.support.runs import sage, small


def test_a_run_with_defaults_has_changed_nothing():
    assert changed_keys(RunConfig()) == []


def test_a_mapping_in_place_of_none_has_changed_keys():
    @dataclass(frozen=True)
    class OwnSettings:
        """As a user's own method may have them."""

        options: dict[str, int] | None = None

    assert changed_keys(OwnSettings(options={"depth": 2})) == ["options.depth"]


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (RunConfig(lr=0.5, method=Sampled(workers=0)), {"lr": 0.5, "method.workers": 0}),
        (RunConfig(method=Historical()), {"method.kind": "historical"}),
        (RunConfig(method=FullBatch(num_shards=3)), {"method.kind": "full_batch", "method.num_shards": 3}),
        (RunConfig(budget=Budget(device="8GiB")), {"budget.device": "8GiB"}),
        (RunConfig(schedule=Schedule(name="cosine")), {"schedule.name": "cosine"}),
        (RunConfig(model=ModelSpec(conv={"aggr": None})), {"model.conv.aggr": None}),
    ],
)
def test_what_differs_from_the_defaults_of_a_run_and_of_its_method(config: RunConfig, changed: dict[str, Any]):
    keys = changed_keys(config)
    settings = dict(flatten(to_dict(config)))
    assert {key: value for key, value in settings.items() if key in keys} == changed
    assert settings.keys() - set(keys)


class Mine(hl.extend.Method):
    """A method of the user's own, no dataclass."""

    def bind(self, job: hl.extend.Job) -> Any:
        return Sampled(fanouts=(3, 3), batch_size=50).bind(job)


@pytest.mark.parametrize(
    ("method", "of_method"),
    [
        (Sampled(fanouts=(3, 3)), {"method.fanouts"}),
        (Historical(num_parts=4, parts_per_batch=2, partition="range"), {"method.kind", "method.num_parts"}),
        (Mine(), {"method.kind", "method.repr"}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_trainer_in_python_stores_what_was_changed(method: hl.extend.Method, of_method: set[str], tmp_path: Path):
    data = small()
    hl.Trainer(sage(data), data, method, epochs=1, show=False, out=tmp_path).fit()
    stored = json.loads((tmp_path / "config.json").read_text())
    settings = dict(flatten(stored["config"]))
    changed = set(stored["changed"])
    assert {"data", "model", "train.epochs", *of_method} <= changed & settings.keys()
    assert "train.lr" not in changed
    assert settings["train.lr"] == 0.003
    if "method.kind" not in of_method and not isinstance(method, Mine):
        assert "method.kind" not in changed
        assert settings["method.kind"] == "Sampled"
