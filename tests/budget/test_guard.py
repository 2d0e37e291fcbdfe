"""BudgetGuard: steps that keep to a memory budget, with the gradients of the undisturbed batch.

A guard predicts the peak of a step. A batch that would exceed the limit is split, cut, resampled or refused
(`over_budget=`). Three claims are tested for each way:

    limit       measured peak <= predicted peak <= limit
    gradients   micro-batches, also after out of memory, add up to the gradient of the whole batch
    state       a failed step leaves gradients, buffers and random numbers as they were

Limits are fractions of the measured peak of the first batch (`peak_of`), so that a batch surely does not fit.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import TransformerConv

from hopline import infer, ops
from hopline.budget import micro_batches
from hopline.budget.guard import BudgetGuard, GuardedUnit
from hopline.budget.plan import Budget
from hopline.budget.predictor import ENOUGH, Predictor
from hopline.contract import Job
from hopline.core.batch import Batch
from hopline.core.batch_sizes import Sizes
from hopline.core.examples import Examples
from hopline.core.sampler import NeighborSampler
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from hopline.nn.whole_module import as_batch_model
from hopline.tasks.task import TrainStep
from hopline.training.trainer import Trainer
from hopline.units.batch_unit import BatchUnit
from hopline.util import trace
from tests.support.helpers import (
    batch_of,
    dataset_of,
    gnn_of,
    gradients,
    guarded,
    own_task,
    randn,
    random_graph,
    stack_of,
    usual_task,
)

DATA = dataset_of(random_graph(2000, 16_000), randn(2000, 6))
SAMPLED = Sampled(fanouts=(5, 5), batch_size=300, workers=0)


def model_of(conv: str = "sage-mean", **options: Any) -> GNN:
    """Two layers of a conv, with dropout: draws must be the same in micro-batches."""
    return GNN(stack_of(conv, 6, 32, 3), dropout=0.5, **options).double()


def job_of(model: torch.nn.Module, loss: TrainStep | None = None) -> Job:
    """A job on the host; without `loss`, the loss is that of the task."""
    return Job(
        data=DATA,
        model=as_batch_model(model),
        module=model,
        examples=Examples(DATA.splits["train"]),
        task=usual_task(3) if loss is None else own_task(loss),
    )


def guard_of(
    model: torch.nn.Module,
    limit: int,
    loss: TrainStep | None = None,
    predictor: Predictor | None = None,
    batches_on_host: bool = False,
    measure_every: int = 8,
    **settings: Any,
) -> BudgetGuard:
    """A guard whose steps may take `limit` bytes. settings: of the `Budget`."""
    return BudgetGuard(
        job_of(model, loss),
        Budget(**settings),
        limit,
        predictor=predictor,
        batches_on_host=batches_on_host,
        measure_every=measure_every,
    )


REDRAW = NeighborSampler(DATA.graph, (5, 5)).sample


def first_batch(model: GNN) -> Any:
    """The first batch of an epoch of SAMPLED: 300 seeds."""
    return next(iter(SAMPLED.loader(DATA, model=model)))


def peak_of(model: GNN) -> int:
    """The measured peak of the first batch, in bytes."""
    guard = guard_of(model, 1 << 30)
    guard.unit(first_batch(model)).forward_backward(300)
    model.zero_grad(set_to_none=True)
    return guard.ledger.peak_bytes


# ---- steps within a budget


def test_a_budget_that_leaves_nothing_for_a_step_is_refused():
    with pytest.raises(ValueError, match="leaves 0 B"):
        guard_of(model_of(), 0)


def test_a_batch_that_fits_is_not_split():
    model = model_of()
    guard = guard_of(model, 1 << 30)
    batch = first_batch(model)
    assert guard.make_fit(batch) is batch
    unit = guard.unit(batch)
    assert isinstance(unit, GuardedUnit)
    assert unit.size == 300


@pytest.mark.parametrize("conv", ["sage-mean", "gcn", "gat", "gin"])
def test_micro_batches_have_the_gradients_of_the_batch_and_keep_to_the_budget(conv: str):
    model = model_of(conv)
    batch = first_batch(model)
    limit = int(0.6 * peak_of(model))
    expected_loss = BatchUnit(job_of(model), batch).forward_backward(300)
    expected_gradients = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad(set_to_none=True)
    guard = guard_of(model, limit)
    counters = trace.Counters()
    with trace.listen(counters):
        loss_of_pieces = guard.unit(batch).forward_backward(300)
    counters.next_epoch()
    counts = counters.last_epoch()

    assert counts["budget.batches_split"] == 1
    assert counts["budget.pieces"] > 1
    assert "budget.steps_over" not in counts
    assert 0 < guard.ledger.peak_bytes <= guard.ledger.promised_bytes <= limit
    torch.testing.assert_close(loss_of_pieces, expected_loss, rtol=1e-10, atol=0)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected_gradients[name], rtol=1e-10, atol=1e-10)


def weighted_loss_with_penalty(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Class weights, whose mean divides by the weights of all rows, and a penalty on the parameters."""
    weight = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
    penalty = sum(p.square().sum() for p in model.parameters())
    return torch.nn.functional.cross_entropy(model(batch), batch.labels, weight=weight) + 0.01 * penalty


