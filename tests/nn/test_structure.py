"""Fingerprints of models: another one wherever another model computes other outputs, the same in every process."""

from __future__ import annotations

import argparse
import enum
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, MessagePassing, SAGEConv
from torch_geometric.nn.models import SGFormer

import hopline as hl
from hopline import infer
from hopline.nn.probe import copy_module
from hopline.nn.structure import hash_of_parts, opaque_part, parts_of, parts_of_function, structure_of
from tests.support.runs import fit, method, small

FACTOR = 2.0
SETTINGS = SimpleNamespace(factor=2.0, epochs=5)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass
class Options:
    factor: float


class Scale:
    """A callable object, with its setting in a private attribute."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, h: Tensor) -> Tensor:
        return h * self._factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


def by_global(h: Tensor) -> Tensor:
    return h * FACTOR


def by_named_setting(h: Tensor) -> Tensor:
    return h * SETTINGS.factor


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda h: h * factor


def with_default(factor: float) -> Callable[[Tensor], Tensor]:
    def scaled(h: Tensor, factor: float = factor, *, shift: float = factor) -> Tensor:
        return h * factor + shift

    return scaled


class Convs(nn.Module):
    """A module with attributes: whatever is given."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.conv = SAGEConv(8, 4)
        vars(self).update(attributes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


class OwnConv(MessagePassing):
    """PyG writes generated functions into such a class, whose files have other names in every process."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def hooked(factor: float, kind: str = "forward") -> nn.Module:
    model = Convs()
    if kind == "forward":
        model.conv.register_forward_hook(lambda module, inputs, output: output * factor)  # type: ignore[operator]
    elif kind == "backward":
        model.conv.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * factor,))
    else:
        model.conv.register_message_forward_hook(lambda module, inputs, output: output * factor)  # type: ignore[operator]
    return model


def buffered(factor: float) -> nn.Module:
    model = Convs()
    model.register_buffer("scale", torch.tensor([1.0, factor]), persistent=False)
    return model


class Times(nn.Module):
    """A parametrization."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def parametrized(factor: float) -> nn.Module:
    model = Convs()
    nn.utils.parametrize.register_parametrization(model.conv.lin_l, "weight", Times(factor))
    return model


class Scripted(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.factor = factor
        self.table = torch.tensor([factor])
        self.factors = [factor]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(x) * self.factor * self.table * self.factors[0]


def traced(factor: float) -> nn.Module:
    example = (torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64))
    return torch.jit.trace(Scripted(factor), example)  # type: ignore[return-value]


def hidden_layer(factor: float) -> nn.Module:
    """Layers in a plain list are no part of the `state_dict`."""
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, factor)
    nn.init.zeros_(layer.bias)
    return Convs(layers=[layer])


def dynamic_class(factor: float) -> nn.Module:
    return type("Dynamic", (Convs,), {"factor": factor})()


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "number": lambda factor: Convs(factor=factor),
    "private": lambda factor: Convs(_factor=factor),
    "closure": lambda factor: hl.nn.GNN([SAGEConv(8, 4)], act=scaled_by(factor)),
    "defaults": lambda factor: Convs(act=with_default(factor)),
    "partial": lambda factor: hl.nn.GNN([SAGEConv(8, 4)], act=functools.partial(F.leaky_relu, negative_slope=factor)),
    "partial of an own function": lambda factor: Convs(act=functools.partial(scaled_by(factor), torch.ones(1))),
    "lambda of one line": lambda factor: Convs(act=(lambda h: h + 1) if factor == 2 else (lambda h: h - 1)),
    "bound method": lambda factor: Convs(act=Scale(factor).__call__),
    "callable object": lambda factor: Convs(act=Scale(factor)),
    "object": lambda factor: Convs(options=Options(factor)),
    "namespace": lambda factor: Convs(args=argparse.Namespace(factor=factor)),
    "slots": lambda factor: Convs(options=Slotted(factor)),
    "enum": lambda factor: Convs(kind=Kind(int(factor) - 1)),
    "tensor": lambda factor: Convs(scale=torch.tensor(factor)),
    "sparse tensor": lambda factor: Convs(scale=torch.tensor([[0, factor]]).to_sparse()),
    "tensor in a list": lambda factor: Convs(scales=[torch.tensor(factor)]),
    "array": lambda factor: Convs(scale=np.array([factor])),
    "set": lambda factor: Convs(names={"a", "b", "c", str(factor)}),
    "dtype": lambda factor: Convs(dtype=torch.float32 if factor == 2 else torch.float64),
    "buffer that is not persistent": buffered,
    "forward hook": hooked,
    "backward hook": lambda factor: hooked(factor, "backward"),
    "hook of PyG": lambda factor: hooked(factor, "message"),
    "parametrization": parametrized,
    "spectral_norm": lambda factor: nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(2, 2), n_power_iterations=int(factor))
    ),
    "hidden layer": hidden_layer,
    "class attribute": dynamic_class,
    "compiled function": lambda factor: Convs(act=torch.compile(scaled_by(factor))),
    "scripted": lambda factor: torch.jit.script(Scripted(factor)),  # type: ignore[dict-item]
    "traced": traced,
    "scripted function": lambda factor: Convs(act=torch.jit.trace(scaled_by(factor), torch.ones(2))),
}
"""A model by a number. Two numbers give two models with the same weights and other outputs."""


