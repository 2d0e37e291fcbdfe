"""Training by any method is what a loop in plain torch and PyG does: losses of every step, rates, and final weights.

The loops are in reference_loops.py, the graph, methods and scenarios in training_cases.py. docs/same_as_pyg.md is the
table for users.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hopline as hl
from hopline.budget.guard import BudgetGuard
from hopline.budget.plan import Budget
from hopline.nn import smoothness
from hopline.training.settings import Schedule
from hopline.util import trace
from tests.equivalence import reference_loops as plain
from tests.equivalence.training_cases import (
    ATTRIBUTED,
    BINARY,
    DATA,
    MODELS,
    NUM_NODES,
    SCENARIOS,
    WAYS,
    WEIGHTED,
    CallingConvention,
    Scenario,
    Steps,
    assert_same,
    assert_same_weights,
    dataset_of,
    epochs_of,
    gat,
    gcn_graph,
    halve_output,
    make,
    plain_twin,
    reference_of,
    sage_gcn,
    trainer_of,
)
from tests.support.helpers import guarded, randn

CELLS = [(name, way) for name, scenario in SCENARIOS.items() for way in WAYS if way not in scenario.without]


def compare(
    scenario: Scenario, way: CallingConvention, reference: Callable[..., Any] | None = None, **options: Any
) -> None:
    """Train by hopline and by the reference loop, from the same weights and with the same seeds.

    reference: of the plain model, further arguments of the loop.
    """
    model = make(scenario.model)
    plain_model = plain_twin(model)
    steps = Steps(scenario.after_step)
    if scenario.prepare is not None:
        scenario.prepare(model)
        scenario.prepare(plain_model)
    trainer = trainer_of(scenario, way, model, callbacks=[steps], **options)
    trainer.fit()
    epochs = epochs_of(trainer, way, trainer.settings.epochs, scenario)
    expected = reference_of(scenario, way, plain_model, epochs, **({} if reference is None else reference(plain_model)))
    assert len(steps.losses) >= 5
    assert_same(steps.trained, expected)
    assert_same_weights(model, plain_model)


@pytest.mark.parametrize(("name", "way"), CELLS, ids=str)
def test_every_scenario_by_every_method_equals_the_reference_loop(name: str, way: str) -> None:
    compare(SCENARIOS[name], WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_models_by_every_method_equal_the_reference_loop_or_are_refused(name: str, way: str) -> None:
    scenario = Scenario(model=MODELS[name])
    if name == "own module" and way != "sampled-block":
        with pytest.raises(ValueError, match="OwnModule is not"):
            compare(scenario, WAYS[way])
    else:
        compare(scenario, WAYS[way])


# ---- hooks


def hook_gcn(model: Any) -> None:
    """A forward hook on a conv."""
    model.convs[1].register_forward_hook(halve_output)


def hook_model(model: nn.Module) -> None:
    """A forward hook on the whole model."""
    model.register_forward_hook(halve_output)


def hook_dropout(model: Any) -> None:
    """A forward hook on the dropout of a PyG model."""
    model.dropout.register_forward_hook(halve_output)


HOOKED = {
    "a GCNConv": Scenario(prepare=hook_gcn),
    "hl.nn.GNN": Scenario(prepare=hook_model),
    "pyg.GraphSAGE": Scenario(model=MODELS["pyg.GraphSAGE"], prepare=hook_model),
    "the dropout of pyg.GraphSAGE": Scenario(model=MODELS["pyg.GraphSAGE"], prepare=hook_dropout),
}


@pytest.mark.parametrize("way", ["sampled-block", "sampled-tree", "historical-one-batch", "sweep", "sequential"])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_that_not_every_method_calls_are_refused_by_name(name: str, way: str) -> None:
    """A hook is called as in plain PyG, or the model is refused: with a hooked forward, layers cannot be seen."""
    refused = ""
    try:
        compare(HOOKED[name], WAYS[way])
    except ValueError as error:
        refused = str(error)
    assert not refused or "hook" in refused or "made of layers" in refused


# ---- schedules


class Interrupted(Exception):
    pass


class InterruptAt(hl.Callback):
    """Ends the run in the first step of an epoch, whose checkpoint is then that of the epoch before."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.epoch == self.epoch:
            raise Interrupted


