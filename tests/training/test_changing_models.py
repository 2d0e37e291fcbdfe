"""Models that callbacks change, and that add more than tensors to their weights: followed, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.nn.attributes import copy_attributes, set_attributes
from hopline.run.train import load_weights
from tests.support.runs import StopAfter, fit, method, same_weights, small


class Annealed(nn.Module):
    """Weights its hops by what callbacks change: other weights of hops are other predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(8, 4)
        self.skip = nn.Linear(8, 4)
        self.temperature = 1.0
        self._shares = [1.0, 0.0]
        self.bias = torch.zeros(4)
        self.options = SimpleNamespace(scale=1.0)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hops = self.temperature * self._shares[0] * self.conv(x, edge_index) + self._shares[1] * self.skip(x)
        return hops * self.mask * self.options.scale + self.bias


class Anneal(hl.Callback):
    """Changes the model after every epoch."""

    def __init__(self, change: Callable[[Annealed, int], None]) -> None:
        self.change = change

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        assert isinstance(trainer.model, Annealed)
        self.change(trainer.model, epoch.epoch)


def change_number(model: Annealed, epoch: int) -> None:
    model.temperature = (-1.0) ** epoch * epoch


def change_list(model: Annealed, epoch: int) -> None:
    model._shares[:] = [1 - epoch / 4, epoch / 2]


def change_tensor(model: Annealed, epoch: int) -> None:
    model.bias.data[epoch % 4] += 3


def change_buffer(model: Annealed, epoch: int) -> None:
    model.mask = torch.eye(4)[epoch % 4]


def change_object(model: Annealed, epoch: int) -> None:
    model.options.scale = -1.0


def make_annealed() -> Annealed:
    torch.manual_seed(0)
    return Annealed()


CHANGES = [change_number, change_list, change_tensor, change_buffer]
SETTINGS: dict[str, Any] = {"epochs": 6, "lr": 0.05, "checkpoint_s": 0.0, "patience": 2}


@pytest.mark.parametrize("change", CHANGES)
def test_asynchronous_evaluation_sees_the_attributes_of_its_epoch(change: Any):
    models = {how: make_annealed() for how in ("blocking", "async")}
    runs = {
        how: fit(small(), model, method(), callbacks=[Anneal(change)], evaluate=how, **SETTINGS)
        for how, model in models.items()
    }
    expected = [(e.epoch, e.metrics) for e in runs["blocking"].evaluations]
    assert [(e.epoch, e.metrics) for e in runs["async"].evaluations] == expected
    assert len({metrics["accuracy"] for _, metrics in expected}) > 1
    ours, plain = (copy_attributes(models[how]) for how in ("async", "blocking"))
    assert all(torch.as_tensor(ours[name] == value).all() for name, value in plain.items())
    assert same_weights(models["async"].state_dict(), models["blocking"].state_dict())


def test_what_asynchronous_evaluation_cannot_follow_is_refused_by_name():
    with pytest.raises(ValueError, match=r"options\.scale .*evaluate=blocking"):
        fit(small(), make_annealed(), method(), callbacks=[Anneal(change_object)], evaluate="async", **SETTINGS)


def change_all(model: Annealed, epoch: int) -> None:
    for change in CHANGES:
        change(model, epoch)


@pytest.mark.parametrize("evaluate", ["blocking", "async"])
def test_a_run_is_resumed_with_the_attributes_that_it_had(evaluate: str, tmp_path: Path):
    change = change_all
    cut = tmp_path / "cut"
    settings = SETTINGS | {"patience": None, "evaluate": evaluate}
    expected = fit(small(), make_annealed(), method(), callbacks=[Anneal(change)], out=tmp_path / "whole", **settings)
    with pytest.raises(RuntimeError, match="enough"):
        fit(
            small(),
            make_annealed(),
            method(),
            callbacks=[Anneal(change), StopAfter(8)],
            out=tmp_path / "cut",
            **settings,
        )
    options = {"callbacks": [Anneal(change)], "out": cut, "resume": True}
    ours = fit(small(), make_annealed(), method(), **options, **settings)
    assert [e.loss for e in ours.history] == [e.loss for e in expected.history]
    assert [e.metrics for e in ours.evaluations] == [e.metrics for e in expected.evaluations]


def test_a_resumed_run_says_what_no_checkpoint_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    options: dict[str, Any] = {"callbacks": [Anneal(change_object)], "out": tmp_path}
    fit(small(), make_annealed(), method(), epochs=1, **options)
    with caplog.at_level(logging.WARNING):
        fit(small(), make_annealed(), method(), epochs=2, resume=True, **options)
    assert r"options.scale of the model had changed" in caplog.text


