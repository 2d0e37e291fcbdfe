"""Makes the `Job` of a user's module: for a run, for its plan, and for a copy of its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from hopline.contract import Job, TrainStep
from hopline.data.dataset import Dataset
from hopline.distributed.world import World
from hopline.nn.gnn import GNN
from hopline.nn.whole_module import Whole, as_batch_model
from hopline.units.losses import check_loss_of, supervised_loss


def make_job(
    module: nn.Module,
    data: Dataset,
    *,
    model: GNN | Whole | None = None,
    train_ids: Tensor | None = None,
    train_step: TrainStep | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    bf16: bool = False,
    world: World | None = None,
    say: Callable[[str], None] = print,
) -> Job:
    """The job of a user's module on a dataset.

    model: the module as the library runs it, called with a batch; None to make it here. train_ids: None for
    the training split. train_step: None for the usual loss of the task. device: None for the CPU. world:
    None for a single process.
    """
    step = supervised_loss(data.task, data.num_classes) if train_step is None else check_loss_of(train_step)
    device = torch.device("cpu") if device is None else device
    return Job(
        data=data,
        model=as_batch_model(module) if model is None else model,
        module=module,
        train_ids=data.train_ids if train_ids is None else train_ids,
        train_step=step,
        usual_loss=train_step is None,
        seed=seed,
        device=device,
        bf16=bf16,
        world=World.alone() if world is None else world,
        say=say,
    )


def for_copy(job: Job, module: nn.Module, data: Dataset | None = None) -> Job:
    """A job like `job` for a copy of its module, which prints no messages. data: None for the dataset of `job`."""
    data = job.data if data is None else data
    return replace(job, model=as_batch_model(module), module=module, data=data, say=lambda text: None)
