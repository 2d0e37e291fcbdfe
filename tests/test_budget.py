from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hopline import trace
from hopline.budget import Budget, Guard, GuardedUnit
from hopline.methods import Sampled, SampledWork
from hopline.nn import GNN
from hopline.nn.whole import as_walkable
from hopline.predict import ENOUGH, Sizes
from hopline.sampling import NeighborSampler
from hopline.trainer import Trainer
from hopline.work import BatchUnit, Job, supervised
from tests.helpers import batch_of, dataset_of, gnn_of, gradients, randn, random_graph, stack_of

DATA = dataset_of(random_graph(2000, 16_000), randn(2000, 6))
SAMPLED = Sampled(fanouts=(5, 5), batch_size=300, workers=0)


def model_of(conv: str = "sage-mean", **options: Any) -> GNN:
    return GNN(stack_of(conv, 6, 32, 3), dropout=0.5, **options).double()


def job_of(model: torch.nn.Module) -> Job:
    return Job(
        data=DATA,
        model=as_walkable(model),
        module=model,
        train_ids=DATA.splits["train"],
        train_step=supervised("single", 3),
    )


def guard_of(model: torch.nn.Module, limit: int, **settings: Any) -> Guard:
    return Guard(job_of(model), Budget(**settings), limit, NeighborSampler(DATA.graph, (5, 5)).sample)


def first_batch(model: GNN) -> Any:
    return next(iter(SAMPLED.loader(DATA, model=model)))


def peak_of(model: GNN) -> int:
    """What the first batch takes, measured."""
    guard = guard_of(model, 1 << 30)
    guard.unit(first_batch(model)).forward_backward(300)
    model.zero_grad(set_to_none=True)
    return guard.peak_bytes


# ---- budgets in words


def test_a_size_alone_is_the_devices():
    assert Budget.of("8GiB") == Budget(device="8GiB")
    assert Budget.of(1000).bytes_on(torch.device("cpu")) == 1000
    assert Budget.of({"device": "2GiB", "host": "1GiB"}).bytes_on(torch.device("cpu")) == 1 << 30
    assert Budget.of({"device": "2GiB", "host": "1GiB"}).bytes_on(torch.device("cuda")) == 2 << 30
    assert Budget(disk="1GiB").bytes_on(torch.device("cpu")) is None
    budget = Budget(host="1GiB")
    assert Budget.of(budget) is budget


def test_what_is_not_a_budget_is_refused():
    for given, message in (
        ("a lot", "Cannot read 'a lot' as a size"),
        ({"devce": "1GiB"}, "no 'devce'.*Did you mean 'device'"),
        ({"host": "0"}, r"budget\.host=8GiB"),
        ({"over_budget": "pray"}, "over_budget must be 'split' or 'resample' or 'cut' or 'refuse'"),
    ):
        with pytest.raises(ValueError, match=message):
            Budget.of(given)


def test_a_budget_that_leaves_nothing_for_a_step_is_refused():
    with pytest.raises(ValueError, match="leaves 0 B for a step"):
        guard_of(model_of(), 0)


# ---- steps within a budget


def test_a_batch_that_fits_runs_as_it_is():
    model = model_of()
    guard, batch = guard_of(model, 1 << 30), first_batch(model)
    assert list(guard.pieces(batch)) == [batch]
    unit = guard.unit(batch)
    assert isinstance(unit, GuardedUnit)
    assert (unit.size, unit.total_size) == (300, 300)


@pytest.mark.parametrize("conv", ["sage-mean", "gcn", "gat", "gin"])
def test_a_batch_in_pieces_has_the_gradients_of_the_whole_and_keeps_to_the_budget(conv: str):
    model = model_of(conv)
    batch, limit = first_batch(model), int(0.6 * peak_of(model))
    loss = BatchUnit(job_of(model), batch).forward_backward(300)
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad(set_to_none=True)
    guard = guard_of(model, limit)
    counters = trace.Counters()
    with trace.listen(counters):
        found = guard.unit(batch).forward_backward(300)
    counters.next_epoch()
    counted = counters.last_epoch()
    assert counted["budget.batches_split"] == 1
    assert counted["budget.pieces"] > 1
    assert "budget.steps_over" not in counted
    assert 0 < guard.peak_bytes <= guard.promised_bytes <= limit
    torch.testing.assert_close(found, loss, rtol=1e-10, atol=0)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-10)


