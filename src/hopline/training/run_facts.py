"""Facts about a run in plain values, for three readers.

    run_facts         sizes, model, method, device: the record "start" of the report
    stored_settings   all settings, and which were changed: config.json
    settings_of       data, method, settings, model: compared when a run is resumed (`checkpoint.identity`),
    Fingerprints      and so are the data's arrays, the model's code and the user's

`check_trainer_ranks` compares the ranks of a run, before it begins.

The report shows the method as a plan has changed it. The other two have the method as the user asked for
it, since a plan changes nothing of what is learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hopline.contract import Method
from hopline.data.fingerprint import before_features
from hopline.data.inputs import Inputs
from hopline.distributed.gradients import CombinedBy, Gradients
from hopline.methods.listed import DEFAULT
from hopline.metrics import Mode, find
from hopline.nn.structure import parts_of, parts_of_function
from hopline.nn.whole_module import edge_arrays_read
from hopline.report.settings import changed_keys
from hopline.tasks.settings import TaskSettings
from hopline.tasks.task import Task, TestStep, TrainStep
from hopline.units.job import examples_of
from hopline.units.rank_facts import check_ranks, settings_or_repr
from hopline.util.config import kind_of, to_dict

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """The sizes of dataset and model, the method as a plan has it, the device and the number of ranks."""
    data = trainer.data
    model = trainer.model
    method: dict[str, Any] = {"kind": kind_of(type(trainer.method))} | settings_or_repr(trainer.method)
    own_gradients = {} if type(trainer.gradients) is Gradients else {"gradients": gradients_of(trainer.gradients)}
    device = str(trainer.device)
    if trainer.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(trainer.device)})"
    convs = getattr(model, "convs", None)  # of hl.nn.GNN and of PyG's models
    layers = [type(conv).__name__ for conv in convs] if isinstance(convs, nn.ModuleList) else []
    return {
        "dataset": data.name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "num_features": data.num_features,
        "num_classes": data.num_classes,
        "num_seeds": trainer.num_seeds,
        "model": type(model).__name__,
        "layers": layers,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "method": method,
        "device": device,
        "num_ranks": trainer.world.size,
        **own_gradients,
    }


def name_of(gradients: Gradients) -> str:
    """A name for the way in which gradients are combined: of the user's function or class, or "sum"."""
    if isinstance(gradients, CombinedBy):
        return getattr(gradients.function, "__qualname__", type(gradients.function).__name__)
    return "sum" if type(gradients) is Gradients else type(gradients).__name__


def gradients_of(gradients: Gradients) -> dict[str, Any]:
    has_settings = type(gradients) not in (Gradients, CombinedBy)
    return {"kind": name_of(gradients)} | (settings_or_repr(gradients) if has_settings else {})


