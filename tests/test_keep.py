from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import SAGEConv

from hopline.budget import Budget
from hopline.callbacks import Callback, Run, StepEnd
from hopline.data import planted
from hopline.full_batch import FullBatch
from hopline.guard import Guard
from hopline.historical import Historical
from hopline.keep import WatchedWork, capped
from hopline.meter import meter_of
from hopline.methods import Sampled, SampledWork
from hopline.nn import GNN
from hopline.nn.whole import as_walkable
from hopline.placement import Placement
from hopline.trainer import Trainer
from hopline.work import BatchUnit, Job, Method, Stateful, supervised
from tests.helpers import dataset_of, randn, random_graph, stack_of
from tests.runs import records

DATA = dataset_of(random_graph(1500, 12_000), randn(1500, 6))
METHODS: list[Method] = [
    Sampled(fanouts=(5, 5), batch_size=300),
    Historical(num_parts=6, parts_per_batch=3, partition="range"),
    FullBatch(num_shards=2, partition="range"),
]


def trainer_of(method: Method, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = GNN(stack_of("sage-mean", 6, 32, 3), dropout=0.3).double()
    return Trainer(model, DATA, method, epochs=2, show=False, **options)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_run_within_a_budget_is_the_run_without(method: Method, tmp_path: Path):
    free, free_run = (trainer := trainer_of(method)), trainer.fit()
    measured = trainer_of(method, budget="1GiB", out=tmp_path / "measured")
    measured.fit()
    assert measured.plan is not None
    taken = max(record["peak_bytes"] for record in records(tmp_path / "measured", "budget"))
    least = measured.plan.kept_bytes("host") + taken
    limit = str(max(int(least * 0.8), measured.plan.smallest_bytes("host")))
    tight = trainer_of(method, budget=limit, out=tmp_path / "tight")
    run = tight.fit()
    for record in records(tmp_path / "tight", "budget"):
        assert record["over"] == 0
        assert 0 < record["peak_bytes"] <= record["limit_bytes"]
    assert [e.loss for e in run.history] == pytest.approx([e.loss for e in free_run.history], rel=1e-9)
    for name, weight in free.model.state_dict().items():
        torch.testing.assert_close(tight.model.state_dict()[name], weight, rtol=1e-7, atol=1e-9)
    assert run.test == free_run.test


def test_what_cannot_be_cut_is_watched(tmp_path: Path):
    trainer = trainer_of(METHODS[2], budget="1GiB", out=tmp_path / "run")
    assert isinstance(trainer.work, WatchedWork)
    assert isinstance(trainer.work, Stateful) == isinstance(trainer.work.work, Stateful)
    trainer.fit()
    found = records(tmp_path / "run", "budget")
    assert [record["epoch"] for record in found] == [1, 2]
    assert all(0 < record["peak_bytes"] <= record["promised_bytes"] for record in found)
    assert trainer.work.guard.take_record()["after"] == []


def test_a_budget_for_another_place_leaves_steps_alone():
    trainer = trainer_of(METHODS[0], budget={"disk": "1MiB"})
    assert isinstance(trainer.work, SampledWork)
    assert trainer.work.guard is None


def test_a_budget_that_is_too_small_names_one_that_would_do_and_a_method():
    with pytest.raises(ValueError, match=r"Sampled does not fit 1 KiB.*at least budget=.*no other method fits"):
        trainer_of(METHODS[0], budget="1KiB")
    with pytest.raises(ValueError, match=r"a budget has no 'divice'.*Did you mean 'device'"):
        trainer_of(METHODS[0], budget={"divice": "1KiB"})
    with pytest.raises(ValueError, match=r"with this budget method=\w+ fits"):
        trainer_of(FullBatch(num_shards=2, partition="range"), budget="1MiB")


# ---- on a GPU

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(layout: str, budget: str | None, **options: Any) -> tuple[Run, int]:
    """A run of some batches, and the most that was allocated meanwhile."""
    data = planted(num_nodes=60_000, num_edges=1_200_000, num_train=8192, num_valid=512, num_test=512)
    torch.manual_seed(0)
    model = GNN([SAGEConv(64, 256), SAGEConv(256, 256), SAGEConv(256, 16)], dropout=0.3)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    method = Sampled(fanouts=(10, 10, 5), batch_size=1024, layout=layout)  # type: ignore[arg-type]
    most = [0]

    class Peak(Callback):
        def on_step_end(self, trainer: Trainer, step: StepEnd) -> None:
            most[0] = max(most[0], torch.cuda.max_memory_allocated())  # guarded steps begin the count anew

    options |= {"callbacks": [Peak()]}
    trainer = Trainer(model, data, method, budget=budget, epochs=2, device="cuda", show=False, **options)
    return trainer.fit(), most[0]


@pytest.mark.parametrize("share", [pytest.param(share, marks=NEEDS_GPU) for share in (0.7, 0.4)])
def test_on_a_gpu_made_small_only_the_run_with_a_budget_ends(share: float):
    host = {"placement": Placement(graph="host", features="host")}
    on_gpu("block", None, **host)
    free, peak = on_gpu("block", None, **host)
    limit, total = int(share * peak), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            on_gpu("block", None, **host)
        held, taken = on_gpu("block", str(limit))
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(limit / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert taken <= limit
    assert [e.loss for e in held.history] == pytest.approx([e.loss for e in free.history], rel=1e-3)
    assert sum(e.counters["budget.batches_split"] for e in held.history) > 0


@pytest.mark.parametrize("conv", [pytest.param(conv, marks=NEEDS_GPU) for conv in ("sage-mean", "gcn", "gat", "gin")])
def test_a_gpu_whose_memory_runs_out_goes_on_in_pieces_with_the_same_gradients(conv: str):
    data = planted(num_nodes=60_000, num_edges=1_200_000)
    torch.manual_seed(0)
    model = GNN(stack_of(conv, 64, 128, 16), dropout=0.5).double().cuda()
    device, seeds = torch.device("cuda", 0), 4096
    step = supervised("single", 16)
    ids = data.splits["train"]
    job = Job(data=data, model=as_walkable(model), module=model, train_ids=ids, train_step=step, device=device)
    method = Sampled(fanouts=(10, 10), batch_size=seeds, workers=0)
    batch = next(iter(method.loader(data, ids, model=model, device=device)))
    with meter_of(device) as meter:
        loss = BatchUnit(job, batch).forward_backward(seeds)
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_allocated() + int(0.7 * meter.peak_bytes)
    guard = Guard(job, Budget(), 1 << 40)  # whose promise is too good: what it does not know is how small the GPU is
    with capped(Budget(device=str(room)), device):
        found = guard.unit(batch).forward_backward(seeds)
    record = guard.take_record()
    assert record["oom"] >= 1
    assert record["pieces"] >= 2
    torch.testing.assert_close(found, loss, rtol=1e-8, atol=0)
    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-6, atol=1e-9)
