"""The library's own callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest
import torch
from torch import Tensor, nn

import hopline as hl
from hopline.callbacks import KeepWeights, peak_memory_bytes
from tests.runs import evaluated, fit, method, sage, small


class StandIn:
    """As much of a trainer as a callback looks at."""

    metric = "accuracy"
    reason: str | None = None

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def stop(self, reason: str) -> None:
        self.reason = reason

    def evaluated_weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def evaluation(epoch: int, value: float, split: str = "valid", **more: float) -> hl.Evaluation:
    return hl.Evaluation(epoch=epoch, split=split, metrics={"accuracy": value, **more}, seconds=0.0)


def stops_at(stop: hl.EarlyStop, values: list[float]) -> int | None:
    """The epoch after which an early stop ends a run with these validation values."""
    trainer: Any = StandIn()
    stop.on_fit_start(trainer)
    for epoch, value in enumerate(values, 1):
        stop.on_evaluate_end(trainer, evaluation(epoch, value))
        if trainer.reason is not None:
            return epoch
    return None


def test_early_stop_waits_for_its_patience_and_begins_again_at_each_rise():
    assert stops_at(hl.EarlyStop(2), [0.1, 0.2, 0.2, 0.3, 0.1, 0.2]) == 6
    assert stops_at(hl.EarlyStop(1), [0.1, 0.1]) == 2
    assert stops_at(hl.EarlyStop(3), [0.1, 0.2, 0.1, 0.1]) is None


def test_early_stop_starts_afresh_with_every_fit():
    stop = hl.EarlyStop(2)
    assert stops_at(stop, [0.9, 0.1, 0.1]) == 3
    assert stops_at(stop, [0.1, 0.2, 0.3]) is None


def test_early_stop_ignores_other_splits():
    stop, trainer = hl.EarlyStop(1), StandIn()
    stop.on_fit_start(trainer)  # type: ignore[arg-type]
    for epoch in range(1, 5):
        stop.on_evaluate_end(trainer, evaluation(epoch, 0.5, "test"))  # type: ignore[arg-type]
    assert trainer.reason is None


def test_early_stop_as_a_callback_ends_a_run():
    values = iter([0.5, 0.4, 0.4, 0.9])

    def scripted(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {"score": next(values)}

    run = fit(small(), epochs=9, callbacks=[hl.EarlyStop(2)], test_step=scripted)
    assert evaluated(run) == [1, 2, 3]
    assert "for 2 evaluations" in run.reason


def test_keep_weights_keeps_the_first_of_equally_good_ones():
    keep, trainer = KeepWeights(None), StandIn()
    for epoch, value in enumerate([0.1, 0.4, 0.4, 0.2], 1):
        nn.init.constant_(trainer.model.weight, epoch)
        keep.on_evaluate_end(trainer, evaluation(epoch, value))  # type: ignore[arg-type]
    assert keep.restore(trainer, 4) == 2  # type: ignore[arg-type]
    assert trainer.model.weight.item() == 2


def test_keep_weights_copies_what_training_goes_on_to_change():
    keep, trainer = KeepWeights(None), StandIn()
    keep.on_evaluate_end(trainer, evaluation(1, 0.5))  # type: ignore[arg-type]
    assert keep.best is not None
    before = keep.best["weight"].item()
    nn.init.constant_(trainer.model.weight, before + 1)
    assert keep.best["weight"].item() == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk_is_named_and_leaves_the_old_weights(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keep, trainer = KeepWeights(tmp_path), StandIn()
    keep.on_epoch_end(trainer, None)  # type: ignore[arg-type]
    before = (tmp_path / "last.pt").read_bytes()

    def full(weights: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"cannot write .*last.pt: .*; free space or choose out="):
        keep.on_epoch_end(trainer, None)  # type: ignore[arg-type]
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_progress_says_speed_and_slowest_stage_of_every_epoch(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run = fit(small(), epochs=2, show=True, out=tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "seeds/s" in line]
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2"]
    assert f"slowest stage: {run.history[1].slowest_stage}" in lines[1]
    assert f"loss {run.history[1].loss:.4f}" in lines[1]
    log = (tmp_path / "run.log").read_text()
    assert all(line in log for line in lines)
    assert "stopped after epoch 2: all 2 epochs are trained" in log


def test_a_quiet_run_prints_nothing(capsys: pytest.CaptureFixture[str]):
    fit(small(), epochs=1)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_the_trainer_calls_its_callbacks_in_their_order():
    order: list[str] = []

    class Named(hl.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_fit_end(self, trainer: hl.Trainer, run: hl.Run) -> None:
            order.append(self.name)

    data = small()
    hl.Trainer(sage(data), data, method(), callbacks=[Named("a"), Named("b")], epochs=1, show=False).fit()
    assert order == ["a", "b"]


def test_peak_memory_is_in_bytes():
    assert psutil.Process().memory_info().rss * 0.9 < peak_memory_bytes() < psutil.virtual_memory().total
