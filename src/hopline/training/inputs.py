"""Checks of the arguments of a `Trainer`. Each raises a ValueError that says what to write instead.

A check returns its argument, with the default filled in where the user gave none.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from difflib import get_close_matches
from typing import get_args

import torch
from torch import nn

from hopline.contract import Job, Method, Work
from hopline.data.dataset import Dataset
from hopline.distributed.gradients import CombinedBy, CombineGradients, Gradients
from hopline.distributed.world import World
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Sampled
from hopline.metrics import Mode
from hopline.nn.gnn import GNN
from hopline.nn.whole_module import is_layered, num_wrapped_ranks, unwrap
from hopline.shards.data import ShardedData
from hopline.training.callbacks import Callback
from hopline.util.config import kind_of


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
    return model


def check_hooks(job: Job) -> None:
    """Refuse hooks that were put on a model after the Trainer was made.

    A PyG model with hooks must run as a whole: running it layer by layer would not call them. The Trainer
    decided which of the two to do when it was made.
    """
    if is_layered(job.module) != isinstance(job.model, GNN):
        raise ValueError(
            f"hooks were put on {type(job.module).__name__} after the Trainer was made: put them on before"
        )


def check_method(method: Method | None) -> Method:
    """The method, or `Sampled()` if there is none."""
    if isinstance(method, Method | None):
        return method or Sampled()
    word = kind_of(method) if isinstance(method, type) else str(method).lower()
    class_names = {kind_of(kind): kind.__name__ for kind in (Sampled, Historical, FullBatch)}
    matches = get_close_matches(word, class_names, n=1)
    suggestion = class_names[matches[0]] if matches else "Sampled"
    if isinstance(method, type):
        sort = "the class"
    elif isinstance(method, str):
        sort = "the string"
    else:
        sort = "the object"
    raise ValueError(f"method must be a Method such as hl.{suggestion}(), not {sort} {method!r}")


def bind_method(method: Method, job: Job) -> Work:
    """Bind a method to a job, and check what it returns."""
    work = method.bind(job)
    if not isinstance(work, Work):
        raise ValueError(
            f"{type(method).__name__}.bind returned a {type(work).__name__}: derive its class from hl.extend.Work, "
            "with units(self, epoch, done=0, examples=0)"
        )
    return work


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
    if gradients.local and isinstance(method, FullBatch) and world.size > 1:
        raise ValueError(
            f"gradients={type(gradients).__name__}(...) gives every rank weights of its own, and the ranks of "
            "hl.FullBatch compute one step together: leave it out, or train by hl.Sampled"
        )
    return gradients


def _takes_two_arguments(function: CombineGradients) -> bool:
    """Whether a function can be called with two arguments.

    True if its signature is unknown, as of some built-ins.
    """
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def check_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks as a new list."""
    if isinstance(callbacks, Callback):
        raise ValueError(f"callbacks must be a list: write callbacks=[{type(callbacks).__name__}(...)]")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks must be objects of classes derived from hl.Callback, not {callback!r}")
    return list(callbacks)


def check_metric_mode(mode: Mode | None, *, own_metric: bool) -> Mode | None:
    """The mode of the metric. own_metric: whether the user's own code computes the metrics."""
    if mode is not None and mode not in get_args(Mode):
        raise ValueError(f"metric_mode must be 'max' or 'min', not {mode!r}")
    if mode == "min" and not own_metric:
        raise ValueError("metric_mode='min' is for a metric of your own: give test_step=, or leave it out")
    return mode


class InPlaceChangeCheck:
    """Notices if a dataset is changed in place.

    Methods and GPUs have copies of it, which would be out of date.
    """

    def __init__(self, data: Dataset) -> None:
        # Weak: once the dataset is placed on a GPU, the original may be freed.
        self._data = weakref.ref(data)
        self._versions = _versions_of(data)

    def check(self) -> None:
        """Raise a ValueError if an array of the dataset was changed since this object was made."""
        data = self._data()
        if data is None:
            return
        versions = _versions_of(data)
        changed = [name for name, version in versions.items() if version != self._versions.get(name)]
        if changed:
            raise ValueError(
                f"{changed[0]} of the dataset was changed in place after the Trainer was made, which has copies of it: "
                "make a new Trainer after the change"
            )


def _versions_of(data: Dataset) -> dict[str, int | None]:
    """The number of in-place changes of each array of the dataset, by its name. Shards are not watched."""
    if isinstance(data, ShardedData):
        return {}
    table_versions = {f"table {name!r}": table.version for name, table in data.tables.items()}
    return {**data.graph.versions, **table_versions}
