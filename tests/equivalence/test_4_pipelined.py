"""Identity 4: pipelined = serial, bit for bit; one batch = its micro-batches at finite fan-outs, with dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from tests.support.helpers import (
    assert_close,
    assert_same_batches,
    assert_same_gradients,
    batch_of,
    dataset_of,
    generator,
    randint,
    randn,
    random_graph,
    stack_of,
    torch_threads,
    twin,
)

GRAPH = random_graph(400, 5000, dtype=torch.int32, weight=True, attr=2)
X = randn(400, 12, dtype=torch.float32)
DATA = dataset_of(GRAPH, X)
METHOD = Sampled(fanouts=(4, 3), batch_size=16, workers=0)
THREADS = [(1, 1), (1, 4), (2, 2), (4, 8), (8, 3)]


@pytest.mark.parametrize(("workers", "look_ahead"), THREADS)
def test_batches(workers: int, look_ahead: int) -> None:
    serial = METHOD.loader(DATA, seed=2)
    pipelined = replace(METHOD, workers=workers, look_ahead=look_ahead).loader(DATA, seed=2)
    for _ in range(2):
        for ours, expected in zip(pipelined, serial, strict=True):
            assert_same_batches(ours, expected)


def train(name: str, workers: int, threads: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """(losses of all steps, weights) after two epochs. threads: of torch."""
    model = GNN(stack_of(name, 12, 16, 3), dropout=0.5, norm="batch").float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = replace(METHOD, workers=workers).loader(DATA, seed=2, model=model)
    losses = []
    with torch_threads(threads):
        for _ in range(2):
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
    return losses, model.state_dict()


@pytest.mark.parametrize("name", ["sage-mean", "gcn", "gat-edges"])
def test_pipelined_training_is_the_serial_one(name: str) -> None:
    expected_losses, expected_weights = train(name, workers=0)
    assert len(expected_losses) == 26
    assert len(set(expected_losses)) > 20
    for workers in (1, 3):
        our_losses, our_weights = train(name, workers)
        assert our_losses == expected_losses
        assert all(torch.equal(our_weights[k], v) for k, v in expected_weights.items())


def test_more_kernel_threads_change_losses_by_rounding_alone() -> None:
    expected, _ = train("sage-max", workers=0)
    ours, _ = train("sage-max", workers=2, threads=2)
    assert ours == pytest.approx(expected, rel=1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.5},
    "input-dropout": {"input_dropout": 0.4},
    "all": {
        "dropout": 0.3,
        "input_dropout": 0.2,
        "encoder": nn.Linear(12, 8),
        "initial_residual": 0.1,
        "residual": True,
        "norm": "layer",
        "jk": "cat",
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "gcn", "gin", "gat-edges", "pna", "transformer", "graph"])
@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "replace"])
def test_gradients_of_the_micro_batches_add_up_to_those_of_the_batch(
    options: str, name: str, replacement: bool
) -> None:
    """Seeds split under one key, losses weighted by their seeds: the gradients of the whole batch."""
    chosen = OPTIONS[options]
    widths = (8, 8, 8) if "encoder" in chosen else (12, 8, 8)
    head = nn.Linear(16 if "jk" in chosen else 8, 3)
    model = twin(GNN(stack_of(name, *widths), head=head, **chosen).double())
    split_model = twin(model)
    labels = randint(0, 3, 400)
    seeds = randint(0, 400, 60, seed=6).unique()
    whole = batch_of(GRAPH, X.double(), (3, 2), seeds, key=-8, replacement=replacement)
    loss = nn.functional.cross_entropy(model(whole), labels[seeds])
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    shuffled = seeds[torch.randperm(seeds.numel(), generator=generator(0))]
    for part in shuffled.split([20, 1, seeds.numel() - 21]):
        batch = batch_of(GRAPH, X.double(), (3, 2), part, key=-8, replacement=replacement)
        share = nn.functional.cross_entropy(split_model(batch), labels[part]) * (part.numel() / seeds.numel())
        share.backward()
        total += share.detach()

    assert_close(total, loss.detach(), 1e-12)
    assert_same_gradients(split_model, model, 1e-11)
