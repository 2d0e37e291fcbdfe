"""A custom loss by a sweep over shards equals plain PyG over all training rows at once, for any number of shards.

Losses that are no mean over rows show that the sweep differentiates the loss of all outputs together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.contract import Job
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.core.row_handles import as_tensor
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.work import HistoricalWork
from hopline.units.measured_unit import MeasuredUnit
from tests.equivalence.test_5_historical import MODELS
from tests.methods.full_batch.ranks import model_of
from tests.methods.historical.test_micro_batches import assert_micro_batches_equal_the_batch
from tests.support.helpers import GNN_OPTIONS, dataset_of, gnn_of, own_task, plain_gnn, randn, random_graph

DATA = dataset_of(random_graph(num_nodes=80, num_edges=500, loops=True), randn(80, 6))
DATA = replace(DATA, tables={**DATA.tables, "w": hl.extend.TensorTable(randn(80, 2, seed=4).exp())})
CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 7.0]).double()

Loss = Callable[[nn.Module, Batch], Tensor]


def weighted_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Class weights: the mean divides by the weights of all rows."""
    return nn.functional.cross_entropy(model(batch), batch.labels, weight=CLASS_WEIGHTS)


def squared_mean(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that is no mean over rows."""
    return model(batch).mean().square()


def regularised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that reads parameters of the model, and rows of a table."""
    rows = as_tensor(batch.tables["w"])[batch.output_idx, 0]
    scores = model(batch)
    fit = (nn.functional.cross_entropy(scores, batch.labels, reduction="none") * rows).sum() / rows.sum()
    return fit + 0.01 * sum(p.square().sum() for p in model.parameters())


def loss_of_two_calls(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that calls the model twice."""
    return model(batch).exp().mean() + model(batch).std()


LOSSES: dict[str, Loss] = {"weighted": weighted_loss, "squared mean": squared_mean, "regularised": regularised_loss}


def step(model: hl.nn.GNN, loss: Loss, **settings: Any) -> tuple[float, list[Tensor | None]]:
    """(loss, gradients) of a full-batch step."""
    method = hl.FullBatch(partition="random", **settings)
    work = hl.Trainer(model, DATA, method, train_step=loss, epochs=1, show=False).work
    model.train()
    model.zero_grad()
    (unit,) = work.units(1)
    loss_value = float(unit.forward_backward(unit.size)) / unit.size
    return loss_value, [p.grad for p in model.parameters()]


class PlainPyGModel(nn.Module):
    """The model over the whole graph by plain PyG, called with a batch."""

    def __init__(self, model: hl.nn.GNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        x = DATA.x[torch.arange(80)].double()
        return plain_gnn(self.model, x, DATA.graph)[batch.seeds]


def plain_step(model: hl.nn.GNN, loss: Loss) -> tuple[float, list[Tensor | None]]:
    """The oracle: (loss, gradients) of plain PyG over the whole graph."""
    ids = DATA.train_ids
    model.zero_grad()
    rows: dict[str, Any] = {"w": DATA.tables["w"].read(ids)}
    loss_value = loss(
        PlainPyGModel(model), Batch(ids, (), None, DATA.labels[ids], rows, output_idx=torch.arange(ids.numel()))
    )
    loss_value.backward()
    return float(loss_value.detach()), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("loss", [*LOSSES, "twice"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "plain", "jk-cat", "jk-of-the-encoder", "residual"])
def test_the_gradient_is_that_of_plain_pyg_for_any_number_of_shards(name: str, loss: str, trim: bool):
    model = gnn_of(name) if name in GNN_OPTIONS else model_of(name)
    train_step = LOSSES.get(loss, loss_of_two_calls)
    expected = plain_step(model, train_step)
    for num_shards in (1, 3, 8):
        ours = step(model, train_step, aggregation="sweep", num_shards=num_shards, trim=trim)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("trim", [False, True])
def test_dropout_of_a_sweep_is_that_of_sequential_aggregation(trim: bool):
    model = gnn_of("jk-cat")
    model.dropout = 0.4
    model.input_dropout = 0.2
    expected = step(model, weighted_loss, aggregation="sequential", num_shards=4)
    torch.testing.assert_close(
        step(model, weighted_loss, aggregation="sweep", num_shards=4, trim=trim), expected, rtol=1e-9, atol=1e-12
    )


def test_a_training_step_is_called_once_with_the_model_itself_and_all_training_nodes():
    model = gnn_of("plain")
    seeds_by_call = []

    def check_arguments(received_model: nn.Module, batch: Batch) -> Tensor:
        assert received_model is model
        seeds_by_call.append(sorted(batch.seeds.tolist()))
        assert torch.equal(batch.input_ids, batch.seeds)
        assert torch.equal(as_tensor(batch.input_rows), DATA.x.read(batch.seeds))
        assert torch.equal(batch.labels, DATA.labels[batch.seeds])
        received_model.steps = getattr(received_model, "steps", 0) + 1  # type: ignore[assignment]
        assert str(len(batch.seeds)) in repr(batch)
        return weighted_loss(received_model, batch)

    for trim in (False, True):
        step(model, check_arguments, aggregation="sweep", num_shards=5, trim=trim)
    assert seeds_by_call == [DATA.train_ids.tolist()] * 2
    assert model.steps == 2
    assert "forward" not in vars(model)


def test_a_loss_that_reads_other_batches_or_edges_is_refused():
    def other_batch(model: nn.Module, batch: Batch) -> Tensor:
        return model(replace(batch, y=None)).sum()

    def edges(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch).sum() * batch.blocks[0].num_edges

    for loss, reason in ((other_batch, "something else than its batch"), (edges, "asked for the edges")):
        model = gnn_of("plain")
        with pytest.raises(ValueError, match=f"{reason}.*aggregation=sequential"):
            step(model, loss, aggregation="sweep", num_shards=3)
        assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: model(batch).detach().mean(), r"has no gradient: compute it from model.batch."),
        (lambda model, batch: model(batch), r"returned a tensor of shape \[\d+, \d+\]: return the mean loss"),
        (lambda model, batch: (model(batch).mean(), 1), "returned a tuple"),
        (lambda model, batch: None, "returned a NoneType"),
    ],
    ids=["detached", "rows", "tuple", "none"],
)
@pytest.mark.parametrize("aggregation", ["sweep", "sequential"])
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused(loss: Any, words: str, aggregation: Any):
    with pytest.raises(ValueError, match=words):
        step(gnn_of("plain"), loss, aggregation=aggregation)


def test_the_predicted_peak_counts_the_outputs_of_all_training_nodes():
    """Many classes in many shards: what the loss takes is far more than what a shard takes."""
    graph = random_graph(num_nodes=4000, num_edges=8000)
    data = dataset_of(graph, randn(4000, 6).float(), num_classes=128)
    model = hl.nn.GNN([pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 128)])
    method = hl.FullBatch(num_shards=64, partition="range", aggregation="sweep")

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch), batch.labels, label_smoothing=0.1)

    trainer = hl.Trainer(model, data, method, train_step=loss, budget="1GiB", epochs=1, show=False)
    (unit,) = trainer.work.units(1)
    assert isinstance(unit, MeasuredUnit)
    unit.forward_backward(unit.size)
    assert trainer.guard is not None
    record = trainer.guard.take_record()
    outputs = unit.size * 128 * 4

    assert outputs < record["peak_bytes"] <= record["promised_bytes"]


# ---- one historical batch in pieces


def work_of(name: str, loss: Loss, **settings: Any) -> HistoricalWork:
    """Historical training with a custom loss. settings: of `Historical`."""
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    model.dropout = 0.4
    method = Historical(num_parts=5, parts_per_batch=2, partition="random", **settings)
    return method.bind(
        Job(data=DATA, model=model, module=model, examples=Examples(DATA.train_ids), task=own_task(loss))
    )


@pytest.mark.parametrize("settings", [{}, {"compensate": True}, {"lipschitz": 0.3}], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["gcn", "pna jumping"])
def test_micro_batches_of_a_historical_batch_have_the_loss_of_the_batch(name: str, loss: str, settings: dict[str, Any]):
    assert_micro_batches_equal_the_batch(work_of(name, LOSSES[loss], **settings), 180)
