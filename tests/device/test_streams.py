"""The capture lock, and runs whose asynchronous evaluation has a stream of its own."""

import gc
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.data.synthetic import planted_partition
from hopline.device import streams
from hopline.methods.sampled import captured_step
from hopline.methods.sampled.captured_step import CapturedUnit, CapturedWork, EagerUnit
from hopline.training.async_evaluation import EvaluationThread
from tests.support.fake_cuda import capture_lock_elsewhere
from tests.support.runs import losses, sage, small


def test_the_capture_lock_is_exclusive_and_reentrant():
    acquired: list[bool] = []

    def ask() -> None:
        is_acquired = streams.capture_lock.acquire(blocking=False)
        acquired.append(is_acquired)
        if is_acquired:
            streams.capture_lock.release()

    with streams.capture_lock, streams.capture_lock:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    ask()
    assert acquired == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs kernels on CPU tensors, which Triton interprets")
@pytest.mark.parametrize("evaluation_holds_lock", [False, True])
def test_which_steps_are_captured_depends_on_the_epoch_and_not_on_the_lock(
    evaluation_holds_lock: bool, monkeypatch: pytest.MonkeyPatch
):
    data = small()  # 150 seeds: two full steps and one of 30
    model = sage(data)
    trainer = hl.Trainer(model, data, hl.Sampled(fanouts=(4, 3), batch_size=60, layout="tree"), show=False)
    loader = trainer.work.loader  # type: ignore[attr-defined]
    work = CapturedWork(trainer.job, loader)
    monkeypatch.setattr(captured_step, "capture", lambda *args: args)  # it would wait for its turn
    with capture_lock_elsewhere() if evaluation_holds_lock else nullcontext():
        first, second = ([type(unit) for unit in work.units(epoch)] for epoch in (1, 2))
        resumed = [type(unit) for unit in CapturedWork(trainer.job, loader).units(2, 1, 60)]
    assert first == [CapturedUnit, CapturedUnit, EagerUnit]
    assert second == [CapturedUnit] * 3
    assert resumed == second[1:]


def test_renewed_accumulators_get_gradients_while_an_old_graph_lives():
    parameter = torch.nn.Parameter(torch.ones(3))
    address = parameter.data_ptr()
    old_graph = (parameter * 2).sum()
    before = torch.autograd.graph.get_gradient_edge(parameter).node
    captured_step.renew_accumulators([parameter])
    assert torch.autograd.graph.get_gradient_edge(parameter).node is not before
    assert parameter.data_ptr() == address
    (parameter * 3).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0] * 3
    old_graph.backward()


def outcome_of(data: hl.Dataset, evaluate: str, **options: Any) -> tuple[Any, ...]:
    """A run's losses, metrics and weights: three layers as wide as those whose products a graph may sum otherwise."""
    torch.manual_seed(0)
    convs = [SAGEConv(100, 128), SAGEConv(128, 128), SAGEConv(128, data.num_classes)]
    model = hl.nn.GNN(convs, dropout=0.5)
    settings = {"epochs": 8, "device": "cuda", "show": False, "lr": 0.01, "evaluate": evaluate} | options
    run = hl.Trainer(model, data, hl.Sampled(fanouts=(10, 5, 5), batch_size=1024), **settings).fit()
    metrics = [(e.epoch, e.split, e.metrics) for e in run.evaluations]
    return losses(run), metrics, [p.detach().cpu() for p in model.parameters()]


def assert_same_outcome(ours: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert ours[:2] == expected[:2]
    assert all(torch.equal(a, b) for a, b in zip(ours[2], expected[2], strict=True))


def delay_evaluation(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Asynchronous evaluations that are not replayed hold the capture lock for longer."""
    evaluate = EvaluationThread._evaluate

    def slowly(thread: EvaluationThread, buffer: Any) -> Any:
        with streams.capture_lock:
            time.sleep(seconds)
            return evaluate(thread, buffer)

    monkeypatch.setattr(EvaluationThread, "_evaluate", slowly)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_training_is_the_same_however_long_asynchronous_evaluation_takes(
    num_steps: int, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
):
    data = planted_partition(num_nodes=20_000, num_edges=400_000, num_classes=16, num_features=100, num_valid=2000)
    num_train = 1024 * (num_steps - 1) + 476
    data = replace(data, splits=data.splits | {"train": torch.arange(num_train), "test": torch.arange(15_000, 16_000)})
    expected = outcome_of(data, "blocking", clip_norm=clip_norm)
    assert_same_outcome(outcome_of(data, "async", clip_norm=clip_norm), expected)
    delay_evaluation(monkeypatch, 0.1)
    assert_same_outcome(outcome_of(data, "async", clip_norm=clip_norm), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["tree", "block"])
@pytest.mark.parametrize(
    "where", [{"graph": "device"}, {"graph": "host"}, {"features": "pinned", "cache": "200kB"}], ids=str
)
def test_evaluation_in_its_own_stream_ends_with_the_blocking_run(layout: str, where: dict[str, Any]):
    data = planted_partition(num_nodes=20_000, num_edges=200_000, num_train=4096)
    if layout == "tree" and where.get("graph") == "host":
        pytest.skip("trees are drawn on the GPU")
    outcomes = {}
    for how in ("blocking", "async"):
        torch.manual_seed(0)
        model = sage(data, dropout=0.5)
        method = hl.Sampled(fanouts=(5, 5), batch_size=256, layout=layout)  # type: ignore[arg-type]
        placement = hl.Placement(**where)
        options = {"epochs": 6, "evaluate": how, "device": "cuda", "show": False, "patience": 2, "lr": 0.05}
        run = hl.Trainer(model, data, method, placement=placement, **options).fit()
        evaluations = [(e.epoch, e.split, e.metrics) for e in run.evaluations]
        outcomes[how] = losses(run), evaluations, run.epochs, run.best_epoch, run.test
        outcomes[how, "weights"] = model.state_dict()
    assert outcomes["blocking"] == outcomes["async"]
    pairs = zip(outcomes["blocking", "weights"].values(), outcomes["async", "weights"].values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("evaluate", ["blocking", "async"])
@pytest.mark.parametrize("layout", ["tree", "block"])
def test_a_run_leaves_no_more_on_a_gpu_than_the_one_before(layout: str, evaluate: str):
    data = planted_partition(num_nodes=20_000, num_edges=200_000, num_train=4096)
    bytes_left = []
    for _ in range(4):
        model = sage(data, dropout=0.5)
        method = hl.Sampled(fanouts=(5, 5), batch_size=256, layout=layout)  # type: ignore[arg-type]
        hl.Trainer(model, data, method, epochs=4, evaluate=evaluate, device="cuda", show=False).fit()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        bytes_left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert bytes_left[1] == bytes_left[3]
