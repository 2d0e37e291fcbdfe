"""Warm-up and capture of a step on `FakeCuda`: model, gradients and streams are as before, also after a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopline as hl
from hopline.methods.sampled.captured_step import WARM_UP_STEPS, CapturedWork, capture
from tests.support.fake_cuda import FakeCuda
from tests.support.runs import sage, small

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it runs kernels on CPU tensors")


class Steps:
    """Steps of a model with batch norm, one of which may fail."""

    def __init__(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None) -> None:
        data = small()
        torch.manual_seed(0)
        self.model = sage(data, norm="batch")
        self.fake_cuda = fake_cuda
        self.fails_at = fails_at
        self.modes: list[int | str] = []
        """Whether each step was to wait for nothing."""
        method = hl.Sampled(fanouts=(4, 3), batch_size=60, layout="tree")
        trainer = hl.Trainer(self.model, data, method, show=False, train_step=self.loss)
        self.lines: list[str] = []
        self.job = replace(trainer.job, say=self.lines.append)
        loader = trainer.work.loader  # type: ignore[attr-defined]
        self.work = CapturedWork(self.job, loader)
        self.batch = next(iter(loader))
        monkeypatch.setattr(self.work.batches, "next", self.next)

    def next(self, num_seeds: int, first: int, total: int) -> hl.Batch:
        """The same batch every time: on a CPU none is drawn by the keys that the device has."""
        self.work.batches.state += 1
        return self.batch

    def loss(self, model: nn.Module, batch: hl.Batch) -> Tensor:
        self.modes.append(self.fake_cuda.sync_debug_mode)
        self.fake_cuda.random_state += 1  # as dropout would
        if len(self.modes) == self.fails_at:
            raise ZeroDivisionError("no more")
        return nn.functional.cross_entropy(model(batch), batch.labels)

    def state(self) -> list[Tensor]:
        """All that steps change."""
        changed = [self.work.batches.state, self.fake_cuda.random_state, *self.model.state_dict().values()]
        return [tensor.detach().clone() for tensor in changed]

    def capture(self) -> Any:
        return capture(self.job, self.work.batches, 60, 0, 60)


def test_warm_up_and_capture_leave_model_and_gradients_as_they_were(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    steps = Steps(fake_cuda, monkeypatch)
    before = steps.state()
    step = steps.capture()
    assert step is not None
    assert not steps.lines
    assert all(torch.equal(a, b) for a, b in zip(steps.state(), before, strict=True))
    assert all(p.grad is None for p in steps.model.parameters())
    assert steps.modes == [0, *["error"] * (WARM_UP_STEPS - 1), 0], "the capture itself finds what waits"
    assert all(gradient is not None for gradient in step.gradients)

    order = [line for line in fake_cuda.log if line != "synchronize"]
    assert order == [
        "side 1 waits for main",
        "capture 0 on side 1 in pool of 0",
        "end of capture 0",
        "main waits for side 1",
    ]
    assert fake_cuda.log[-2:] == ["synchronize", "main waits for side 1"]


@pytest.mark.parametrize("fails_at", [1, 2, WARM_UP_STEPS + 1])
def test_a_failed_capture_leaves_model_and_gradients_as_they_were_and_is_logged(
    fails_at: int, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    steps = Steps(fake_cuda, monkeypatch, fails_at)
    before = steps.state()
    assert steps.capture() is None
    assert steps.lines == ["steps are not captured in a CUDA graph, so kernels are launched one by one: no more"]
    assert all(torch.equal(a, b) for a, b in zip(steps.state(), before, strict=True))
    assert all(p.grad is None for p in steps.model.parameters())
    assert fake_cuda.sync_debug_mode == 0
    assert len(fake_cuda.current) == 1


def test_the_last_step_computes_in_the_memory_of_a_full_one(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    steps = Steps(fake_cuda, monkeypatch)
    for epoch in (1, 2):
        list(steps.work.units(epoch))
    assert list(steps.work.steps) == [60, 30]
    assert [graph.memory for graph in fake_cuda.graphs] == ["pool of 0"] * 2