def own_settings(trainer: Trainer) -> dict[str, str]:
    """Names of the optimizer and the schedule of the user's own, in place of those settings."""
    own = {} if trainer.own_optimizer is None else {"optimizer": trainer.own_optimizer.name}
    if trainer.own_schedule is not None:
        own["schedule"] = f"{trainer.own_schedule.name}, after every {trainer.own_schedule.every}"
    return own


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The data, method, settings, gradients and model of a run, as the user asked for them."""
    method = trainer.requested_method
    return {
        "data": trainer.data.name,
        "method": {"kind": type(method).__name__} | settings_or_repr(method),
        "train": to_dict(trainer.settings) | own_settings(trainer),
        "gradients": gradients_of(trainer.gradients),
        "task": task_facts(trainer.requested_task),
        "model": repr(trainer.model),
    }


def stored_settings(trainer: Trainer) -> dict[str, Any]:
    """The content of config.json.

    "config": all settings. "changed": the keys without their defaults. "inputs": the form of the training data.
    "contents": checksums of the training data.
    """
    settings = settings_of(trainer)
    data = trainer.data
    inputs = Inputs.of(data, edge_arrays_read(trainer.job.model, data.edge_arrays), trainer.task).to_dict()
    of_data = {"inputs": inputs, "contents": before_features(trainer.fingerprints.contents, data)}
    own_gradients: dict[str, Any] = {}
    changed: list[str] = []
    if type(trainer.gradients) is not Gradients:
        own_gradients = {"gradients": settings["gradients"]}
        changed = [f"gradients.{key}" for key in settings["gradients"]]
    own = own_settings(trainer)
    if trainer.config is not None:
        config = to_dict(trainer.config) | own_gradients | ({"own": own} if own else {})
        return {"config": config, "changed": [*changed_keys(trainer.config), *changed], **of_data}

    changed += ["data", "model", *(f"train.{key}" for key in [*changed_keys(trainer.settings), *own])]
    method = trainer.requested_method
    has_repr_only = "repr" in settings["method"]
    if has_repr_only or type(method) is not type(DEFAULT):
        changed.append("method.kind")
    method_keys = ["repr"] if has_repr_only else changed_keys(method)
    changed += [f"method.{key}" for key in method_keys]
    return {"config": settings, "changed": changed, **of_data}


@dataclass(frozen=True)
class Fingerprints:
    """Texts by name that are equal if data and code are. Empty for a run without a folder.

    Taken before training, because a module may count something while it trains.
    """

    contents: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of "model", apart from its weights, and of the user's functions, classes and objects."""

    @classmethod
    def of(
        cls, trainer: Trainer, train_step: TrainStep | None, test_step: TestStep | None, gradients: Any
    ) -> Fingerprints:
        """The fingerprints of a trainer's model and data, and of the user's code.

        train_step, test_step, gradients: as they were given.
        """
        model = trainer.model
        own: dict[str, Any] = {
            "train_step": train_step,
            "test_step": test_step,
            "gradients": gradients,
            "method": type(trainer.requested_method),
            "Trainer": type(trainer),
        }
        if isinstance(trainer.requested_task, Task):
            own["task"] = trainer.requested_task
        sampler = getattr(trainer.requested_method, "sampler", None)
        if sampler is not None:
            own["sampler"] = type(sampler)
        if trainer.own_optimizer is not None:
            own["optimizer"] = trainer.own_optimizer.parts(model)
        if trainer.own_schedule is not None:
            own["schedule"] = trainer.own_schedule.make
        code = {name: parts_of_function(name, what, model) for name, what in own.items()}
        return cls(trainer.data.contents(), {"model": parts_of(model), **code})


def check_trainer_ranks(
    trainer: Trainer,
    method: Method,
    train_step: TrainStep | None,
    test_step: TestStep | None,
    metric_mode: Mode | None,
    *,
    owns_world: bool,
) -> None:
    """Refuse ranks whose Trainers were given different things. Collective, and free for a single process.

    `out`, callbacks, the placement and `config` are not compared. method: as it was given, since defaults depend on
    the model and the graph, whose difference shall be named. owns_world: False for the world of a user, who may go
    on with it.
    """
    budget = trainer.budget
    settings = {
        "method": {"kind": type(method).__name__} | settings_or_repr(method),
        **to_dict(trainer.settings),
        **own_settings(trainer),
        "budget": None if budget is None else to_dict(budget),
        "gradients": gradients_of(trainer.gradients),
        "train_step": _function_name(train_step),
        "test_step": _function_name(test_step),
        "metric_mode": metric_mode,
        "task": task_facts(trainer.requested_task),
    }
    data = trainer.data
    splits = {f"the split {name!r}": ids for name, ids in data.splits.items()}
    if isinstance(trainer.requested_task, Task) and trainer.world.size > 1:
        examples = examples_of(trainer.requested_task, data)
        splits["the nodes of the examples"] = examples.nodes
        if examples.y is not None:
            splits["the labels of the examples"] = examples.y
    try:
        check_ranks(trainer.world, f"hl.{type(trainer).__name__}", data, splits, settings, trainer.model)
    except ValueError:
        if owns_world:
            trainer.world.close()
        raise


def task_facts(task: Task | TaskSettings | None) -> dict[str, Any] | str | None:
    """A task as the user asked for it, in plain JSON values. A metric that is a function is named."""
    if task is None:
        return None
    if isinstance(task, Task):
        return type(task).__qualname__
    facts = {"kind": kind_of(type(task))} | to_dict(task)
    if callable(facts["metric"]):
        facts["metric"] = find(facts["metric"]).name
    return facts


def _function_name(function: Callable[..., Any] | None) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)
