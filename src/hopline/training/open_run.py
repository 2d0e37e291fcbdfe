"""What a run does before its first step, apart from its folder (`run_folder`) and its checkpoint.

initialise_weights   parameters of lazy layers; the same weights on all ranks
make_schedule        the learning rate over the epochs, by the settings or by the user's function
describe_run         what the user should know: placement, plan, how a module without layers runs
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hopline import inference as infer
from hopline.contract import Job
from hopline.data.placement import describe
from hopline.device.snapshots import evaluating
from hopline.metrics import Mode
from hopline.nn.whole_module import Whole
from hopline.nn.whole_module_probe import initialise
from hopline.shards.data import ShardedData
from hopline.training.callbacks import Callback, EarlyStop
from hopline.training.evaluation import whole_notes
from hopline.training.inputs import check_storable
from hopline.training.lr_schedule import OwnScheduler, Scheduler
from hopline.training.report_callbacks import ShowProgress, WatchBudget, WatchHistory, WatchPipeline
from hopline.util.host import host_memory

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


def initialise_weights(job: Job) -> None:
    """Create the parameters of lazy layers by a forward pass. All ranks get the first rank's weights."""
    has_lazy_layers = any(isinstance(p, nn.UninitializedParameter) for p in job.module.parameters())
    if has_lazy_layers:
        if isinstance(job.model, Whole):
            # A module without layers. `infer.exact` would run it on the whole graph, not on a tiny one.
            with evaluating(job.model):
                initialise(job.model, job.data.x, job.data.graph.edge)
        else:
            infer.exact(job.model, job.data, job.train_ids[:1], device=job.device)
    # What modules add by `get_extra_state` need be no tensors.
    job.world.broadcast_tensors(w for w in job.module.state_dict().values() if isinstance(w, Tensor))


def make_schedule(trainer: Trainer) -> Scheduler | OwnScheduler:
    """The schedule of the optimizer's rate."""
    settings = trainer.settings
    if trainer.own_schedule is None:
        return Scheduler(settings.schedule, trainer.optimizer, settings.epochs)
    # Without a validation split a plateau goes by the loss.
    mode: Mode | None = trainer.run_metric.mode if trainer.has("valid") else "min"
    schedule = trainer.own_schedule.scheduler(trainer.optimizer, mode)
    if schedule.plateau is not None and settings.evaluate == "async":
        raise ValueError("ReduceLROnPlateau needs each evaluation before the next epoch: set evaluate='blocking'")
    if trainer.checkpoints.path is not None:
        check_storable(f"the state of {trainer.own_schedule.name}", schedule.state_dict())
    return schedule


def callbacks_of(trainer: Trainer, checkpoint: dict[str, Any] | None) -> list[Callback]:
    """The callbacks that the settings add. Opens the report of the run folder.

    checkpoint: the state to resume from. None for a new run.
    """
    callbacks: list[Callback] = []
    if trainer.settings.patience is not None:
        callbacks.append(EarlyStop(trainer.settings.patience))
    callbacks += trainer.folder.begin(trainer, checkpoint)
    report = trainer.folder.report
    callbacks += [WatchBudget(report), WatchPipeline(report), WatchHistory(report)]
    if trainer.settings.show and trainer.world.rank == 0:
        callbacks.append(ShowProgress())
    return callbacks


def describe_run(trainer: Trainer) -> None:
    """Say where the data lie, what a plan has decided, and how a module without layers runs."""
    if trainer.device.type == "cuda" and not isinstance(trainer.data, ShardedData):
        trainer.say(describe(trainer.data))
    plan = trainer.plan
    if plan is not None:
        for line in plan.lines():
            trainer.say(line, logging.WARNING if line == plan.price_warning else logging.INFO)
        warning = plan.excess_warning(host_memory().total)
        if warning:
            trainer.say(warning, logging.WARNING)
    notes = whole_notes(trainer.job, trainer.method, trainer.measure.part_hops, evaluates=trainer.evaluates_exactly)
    if notes.approximation:
        trainer.say(notes.approximation, logging.WARNING)
    if notes.evaluation:
        trainer.say(notes.evaluation)
