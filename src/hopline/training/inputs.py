"""Checks of the arguments of a `Trainer`. Each raises a ValueError that says what to write instead.

A check returns its argument, with the default filled in where the user gave none.
"""

from __future__ import annotations

import inspect
import io
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hopline.contract import Job, Method
from hopline.core.graph import version_of
from hopline.data.checks import check_training
from hopline.data.dataset import Dataset
from hopline.data.fingerprint import sample
from hopline.distributed.gradients import CombinedBy, CombineGradients, Gradients, have_same_bits
from hopline.distributed.world import World
from hopline.methods.listed import DEFAULT, METHODS
from hopline.nn.layered import Layered
from hopline.nn.whole_module import is_layered, num_wrapped_ranks, unwrap
from hopline.shards.data import ShardedData
from hopline.tasks.settings import TASK_SETTINGS, TaskSettings
from hopline.tasks.task import Task, TestStep, TrainStep
from hopline.training.callbacks import Callback
from hopline.training.lr_schedule import MakeScheduler, OwnSchedule
from hopline.training.optimizer import MakeOptimizer, OwnOptimizer, describe_call
from hopline.training.run_facts import name_of
from hopline.training.settings import Schedule, TrainSettings
from hopline.units.job import examples_of
from hopline.util.config import check_names, find_by_other_name, kind_of

KEYWORDS_ELSEWHERE = {
    **dict.fromkeys(("metric", "metrics"), "task=hl.Classification(metric='macro_f1')"),
    **dict.fromkeys(
        ("loss", "loss_fn", "criterion"),
        "task=hl.Regression(loss='huber'), or train_step=(model, batch) -> mean loss over the batch's seeds",
    ),
    **dict.fromkeys(("class_weights", "label_smoothing"), "task=hl.Classification(class_weights='balanced')"),
    **dict.fromkeys(("logger", "loggers"), "callbacks=[...] of classes derived from hl.Callback"),
    **dict.fromkeys(("max_epochs", "num_epochs"), "epochs="),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "schedule="),
    **dict.fromkeys(("batch_size", "fanouts"), "method=hl.Sampled(fanouts=(10, 10), batch_size=1024)"),
}
"""What a Trainer has in place of keyword arguments that users of other libraries look for."""
NUM_SAMPLED_ROWS = 64
"""Rows of each array that are compared between epochs. So few that a memory-mapped file is read in no time."""


def check_keywords(trainer: type, settings: Mapping[str, Any]) -> None:
    parameters = inspect.signature(trainer).parameters.values()
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    check_names("Trainer", settings, [*keywords, *(field.name for field in fields(TrainSettings))], KEYWORDS_ELSEWHERE)


def check_world(world: World | None, device: str, *, device_is_given: bool) -> World:
    """The ranks that train together. Without `world=`: those of torch.distributed, or this process alone.

    device_is_given: whether the user has set `device=`, which must then agree with the world.
    """
    if world is None:
        return World.current(device)
    if not isinstance(world, World):
        raise ValueError(f"world must be a World such as hl.World.current(), not {type(world).__name__} {world!r}")
    if device_is_given and torch.device(device).type != world.device.type:
        raise ValueError(
            f"device={device!r} is asked for, and world= trains on {world.device}: leave one out, or give "
            f"world=hl.World.current({device!r})"
        )
    return world


