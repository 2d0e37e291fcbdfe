"""Several ranks train as a loop in plain torch and PyG does in one process, and every seed comes once an epoch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hopline as hl
from hopline.core.seed_order import share_of
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from tests.equivalence.training_cases import (
    DATA,
    SCENARIOS,
    WAYS,
    dataset_of,
    epochs_of,
    make,
    plain_twin,
    reference_of,
    trainer_of,
)
from tests.equivalence.training_ranks import EPOCHS, count_seeds_and_train

CASES: dict[int, list[tuple[str, str]]] = {
    1: [],
    2: [
        ("usual loss", "sampled-block"),
        ("class weights", "sampled-block"),
        ("accumulation, uneven last batch", "sampled-block"),
        ("unfrozen, clipping", "sampled-block"),
        ("label smoothing", "sampled-tree"),
        ("parameters in the loss", "historical-compensated"),
        ("parameters in the loss", "sequential"),
        ("multi-label", "stored"),
        ("tied layers", "one-shot"),
        ("class weights", "sequential"),
        ("class weights", "stored"),
        ("class weights", "one-shot"),
        ("examples with labels of their own", "sampled-block"),
        ("examples with labels of their own", "historical-compensated"),
        ("a joint loss of examples", "sequential"),
        ("repeated training ids", "one-shot"),
        ("regression, standardised, some not known", "sampled-block"),
        ("regression, standardised, some not known", "stored"),
        ("regression", "historical-compensated"),
        ("class weights and smoothing of the task", "sampled-tree"),
        ("class weights and smoothing of the task", "sequential"),
        ("class weights and smoothing of the task", "historical-compensated"),
        ("regression, standardised, some not known", "historical-compensated"),
        ("regression, some not known", "one-shot"),
        ("a class that does not count", "sampled-block"),
    ],
    3: [("usual loss", "sampled-block"), ("usual loss", "historical-compensated"), ("usual loss", "sequential")],
}
"""By the number of ranks: scenarios and methods. The last batch of three ranks has no seeds for one of them."""


FULL_BATCH = ("sequential", "stored", "one-shot")


@functools.cache
def train_ranks(num_ranks: int) -> Any:
    """(how often each node was a seed, results of the cases). Ranks are started once for all tests."""
    return run(count_seeds_and_train, LaunchSettings(devices=num_ranks, timeout_s=60), CASES[num_ranks])


@pytest.mark.parametrize("num_ranks", CASES)
def test_every_seed_comes_once_an_epoch(num_ranks: int) -> None:
    counts, _ = train_ranks(num_ranks)
    assert len(counts) == 15
    for name, epochs in counts.items():
        # A training step of the full batch is given the training nodes of all ranks, on every rank.
        times = num_ranks if name in FULL_BATCH else 1
        assert epochs == [(times * DATA.train_mask.double()).tolist()] * EPOCHS, name


def batches_of(name: str, way: str, num_ranks: int) -> tuple[list[list[Tensor]], int]:
    """The batches of each epoch as the reference loop takes them, and how many of them make a step."""
    method = WAYS[way].method(2)
    scenario = SCENARIOS[name]
    if not isinstance(method, hl.Sampled):
        return [[torch.arange(DATA.x.size(0))]] * WAYS[way].epochs, 1
    method = replace(method, batch_size=(scenario.batch_size or method.batch_size) * num_ranks)
    if scenario.task is not None:  # a step is one mean over the examples of all ranks
        whole = replace(scenario, batch_size=None)  # `method` has that of all ranks
        trainer = trainer_of(whole, replace(WAYS[way], method=lambda _: method), make(scenario.model))
        return epochs_of(trainer, WAYS[way], WAYS[way].epochs, scenario), 1
    loader = method.loader(dataset_of(scenario))
    epochs = [[batch.seeds for batch in loader.epoch(epoch)] for epoch in range(1, WAYS[way].epochs + 1)]
    shares = [[share_of(seeds, r, num_ranks) for seeds in epoch for r in range(num_ranks)] for epoch in epochs]
    return shares, num_ranks * scenario.settings.get("accumulate", 1)


@pytest.mark.parametrize(("num_ranks", "name", "way"), [(n, *case) for n, cases in CASES.items() for case in cases])
def test_ranks_train_as_one_process(num_ranks: int, name: str, way: str) -> None:
    """Of `Sampled`, each rank's loss is over its own share of a batch, as with DistributedDataParallel."""
    _, results = train_ranks(num_ranks)
    ours = results[CASES[num_ranks].index((name, way))]
    scenario = SCENARIOS[name]
    model = plain_twin(make(scenario.model))
    if scenario.prepare is not None:
        scenario.prepare(model)
    epochs, accumulate = batches_of(name, way, num_ranks)
    expected = reference_of(scenario, WAYS[way], model, epochs, accumulate=accumulate)
    assert ours["losses"] == pytest.approx(expected.losses, abs=1e-9)

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert ours["weights"] == pytest.approx(weights.tolist(), abs=1e-9)
