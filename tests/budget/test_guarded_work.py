"""A Trainer with `budget=`: the losses and weights of the run without one, within the limit.

Tests on the CPU compare whole runs of every method. Tests with the marker `gpu` limit the memory of a real GPU, so
that only a run with a budget can end. The last ones have a custom method that is planned and measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

from hopline import contract
from hopline.budget.guard import BudgetGuard, limit_cuda_memory
from hopline.budget.plan import Budget, DoesNotFit, Outline, Plan
from hopline.contract import Job, Method, Unit, Work
from hopline.core.examples import Examples
from hopline.data.placement_settings import Placement
from hopline.data.synthetic import planted_partition
from hopline.device.meter import meter_of
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Sampled
from hopline.methods.sampled.work import SampledWork
from hopline.nn import GNN
from hopline.nn.whole_module import as_batch_model
from hopline.training.callbacks import Callback, Run, StepEnd
from hopline.training.trainer import Trainer
from hopline.units.batch_unit import BatchUnit
from hopline.units.measured_unit import MeasuredUnit
from hopline.util import trace
from tests.support.helpers import dataset_of, guarded, own_task, randn, random_graph, stack_of, usual_task
from tests.support.runs import records

DATA = dataset_of(random_graph(1500, 12_000), randn(1500, 6))
METHODS: list[Method] = [
    Sampled(fanouts=(5, 5), batch_size=300),
    Historical(num_parts=6, parts_per_batch=3, partition="range"),
    FullBatch(num_shards=2, partition="range"),
]


def trainer_of(method: Method, **options: Any) -> Trainer:
    """A trainer of two SAGE layers for two epochs, always with the same first weights."""
    torch.manual_seed(0)
    model = GNN(stack_of("sage-mean", 6, 32, 3), dropout=0.3).double()
    return Trainer(model, DATA, method, epochs=2, show=False, **options)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_run_within_a_budget_equals_the_run_without_one(method: Method, tmp_path: Path):
    unlimited = trainer_of(method)
    unlimited_run = unlimited.fit()

    measured = trainer_of(method, budget="1GiB", out=tmp_path / "measured")
    measured.fit()
    assert measured.plan is not None
    largest_step_bytes = max(record["peak_bytes"] for record in records(tmp_path / "measured", "budget"))
    peak_bytes = measured.plan.resident_bytes("host") + largest_step_bytes
    with pytest.raises(DoesNotFit) as refused:
        trainer_of(method, budget="1KiB")
    limit = str(max(int(peak_bytes * 0.8), refused.value.smallest_bytes["host"]))

    tight = trainer_of(method, budget=limit, out=tmp_path / "tight")
    run = tight.fit()

    for record in records(tmp_path / "tight", "budget"):
        assert record["over"] == 0
        assert 0 < record["peak_bytes"] <= record["limit_bytes"]
    assert [e.loss for e in run.history] == pytest.approx([e.loss for e in unlimited_run.history], rel=1e-9)
    for name, weight in unlimited.model.state_dict().items():
        torch.testing.assert_close(tight.model.state_dict()[name], weight, rtol=1e-7, atol=1e-9)
    assert run.test == unlimited_run.test


def test_full_batch_steps_are_measured_and_not_split(tmp_path: Path):
    trainer = trainer_of(METHODS[2], budget="1GiB", out=tmp_path / "run")
    assert all(isinstance(unit, MeasuredUnit) for unit in trainer.work.units(1))

    trainer.fit()
    budget_records = records(tmp_path / "run", "budget")
    assert [record["epoch"] for record in budget_records] == [1, 2]
    assert all(0 < record["peak_bytes"] <= record["promised_bytes"] for record in budget_records)

    assert trainer.guard is not None
    assert trainer.guard.take_record()["after"] == []


def test_a_disk_budget_leaves_steps_on_the_host_unguarded():
    trainer = trainer_of(METHODS[0], budget={"disk": "1MiB"})
    assert trainer.guard is None
    assert all(isinstance(unit, BatchUnit) for unit in trainer.work.units(1))


def test_a_budget_that_is_too_small_is_refused_with_one_that_suffices():
    with pytest.raises(ValueError, match=r"1 KiB.*budget=.*no other method"):
        trainer_of(METHODS[0], budget="1KiB")
    with pytest.raises(ValueError, match=r"'divice'.*'device'"):
        trainer_of(METHODS[0], budget={"divice": "1KiB"})
    with pytest.raises(ValueError, match=r"method=\w+ fits"):
        trainer_of(FullBatch(num_shards=2, partition="range"), budget="900KiB")


class RecordingModel(GNN):
    """Keeps the input rows that it was called with, and computes nothing."""

    def forward(self, batch: Any, *edges: Any) -> Any:
        self.called_with = batch.x


def test_before_the_first_step_a_device_gets_the_rows_that_it_cannot_read_itself():
    # The device "meta" cannot read host memory, as a GPU cannot read what is not pinned.
    device = torch.device("meta")
    model = RecordingModel(stack_of("sage-mean", 6, 32, 3)).double()
    step = usual_task(3).loss
    ids = DATA.splits["train"]
    job = Job(data=DATA, model=model, module=model, examples=Examples(ids), task=own_task(step))
    method = Sampled(fanouts=(5, 5), batch_size=300)

    work = method.bind(replace(job, device=device))
    guarded(work, method, BudgetGuard(job, Budget(), 1 << 40))

    assert isinstance(model.called_with, Tensor)
    assert model.called_with.device == device


# ---- on a GPU

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train_on_gpu(layout: str, budget: str | None, **options: Any) -> tuple[Run, int, Plan | None]:
    """(run, largest allocation after any step in bytes, plan) of a few batches."""
    data = planted_partition(num_nodes=60_000, num_edges=1_200_000, num_train=8192, num_valid=512, num_test=512)
    torch.manual_seed(0)
    model = GNN([SAGEConv(64, 256), SAGEConv(256, 256), SAGEConv(256, 16)], dropout=0.3)
    free_all()
    torch.cuda.reset_peak_memory_stats()
    method = Sampled(fanouts=(10, 10, 5), batch_size=1024, layout=layout)  # type: ignore[arg-type]
    peak_bytes = [0]

    class Peak(Callback):
        def on_step_end(self, trainer: Trainer, step: StepEnd) -> None:
            # The largest so far, since a guarded step resets the statistics of the peak.
            peak_bytes[0] = max(peak_bytes[0], torch.cuda.max_memory_allocated())

    options |= {"callbacks": [Peak()]}
    trainer = Trainer(model, data, method, budget=budget, epochs=2, device="cuda", show=False, **options)
    run = trainer.fit()
    return run, peak_bytes[0], trainer.plan


def free_all() -> int:
    """The bytes that are still allocated on the GPU after everything unreferenced was freed."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("inference", ["exact", "sampled"])