def unwrap_model(model: nn.Module, world: World) -> nn.Module:
    """The user's module without the wrapper of DistributedDataParallel or the like.

    The Trainer sums gradients over its own ranks. So it must know of all ranks that the wrapper knows of.
    """
    num_ranks = num_wrapped_ranks(model)
    if num_ranks > 1 and world.size != num_ranks:
        raise ValueError(
            f"the model is wrapped for {num_ranks} ranks, and the Trainer knows of {world.size}: give it the plain "
            "model and leave out world=, or wrap it for all ranks of torch.distributed (docs/engines.md)"
        )
    model = unwrap(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    if any(p.dtype == torch.float16 for p in model.parameters()):
        raise ValueError(
            "the model's parameters are float16, whose range is too small to train in: give model.float(), and "
            "precision='bf16' for a forward pass in half precision"
        )
    return model


def check_hooks(job: Job) -> None:
    """Refuse hooks that were put on a model after the Trainer was made.

    A PyG model with hooks must run as a whole: running it layer by layer would not call them. The Trainer
    decided which of the two to do when it was made.
    """
    if is_layered(job.module) != isinstance(job.model, Layered):
        raise ValueError(
            f"hooks were put on {type(job.module).__name__} after the Trainer was made: put them on before"
        )


def check_extra_state(model: nn.Module) -> None:
    """Refuse a module whose `get_extra_state` returns what no file of weights and no checkpoint can hold."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            check_storable(f"{name} of the model (by get_extra_state)", value)


def check_storable(what: str, value: Any) -> None:
    """Refuse a value that torch.load would not read back without executing anything (`weights_only`)."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # torch and pickle fail in many ways
        raise ValueError(
            f"{what} holds more than tensors, numbers, strings, lists and dicts, which is all that files of a run can "
            "hold: change it, or leave out out="
        ) from error


def check_method(method: Method | str | None) -> Method:
    """The method, by its name too, or the default if there is none."""
    if isinstance(method, Method | None):
        return method or DEFAULT
    word = kind_of(method) if isinstance(method, type) else str(method).lower()
    kinds = {kind_of(kind): kind for kind in METHODS}
    if isinstance(method, str) and method in kinds:
        return kinds[method]()
    if isinstance(method, str) and (found := find_by_other_name(method, METHODS)) is not None:
        return found
    if method == "auto":
        raise ValueError(
            "method='auto' times the methods on the command line alone: type `hopline plan DATASET`, and give the "
            f"Trainer the one that it recommends, one of {', '.join(map(repr, kinds))}"
        )
    matches = get_close_matches(word, kinds, n=1)
    suggestion = f"hl.{(kinds[matches[0]] if matches else type(DEFAULT)).__name__}()"
    raise ValueError(f"method must be a Method such as {suggestion}, not {method!r}")


def check_gradients(gradients: Gradients | CombineGradients | None, method: Method, world: World) -> Gradients:
    """The object that combines gradients: the user's, one around the user's function, or the usual sum."""
    if isinstance(gradients, type):
        name = gradients.__name__
        raise ValueError(f"gradients must be an object, not the class {name}: write {name}(...)")
    if gradients is not None and not isinstance(gradients, Gradients):
        if not callable(gradients) or not _takes_two_arguments(gradients):
            raise ValueError(
                f"gradients must be a function of (parameters, world), or an object of a class derived from "
                f"hl.extend.Gradients, not {gradients!r}"
            )
        return CombinedBy(gradients)
    gradients = gradients or Gradients()
    if gradients.local and method.shares_steps and world.size > 1:
        raise ValueError(
            f"gradients={type(gradients).__name__}(...) gives every rank weights of its own, and the ranks of "
            f"{type(method).__name__} compute one step together: leave it out, or train by hl.Sampled"
        )
    return gradients


def _takes_two_arguments(function: CombineGradients) -> bool:
    """Whether a function can be called with two arguments. True if its signature is unknown, as of some built-ins."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def check_optimizer(
    optimizer: str | torch.optim.Optimizer | MakeOptimizer, settings: Mapping[str, Any]
) -> OwnOptimizer | None:
    """The user's optimizer. None for a name, which is one of the settings. settings: those that the user gave."""
    torch_classes = {name.lower(): name for name in torch.optim.__all__}
    if isinstance(optimizer, str):
        if optimizer.lower() in torch_classes and optimizer not in ("adam", "adamw", "sgd"):
            raise ValueError(
                f"optimizer={optimizer!r} is no name here: give torch.optim.{torch_classes[optimizer.lower()]}"
            )
        return None
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    if not is_made and not callable(optimizer):
        raise ValueError(
            "optimizer must be 'adam', 'adamw', 'sgd', a class such as torch.optim.RMSprop, or an optimizer over "
            f"model.parameters(), not {optimizer!r:.60}"
        )
    for name in ("lr", "weight_decay", "weight_decay_rest"):
        if is_made and name in settings:
            raise ValueError(f"{type(optimizer).__name__} has {name}= of its own: leave it out of the Trainer")
        if isinstance(optimizer, partial) and name in optimizer.keywords:
            raise ValueError(
                f"{describe_call(optimizer)} gets {name} from the Trainer: write "
                f"hl.Trainer(..., {name}={optimizer.keywords[name]!r}), and leave it out there"
            )
    return OwnOptimizer(optimizer)


def check_schedule(schedule: Schedule | str | MakeScheduler, every: Literal["epoch", "step"]) -> OwnSchedule | None:
    """The user's schedule. None for a `Schedule` or its name, which is one of the settings."""
    if every not in ("epoch", "step"):
        raise ValueError(f"schedule_every must be 'epoch' or 'step', not {every!r}")
    if isinstance(schedule, Schedule | str):
        if every == "step":
            raise ValueError(
                "schedule_every='step' is for schedulers of torch: give schedule=lambda optimizer: "
                "torch.optim.lr_scheduler.OneCycleLR(optimizer, ...), or leave it out"
            )
        return None
    if not callable(schedule):
        raise ValueError(
            f"schedule must be a function of the optimizer, not {type(schedule).__name__}: write schedule=lambda "
            f"optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10), or schedule='cosine'"
        )
    return OwnSchedule(schedule, every)


def check_settings(
    optimizer: str | torch.optim.Optimizer | MakeOptimizer,
    schedule: Schedule | str | MakeScheduler,
    given: Mapping[str, Any],
    *,
    out: Path | str | None,
) -> TrainSettings:
    """The settings of training. Fields that the user's own optimizer or schedule decides keep their defaults.

    optimizer, schedule: as they were checked. given: all other fields that the user gave.
    """
    values = dict(given)
    if isinstance(optimizer, str):
        values["optimizer"] = optimizer
    elif isinstance(optimizer, torch.optim.Optimizer):
        first_group = optimizer.param_groups[0]
        values |= {name: float(first_group[name]) for name in ("lr", "weight_decay") if name in first_group}
    if isinstance(schedule, Schedule | str):
        values["schedule"] = schedule
    checked = TrainSettings(**values)
    if checked.overwrite and out is None:
        raise ValueError("overwrite=True replaces the run in out=: give out=, or leave it out")
    return checked


def check_task(task: Task | TaskSettings | str | None) -> Task | TaskSettings | None:
    """The task as an object. None: the default of the labels."""
    if task is None or isinstance(task, Task | TaskSettings):
        return task
    if isinstance(task, str) and task in TASK_SETTINGS:
        return TASK_SETTINGS[task]()
    names = ", ".join(map(repr, TASK_SETTINGS))
    raise ValueError(
        f"task must be one of {names}, an hl.Classification, an hl.Regression or an hl.extend.Task, not {task!r}"
    )


def check_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks as a new list."""
    if isinstance(callbacks, Callback):
        raise ValueError(f"callbacks must be a list: write callbacks=[{type(callbacks).__name__}(...)]")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks must be objects of classes derived from hl.Callback, not {callback!r}")
    return list(callbacks)


def check_data(
    data: Dataset,
    task: Task,
    settings: TrainSettings,
    train_step: TrainStep | None,
    test_step: TestStep | None,
) -> None:
    """Refuse splits and labels that the run cannot train on, or evaluate."""
    valid_ids = data.splits.get("valid")
    has_valid = valid_ids is not None and valid_ids.numel() > 0
    if settings.patience is not None and not has_valid:
        raise ValueError(
            f"patience={settings.patience} needs a validation metric, and the dataset has no 'valid' split: "
            "add one, or leave out patience="
        )
    splits_to_check = []
    if train_step is None:
        splits_to_check.append("train")
    if test_step is None:
        splits_to_check += ["valid", "test"]
    splits = {name: examples_of(task, data, name) for name in splits_to_check if name in ("train", *data.splits)}
    check_training(data, splits)


def check_same_weights(gradients: Gradients, model: nn.Module, world: World, epoch: int) -> None:
    """Refuse gradients of the user's own that gave ranks different weights in an epoch. Collective.

    Only the first rank's weights are evaluated, so all ranks must have the same. The usual sum does
    give the same.
    """
    is_usual_sum = type(gradients) is Gradients
    if is_usual_sum or have_same_bits(model.parameters(), world):
        return
    raise ValueError(
        f"after epoch {epoch} the ranks have different weights, and {name_of(gradients)} combines their "
        "gradients: let combine leave the same gradients on every rank, added in the same order, or bring the "
        "weights together in after_epoch"
    )


class InPlaceChangeCheck:
    """Notices if a dataset is changed in place.

    Methods and GPUs have copies of it, which would be out of date. Changes by torch are all noticed. Torch does not
    count those by NumPy or `.data`: of them the check sees what it finds in `NUM_SAMPLED_ROWS` rows of an array.
    """

    def __init__(self, data: Dataset) -> None:
        # Weak: once the dataset is placed on a GPU, the original may be freed.
        self._data = weakref.ref(data)
        self._marks = _marks_of(data)

    def check(self) -> None:
        """Raise a ValueError if an array of the dataset was changed since this object was made."""
        data = self._data()
        if data is None:
            return
        changed = [name for name, mark in _marks_of(data).items() if mark != self._marks.get(name)]
        if changed:
            raise ValueError(
                f"{changed[0]} of the dataset was changed in place after the Trainer was made, which has copies of it: "
                "make a new Trainer after the change"
            )


class WeightsCheck:
    """Notices parameters and buffers that are registered, replaced or removed while a model is trained.

    The optimizer would not train new ones, and the weights of earlier epochs would not fit the model.
    """

    def __init__(self, model: nn.Module) -> None:
        """model: as the optimizer was made for it."""
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._names: set[str] | None = None
        """Names in the `state_dict` after the first epoch: a module may register buffers when it first runs."""

    def check(self, *, is_trained: bool) -> None:
        """Raise a ValueError if there are others now. is_trained: whether an epoch has been trained."""
        parameters = dict(self._model.named_parameters())
        changed = [n for n in {**self._parameters, **parameters} if parameters.get(n) is not self._parameters.get(n)]
        if is_trained:
            names = set(self._model.state_dict(keep_vars=True))
            self._names = self._names or names
            changed += sorted(names ^ self._names)
        if changed:
            raise ValueError(
                f"{changed[0]} of the model was registered, replaced or removed after training had begun: neither the "
                "optimizer nor the weights of earlier epochs know it; register it before the Trainer is made, and "
                "change its values in place"
            )


def _marks_of(data: Dataset) -> dict[str, tuple[int | None, str]]:
    """By name of an array of the dataset: its version, and a checksum of some of its rows. Shards are not watched."""
    if isinstance(data, ShardedData):
        return {}
    arrays = data.graph.named_arrays if data.y is None else {**data.graph.named_arrays, "labels": data.y}
    array_marks = {name: (version_of(array), sample(array, NUM_SAMPLED_ROWS)) for name, array in arrays.items()}
    tables = {f"table {name!r}": table for name, table in data.tables.items()}
    storages = {name: table.storage() for name, table in tables.items()}  # None: not one tensor
    samples = {name: "" if storage is None else sample(storage, NUM_SAMPLED_ROWS) for name, storage in storages.items()}
    return array_marks | {name: (table.version, samples[name]) for name, table in tables.items()}
