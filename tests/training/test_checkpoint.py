"""Checkpoints: whole or not there, verified, and refused where they belong to another run."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hopline as hl
from hopline.distributed.world import World
from hopline.training import checkpoint
from hopline.training.callbacks import Callback, EpochEnd, StepEnd
from hopline.training.settings import TrainSettings
from tests.support.runs import StopAfter, read_checkpoint, records, sage, small

STATE = {"weights": torch.arange(5.0), "epoch": 3, "names": ["a", "b"]}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", STATE)
    state = read_checkpoint(tmp_path / "c")
    assert torch.equal(state["weights"], STATE["weights"])
    assert state["epoch"] == 3
    assert state["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("place", [0, 30, 90, 400, -1])
def test_a_changed_byte_is_noticed(place: int, tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.write(path, STATE)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|not a hopline checkpoint"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "content", [b"", b"hopline-checkpoint", b"x" * 500, b"hopline-checkpoint zz 0\n", b"hopline-checkpoint zz z\n"]
)
def test_a_file_that_is_no_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ValueError, match=r"c is damaged \(its|c is not a hopline checkpoint"):
        read_checkpoint(tmp_path / "c")


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    buffer = io.BytesIO()
    torch.save({"format": checkpoint.FORMAT, "bad": Bad()}, buffer)
    payload = buffer.getvalue()
    header = f"hopline-checkpoint {hashlib.sha256(payload).hexdigest()} {len(payload)}\n".encode()
    (tmp_path / "c").write_bytes(header + payload)
    with pytest.raises(ValueError, match=r"c is damaged .*UnpicklingError"):
        read_checkpoint(tmp_path / "c")
    assert not (tmp_path / "executed").exists()


def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path / "c", STATE)
    before = (tmp_path / "c").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        checkpoint.write(tmp_path / "c", {"epoch": 4})
    assert (tmp_path / "c").read_bytes() == before
    assert os.listdir(tmp_path) == ["c"]


# ---- a run that goes on


def make_trainer(
    out: Path, *, hidden: int = 4, stop: int | None = None, data: Any = None, **settings: Any
) -> hl.Trainer:
    data = data or small(num_train=48)
    method = settings.pop("method", hl.Sampled(fanouts=(3, 2), batch_size=16, workers=0))
    callbacks = [] if stop is None else [StopAfter(stop)]
    options = {"epochs": 3, "show": False, "checkpoint_s": 0.0, **settings}
    return hl.Trainer(sage(data, hidden, dropout=0.3), data, method, out=out, callbacks=callbacks, **options)


def have_same_weights(one: hl.Trainer, other: hl.Trainer) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "plateau", "step"])
def test_every_optimizer_and_schedule_goes_on_exactly(optimizer: str, schedule: str, tmp_path: Path) -> None:
    every = 0 if schedule == "plateau" else 1
    options = {"optimizer": optimizer, "schedule": hl.Schedule(name=schedule, warmup=1, every=every)}  # type: ignore[arg-type]
    whole = make_trainer(tmp_path / "whole", **options)
    expected = whole.fit()
    with pytest.raises(RuntimeError, match="enough"):
        make_trainer(tmp_path / "cut", stop=5, **options).fit()
    second = make_trainer(tmp_path / "cut", resume=True, **options)
    ours = second.fit()
    assert have_same_weights(whole, second)
    assert [e.loss for e in ours.history] == [e.loss for e in expected.history]
    assert [e.lr for e in ours.history] == [e.lr for e in expected.history]
    assert [e.metrics for e in ours.evaluations] == [e.metrics for e in expected.evaluations]
    assert ours.test == expected.test
    assert ours.best_epoch == expected.best_epoch


def test_more_epochs_continue_from_the_last(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", epochs=2).fit()
    whole = make_trainer(tmp_path / "whole", epochs=4)
    whole.fit()
    longer = make_trainer(tmp_path / "run", epochs=4, resume=True)
    # The best weights are in the model after fit; the last ones are what training went on from.
    longer.fit()
    assert torch.load(tmp_path / "run" / "last.pt")["convs.0.lin_l.weight"].equal(
        torch.load(tmp_path / "whole" / "last.pt")["convs.0.lin_l.weight"]
    )


@pytest.mark.parametrize("evaluate", ["blocking", "async"])
def test_an_epoch_in_which_a_callback_stops_the_run_is_resumed_to_its_end(evaluate: str, tmp_path: Path) -> None:
    class StopAtStep(Callback):
        def on_step_end(self, trainer: hl.Trainer, step: StepEnd) -> None:
            if step.step == 4:  # the first of three steps of epoch 2
                trainer.stop("enough for me")

    uninterrupted = make_trainer(tmp_path / "whole", evaluate=evaluate)
    uninterrupted.callbacks.append(StopAtStep())
    expected = uninterrupted.fit()
    interrupted = make_trainer(tmp_path / "cut", stop=5, evaluate=evaluate)
    interrupted.callbacks.append(StopAtStep())
    with pytest.raises(RuntimeError, match="enough"):
        interrupted.fit()
    resumed = make_trainer(tmp_path / "cut", resume=True, evaluate=evaluate)
    ours = resumed.fit()
    assert (ours.epochs, ours.reason) == (expected.epochs, expected.reason) == (2, "enough for me")
    assert [e.loss for e in ours.history] == [e.loss for e in expected.history]
    assert have_same_weights(uninterrupted, resumed)


def test_early_stopping_remembers_how_long_it_waited(tmp_path: Path) -> None:
    options = {"patience": 2, "lr": 1e-12, "epochs": 9}  # nothing improves
    expected = make_trainer(tmp_path / "whole", **options).fit()
    with pytest.raises(RuntimeError, match="enough"):
        make_trainer(tmp_path / "cut", stop=8, **options).fit()
    ours = make_trainer(tmp_path / "cut", resume=True, **options).fit()
    assert (ours.epochs, ours.reason) == (expected.epochs, expected.reason)
    assert expected.epochs < 9


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": 6}, "another model: convs.0"),
        ({"seed": 5}, "seed is 0 there and 5 here"),
        ({"lr": 0.5}, "lr is"),
        ({"weight_decay_rest": 0.5}, "weight_decay_rest is None there and 0.5 here"),
        ({"method": hl.Sampled(fanouts=(3, 2), batch_size=9)}, "method is"),
        ({"data": "other"}, "dataset is"),
        ({"data": "split"}, r"training nodes is '48 nodes, crc32:\w{8}' there and '48 nodes, crc32:\w{8}' here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", epochs=1).fit()
    before = contents(tmp_path / "run")
    if changes.get("data") == "other":
        changes = {"data": small(num_train=48, num_edges=4200)}
    elif changes.get("data") == "split":
        data = small(num_train=48)
        shifted = torch.cat([data.splits["train"][1:], data.splits["test"][-1:]]).sort().values
        changes = {"data": dataclasses.replace(data, splits={**data.splits, "train": shifted})}
    with pytest.raises(ValueError, match=named):
        make_trainer(tmp_path / "run", resume=True, **changes).fit()
    assert contents(tmp_path / "run") == before


def own_loss(model: Any, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch), batch.y)


def weighted_loss(weight: Tensor) -> Any:
    return lambda model, batch: torch.nn.functional.cross_entropy(model(batch), batch.y, weight)


def measure(name: str) -> Any:
    def test_step(model: Any, data: Any, ids: Tensor) -> dict[str, float]:
        return {name: float(len(ids))}

    return test_step


class OwnEvaluation(hl.Trainer):
    """Another metric, by overriding a method."""

    def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
        return {"loss": 1.0}


def _with_splits(**splits: Any) -> dict[str, Any]:
    data = small(num_train=48)
    kept = {name: ids for name, ids in {**data.splits, **splits}.items() if ids is not None}
    return {"data": dataclasses.replace(data, splits=kept)}


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({}, _with_splits(valid=torch.arange(300, 320)), r"validation nodes is '80 nodes, .* there and '20 nodes"),
        ({}, _with_splits(valid=None), "validation nodes is '80 nodes, .* there and None here"),
        (_with_splits(test=None), {}, "test nodes is None there and '272 nodes, .* here"),
        ({}, {"train_step": own_loss}, "train_step is None there and own_loss here"),
        ({"train_step": own_loss}, {}, "train_step is own_loss there and None here"),
        (
            {"train_step": weighted_loss(torch.ones(4))},
            {"train_step": weighted_loss(torch.arange(4.0))},
            r"train_step.weight is torch.float32 \[4\] .* there and torch.float32 \[4\] .* here",
        ),
        ({}, {"test_step": measure("loss")}, r"test_step is None there and measure.<locals>.test_step here"),
        ({"test_step": measure("auc")}, {"test_step": measure("f1")}, "test_step.name is 'auc' there and 'f1' here"),
        ({}, {"kind": OwnEvaluation}, r"Trainer is hopline\..*Trainer there and OwnEvaluation here"),
        ({}, {"inference": "sampled"}, "inference is 'exact' there and 'sampled' here"),
    ],
)
def test_a_run_that_learns_or_measures_something_else_is_refused(
    before: dict[str, Any], after: dict[str, Any], named: str, tmp_path: Path
) -> None:
    def run(options: dict[str, Any], **settings: Any) -> hl.Run:
        data = options.get("data") or small(num_train=48)
        kind = options.get("kind", hl.Trainer)
        rest = {key: value for key, value in options.items() if key not in ("data", "kind")}
        method = hl.Sampled(fanouts=(3, 2), batch_size=16, workers=0)
        return kind(sage(data), data, method, out=tmp_path / "run", show=False, **rest, **settings).fit()

    run(before, epochs=1)
    with pytest.raises(ValueError, match=named):
        run(after, epochs=2, resume=True)
    assert run(before, epochs=2, resume=True).epochs == 2


def test_workers_and_look_ahead_may_change(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", epochs=1).fit()
    other = hl.Sampled(fanouts=(3, 2), batch_size=16, workers=2, look_ahead=3)
    assert make_trainer(tmp_path / "run", resume=True, method=other).fit().epochs == 3


def test_a_method_that_skips_units_to_resume_is_resumed_exactly(tmp_path: Path) -> None:
    class Plain(hl.Sampled):
        def bind(self, job: Any) -> Any:
            work = super().bind(job)

            class Work(hl.extend.Work):
                def units(self, epoch: int, done: int = 0, examples: int = 0) -> Any:
                    yield from itertools.islice(work.units(epoch), done, None)

            return Work()

    method = Plain(fanouts=(3, 2), batch_size=16, workers=0)
    uninterrupted = make_trainer(tmp_path / "whole", method=method)
    uninterrupted.fit()
    with pytest.raises(RuntimeError, match="enough"):
        make_trainer(tmp_path / "cut", method=method, stop=5).fit()
    resumed = make_trainer(tmp_path / "cut", method=method, resume=True)
    resumed.fit()
    assert have_same_weights(uninterrupted, resumed)


def test_a_callback_of_the_users_keeps_its_state(tmp_path: Path) -> None:
    class Count(Callback):
        epochs = 0

        def on_epoch_end(self, trainer: hl.Trainer, epoch: EpochEnd) -> None:
            self.epochs += 1

        def state(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def restore_state(self, state: dict[str, Any]) -> None:
            self.epochs = state["epochs"]

    first = make_trainer(tmp_path / "run", epochs=2)
    first.callbacks.append(Count())
    first.fit()
    second = make_trainer(tmp_path / "run", epochs=3, resume=True)
    count = Count()
    second.callbacks.append(count)
    second.fit()
    assert count.epochs == 3


def test_resume_without_a_checkpoint_begins(tmp_path: Path) -> None:
    assert make_trainer(tmp_path / "new", resume=True, epochs=1).fit().epochs == 1


def test_checkpoints_are_written_by_time_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(checkpoint, "write", lambda path, state: written.append(state["position"]["epoch"]))
    make_trainer(tmp_path / "run", epochs=20, checkpoint_s=60.0).fit()
    assert written == [21]


@pytest.mark.parametrize(("takes_s", "steps"), [(0.1, 2), (1.0, 13)])  # of 4 s each, after 8 s or 50 times as long
def test_where_writing_takes_long_fewer_are_written(
    takes_s: float, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    written = []
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])

    def write(path: Path, state: dict[str, Any]) -> None:
        now[0] += takes_s
        written.append(state["num_steps"])

    class Wait(Callback):
        def on_step_end(self, trainer: hl.Trainer, step: StepEnd) -> None:
            now[0] += 4.0

    monkeypatch.setattr(checkpoint, "write", write)
    job = make_trainer(tmp_path / "run", epochs=20, checkpoint_s=8.0)  # 60 steps
    job.callbacks.append(Wait())
    job.fit()
    assert written[:2] == [2, 2 + steps]  # how long it takes is known after the first
    assert {later - before for before, later in itertools.pairwise(written[:-1])} == {steps}


class Fails(Callback):
    """Raises when an evaluation has ended, as a kill between two checkpoints would."""

    def __init__(self, epoch: int, hook: str) -> None:
        self.epoch = epoch
        self.hook = hook

    def on_epoch_end(self, trainer: hl.Trainer, epoch: EpochEnd) -> None:
        if self.hook == "epoch" and epoch.epoch == self.epoch:
            raise RuntimeError("enough")

    def on_evaluate_end(self, trainer: hl.Trainer, evaluation: hl.extend.Evaluation) -> None:
        if self.hook == evaluation.split and evaluation.epoch == self.epoch:
            raise RuntimeError("enough")


@pytest.mark.parametrize("hook", ["epoch", "valid"])
@pytest.mark.parametrize("checkpoint_s", [0.0, 60.0])
def test_every_epoch_and_evaluation_is_recorded_once(checkpoint_s: float, hook: str, tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", epochs=2, checkpoint_s=checkpoint_s).fit()
    cut = make_trainer(tmp_path / "run", epochs=5, checkpoint_s=checkpoint_s, resume=True)
    cut.callbacks.append(Fails(4, hook))
    with pytest.raises(RuntimeError, match="enough"):
        cut.fit()
    make_trainer(tmp_path / "run", epochs=5, checkpoint_s=checkpoint_s, resume=True).fit()
    assert [r["epoch"] for r in records(tmp_path / "run", "epoch")] == [1, 2, 3, 4, 5]
    explained = [r["epoch"] for r in records(tmp_path / "run", "pipeline")]
    assert explained == sorted(set(explained))
    evaluations = [(r["split"], r["epoch"]) for r in records(tmp_path / "run", "evaluate")]
    assert evaluations[:-1] == [("valid", epoch) for epoch in (1, 2, 3, 4, 5)]
    assert evaluations[-1][0] == "test"
    assert [len(records(tmp_path / "run", event)) for event in ("start", "end", "close")] == [1, 1, 1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("early", [False, True])
def test_resuming_a_finished_run_changes_nothing_in_its_folder(
    early: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"epochs": 9, "patience": 1, "lr": 1e-12} if early else {"epochs": 3}
    first = make_trainer(tmp_path / "run", **options).fit()
    before = contents(tmp_path / "run")
    with caplog.at_level("INFO", logger="hopline"):
        resumed = make_trainer(tmp_path / "run", resume=True, **options).fit()
    assert contents(tmp_path / "run") == before
    assert (resumed.test, resumed.valid, resumed.best_epoch) == (first.test, first.valid, first.best_epoch)
    sentence = "training has ended after epoch 2: validation" if early else "all 3 epochs were trained"
    assert sentence in caplog.text
    assert "seeds done" not in caplog.text


@pytest.mark.parametrize("payload", ["text", "list", "no format", "no identity"])
def test_a_checkpoint_that_holds_something_else_is_named(payload: str, tmp_path: Path) -> None:
    """With a checksum that is right, as of a file that another program or an earlier version has made."""
    make_trainer(tmp_path / "run", epochs=1).fit()
    buffer = io.BytesIO(b"neither zip nor pickle")
    values = {"list": [1, 2], "no format": {"epoch": 1}, "no identity": {"format": checkpoint.FORMAT, "epoch": 1}}
    if payload in values:
        torch.save(values[payload], buffer)
    content = buffer.getvalue()
    header = f"hopline-checkpoint {hashlib.sha256(content).hexdigest()} {len(content)}\n".encode()
    path = tmp_path / "run" / checkpoint.FILE
    path.write_bytes(header + content)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged .*remove it"):
        make_trainer(tmp_path / "run", epochs=2, resume=True).fit()


def test_a_signal_that_comes_while_ranks_agree_is_not_forgotten(tmp_path: Path) -> None:
    class Two(World):
        """As if there were another rank, which knows of no signal; ours comes during the exchange."""

        def max(self, values: Any) -> list[float]:
            os.kill(os.getpid(), signal.SIGTERM)
            return list(values)

    world = Two.alone()
    world.size = 2
    checkpoints = checkpoint.Checkpoints(tmp_path, TrainSettings(checkpoint_s=60), world)
    with checkpoints, checkpoints.hold_signals():
        checkpoints.write_if_due(None)  # type: ignore[arg-type]
        assert checkpoints.signals.received == signal.SIGTERM