@pytest.mark.parametrize("share", [pytest.param(share, marks=NEEDS_GPU) for share in (0.7, 0.4, 0.2)])
def test_on_a_gpu_made_small_only_the_run_with_a_budget_ends(share: float, inference: str):
    host = {"placement": Placement(graph="host", features="host")}
    train_on_gpu("block", None, **host)
    unlimited, peak, _ = train_on_gpu("block", None, **host)
    bytes_before = free_all()  # what other tests left allocated
    limit = bytes_before + int(share * (peak - bytes_before))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            train_on_gpu("block", None, **host)
        run_within, peak_within, plan = train_on_gpu("block", str(limit), inference=inference)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(limit / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert peak_within <= limit
    assert [e.loss for e in run_within.history] == pytest.approx([e.loss for e in unlimited.history], rel=1e-3)

    assert plan is not None
    if plan.step_bytes > plan.limit_bytes:
        assert plan.batches_on_host, "rather than take room that pieces could have"
        # The plan's bound is for shapes that were not seen yet. At 0.7 the batches turn out to fit as they are.
        assert share == 0.7 or sum(e.counters.get("budget.batches_split", 0) for e in run_within.history) > 0
    assert share > 0.2 or plan.step_bytes > plan.limit_bytes
    assert sum(e.counters.get("budget.steps_over", 0) for e in run_within.history) == 0


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("conv", [pytest.param(conv, marks=NEEDS_GPU) for conv in ("sage-mean", "gcn", "gat", "gin")])
def test_a_gpu_that_is_out_of_memory_splits_the_batch_and_has_the_same_gradients(conv: str, on_host: bool):
    data = planted_partition(num_nodes=60_000, num_edges=1_200_000)
    torch.manual_seed(0)
    model = GNN(stack_of(conv, 64, 128, 16), dropout=0.5).double().cuda()
    device = torch.device("cuda", 0)
    seeds = 4096
    step = usual_task(16).loss
    ids = data.splits["train"]
    job = Job(
        data=data, model=as_batch_model(model), module=model, examples=Examples(ids), task=own_task(step), device=device
    )
    method = Sampled(fanouts=(10, 10), batch_size=seeds, workers=0)
    loader = method.loader(data, ids, model=model, device=device).with_budget(None, batches_on_host=on_host)
    loaded = next(iter(loader))
    assert loaded.seeds.is_cuda != on_host

    batch = loaded.to(device)
    with meter_of(device) as meter:
        expected_loss = BatchUnit(job, batch).forward_backward(seeds)
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    if on_host:
        del batch
    free_all()
    limit_bytes = torch.cuda.memory_allocated() + int(0.7 * meter.peak_bytes)
    guard = BudgetGuard(
        job, Budget(), 1 << 40
    )  # it does not know how small the GPU is, so it predicts that the batch fits
    with limit_cuda_memory(Budget(device=str(limit_bytes)), device):
        ours = guard.unit(loaded).forward_backward(seeds)
    record = guard.take_record()
    assert record["oom"] >= 1
    assert record["pieces"] >= 2
    torch.testing.assert_close(ours, expected_loss, rtol=1e-8, atol=0)

    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_that_does_not_fit_on_the_gpu_stays_on_the_host_and_is_split():
    """As where something else takes the memory that a plan had for batches."""
    data = planted_partition(num_nodes=60_000, num_edges=1_200_000, num_train=8192, num_features=512)
    torch.manual_seed(0)
    model = GNN(stack_of("sage-mean", 512, 128, 16)).float().cuda()
    device = torch.device("cuda", 0)
    ids = data.splits["train"]
    step = usual_task(16).loss
    job = Job(
        data=data, model=as_batch_model(model), module=model, examples=Examples(ids), task=own_task(step), device=device
    )
    method = Sampled(fanouts=(10, 10), batch_size=4096, workers=2)
    work = method.bind(job)
    assert isinstance(work, SampledWork)
    expected_losses = [unit.forward_backward(4096).item() for unit in work.units(1)]
    guard = BudgetGuard(job, Budget(), 1 << 40)
    work = guarded(work, method, guard)
    assert isinstance(work, SampledWork)
    with closing(work.loader.epoch(1)) as batches:
        num_bytes = next(batches).num_bytes
    limit_bytes = free_all() + num_bytes // 2
    counters = trace.Counters()
    with limit_cuda_memory(Budget(device=str(limit_bytes)), device), trace.listen(counters):
        losses = [unit.forward_backward(4096).item() for unit in work.units(1)]
    assert losses == pytest.approx(expected_losses, rel=1e-4)

    counters.next_epoch()
    assert counters.last_epoch()["batches.without_room"] >= 2
    assert guard.take_record()["pieces"] >= 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_the_process_already_holds_on_the_gpu_counts():
    before = trainer_of(METHODS[0], budget="1GiB", device="cuda").plan
    allocated = torch.zeros(100 << 20, dtype=torch.uint8, device="cuda")
    after = trainer_of(METHODS[0], budget="1GiB", device="cuda").plan
    assert before is not None
    assert after is not None
    assert after.resident_bytes("device") - before.resident_bytes("device") == pytest.approx(allocated.nbytes, rel=0.05)


class UnitOfSevenSeeds(Unit):
    """A step that allocates 100 + total float32, and nothing else that counts."""

    size = 7

    def forward_backward(self, total: float) -> Tensor:
        return torch.zeros(100 + int(total)).sum()


class UnguardedWork(Work):
    """One step that cannot be split. Without `guarded`, so a budget is refused."""

    def __init__(self) -> None:
        self.guard_and_plan: tuple[contract.Guard, Plan] | None = None

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        assert self.guard_and_plan is not None
        guard, plan = self.guard_and_plan
        yield MeasuredUnit(UnitOfSevenSeeds(), guard, plan.step_bytes)


class MeasuredWork(UnguardedWork):
    """The same step, measured by the guard."""

    def guarded(self, guard: contract.Guard, plan: Plan) -> MeasuredWork:
        self.guard_and_plan = guard, plan
        return self


class CustomMethod(Method):
    """A method of a user, which predicts 500 bytes for a step."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def bind(self, job: Job) -> Work:
        return self.work

    def plan(self, outline: Outline, budget: Budget) -> Plan:
        return outline.make_plan(
            self,
            budget,
            step_bytes=500.0,
            min_step_bytes=500.0,
            steps=1,
            count=7,
            covers="steps of {} nodes",
        )


def test_a_custom_method_is_planned_and_measured():
    trainer = trainer_of(CustomMethod(MeasuredWork()), budget="1GiB")
    (unit,) = trainer.work.units(1)
    assert (unit.size, unit.total_size) == (7, None)

    unit.forward_backward(7)
    assert trainer.guard is not None
    record = trainer.guard.take_record()

    assert (record["promised_bytes"], record["before"]) == (500, [500])
    assert record["after"] == [record["peak_bytes"]] == [107 * 4 + 4]


def test_work_without_guarded_is_refused_by_name():
    message = r"UnguardedWork has no guarded\(guard, plan\).*leave out budget=, or define it"
    with pytest.raises(ValueError, match=message):
        trainer_of(CustomMethod(UnguardedWork()), budget="1GiB")
