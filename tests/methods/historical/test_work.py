"""Historical training: lag, refresh by evaluation, resuming, and that it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import hopline as hl
from hopline.methods.historical.settings import Historical
from hopline.nn import GNN
from tests.support.helpers import assert_close, dataset_of, randn, random_graph

GRAPH = random_graph(num_nodes=60, num_edges=300)
DATA = dataset_of(GRAPH, randn(60, 6))


def model_of(dropout: float = 0.0, **options: Any) -> GNN:
    """Three GCN layers in float64, always with the same first weights."""
    torch.manual_seed(0)
    convs = [pyg.GCNConv(6, 8), pyg.GCNConv(8, 8), pyg.GCNConv(8, 3)]
    return GNN(convs, dropout=dropout, **options).double()


def trainer_of(
    model: nn.Module | None = None, *, epochs: int = 3, out: Path | None = None, **settings: Any
) -> hl.Trainer:
    """A trainer on six random parts, two in a batch. settings: of `Historical`, and resume=."""
    train = {name: settings.pop(name) for name in ("resume",) if name in settings}
    method = Historical(**({"num_parts": 6, "parts_per_batch": 2, "partition": "random"} | settings))
    return hl.Trainer(model or model_of(), DATA, method, epochs=epochs, show=False, out=out, **train)


def test_a_commit_is_written_after_the_lag():
    trainer = trainer_of(warm_up=False, lag=2)
    work: Any = trainer.work
    num_written = []
    for unit in work.units(1):
        unit.forward_backward(unit.total_size)
        unit.commit()
        num_written.append(int((work.partitioned.histories.written >= 0).sum()))
    assert num_written[:2] == [0, 0]
    assert num_written[2] > 0


REGULARISED = {"edge_dropout": 0.3, "lipschitz": 0.1, "max_batches": 2}


@pytest.mark.parametrize("settings", [{}, {"compensate": True}, {"lag": 1, "storage": "bf16"}, REGULARISED], ids=str)
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(settings: dict[str, Any], tmp_path: Path):
    whole = trainer_of(model_of(dropout=0.3), epochs=4, out=tmp_path / "whole", **settings).fit()
    trainer_of(model_of(dropout=0.3), epochs=2, out=tmp_path / "cut", **settings).fit()
    again = trainer_of(model_of(dropout=0.3), epochs=4, out=tmp_path / "cut", resume=True, **settings).fit()
    assert [e.loss for e in again.history] == [e.loss for e in whole.history]


def test_refresh_with_compensation_does_not_change_gradients_of_a_step():
    work: Any = trainer_of(compensate=True).work
    parameters = list(work.job.module.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    work.refresh()

    for parameter in parameters:
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_refresh_by_evaluation_leaves_the_tables_of_a_refresh():
    data = replace(DATA, splits=DATA.splits | {"valid": torch.arange(30, 40)})

    def train(**settings: Any) -> tuple[hl.Trainer, list[float]]:
        method = Historical(num_parts=6, parts_per_batch=2, partition="random", lag=1, **settings)
        trainer = hl.Trainer(model_of(dropout=0.3), data, method, epochs=3, show=False)
        return trainer, [epoch.loss for epoch in trainer.fit().history]

    trainer, losses = train(refresh_every="evaluation")
    assert losses == pytest.approx(train(refresh_every=1)[1], abs=1e-12)
    assert losses[-1] != pytest.approx(train()[1][-1], abs=1e-6)

    work: Any = trainer.work
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1.1)
    work.partitioned.histories.step = 100
    trainer.evaluate("valid")
    tables = {l: table.clone() for l, table in work.partitioned.histories.tables.items()}
    assert (work.partitioned.histories.written == 100).all()
    assert not work.waiting

    work.refresh()
    assert len(tables) == 2
    for l, table in work.partitioned.histories.tables.items():
        torch.testing.assert_close(table, tables[l], rtol=1e-9, atol=1e-12)


def test_a_head_that_changes_its_input_in_place_has_the_same_gradients():
    gradients = []
    for inplace in (False, True):
        torch.manual_seed(0)
        head = nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(5, 3))
        model = GNN([pyg.SAGEConv(6, 4), pyg.SAGEConv(4, 5)], head=head).double()
        for unit in trainer_of(model, num_parts=4, parts_per_batch=1, compensate=True).work.units(1):
            unit.forward_backward(10)
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs)
