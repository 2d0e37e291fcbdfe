"""Which settings of a run count as changed."""

from typing import Any

import pytest

from hopline.budget.settings import Budget
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Sampled
from hopline.report.settings import split_settings
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import RunConfig
from hopline.training.settings import Schedule, TrainSettings
from hopline.util.config import to_dict


def of_trainer(method: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """What `Trainer` writes as its settings."""
    return {"data": "cora", "method": method, "train": to_dict(TrainSettings(**settings)), "model": "GNN()"}


def test_a_run_with_defaults_has_changed_nothing():
    changed, others = split_settings(to_dict(RunConfig()))
    assert changed == {}
    assert others["method.fanouts"] == "auto"
    assert others["budget"] is None


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
    found = split_settings(to_dict(config))
    assert found.changed == changed
    assert not found.changed.keys() & found.others.keys()
    assert found.others


def test_a_trainer_in_python_is_compared_with_the_defaults_of_training_and_of_its_method():
    config = of_trainer({"kind": "Historical", **to_dict(Historical(lag=1))}, epochs=3)
    found = split_settings(config)
    assert found.changed == {
        "data": "cora",
        "method.kind": "Historical",
        "method.lag": 1,
        "train.epochs": 3,
        "model": "GNN()",
    }
    assert found.others["method.num_parts"] == 40


def test_a_method_of_the_users_own_is_shown_as_it_is():
    found = split_settings(of_trainer({"kind": "Mine", "repr": "Mine()"}))
    assert found.changed == {"data": "cora", "method.kind": "Mine", "method.repr": "Mine()", "model": "GNN()"}


def test_a_setting_that_was_removed_is_compared_with_the_default_that_it_had():
    config = to_dict(RunConfig())
    config["model"] |= {"heads": 8, "alpha": 0.1, "residual": False, "residual_first": False}
    config["schedule"] |= {"every": 10, "patience": 5}
    found = split_settings(config)
    assert found.changed == {"model.heads": 8}
    assert found.others["model.alpha"] == 0.1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"note": 3},
        {**to_dict(RunConfig()), "from_a_later_version": 1},
        {**to_dict(RunConfig()), "method": "sampled"},
        {**to_dict(RunConfig()), "method": {"kind": "sampled", "nonesuch": 1}},
        {"train": {"nonesuch": 1}},
        {"method": None, "train": None},
    ],
)
def test_with_a_key_that_is_not_known_nothing_is_folded_away(config: dict[str, Any]):
    assert split_settings(config).others == {}
