"""Training by several ranks is what a loop in plain torch and PyG does in one process; every seed comes once an epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import hopline as hl
from hopline.launch import run
from hopline.launch_settings import LaunchSettings
from hopline.sampling import share_of
from tests.equivalence.training_cases import DATA, SCENARIOS, WAYS, dataset_of, make, plain_twin, reference_of
from tests.equivalence.training_ranks import EPOCHS, both

FULL_BATCH = ("sequential", "stored", "one-shot")
CASES = [
    *[(name, "sampled-block") for name in ("usual loss", "class weights", "accumulation, uneven last batch")],
    *[(name, "sampled-block") for name in ("parameters in the loss", "clipping", "unfrozen", "tied weights")],
    *[(name, "sampled-tree") for name in ("usual loss", "label smoothing")],
    *[(name, "historical-compensated") for name in ("usual loss", "parameters in the loss", "tied layers")],
    *[("usual loss", way) for way in FULL_BATCH],
    *[(name, "sequential") for name in ("parameters in the loss", "label smoothing", "multi-label", "tied layers")],
    *[("class weights", way) for way in FULL_BATCH],
]


@pytest.fixture(scope="module", params=[1, 2, 3])
def by_ranks(request: pytest.FixtureRequest) -> tuple[int, list]:
    """(ranks, what they found): one start for all tests."""
    return request.param, run(both, LaunchSettings(devices=request.param, timeout_s=60), CASES)


def test_every_seed_comes_once_an_epoch(by_ranks: tuple[int, list]) -> None:
    _, (counts, _) = by_ranks
    assert len(counts) == 15
    for name, epochs in counts.items():
        assert epochs == [DATA.train_mask.double().tolist()] * EPOCHS, name


def batches_of(name: str, way: str, num_ranks: int) -> tuple[list[list[Tensor]], int]:
    """The batches of each epoch as the reference loop takes them, and how many of them make a step."""
    method, scenario = WAYS[way].method(2), SCENARIOS[name]
    if not isinstance(method, hl.Sampled):
        return [[torch.arange(DATA.x.size(0))]] * WAYS[way].epochs, 1
    method = replace(method, batch_size=(scenario.batch_size or method.batch_size) * num_ranks)
    loader = method.loader(dataset_of(scenario))
    epochs = [[batch.seeds for batch in loader.epoch(epoch)] for epoch in range(1, WAYS[way].epochs + 1)]
    shares = [[share_of(seeds, r, num_ranks) for seeds in epoch for r in range(num_ranks)] for epoch in epochs]
    return shares, num_ranks * scenario.settings.get("accumulate", 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_ranks_train_as_one_process(case: tuple[str, str], by_ranks: tuple[int, list]) -> None:
    """Of `Sampled`, each rank's loss is over its own share of a batch, as with DistributedDataParallel."""
    num_ranks, (_, found) = by_ranks
    name, way = case
    scenario = SCENARIOS[name]
    model = plain_twin(make(scenario.model))
    if scenario.prepare is not None:
        scenario.prepare(model)
    epochs, accumulate = batches_of(name, way, num_ranks)
    expected = reference_of(scenario, WAYS[way], model, epochs, accumulate=accumulate)
    result = found[CASES.index(case)]
    assert result["losses"] == pytest.approx(expected.losses, abs=1e-9)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert result["weights"] == pytest.approx(weights.tolist(), abs=1e-9)