@pytest.mark.parametrize("runs_out_of_memory", [False, True], ids=["by promise", "after memory ran out"])
@pytest.mark.parametrize("conv", ["sage-mean", "gcn", "gat"])
def test_a_custom_loss_over_micro_batches_is_that_of_the_whole_batch(
    conv: str, runs_out_of_memory: bool, monkeypatch: pytest.MonkeyPatch
):
    model = model_of(conv)
    batch = first_batch(model)
    limit = int(0.6 * peak_of(model))
    expected_loss = BatchUnit(job_of(model, weighted_loss_with_penalty), batch).forward_backward(400)
    expected_gradients = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad(set_to_none=True)
    guard = guard_of(model, 1 << 30 if runs_out_of_memory else limit, weighted_loss_with_penalty)
    if runs_out_of_memory:
        forward_backward = BatchUnit.forward_backward
        sizes_run = list[int]()

        def out_of_memory_once(unit: BatchUnit, total: float) -> Tensor:
            result = forward_backward(unit, total)  # leaves gradients, which the guard must undo
            sizes_run.append(unit.size)
            if len(sizes_run) == 1:
                raise MemoryError
            return result

        monkeypatch.setattr(BatchUnit, "forward_backward", out_of_memory_once)
    loss_of_pieces = guard.unit(batch).forward_backward(400)

    assert guard.take_record()["pieces"] > 1
    torch.testing.assert_close(loss_of_pieces, expected_loss, rtol=1e-10, atol=0)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected_gradients[name], rtol=1e-10, atol=1e-10)


def test_a_custom_loss_over_micro_batches_refuses_convs_that_draw_random_numbers():
    model = GNN([TransformerConv(6, 32, dropout=0.5), TransformerConv(32, 3)]).double()
    guard = guard_of(model, int(0.4 * peak_of(model)), weighted_loss_with_penalty)
    with pytest.raises(ValueError, match=r"same outputs twice.*random"):
        guard.unit(first_batch(model)).forward_backward(300)


def test_measured_steps_lead_to_fewer_micro_batches():
    model = model_of()
    guard = guard_of(model, int(0.6 * peak_of(model)))
    batch = first_batch(model)
    num_groups = []
    for _ in range(3):
        num_groups.append(len(guard.make_fit(batch).groups))
        guard.unit(batch).forward_backward(300)
    assert guard.predictor is not None

    assert guard.predictor.num_seen >= ENOUGH
    assert num_groups[-1] < num_groups[0]