def train_with_interruptions(
    scenario: Scenario, way: CallingConvention, out: Path, lengths: list[tuple[int, int | None]], **options: Any
) -> tuple[nn.Module, Steps]:
    """(model, steps) after several runs in one folder.

    lengths: for each run, its epochs= and the epoch in which it is interrupted.
    """
    steps = Steps()
    model = make(scenario.model)
    for epochs, cut in lengths:
        callbacks: list[hl.Callback] = [steps] if cut is None else [steps, InterruptAt(cut)]
        trainer = trainer_of(
            scenario,
            way,
            model,
            callbacks=callbacks,
            out=out,
            resume=True,
            checkpoint_s=0.0,
            **(options | {"epochs": epochs}),
        )
        try:
            trainer.fit()
        except Interrupted:
            model = make(scenario.model, seed=1)  # whose weights the checkpoint replaces
    return model, steps


SCHEDULES = [
    *[(name, warmup, "sampled-block") for name in ("constant", "cosine", "step", "plateau") for warmup in (0, 2)],
    *[(*schedule, way) for schedule in (("cosine", 2), ("plateau", 0)) for way in ("historical", "sweep")],
]


@pytest.mark.parametrize(("name", "warmup", "way"), SCHEDULES)
def test_a_schedule_resumed_at_every_epoch_equals_that_of_torch(
    name: str, warmup: int, way: str, tmp_path: Path
) -> None:
    epochs = 6
    floor = 0.02
    schedule = Schedule(name=name, warmup=warmup, every=0 if name == "plateau" else 2, floor=floor)  # type: ignore[arg-type]
    scenario = Scenario(lr=6.0)  # so high that the loss rises at times, which is what a plateau is about
    cuts = [(epochs, epoch) for epoch in range(2, epochs + 1)]
    model, steps = train_with_interruptions(scenario, WAYS[way], tmp_path, [*cuts, (epochs, None)], schedule=schedule)

    plain_model = plain_twin(make(scenario.model))
    trainer = trainer_of(scenario, WAYS[way], make(scenario.model))
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=scenario.lr)
    plain_schedule = plain.make_schedule(name, optimizer, epochs, warmup, floor)
    seeds = epochs_of(trainer, WAYS[way], epochs)
    expected = reference_of(scenario, WAYS[way], plain_model, seeds, optimizer=optimizer, schedule=plain_schedule)

    assert len(set(expected.rates)) > (name != "constant" or warmup > 0)
    assert_same(steps.trained, expected)
    assert_same_weights(model, plain_model)


@pytest.mark.parametrize(("before", "cut", "after"), [(3, None, 6), (6, 4, 4), (6, 3, 9)])
def test_a_cosine_resumed_with_another_number_of_epochs_is_that_of_the_new_number(
    before: int, cut: int | None, after: int, tmp_path: Path
) -> None:
    schedule = Schedule(name="cosine", floor=0.02)
    lengths = [(before, cut), (after, None)]
    _, steps = train_with_interruptions(Scenario(lr=0.5), WAYS["sweep"], tmp_path, lengths, schedule=schedule)
    done = before if cut is None else cut - 1
    expected = [0.02 + 0.48 * (1 + math.cos(math.pi * epoch / after)) / 2 for epoch in range(done, after)]
    assert steps.trained.rates[done:] == pytest.approx(expected, abs=1e-9)


# ---- edges


