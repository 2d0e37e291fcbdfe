from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hopline.full_batch import FullBatch
from hopline.historical import Historical
from hopline.keep import WatchedWork
from hopline.methods import Sampled, SampledWork
from hopline.nn import GNN
from hopline.trainer import Trainer
from hopline.work import Method, Stateful
from tests.helpers import dataset_of, randn, random_graph, stack_of
from tests.runs import records

DATA = dataset_of(random_graph(1500, 12_000), randn(1500, 6))
METHODS: list[Method] = [
    Sampled(fanouts=(5, 5), batch_size=300),
    Historical(num_parts=6, parts_per_batch=3, partition="range"),
    FullBatch(num_shards=2, partition="range"),
]


def trainer_of(method: Method, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = GNN(stack_of("sage-mean", 6, 32, 3), dropout=0.3).double()
    return Trainer(model, DATA, method, epochs=2, show=False, **options)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_run_within_a_budget_is_the_run_without(method: Method, tmp_path: Path):
    free, free_run = (trainer := trainer_of(method)), trainer.fit()
    measured = trainer_of(method, budget="1GiB", out=tmp_path / "measured")
    measured.fit()
    assert measured.plan is not None
    taken = max(record["peak_bytes"] for record in records(tmp_path / "measured", "budget"))
    least = measured.plan.kept_bytes("host") + taken
    limit = str(max(int(least * 0.8), measured.plan.smallest_bytes("host")))
    tight = trainer_of(method, budget=limit, out=tmp_path / "tight")
    run = tight.fit()
    for record in records(tmp_path / "tight", "budget"):
        assert record["over"] == 0
        assert 0 < record["peak_bytes"] <= record["limit_bytes"]
    assert [e.loss for e in run.history] == pytest.approx([e.loss for e in free_run.history], rel=1e-9)
    for name, weight in free.model.state_dict().items():
        torch.testing.assert_close(tight.model.state_dict()[name], weight, rtol=1e-7, atol=1e-9)
    assert run.test == free_run.test


def test_what_cannot_be_cut_is_watched(tmp_path: Path):
    trainer = trainer_of(METHODS[2], budget="1GiB", out=tmp_path / "run")
    assert isinstance(trainer.work, WatchedWork)
    assert isinstance(trainer.work, Stateful) == isinstance(trainer.work.work, Stateful)
    trainer.fit()
    found = records(tmp_path / "run", "budget")
    assert [record["epoch"] for record in found] == [1, 2]
    assert all(0 < record["peak_bytes"] <= record["promised_bytes"] for record in found)
    assert trainer.work.guard.take_record()["after"] == []


def test_a_budget_for_another_place_leaves_steps_alone():
    trainer = trainer_of(METHODS[0], budget={"disk": "1MiB"})
    assert isinstance(trainer.work, SampledWork)
    assert trainer.work.guard is None


def test_a_budget_that_is_too_small_names_one_that_would_do_and_a_method():
    with pytest.raises(ValueError, match=r"Sampled does not fit 1 KiB.*at least budget=.*no other method fits"):
        trainer_of(METHODS[0], budget="1KiB")
    with pytest.raises(ValueError, match=r"a budget has no 'divice'.*Did you mean 'device'"):
        trainer_of(METHODS[0], budget={"divice": "1KiB"})
    with pytest.raises(ValueError, match=r"with this budget method=\w+ fits"):
        trainer_of(FullBatch(num_shards=2, partition="range"), budget="1MiB")