def test_once_the_predictor_is_sure_few_steps_are_measured_and_the_largest_is_among_them():
    model = model_of("gcn")
    peaks = []
    num_measured = []
    for measure_every in (1, 8):
        guard = guard_of(model, 1 << 30, measure_every=measure_every)
        for batch in Sampled(fanouts=(5, 5), batch_size=30, workers=0).loader(DATA, model=model):
            guard.unit(batch).forward_backward(30)
        record = guard.take_record()
        assert guard.predictor is not None
        assert len(record["after"]) == len(record["before"]) == 34
        peaks.append(record["peak_bytes"])
        num_measured.append(guard.predictor.num_seen)
    assert num_measured[0] == 34
    assert ENOUGH <= num_measured[1] < 20
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def trainer_within(share: float | None, method: Sampled, epochs: int) -> Trainer:
    """A trainer whose steps may take a share of the peak of the first batch, scaled to its batch_size."""
    model = model_of("gcn")
    trainer = Trainer(model, DATA, method, epochs=epochs, show=False)
    if share is not None:
        trainer.guard = guard_of(model, int(share * peak_of(model_of("gcn")) * method.batch_size / 300))
        trainer.work = guarded(trainer.work, method, trainer.guard)
    return trainer


def test_over_budget_refuse_names_the_bytes_that_are_missing():
    model = model_of()
    guard = guard_of(model, 5000, over_budget="refuse")
    batch = first_batch(model)
    with pytest.raises(ValueError, match=r"over_budget=split .* batch_size smaller"):
        guard.make_fit(batch)


@pytest.mark.parametrize("how", ["cut", "cut_by_degree", "cut_by_pagerank"])
def test_cutting_keeps_to_the_budget_and_counts_the_edges(how: str):
    model = model_of()
    batch = first_batch(model)
    predicted_peak = guard_of(model, 1 << 30).predict_peak(batch)
    guard = guard_of(model, int(0.5 * predicted_peak), over_budget=how)
    counters = trace.Counters()
    with trace.listen(counters):
        cut = guard.make_fit(batch)
    counters.next_epoch()
    num_edges_cut = sum(Sizes.of(batch).edges) - sum(Sizes.of(cut).edges)
    assert counters.last_epoch() == {"budget.batches_cut": 1, "budget.edges_cut": num_edges_cut}
    assert num_edges_cut > 0
    assert torch.equal(cut.seeds, batch.seeds)
    assert 0.85 * guard.limit_bytes < guard.predict_peak(cut) <= guard.limit_bytes - cut.num_bytes

    guard.unit(batch).forward_backward(300)
    assert cut.num_bytes < guard.ledger.peak_bytes <= guard.ledger.promised_bytes <= guard.limit_bytes


def test_a_cut_batch_counts_the_same_with_a_loss_of_the_users_own():
    """The ledger has the original's predicted peak, and the cut batch counts as memory beside its step."""
    model = model_of()
    batch = first_batch(model)
    usual_loss = usual_task(3).loss
    original_bytes = guard_of(model, 1 << 30).predict_peak(batch)
    predicted_bytes = []
    for loss in (None, lambda model, batch: usual_loss(model, batch)):
        guard = guard_of(model, int(0.5 * original_bytes), loss, over_budget="cut")
        model.zero_grad(set_to_none=True)
        guard.unit(batch).forward_backward(300)
        assert guard.ledger.take()["before"] == [original_bytes]
        predicted_bytes.append(guard.ledger.promised_bytes)
    assert predicted_bytes[0] == predicted_bytes[1]


def test_a_resampled_batch_is_another_sample_of_the_same_seeds():
    model = model_of()
    batch = first_batch(model)
    predicted_peak = guard_of(model, 1 << 30).predict_peak(batch)
    guard = guard_of(model, int(predicted_peak) - 1, over_budget="resample")
    sampler = NeighborSampler(DATA.graph, (3, 3))
    resampled = guard.make_fit(batch, sampler.sample)
    assert guard.take_record()["resampled"] == 1
    assert guard.predict_peak(resampled) < predicted_peak
    assert torch.equal(resampled.seeds, batch.seeds)
    assert resampled.key != batch.key

    expected_blocks = sampler.sample(batch.seeds, resampled.key)  # type: ignore[arg-type]
    assert torch.equal(resampled.input_ids, expected_blocks[0].src_ids)

    guard.job.model(resampled).sum().backward()


