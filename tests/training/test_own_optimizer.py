"""Optimizers and schedulers of torch: by class, partial or object, equal to a plain loop, and resumed to the bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch_geometric.nn import GraphSAGE

import hopline as hl
from tests.support.runs import StopAfter, fit, method, same_weights, small, without

ALL = hl.Sampled(fanouts=(-1, -1), batch_size=1000, shuffle=False)
"""One batch of all training nodes, with all their neighbours."""


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=60)


def by_two(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 2, gamma=0.5)


@pytest.mark.parametrize("is_made", [False, True], ids=["class", "object"])
@pytest.mark.parametrize(("schedule", "every"), [(by_two, "epoch"), (one_cycle, "step")], ids=["StepLR", "OneCycleLR"])
def test_training_is_that_of_a_plain_loop_in_float64(is_made: bool, schedule: Any, every: Any):
    data = small()
    torch.manual_seed(0)
    ours, theirs = (GraphSAGE(8, 16, 2, 4).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    graph: Any = data.to_pyg()

    arguments: dict[str, Any] = {"optimizer": partial(RMSprop, alpha=0.9), "lr": 0.02, "weight_decay": 0.01}
    if is_made:
        arguments = {"optimizer": RMSprop(ours.parameters(), lr=0.02, weight_decay=0.01, alpha=0.9)}
    trainer = hl.Trainer(
        ours, without(data, "valid"), ALL, epochs=5, show=False, schedule=schedule, schedule_every=every, **arguments
    )
    optimizer = RMSprop(theirs.parameters(), lr=0.02, weight_decay=0.01, alpha=0.9)
    scheduler = schedule(optimizer)
    start = {name: weight.clone() for name, weight in ours.state_dict().items()}
    for _ in range(2):  # a second run begins with an optimizer that remembers nothing of the first
        run = trainer.fit()
        expected_rates = []
        for _ in range(5):
            optimizer.zero_grad()
            rates_before = optimizer.param_groups[0]["lr"]
            out = theirs(graph.x.double(), graph.edge_index)[graph.train_mask]
            nn.functional.cross_entropy(out, graph.y[graph.train_mask]).backward()
            optimizer.step()
            scheduler.step()
            expected_rates.append(rates_before if every == "epoch" else optimizer.param_groups[0]["lr"])
        assert [epoch.lr for epoch in run.history] == pytest.approx(expected_rates, rel=1e-12)
        for name, weight in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], weight, rtol=1e-10, atol=1e-12)
        ours.load_state_dict(start)
        theirs.load_state_dict(start)
        optimizer = RMSprop(theirs.parameters(), lr=0.02, weight_decay=0.01, alpha=0.9)
        scheduler = schedule(optimizer)


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=1.0, threshold_mode="abs")


@pytest.mark.parametrize("evaluate", ["blocking", "async"])
@pytest.mark.parametrize(
    ("optimizer", "schedule", "every"),
    [
        (partial(RMSprop, momentum=0.9, centered=True), by_two, "epoch"),
        ("object", one_cycle, "step"),
        ("adam", lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step), "step"),
        (torch.optim.NAdam, plateau, "epoch"),
    ],
    ids=["StepLR", "OneCycleLR", "LambdaLR", "plateau"],
)
def test_a_run_that_stops_is_resumed_to_the_bit(
    optimizer: Any, schedule: Any, every: Any, evaluate: str, tmp_path: Path
):
    if schedule is plateau and evaluate == "async":
        pytest.skip("refused")

    def run(folder: Path, **settings: Any) -> tuple[hl.Run, nn.Module]:
        torch.manual_seed(0)
        model = GraphSAGE(8, 16, 2, 4, dropout=0.5)
        given = RMSprop(model.parameters(), lr=0.01, momentum=0.9) if optimizer == "object" else optimizer
        options: dict[str, Any] = {} if optimizer == "object" else {"lr": 0.01, "weight_decay": 0.01}
        options |= {"optimizer": given, "schedule": schedule, "schedule_every": every, "evaluate": evaluate}
        options |= {"epochs": 4, "out": folder, "checkpoint_s": 0.0, "show": False}
        return hl.Trainer(model, small(), method(), **options, **settings).fit(), model

    expected, expected_model = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="enough"):
        run(tmp_path / "cut", callbacks=[StopAfter(8)])  # in the third epoch
    ours, model = run(tmp_path / "cut", resume=True)
    assert same_weights(model.state_dict(), expected_model.state_dict())
    assert [epoch.lr for epoch in ours.history] == [epoch.lr for epoch in expected.history]
    assert len({epoch.lr for epoch in ours.history}) > 1
    assert ours.test == expected.test


def test_settings_name_them_and_a_resumed_run_must_have_the_same(tmp_path: Path):
    settings: dict[str, Any] = {"epochs": 1, "out": tmp_path, "optimizer": partial(RMSprop, alpha=0.9)}
    fit(small(), schedule=by_two, **settings)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["config"]["train"]["optimizer"] == "RMSprop(alpha=0.9)"
    assert stored["config"]["train"]["schedule"] == "StepLR, after every epoch"
    assert {"train.optimizer", "train.schedule"} <= set(stored["changed"])
    others: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": "adam"}, "optimizer is 'RMSprop"),
        ({"optimizer": partial(RMSprop, alpha=0.8)}, r"alpha=0\.8"),
        ({"schedule": lambda optimizer: StepLR(optimizer, 3)}, "schedule"),
        ({"schedule": "cosine"}, "schedule is 'StepLR"),
        ({"schedule_every": "step"}, "after every step"),
    ]
    for other, words in others:
        together: dict[str, Any] = {"schedule": by_two} | settings | other
        with pytest.raises(ValueError, match=f"another run.*{words}"):
            fit(small(), resume=True, **together)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "rmsprop"}, "torch.optim.RMSprop"),
        ({"optimizer": 3}, "torch.optim.RMSprop"),
        ({"optimizer": partial(RMSprop, lr=0.1)}, r"hl.Trainer\(..., lr=0.1\)"),
        ({"optimizer": torch.optim.Rprop, "weight_decay": 0.1}, "leave out weight_decay="),
        ({"optimizer": torch.optim.LBFGS}, "choose another optimizer="),
        ({"optimizer": lambda parameters: RMSprop(parameters)}, "optimizer=lambda groups, lr"),
        ({"optimizer": lambda groups, lr: None}, "return a torch.optim.Optimizer"),
        ({"optimizer": RMSprop([nn.Parameter(torch.ones(1))], lr=0.1)}, "lr= of its own"),
        ({"schedule": 3}, "schedule='cosine'"),
        ({"schedule": lambda optimizer: None}, "lambda optimizer: torch"),
        ({"schedule": lambda _: by_two(RMSprop([nn.Parameter(torch.ones(1))]))}, "that it is given"),
        ({"schedule_every": "step"}, "schedule_every='step' is for schedulers of torch"),
        ({"schedule": by_two, "schedule_every": "batch"}, "'epoch' or 'step'"),
        ({"schedule": plateau, "evaluate": "async"}, "evaluate='blocking'"),
        ({"schedule": plateau, "schedule_every": "step"}, "leave out schedule_every="),
        ({"schedule": ReduceLROnPlateau}, "mode='max'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_refused_before_training(settings: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(ValueError, match=words):
        fit(small(), out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_budget_counts_the_state_of_an_optimizer_of_the_user():
    def state_bytes(optimizer: Any) -> int:
        model = GraphSAGE(8, 16, 2, 4)
        plan = hl.Trainer(model, small(), method(), budget="1GiB", show=False, optimizer=optimizer).plan
        assert plan is not None
        return next(item.num_bytes for item in plan.items if item.name == "optimizer")

    assert state_bytes(RMSprop) * 2 == state_bytes("adam") * 3