def test_fewer_pieces_once_steps_were_measured():
    model = model_of()
    guard, batch = guard_of(model, int(0.6 * peak_of(model))), first_batch(model)
    numbers = []
    for _ in range(3):
        numbers.append(len(list(guard.pieces(batch))))
        guard.unit(batch).forward_backward(300)
    assert guard.predictor is not None
    assert guard.predictor.num_seen >= ENOUGH
    assert numbers[-1] < numbers[0]


def test_training_under_a_budget_is_training():
    losses = []
    for share in (None, 0.5):
        model = model_of("gcn")
        trainer = Trainer(model, DATA, SAMPLED, epochs=2, show=False)
        assert isinstance(trainer.work, SampledWork)
        if share is not None:
            trainer.work.guard = guard_of(model, int(share * peak_of(model_of("gcn"))))
        losses.append([epoch.loss for epoch in trainer.fit().history])
        if share is not None:
            assert 0 < trainer.work.guard.peak_bytes <= trainer.work.guard.limit_bytes  # type: ignore[union-attr]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-9, atol=0)


def test_batch_norms_are_refused_when_a_batch_would_be_split():
    model = gnn_of("batch-norm")
    batch = batch_of(DATA.graph, randn(2000, 6), (3, 3, 3), torch.arange(500))
    with pytest.raises(ValueError, match="norm='layer'"):
        guard_of(model, 1000).pieces(batch)


def test_refusing_says_how_much_is_missing():
    model = model_of()
    guard, batch = guard_of(model, 5000, over_budget="refuse"), first_batch(model)
    with pytest.raises(
        ValueError, match=r"a batch may take .* more, make batch_size smaller, or set over_budget=split"
    ):
        guard.pieces(batch)


@pytest.mark.parametrize("by", ["random", "degree", "pagerank"])
def test_cutting_keeps_to_the_budget_and_counts_the_edges(by: Any):
    model = model_of()
    batch = first_batch(model)
    whole = guard_of(model, 1 << 30).promise(batch)
    guard, counters = guard_of(model, int(0.5 * whole), over_budget="cut", cut_by=by), trace.Counters()
    with trace.listen(counters):
        (cut,) = guard.pieces(batch)
    counters.next_epoch()
    lost = sum(Sizes.of(batch).edges) - sum(Sizes.of(cut).edges)
    assert counters.last_epoch() == {"budget.batches_cut": 1, "budget.edges_cut": lost}
    assert lost > 0
    assert 0.99 * guard.limit_bytes < guard.promise(cut) <= guard.limit_bytes
    assert torch.equal(cut.seeds, batch.seeds)


def test_a_batch_drawn_anew_is_another_sample_of_the_same_seeds():
    model = model_of()
    batch = first_batch(model)
    whole = guard_of(model, 1 << 30).promise(batch)
    guard, counters = guard_of(model, int(whole) - 1, over_budget="resample"), trace.Counters()
    with trace.listen(counters):
        (found,) = guard.pieces(batch)
    counters.next_epoch()
    assert counters.last_epoch()["budget.resampled"] >= 1
    assert guard.promise(found) < whole
    assert torch.equal(found.seeds, batch.seeds)
    assert found.key != batch.key
    expected = SAMPLED.loader(DATA, model=model).sampler.sample(batch.seeds, found.key)  # type: ignore[arg-type]
    assert torch.equal(found.input_ids, expected[0].src_ids)
    guard.job.model(found).sum().backward()


def test_where_no_other_sample_fits_the_smallest_is_split():
    model = model_of()
    batch = replace(first_batch(model), x=DATA.x.read(first_batch(model).input_ids))
    guard, counters = guard_of(model, int(0.5 * peak_of(model)), over_budget="resample"), trace.Counters()
    with trace.listen(counters):
        pieces = list(guard.pieces(batch))
    counters.next_epoch()
    assert counters.last_epoch()["budget.resampled"] == 10
    assert counters.last_epoch()["budget.batches_split"] == 1
    assert sum(p.num_seeds for p in pieces) == 300
    for piece in pieces:
        assert torch.equal(piece.x, DATA.x.read(piece.input_ids))  # type: ignore[arg-type]