def test_where_no_other_sample_fits_the_batch_is_split():
    model = model_of()
    batch = replace(first_batch(model), x=DATA.x.read(first_batch(model).input_ids))
    guard = guard_of(model, int(0.5 * peak_of(model)), over_budget="resample")
    fitting = guard.make_fit(batch, REDRAW)
    assert guard.take_record()["resampled"] == 10
    assert fitting.blocks is batch.blocks
    assert torch.equal(torch.cat(fitting.groups).sort().values, torch.arange(300))


# ---- prepared ahead


def test_the_threads_that_prefetch_batches_also_split_them():
    unlimited = trainer_within(None, replace(SAMPLED, batch_size=250), epochs=3)
    expected = [epoch.loss for epoch in unlimited.fit().history]
    had_groups = []

    def note_groups(self: GuardedUnit, total: int) -> torch.Tensor:
        had_groups.append(bool(self.batch.groups))
        return forward_backward(self, total)

    forward_backward = GuardedUnit.forward_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuardedUnit, "forward_backward", note_groups)
        trainer = trainer_within(0.7, replace(SAMPLED, workers=2, batch_size=250), epochs=3)
        losses = [epoch.loss for epoch in trainer.fit().history]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=0)
    assert sum(had_groups) > len(had_groups) // 2

    guard = trainer.guard
    assert guard is not None
    assert 0 < guard.ledger.peak_bytes <= guard.ledger.promised_bytes <= guard.limit_bytes


def test_prefetching_splits_batches_but_never_changes_them():
    model = model_of()
    batch = first_batch(model)
    limit = int(0.5 * peak_of(model))
    for over_budget, is_split in (
        ("split", True),
        ("cut", False),
        ("cut_by_degree", False),
        ("resample", False),
        ("refuse", False),
    ):
        guard = guard_of(model, limit, over_budget=over_budget)
        assert guard.split_ahead(batch) is batch  # before ENOUGH measured steps nothing is split ahead
        for _ in range(ENOUGH):
            guard.learn(Sizes.of(batch), 2 * limit)
        ahead = guard.split_ahead(batch)
        assert bool(ahead.groups) == is_split
        assert (ahead is batch) != is_split
    # A batch that cannot be split is left alone: the training thread raises the error.
    assert (
        guard_of(gnn_of("batch-norm"), 1000).split_ahead(batch_of(DATA.graph, randn(2000, 6), (3, 3, 3))).groups == ()
    )
    # A batch that fits after all runs whole: its groups are dropped.
    guard = guard_of(model, 1 << 30)
    assert guard.make_fit(replace(batch, groups=(torch.arange(300),))).groups == ()


