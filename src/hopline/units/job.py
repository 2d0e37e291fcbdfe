"""Makes the `Job` of a user's module: for a run, for its plan, and for a copy of its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from hopline.contract import Job
from hopline.core.examples import Examples, as_examples
from hopline.data.dataset import Dataset
from hopline.distributed.world import World
from hopline.nn.layered import Layered
from hopline.nn.whole_module import Whole, as_batch_model
from hopline.tasks.own_steps import OwnSteps
from hopline.tasks.settings import DEFAULT_TASKS, TaskSettings
from hopline.tasks.task import Task, TestStep, TrainStep


def make_job(
    module: nn.Module,
    data: Dataset,
    *,
    model: Layered | Whole | None = None,
    examples: Examples | Tensor | None = None,
    task: Task | TaskSettings | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    bf16: bool = False,
    world: World | None = None,
    say: Callable[[str], None] = print,
) -> Job:
    """The job of a user's module on a dataset.

    model: the module as the library runs it, called with a batch; None to make it here. examples: or their nodes; None
    for those of the task in the training split. task: as `bind_task` takes it. device: None for the CPU. world: None
    for a single process.
    """
    nodes = examples.nodes if isinstance(examples, Examples) else examples
    bound = bind_task(task, data, nodes)
    return Job(
        data=data,
        model=as_batch_model(module) if model is None else model,
        module=module,
        examples=examples_of(bound, data) if examples is None else as_examples(examples),
        task=bound,
        seed=seed,
        device=torch.device("cpu") if device is None else device,
        bf16=bf16,
        world=World.alone() if world is None else world,
        say=say,
    )


def examples_of(task: Task, data: Dataset, split: str = "train") -> Examples:
    """The examples of a task in a split of a dataset."""
    splits = {split: torch.empty(0, dtype=torch.int64), **data.splits}
    examples = as_examples(task.examples(splits, split))
    if split == "train" and not len(examples):
        _ = data.train_ids  # says what to type where the split is missing
        raise ValueError(f"examples() of {type(task).__name__} gave none to train on: return at least one node")
    return examples


def bind_task(
    task: Task | TaskSettings | None,
    data: Dataset,
    train_ids: Tensor | None = None,
    train_step: TrainStep | None = None,
    test_step: TestStep | None = None,
) -> Task:
    """The task of a run. Collective for a dataset in shards.

    task: the user's, or settings; None for the default of the labels. train_ids: None for the training split.
    train_step, test_step: functions of the user's
    in place of its loss and evaluation.
    """
    if task is None:
        task = DEFAULT_TASKS[data.task]
    if isinstance(task, TaskSettings):
        task = task.bind(data.label_facts(data.train_ids if train_ids is None else train_ids))
    if train_step is None and test_step is None:
        return task
    return OwnSteps(task, train_step, test_step)


def for_copy(job: Job, module: nn.Module, data: Dataset | None = None) -> Job:
    """A job like `job` for a copy of its module, which prints no messages. data: None for the dataset of `job`."""
    data = job.data if data is None else data
    return replace(job, model=as_batch_model(module), module=module, data=data, say=lambda text: None)
