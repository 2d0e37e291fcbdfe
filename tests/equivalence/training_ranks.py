"""The part of several ranks in the comparison with the reference loops: which seeds they have, and what they train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import hopline as hl
from hopline.distributed.world import World
from tests.equivalence import reference_loops as plain
from tests.equivalence.training_cases import (
    NUM_NODES,
    SCENARIOS,
    WAYS,
    Scenario,
    Steps,
    dataset_of,
    make,
    sage_gcn,
    trainer_of,
)

EPOCHS = 3


def seed_counts(world: World) -> dict[str, list[list[float]]]:
    """By loader or method and by epoch, how often each node was a seed on any of the ranks."""
    return {name: [_count_seeds(world, seeds) for seeds in epochs] for name, epochs in _seeds_by_loader(world)}


def _count_seeds(world: World, seeds: list[Tensor]) -> list[float]:
    """How often each node is among the seeds of all ranks."""
    counts = torch.bincount(torch.cat([torch.empty(0, dtype=torch.int64), *seeds]), minlength=NUM_NODES)
    return world.sum(counts.tolist())


def _seeds_by_loader(world: World) -> Iterator[tuple[str, list[list[Tensor]]]]:
    """(name, seeds by epoch) of this rank, for every loader and then for Trainers."""
    data = dataset_of(Scenario())
    for workers in range(5):
        for layout, fanouts in (("block", (-1, -1)), ("tree", (3, 2))):
            method = hl.Sampled(fanouts=fanouts, batch_size=4, workers=workers, layout=layout)  # type: ignore[arg-type]
            loader = method.loader(data, world=world)
            seeds = [[batch.seeds for batch in loader.epoch(epoch)] for epoch in range(1, EPOCHS + 1)]
            yield f"{layout}, {workers} workers", seeds
    for name in ("sampled-block", "historical", "historical-compensated", "sequential", "one-shot"):
        yield name, _seeds_of_trainer(world, name)


def _seeds_of_trainer(world: World, way: str) -> list[list[Tensor]]:
    """The seeds of each epoch of a Trainer, as its training step is given them."""
    seeds_by_epoch: list[list[Tensor]] = []

    class Epochs(hl.Callback):
        def on_fit_start(self, trainer: hl.Trainer) -> None:
            seeds_by_epoch.append([])

        def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
            seeds_by_epoch.append([])

    def train_step(model: nn.Module, batch: hl.Batch) -> Tensor:
        if torch.is_grad_enabled() and model.training:  # not where tables are filled
            seeds_by_epoch[-1].append(batch.seeds)
        return plain.cross_entropy(model, model(batch), batch.labels)

    options: dict[str, Any] = {"world": world, "epochs": EPOCHS, "train_step": train_step, "callbacks": [Epochs()]}
    trainer_of(Scenario(), WAYS[way], make(sage_gcn), **options).fit()
    return seeds_by_epoch[:EPOCHS]


def train_all(world: World, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Losses of every step and final weights, by scenario and method."""
    return [_train(world, SCENARIOS[name], way) for name, way in cases]


def _train(world: World, scenario: Scenario, way: str) -> dict[str, Any]:
    """Losses of all steps and final weights of one case."""
    model = make(scenario.model)
    steps = Steps(scenario.after_step)
    if scenario.prepare is not None:
        scenario.prepare(model)
    convention = WAYS[way]
    if way == "historical-compensated":  # the batches of all ranks are one step
        parts: dict[str, Any] = {"num_parts": 2 * world.size, "parts_per_batch": 2}
        method = convention.method
        convention = replace(convention, method=lambda layers: replace(method(layers), **parts), settings={})  # type: ignore[type-var]
    trainer_of(scenario, convention, model, world=world, callbacks=[steps]).fit()
    losses = world.sum(steps.trained.losses)  # each rank has the share of its own seeds
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights.tolist()}


def count_seeds_and_train(world: World, cases: list[tuple[str, str]]) -> list[Any]:
    """[seed counts, results of the cases]."""
    return [seed_counts(world), train_all(world, cases)]