@pytest.mark.parametrize("batches_on_host", [False, True])
def test_splitting_ahead_reads_no_gradient(monkeypatch: pytest.MonkeyPatch, batches_on_host: bool):
    """Gradients belong to the training thread: torch does not allow reading one while another thread sets it."""
    model = model_of()
    batch = first_batch(model)
    limit = int(0.5 * peak_of(model))

    def fail_on_gradients(module: torch.nn.Module) -> int:
        raise AssertionError("a gradient was looked at")

    for module in ("budget.guard", "device.out_of_memory"):
        monkeypatch.setattr(f"hopline.{module}.gradient_bytes", fail_on_gradients)
    guard = guard_of(model, limit, batches_on_host=batches_on_host)
    for peak_bytes in (2 * limit, limit // 2):
        for _ in range(200):
            guard.learn(Sizes.of(batch), peak_bytes)
        guard.split_ahead(batch)

    with pytest.raises(AssertionError, match="was looked at"):
        guard.make_fit(batch)


# ---- when memory runs out


class FailAtOperation(TorchDispatchMode):
    """A mode in which the torch operation at a position, counted from 1, is out of memory. None: it only counts."""

    ERRORS = (
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    )

    def __init__(self, position: int | None) -> None:
        super().__init__()
        self.position = position
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        if self.num_operations == self.position:
            raise self.ERRORS[self.num_operations % 3]
        return func(*args, **(kwargs or {}))


def count_operations(model: GNN, batch: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """(torch operations of one step, gradients of two steps)."""
    model.zero_grad(set_to_none=True)
    unit = BatchUnit(job_of(model), batch)
    unit.forward_backward(600)
    with FailAtOperation(None) as counter:
        unit.forward_backward(600)
    gradients_of_two_steps = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad(set_to_none=True)
    return counter.num_operations, gradients_of_two_steps


def fail_once(position: int) -> tuple[list[int], Any]:
    """(operations left, a step of a unit in which the operation at `position` is out of memory).

    The position counts over all micro-batches. Operations left are negative once the operation has failed.
    """
    operations_left = [position]
    forward_backward = BatchUnit.forward_backward

    def step(self: BatchUnit, total: int) -> torch.Tensor:
        with FailAtOperation(operations_left[0]) as mode:
            try:
                return forward_backward(self, total)
            finally:
                operations_left[0] -= mode.num_operations

    return operations_left, step


@pytest.mark.parametrize(
    ("conv", "dtype", "tolerance"),
    [("sage-mean", torch.float64, 1e-10), ("gcn", torch.float64, 1e-10), ("gat", torch.float32, 1e-6)],
)
def test_after_out_of_memory_gradients_are_those_of_the_undisturbed_batch(
    conv: str, dtype: torch.dtype, tolerance: float
):
    """Whichever operation is out of memory: in forward or backward, in the whole batch or in a micro-batch."""
    model = model_of(conv).to(dtype)
    batch = first_batch(model)
    batch = batch if dtype == torch.float64 else replace(batch, x=batch.x.to(dtype))
    num_operations, expected = count_operations(model, batch)
    predictor, peak = learn_by_steps(model, batch)
    scale = max(float(grad.abs().max()) for grad in expected.values())
    for number in range(8):
        limit = int((2.0, 0.7)[number % 2] * peak)
        guard = guard_of(model, limit, predictor=predictor)
        model.zero_grad(set_to_none=True)
        BatchUnit(guard.job, batch).forward_backward(600)  # gradients of an earlier batch, to which the step adds
        operations_left, step = fail_once(1 + ops.derive_key(number, num_operations) % (num_operations - 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchUnit, "forward_backward", step)
            guard.unit(batch).forward_backward(600)
        record = guard.take_record()
        assert operations_left[0] < 0, "no operation failed"
        assert record["oom"] == 1
        assert record["pieces"] >= 2
        assert guard.target_bytes < limit
        for name, grad in gradients(model).items():
            assert float((grad - expected[name]).abs().max()) <= tolerance * scale, (number, name)


def learn_by_steps(model: GNN, batch: Any) -> tuple[Predictor, int]:
    """(predictor after ENOUGH measured steps, peak of one step in bytes)."""
    guard = guard_of(model, 1 << 30)
    for _ in range(ENOUGH):
        guard.unit(batch).forward_backward(300)
        model.zero_grad(set_to_none=True)
    assert guard.predictor is not None
    return guard.predictor, guard.ledger.peak_bytes


def test_a_run_that_is_out_of_memory_in_some_steps_ends_with_the_same_weights():
    weights = []
    for runs_out_of_memory in (False, True):
        trainer = trainer_within(0.8, replace(SAMPLED, workers=2), epochs=3)
        operations_left, step = fail_once(0)
        step_numbers = iter(range(1000))

        def forward_backward(self: GuardedUnit, total: int, run: Any = GuardedUnit.forward_backward) -> torch.Tensor:
            step_number = next(step_numbers)  # noqa: B023
            is_out_of_memory = step_number % 4 == 1
            operations_left[0] = 1 + ops.derive_key(step_number) % 60 if is_out_of_memory else -1  # noqa: B023
            return run(self, total)

        with pytest.MonkeyPatch.context() as patch:
            if runs_out_of_memory:
                patch.setattr(BatchUnit, "forward_backward", step)
                patch.setattr(GuardedUnit, "forward_backward", forward_backward)
            history = trainer.fit().history
        assert sum(epoch.counters.get("budget.out_of_memory", 0) for epoch in history) == (
            3 if runs_out_of_memory else 0
        )
        weights.append(trainer.model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-8, atol=1e-10)


def test_out_of_memory_in_a_batch_that_cannot_shrink_is_reported_with_what_to_change(monkeypatch: pytest.MonkeyPatch):
    def step(self: BatchUnit, total: int) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(BatchUnit, "forward_backward", step)
    model = model_of()
    batch = micro_batches.micro_batch_of(first_batch(model), torch.arange(9)).batch()
    for over_budget, message in (
        ("split", r"ran out twice in a step of a single seed.* fan-outs smaller \(changes the training\)"),
        ("refuse", "ran out in a step: set over_budget=split"),
        ("cut", "the seeds alone take more"),
        ("cut_by_pagerank", "the seeds alone take more"),
    ):
        with pytest.raises(ValueError, match=message):
            guard_of(model, 1 << 30, over_budget=over_budget).unit(batch).forward_backward(9)


def test_a_failed_step_restores_running_statistics_and_random_state(monkeypatch: pytest.MonkeyPatch):
    """A model with batch norm cannot be split, so out of memory is an error. So are other exceptions in a step."""
    model = gnn_of("batch-norm").train()
    batch = replace(batch_of(DATA.graph, randn(2000, 6), (3, 3, 3), torch.arange(50)), y=DATA.y[:50])  # type: ignore[index]
    for error in (MemoryError(), RuntimeError("something else")):
        before = copy.deepcopy(model.state_dict())
        random_state = torch.get_rng_state()

        def step(self: BatchUnit, total: int, error: Exception = error) -> torch.Tensor:
            (self.job.task.loss(self.job.model, self.batch) * torch.rand(1)).backward()
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(BatchUnit, "forward_backward", step)
            with pytest.raises((ValueError, RuntimeError), match=r"norm='layer'|something else"):
                guard_of(model, 1 << 30).unit(batch).forward_backward(50)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(random_state, torch.get_rng_state())


# ---- inference


@pytest.mark.parametrize("conv", ["sage-mean", "gat"])
def test_sampled_inference_in_micro_batches_has_the_same_outputs(conv: str):
    model = model_of(conv, norm="batch")
    method = replace(SAMPLED, shuffle=False)
    ids = ops.permutation(5, 2000)[:1200]
    expected = infer.sampled(model, method.loader(DATA, ids, model=model))
    generous = guard_of(model, 1 << 30)
    assert torch.equal(infer.sampled(model, method.loader(DATA, ids, model=model), guard=generous), expected)

    whole_peak_bytes = generous.inference.ledger.peak_bytes
    # Without gradients no activations are kept for backward. That makes up for the batch norm, which `peak_of` has not.
    assert whole_peak_bytes < 1.01 * peak_of(model_of(conv))

    guard = guard_of(model, int(0.5 * whole_peak_bytes), over_budget="refuse")
    for _ in range(2):
        ours = infer.sampled(model, method.loader(DATA, ids, model=model), guard=guard)
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    record = guard.inference.take_record()

    assert record["split"] == 8
    assert record["over"] == 0
    assert 0 < record["peak_bytes"] <= record["promised_bytes"] <= guard.limit_bytes