def test_tensors_are_set_in_place_so_that_views_of_them_stay():
    model = make_annealed()
    view = model.bias[:2]
    before = copy_attributes(model)
    model.bias.add_(1)
    set_attributes(model, before)
    assert view.tolist() == [0.0, 0.0]
    assert before["bias"] is not model.bias


# ---- extra states, and weights that are registered late


class Extra(SAGEConv):
    """Counts its calls in training, and keeps the number as an extra state."""

    extra: Any = None

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.calls = 0

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        self.calls += self.training
        return super().forward(x, edge_index, size)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "names": ["a"]} if self.extra is None else self.extra

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("evaluate", ["blocking", "async"])
def test_an_extra_state_is_trained_stored_resumed_and_read(evaluate: str, tmp_path: Path):
    how = method(fanouts=(4,))
    options: dict[str, Any] = {"out": tmp_path, "evaluate": evaluate}
    fit(small(), hl.nn.GNN([Extra()]), how, epochs=2, **options)
    model = hl.nn.GNN([Extra()])
    run = fit(small(), model, how, epochs=3, resume=True, **options)
    stored = torch.load(tmp_path / "last.pt", weights_only=True)["convs.0._extra_state"]
    assert stored["calls"] == 3 * 3, "three batches an epoch"
    read = hl.nn.GNN([Extra()])
    load_weights(read, tmp_path / "best.pt", of_run=True)
    assert same_weights(
        {k: v for k, v in read.state_dict().items() if isinstance(v, Tensor)},
        {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)},
    )
    assert run.epochs == 3
    rows = hl.infer.exact(model, small(), folder=tmp_path / "rows")
    assert torch.equal(hl.infer.exact(model, small(), folder=tmp_path / "rows"), rows)


def test_an_extra_state_that_no_file_holds_is_refused_before_training(tmp_path: Path):
    conv = Extra()
    conv.extra = SimpleNamespace(a=1)
    model = hl.nn.GNN([conv])
    with pytest.raises(ValueError, match=r"convs\.0\._extra_state .*leave out out="):
        fit(small(), model, method(fanouts=(4,)), out=tmp_path)


def _register_parameter(model: nn.Module) -> None:
    model.register_parameter("late", nn.Parameter(torch.zeros(1)))


def _replace_layer(model: nn.Module) -> None:
    model.skip = nn.Linear(8, 4)


def _register_buffer(model: nn.Module) -> None:
    model.register_buffer("late", torch.zeros(1))


def late(hook: str, register: Callable[[nn.Module], None]) -> hl.Callback:
    """A callback that registers something in a hook, during or after the second epoch or before the first."""

    def act(self: hl.Callback, trainer: hl.Trainer, *event: Any) -> None:
        if (hook == "on_fit_start" or trainer.run.epochs == 2) and not hasattr(self, "done"):
            vars(self)["done"] = True
            register(trainer.model)

    return type("Late", (hl.Callback,), {hook: act})()


@pytest.mark.parametrize("hook", ["on_fit_start", "on_step_end", "on_epoch_end", "on_evaluate_end"])
@pytest.mark.parametrize(
    ("register", "name"), [(_register_parameter, "late"), (_replace_layer, "skip.weight"), (_register_buffer, "late")]
)
def test_weights_that_a_callback_registers_are_refused_at_once(register: Any, name: str, hook: str, tmp_path: Path):
    options: dict[str, Any] = {"out": tmp_path, "lr": 0.01, "checkpoint_s": 0.0, "show": False}
    callbacks = [late(hook, register)]
    trainer = hl.Trainer(make_annealed(), small(), method(), callbacks=callbacks, epochs=5, **options)
    if register is _register_buffer and hook == "on_fit_start":  # all epochs have it
        trainer.fit()
        return
    with pytest.raises(ValueError, match=f"{name} of the model was registered"):
        trainer.fit()
    assert trainer.run.epochs <= 3
    if register is not _register_buffer:  # the checkpoint is one that a run without the callback can resume
        assert fit(small(), make_annealed(), method(), epochs=4, resume=True, **options).epochs == 4


def test_a_buffer_that_a_module_registers_when_it_first_runs_is_kept(tmp_path: Path):
    class Late(Annealed):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(1))
            return super().forward(x, edge_index)

    assert fit(small(), Late(), method(), out=tmp_path, epochs=3).epochs == 3