def first_of_each(edge_index: Tensor) -> Tensor:
    """The positions of the edges that are left when only the first of equal ones is kept."""
    first: dict[tuple[int, int], int] = {}
    for position, (src, dst) in enumerate(edge_index.t().tolist()):
        first.setdefault((src, dst), position)
    return torch.tensor(list(first.values()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("array", ["edge_weight", "edge_attr"])
def test_removing_duplicate_edges_keeps_the_arrays_of_the_first(array: str, way: str) -> None:
    data, model = {"edge_weight": (WEIGHTED, gcn_graph), "edge_attr": (ATTRIBUTED, gat)}[array]
    assert data.edge_index is not None
    order = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(0))
    shuffled = copy.copy(data)
    shuffled.edge_index = data.edge_index[:, order]
    shuffled[array] = data[array][order]
    first_positions = first_of_each(shuffled.edge_index)
    assert first_positions.numel() < data.num_edges - 10

    unique = copy.copy(data)
    unique.edge_index = shuffled.edge_index[:, first_positions]
    unique[array] = shuffled[array][first_positions]
    removed = hl.from_pyg(shuffled, duplicates="remove")
    removed = replace(removed, splits={"train": removed.splits["train"]})
    compare(Scenario(model=model, data=unique), WAYS[way], data=removed)


# ---- settings of Historical


@pytest.mark.parametrize("way", ["historical", "historical-one-batch"])
def test_the_lipschitz_penalty_equals_that_of_the_reference_loop(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalty of GNNAutoScale, with noise that the reference knows too."""
    noise = randn(NUM_NODES, 8, seed=3)
    monkeypatch.setattr(smoothness, "_normal", lambda h, block, l: noise[block.src_ids])

    def penalty_of(model: Any) -> dict[str, Any]:
        inputs: list[Tensor] = []
        model.convs[1].register_forward_pre_hook(lambda conv, inputs_of_conv: inputs.append(inputs_of_conv[0]))

        def penalty(model: Any, batch: Tensor) -> Tensor:
            h = inputs[-1]
            change = model.convs[1](h, DATA.edge_index) - model.convs[1](h + 0.1 * noise, DATA.edge_index)
            return 0.7 * change[batch].norm(dim=1).mean()

        return {"penalty": penalty}

    way_without = WAYS[way]
    changed = replace(way_without, method=lambda layers: replace(way_without.method(layers), lipschitz=0.7))  # type: ignore[type-var]
    compare(Scenario(), changed, penalty_of)


def gradient_of(model: nn.Module) -> Tensor:
    """All gradients of a model as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Gradients(hl.Callback):
    """Loss and gradient of each step."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        self.found.append((step.loss, gradient_of(trainer.model)))


@pytest.mark.parametrize("num_train", [18, 23, 3])
@pytest.mark.parametrize("max_batches", [None, 2])
@pytest.mark.parametrize(
    "name", ["usual loss", "regression, some not known", "class weights and smoothing of the task"]
)
def test_the_mean_over_compensated_batches_is_the_full_batch(
    name: str, max_batches: int | None, num_train: int
) -> None:
    """The mean over all groups, at weights that stay as they are: a step stands for as much as any other."""
    scenario = SCENARIOS[name]
    data = dataset_of(scenario)
    ids = data.splits["train"][:num_train]
    model = make(scenario.model)
    steps = Gradients()
    plain_model = plain_twin(model)
    method = hl.Historical(
        num_parts=6, parts_per_batch=1, partition="random", groups="fixed", compensate=True, refresh_every=1,
        max_batches=max_batches,
    )  # fmt: skip
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 1e-30, "epochs": 12 if max_batches else 1, "show": False}
    settings["task"] = scenario.task
    trainer = hl.Trainer(model, replace(data, splits={"train": ids}), method, callbacks=[steps], **settings)
    trainer.fit()

    drawn: Any = trainer.work.groups  # type: ignore[attr-defined]
    groups = [group for epoch in range(1, settings["epochs"] + 1) for group in drawn.groups_of(epoch)]
    step_by_group = dict(zip(groups, steps.found, strict=True))
    assert len(step_by_group) == 6

    losses, gradients = (torch.stack(values) for values in zip(*step_by_group.values(), strict=True))
    expected = scenario.loss(plain_model, plain.whole_graph(plain_model, DATA, ids)[ids], scenario.data.y[ids])
    expected.backward()

    torch.testing.assert_close(losses.mean(), expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients.mean(0), gradient_of(plain_model), rtol=1e-9, atol=1e-9)


# ---- batches in pieces


SPLIT_BYTES = {"sampled-block": 24_000, "historical": 100_000, "historical-one-batch": 100_000}
"""So little that the first batch at least, whose memory is not known yet, comes in pieces."""


@pytest.mark.parametrize("way", SPLIT_BYTES)
@pytest.mark.parametrize(
    "name",
    [
        "usual loss",
        "class weights",
        "label smoothing",
        "parameters in the loss",
        "examples with labels of their own",
        "a joint loss of examples",
        "regression, standardised, some not known",
        "class weights and smoothing of the task",
        "a class that does not count",
    ],
)
def test_batches_split_by_a_budget_train_as_whole_ones(name: str, way: str) -> None:
    scenario = replace(SCENARIOS[name], batch_size=None)
    steps = Steps()
    model = make(scenario.model)
    counters = trace.Counters()
    plain_model = plain_twin(model)
    trainer = trainer_of(scenario, WAYS[way], model, callbacks=[steps])
    trainer.work = guarded(trainer.work, trainer.method, BudgetGuard(trainer.job, Budget(), SPLIT_BYTES[way]))
    with trace.listen(counters):
        trainer.fit()
    counters.next_epoch()
    assert counters.last_epoch()["budget.batches_split"] > 0

    epochs = epochs_of(trainer, WAYS[way], trainer.settings.epochs, scenario)
    assert_same(steps.trained, reference_of(scenario, WAYS[way], plain_model, epochs))
    assert_same_weights(model, plain_model)


# ---- fits, optimizers, ids and classes


@pytest.mark.parametrize("way", WAYS)
def test_a_second_fit_starts_from_the_weights_of_the_first(way: str) -> None:
    scenario = Scenario()
    steps = Steps()
    model = make(scenario.model)
    plain_model = plain_twin(model)
    trainer = trainer_of(scenario, WAYS[way], model, callbacks=[steps])
    epochs = epochs_of(trainer, WAYS[way], trainer.settings.epochs)
    for _ in range(2):
        steps.losses.clear()
        trainer.fit()
        expected = reference_of(scenario, WAYS[way], plain_model, epochs)
        assert_same(steps.trained, expected)

    assert_same_weights(model, plain_model)


class LastConvAlone(hl.Trainer):
    """An optimizer of the user's own, over some of the parameters."""

    def make_optimizer(self) -> Optimizer:
        model: Any = self.model
        return torch.optim.SGD(model.convs[1].parameters(), lr=0.5)


@pytest.mark.parametrize("way", WAYS)
def test_clipping_counts_only_parameters_of_the_optimizer(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hl, "Trainer", LastConvAlone)

    def reference(model: Any) -> dict[str, Any]:
        return {"optimizer": torch.optim.SGD(model.convs[1].parameters(), lr=0.5)}

    compare(Scenario(settings={"clip_norm": 0.05}), WAYS[way], reference)


@pytest.mark.parametrize("way", WAYS)
def test_one_column_for_two_classes_is_scored_by_its_sign(way: str) -> None:
    scenario = Scenario(model=lambda: sage_gcn(1), data=BINARY, loss=plain.binary)
    model = make(scenario.model)
    plain_model = plain_twin(model)
    trainer = trainer_of(scenario, WAYS[way], model, data=dataset_of(scenario, evaluated=True))
    run = trainer.fit()

    def validate(model: nn.Module) -> float:
        with torch.no_grad():
            out = plain.whole_graph(model, BINARY, BINARY.val_mask)[BINARY.val_mask].squeeze(-1)
        return ((out > 0).long() == BINARY.y[BINARY.val_mask]).double().mean().item()

    epochs = epochs_of(trainer, WAYS[way], trainer.settings.epochs)
    expected = reference_of(scenario, WAYS[way], plain_model, epochs, validate=validate)

    assert [e.metrics["accuracy"] for e in run.evaluations if e.split == "valid"] == pytest.approx(expected.scores)


@pytest.mark.parametrize("way", WAYS)
def test_one_column_for_three_classes_is_refused(way: str) -> None:
    with pytest.raises(ValueError, match="classes"):
        trainer_of(Scenario(), WAYS[way], make(lambda: sage_gcn(1))).fit()


# ---- evaluation


EVALUATED = [*[("async", way) for way in WAYS], ("blocking", "sampled-block"), ("blocking", "sweep")]


@pytest.mark.parametrize("patience", [None, 2])
@pytest.mark.parametrize(("evaluate", "way"), EVALUATED)
def test_training_keeps_the_weights_of_the_best_epoch(evaluate: str, way: str, patience: int | None) -> None:
    scenario = Scenario()
    model = make(scenario.model)
    steps = Steps()
    plain_model = plain_twin(model)
    options: dict[str, Any] = {"data": dataset_of(scenario, evaluated=True), "epochs": 8, "patience": patience}
    trainer = trainer_of(scenario, WAYS[way], model, callbacks=[steps], evaluate=evaluate, **options)
    run = trainer.fit()
    epochs = epochs_of(trainer, WAYS[way], 8)
    stops: dict[str, Any] = {} if patience is None else {"patience": patience}
    expected = reference_of(
        scenario, WAYS[way], plain_model, epochs, validate=lambda m: plain.accuracy(m, DATA, DATA.val_mask), **stops
    )
    scores = [e.metrics["accuracy"] for e in run.evaluations if e.split == "valid"]
    assert scores == pytest.approx(expected.scores)
    assert (run.epochs, run.best_epoch) == (len(expected.scores), expected.best_epoch)
    assert [epoch.lr for epoch in run.history] == expected.rates

    plain_model.load_state_dict(expected.best_weights)
    assert_same_weights(model, plain_model)
    assert run.test == pytest.approx(plain.accuracy(plain_model, DATA, DATA.test_mask))

    # With asynchronous evaluation, training runs some steps further before it learns that it should stop.
    losses = steps.trained.losses[: len(expected.losses)]
    assert losses == pytest.approx(expected.losses, abs=1e-9)


# ---- the page


def test_the_page_for_users_has_the_table_of_scenarios_by_method() -> None:
    page = (Path(__file__).parents[2] / "docs" / "same_as_pyg.md").read_text()
    table = page.split("## What is compared")[1].split("\n\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    (_, *columns), _, *body = rows
    assert [column.strip("`") for column in columns] == list(WAYS)
    assert [name for name, *_ in body] == list(SCENARIOS)
    for name, *cells in body:
        expected = ["-" if way in SCENARIOS[name].without else "=" for way in WAYS]
        assert cells == expected, name