def make(name: str, factor: float) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](factor)


@pytest.mark.parametrize("name", MODELS)
def test_another_value_is_another_model(name: str):
    assert structure_of(make(name, 2.0)) == structure_of(make(name, 2.0))
    assert structure_of(make(name, 3.0)) != structure_of(make(name, 2.0))
    assert opaque_part(parts_of(make(name, 2.0))) is None


def test_globals_that_code_names_are_compared_and_others_are_not(monkeypatch: pytest.MonkeyPatch):
    acts = (by_global, by_named_setting)
    before = [structure_of(Convs(act=act)) for act in acts]
    monkeypatch.setattr(SETTINGS, "epochs", 9)
    assert [structure_of(Convs(act=act)) for act in acts] == before
    monkeypatch.setattr(SETTINGS, "factor", 3.0)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert all(structure_of(Convs(act=act)) != old for act, old in zip(acts, before, strict=True))


def test_base_classes_and_functions_that_are_called_are_compared():
    names = parts_of(type("Derived", (Convs,), {"act": staticmethod(by_global)})())
    assert {"Convs.forward source", "Derived.act.0 global FACTOR"} <= names.keys()


def test_weights_modes_and_devices_are_no_part_of_it():
    torch.manual_seed(1)
    model = Convs(device=torch.device("cpu"))
    model.add_module("normed", nn.utils.spectral_norm(nn.Linear(2, 2)))
    vars(model)["weights"] = list(model.conv.parameters())  # as SGFormer of PyG has them
    vars(model)["view"] = model.conv.lin_l.weight.data[0]
    before = structure_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    vars(model)["device"] = torch.device("cuda")
    assert structure_of(model.eval()) == before
    vars(model)["device"] = "cpu"
    on_cpu = structure_of(model)
    vars(model)["device"] = "cuda:1"
    assert structure_of(model) == on_cpu
    assert structure_of(SGFormer(3, 4, 2)) == structure_of(SGFormer(3, 4, 2))


def test_a_model_is_the_same_after_it_has_run_and_in_a_copy():
    data = small()
    for convs in ([SAGEConv(8, 4)], [GCNConv(8, 4)], [OwnConv()]):
        model = hl.nn.GNN(convs, act=scaled_by(2.0))
        before = parts_of(model)
        infer.exact(model, data)
        next(iter(hl.Sampled(fanouts=(2,)).loader(data, torch.arange(3), model=model)))  # puts a hook on it
        assert parts_of(model) == before
        assert parts_of(copy_module(model)) == before


def print_fingerprints() -> None:
    for name in MODELS:
        print(name, structure_of(make(name, 2.0)), sep="=")
    print("own", structure_of(OwnConv()), sep="=")


def test_fingerprints_are_the_same_in_every_process(capfd: pytest.CaptureFixture[str]):
    print_fingerprints()
    ours = capfd.readouterr().out.splitlines()
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": f"{root / 'src'}:{root}"}
    program = "from tests.nn.test_structure import print_fingerprints; print_fingerprints()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, check=True)
    assert capfd.readouterr().out.splitlines() == ours
    assert len(ours) == len(MODELS) + 1


# ---- those who compare


def test_what_cannot_be_compared_is_refused_by_name(tmp_path: Path):
    class Guard:
        """Can be copied, and not be taken apart."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
            return self

    def locked() -> nn.Module:
        conv = SAGEConv(8, 4)
        vars(conv)["guard"] = Guard()
        return hl.nn.GNN([conv])

    data = small()
    with pytest.raises(ValueError, match=r"convs\.0\.guard\.lock \(lock\) of GNN .*leave out folder="):
        infer.exact(locked(), data, folder=tmp_path / "rows")
    how = method(fanouts=(4,))
    fit(data, locked(), how, out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"another model: convs\.0\.guard\.lock \(lock\)"):
        fit(data, locked(), how, out=tmp_path / "run", resume=True, epochs=3)


def test_a_run_is_not_resumed_with_another_buffer(tmp_path: Path):
    data = small()
    how = method(fanouts=(4,))
    fit(data, buffered(2.0), how, out=tmp_path)
    with pytest.raises(ValueError, match=r"another model: .* scale is torch\.float32"):
        fit(data, buffered(3.0), how, out=tmp_path, resume=True, epochs=3)
    assert fit(data, buffered(2.0), how, out=tmp_path, resume=True, epochs=3).epochs == 3


class Experiment:
    """A loss as a method, of an object that holds much more."""

    def __init__(self, factor: float, started: float) -> None:
        self.factor = factor
        self.started = started
        self.model = Convs()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._scaled(model(batch).sum())

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss * self.factor


def test_of_the_object_of_a_method_only_what_it_reads_is_compared():
    def parts(factor: float, started: float) -> str:
        experiment = Experiment(factor, started)
        return hash_of_parts(parts_of_function("train_step", experiment.loss, experiment.model))

    assert parts(2.0, 1.0) == parts(2.0, 5.0) != parts(3.0, 1.0)
