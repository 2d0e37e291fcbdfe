"""`Trainer`: one training loop for all methods.

    fit
        open the run folder, make the optimizer, find a checkpoint     _open
        describe the run, resume if there is a checkpoint              _begin
        for each epoch:                                                _train_epochs
            for each step:                                             _train_epoch
                unit.forward_backward, for the units of the step       step
                combine the gradients of the ranks
                the optimizer's step
                unit.commit, for the units of the step
                callbacks, late results of evaluations, checkpoint
            callbacks, validation, learning rate, checkpoint
        load the best weights, and test them                           _test

The loop does not know which method trains. A method yields *units*: work that ends in gradients, such as a
batch (`contract.Unit`). A step runs `settings.accumulate` of them.

With evaluate="async" a thread validates while training continues, so results come late. The evaluator acts on
them (`validation.Evaluator`): the loop asks it to after each step and each epoch, and `all_results` waits for the
rest. If a late result ends the run, the exception `RunEnded` leaves the loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.guard import limit_cuda_memory
from hopline.budget.plan import Budget
from hopline.contract import Method, Unit, in_groups
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.placement_settings import Placement
from hopline.device.snapshots import preserve_all_rng, preserve_modes
from hopline.distributed.gradients import CombineGradients, Gradients
from hopline.distributed.world import World
from hopline.metrics import Mode
from hopline.nn.whole_module import as_batch_model
from hopline.tasks.settings import TaskSettings
from hopline.tasks.task import Task, TestStep, TrainStep
from hopline.training.async_evaluation import AsyncEvaluator, check_async
from hopline.training.best_weights import KeepWeights
from hopline.training.binding import bind
from hopline.training.callbacks import Callback, EpochEnd, Run, StepEnd
from hopline.training.checkpoint import Checkpoints
from hopline.training.evaluation import Measure, check_whole, part_hops_of
from hopline.training.inputs import (
    InPlaceChangeCheck,
    WeightsCheck,
    check_callbacks,
    check_data,
    check_extra_state,
    check_gradients,
    check_hooks,
    check_keywords,
    check_method,
    check_optimizer,
    check_same_weights,
    check_schedule,
    check_settings,
    check_task,
    check_world,
    unwrap_model,
)
from hopline.training.lr_schedule import MakeScheduler
from hopline.training.metric import RunMetric
from hopline.training.open_run import callbacks_of, describe_run, initialise_weights, make_schedule
from hopline.training.optimizer import MakeOptimizer, Update, optimizer_of
from hopline.training.rank_steps import align_groups, total_size, total_weight
from hopline.training.run_facts import Fingerprints, check_trainer_ranks
from hopline.training.run_folder import RunFolder
from hopline.training.run_state import Position, RunState
from hopline.training.run_times import RunTimes, peak_bytes
from hopline.training.settings import Schedule
from hopline.training.validation import Evaluator
from hopline.units.job import bind_task, make_job
from hopline.units.own_threads import own_threads
from hopline.util import trace
from hopline.util.errors import NotCopied
from hopline.util.host import keep_freed_memory_within, refuse_after_fork
from hopline.util.log import logger, print_messages
from hopline.util.output import outlive_output

BudgetLike = Budget | str | Mapping[str, str] | None
"""What `Trainer(budget=)` accepts: a budget, a limit of the device such as "8GiB", or a budget's fields."""


class Trainer(NotCopied):
    """Trains a model on a dataset by a method.

    Extend it by callbacks, by a `Method` of your own, by `train_step` and `test_step`, or by overriding
    `step`, `evaluate` and `make_optimizer`.

    A trainer trains its model in place, so a second `fit` starts from the weights that the first one left.
    It belongs to the thread that calls `fit`, which also calls all callbacks.

    Args:
        model: A `GNN`, a PyG model, or any module with forward(x, edge_index). It is trained in place.
        data: A dataset with a "train" split. Validation and the final test run if it has "valid" and "test".
        method: `hl.Sampled` (default), `hl.Historical`, `hl.FullBatch`, or one of your own. Or a name: "sampled",
            "historical" or "full_batch".
        optimizer: "adam", "adamw" or "sgd". Or a class of torch.optim or a `functools.partial` of one, made with
            `lr` and `weight_decay` of the Trainer. Or an optimizer over model.parameters(), with its own.
        schedule: An `hl.Schedule`, or its name, such as "cosine". Or a function of the optimizer that returns a
            scheduler of torch.
        schedule_every: Whether a scheduler of torch is stepped after every "epoch" or every "step".
        callbacks: Called around steps, epochs and evaluations.
        task: What is learnt: an `hl.Classification` or `hl.Regression` with its loss and metric, its name, such as
            "regression", or an `hl.extend.Task` of your own. Default: by the labels.
        train_step: (model, batch) -> mean loss over the batch's seeds, a scalar. Default: the loss of the task.
        test_step: (model, data, ids) -> metrics by name, the first of which chooses the best weights. It
            needs evaluate="blocking". Default: the metric of the task.
        metric_mode: Whether the first metric of `test_step`, or the metric of a task of your own, is best at its
            "max" or its "min". Only needed where its name does not tell, as "accuracy" and "loss" do.
        out: A folder for the report, checkpoints and the best weights. Default: nothing is written.
        config: Settings that made this run, for the report.
        world: The ranks that train together. Default: `hl.World.current(device)`, the ranks of
            `torch.distributed` if it is initialised, else this process alone.
        placement: Where a GPU finds graph and features.
        budget: Memory that the run may take: "8GiB", or `hl.Budget(...)`.
        gradients: How ranks combine their gradients: a function (parameters, world) -> None, or an
            `hl.extend.Gradients`. Default: the sum.
        settings: Fields of `hl.extend.TrainSettings`: epochs, lr, patience, seed, device, show, ...

    Raises:
        ValueError: A setting, a split or a label is not allowed, or the method cannot train this model or
            dataset.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1], "valid": [2], "test": [3]},
        ... )
        >>> model = hl.nn.GNN([SAGEConv(4, 8), SAGEConv(8, 2)], dropout=0.5)
        >>> run = hl.Trainer(model, data, hl.Sampled(fanouts=(2, 2)), epochs=1, show=False).fit()
        >>> run.epochs, run.reason
        (1, '1 epoch is trained')
    """

    instead = (
        "it has threads, tables and process groups of its own. Make another hl.Trainer with copy.deepcopy(model), or "
        "give out= and continue by resume=True"
    )

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        method: Method | str | None = None,
        *,
        optimizer: str | torch.optim.Optimizer | MakeOptimizer = "adam",
        schedule: Schedule | str | MakeScheduler = "constant",
        schedule_every: Literal["epoch", "step"] = "epoch",
        callbacks: Sequence[Callback] = (),
        task: Task | TaskSettings | str | None = None,
        train_step: TrainStep | None = None,
        test_step: TestStep | None = None,
        metric_mode: Mode | None = None,
        out: Path | str | None = None,
        config: Any = None,
        world: World | None = None,
        placement: Placement | None = None,
        budget: BudgetLike = None,
        gradients: Gradients | CombineGradients | None = None,
        **settings: Any,
    ) -> None:
        expect_dataset(data, "Trainer")
        check_keywords(Trainer, settings)

        # What the user gave, and how it is put to use.
        self.own_optimizer = check_optimizer(optimizer, settings)
        self.own_schedule = check_schedule(schedule, schedule_every)
        self.settings = check_settings(optimizer, schedule, settings, out=out)
        self.world = check_world(world, self.settings.device, device_is_given="device" in settings)
        self.model = unwrap_model(model, self.world).to(self.device)
        # The model as the library runs it, called with a batch. It shares its parameters with `self.model`.
        batch_model = as_batch_model(self.model)
        given_method = check_method(method)
        # As the user asked for it. A plan for a budget may replace `method`.
        self.requested_method = given_method.for_model(batch_model).for_graph(data.num_nodes)
        self.gradients = check_gradients(gradients, self.requested_method, self.world)
        self.budget = None if budget is None else Budget.of(budget)
        overrides_evaluate = type(self).evaluate is not Trainer.evaluate
        self.requested_task = check_task(task)
        self.data = data
        # Before all other collective calls: a rank that differs sends messages of other sizes.
        check_trainer_ranks(self, given_method, train_step, test_step, metric_mode, owns_world=world is None)
        self.task = bind_task(self.requested_task, data, None, train_step, test_step)
        self.run_metric = RunMetric(self.task, metric_mode, overrides_evaluate=overrides_evaluate)

        # The folder of the run. Only the first rank writes, so its folder decides whether all ranks take part
        # in checkpoints.
        self.out = None if out is None else Path(out)
        self.folder = RunFolder(self.out if self.world.rank == 0 else None, self.settings)
        first_out = self.world.broadcast_object(None if out is None else str(out))
        self.checkpoints = Checkpoints(None if first_out is None else Path(first_out), self.settings, self.world)
        self.fingerprints = Fingerprints()
        if first_out is not None:
            self.fingerprints = Fingerprints.of(self, train_step, test_step, gradients)
            check_extra_state(self.model)
        self.callbacks = check_callbacks(callbacks)
        self.config = config

        # The method at work: on data that are placed, within a budget.
        check_data(data, self.task, self.settings, train_step, test_step)
        self._change_check = InPlaceChangeCheck(data)
        job = make_job(
            self.model,
            data,
            model=batch_model,
            task=self.task,
            seed=self.settings.seed,
            device=self.device,
            bf16=self.settings.precision == "bf16",
            world=self.world,
            say=self.say,
        )
        with print_messages(self.settings.show):
            bound = bind(
                self.requested_method,
                job,
                placement or Placement(),
                self.budget,
                optimizer="own" if self.own_optimizer is not None else self.settings.optimizer,
                async_evaluation=self.settings.evaluate == "async",
            )
        self.method = bound.method
        self.job = bound.job
        self.data = bound.job.data
        self.work = bound.work
        self.plan = bound.plan
        self.guard = bound.guard

        # How the run is evaluated.
        self.measure = Measure.within(self.plan, self.method, part_hops_of(self.job, self.method))
        """As validation computes it, with progress if that is shown."""
        if self.evaluates_exactly:
            self.work.check_exact()
            check_whole(self.job, self.measure.part_hops, self.measure.chunk_bytes)
        if self.settings.evaluate == "async":
            check_async(self)

        self.state = RunState(Run(metric=self.metric))

    # ---- the loop: epochs, steps of each epoch, units of each step

    def fit(self) -> Run:
        """Train, load the best weights into the model, and test them.

        `fit` leaves the process as it was, also after an error or Ctrl-C: signal handlers, torch's number
        of threads, the states of torch's random generators, each module's mode (`train()` or `eval()`), and
        how glibc treats freed memory. The model keeps the weights that training has given it.

        Returns:
            The scores at the best epoch, and what happened in each epoch. All ranks get the same numbers.

        Raises:
            ValueError: The loss is not finite, the method gives no batches, or arrays of the dataset were
                changed in place since the Trainer was made.
        """
        refuse_after_fork(torch.get_num_threads())
        run = Run(metric=self.metric, folder=self.out, rank=self.world.rank)
        self.state = RunState(run)
        started = time.perf_counter()
        with ExitStack() as stack:
            for context in self._surroundings():
                stack.enter_context(context)
            checkpoint = self._open(stack)
            try:
                with self.evaluator.all_results():
                    self._begin(checkpoint)
                    if self.has_steps_left:
                        with self.checkpoints.hold_signals():
                            self._train_epochs()
                run.reason = self.stop_reason or _describe_last_epoch(self.settings.epochs)
                run.finished = True
                self._test()
            except BaseException as error:
                run.reason = ": ".join(filter(None, (type(error).__name__, str(error))))
                raise
            finally:
                run.metric = self.metric
                run.stages = self.times.timers.statistics()
                run.seconds = self.state.earlier_s + time.perf_counter() - started
                run.peak_bytes = peak_bytes(self.device)
                # A stack calls all of them even if one raises: one of them closes the progress bar. A stack
                # calls in reverse, so the loop is reversed too, and callbacks end in their order.
                with ExitStack() as ends:
                    for callback in reversed(self.active):
                        ends.callback(callback.on_fit_end, self, run)
        return run

    def _train_epochs(self) -> None:
        """Train and validate epoch by epoch: up to the last one, or until something stops the run."""
        for epoch in range(self.position.epoch, self.settings.epochs + 1):
            epoch_end = self._train_epoch(epoch)
            self.run.epochs = epoch
            self.run.history.append(epoch_end)
            self.call("on_epoch_end", epoch_end)

            # Asked before the evaluation, whose callbacks may stop the run and so change the answer.
            is_evaluation_due = self._is_evaluation_due(epoch)
            evaluation = self.evaluator.after_epoch(epoch)
            # Only the plateau schedule reads it. It needs evaluate="blocking", and goes by the loss if there is
            # no "valid" split.
            score = -epoch_end.loss if evaluation is None else self.score(evaluation.metrics)
            self.schedule.step(score, evaluated=is_evaluation_due)
            self.times.end_epoch()

            self.state.position = Position(epoch=epoch + 1)
            is_last = epoch == self.settings.epochs or self.stop_reason is not None
            self.checkpoints.write_if_due(self, at_end=is_last)
            if is_last:
                return

    def _train_epoch(self, epoch: int) -> EpochEnd:
        """Train an epoch, or what is left of it after a resume."""
        self._change_check.check()
        # Two modules with the same parameters: the one that the library runs, and the user's.
        self.job.model.train()
        self.model.train()

        position = self.position
        # As if the epoch had begun in this process, so that its seconds include those before a resume.
        started = time.perf_counter() - position.seconds
        units = self.work.units(epoch, done=position.units, examples=round(position.seeds))
        groups = in_groups(units, self.settings.accumulate)
        with closing(align_groups(groups, self.world)) as steps:
            for step_units in steps:
                loss, size = self.step(step_units)

                # The sum is float64 and stays on the device of the loss, so that no step synchronises.
                loss_sum = torch.as_tensor(position.loss_sum, dtype=torch.float64)
                position.loss_sum = torch.add(loss_sum, loss, alpha=size)
                position.seeds += size
                position.units += len(step_units)
                position.seconds = time.perf_counter() - started
                self.state.num_steps += 1
                self.schedule.after_step()
                self.call("on_step_end", StepEnd(epoch=epoch, step=self.num_steps, loss=loss, size=size))
                self.evaluator.after_step()
                self.checkpoints.write_if_due(self, in_epoch=True)

        self._exchange(self.gradients.after_epoch)
        check_same_weights(self.gradients, self.model, self.world, epoch)
        return self.times.end_training(self, epoch, started)

    def step(self, units: Sequence[Unit]) -> tuple[Tensor, float]:
        """Make one optimizer step over some units.

        Returns (loss, number of seeds). The seeds are those of all ranks. The loss is this rank's share of
        the mean over them: summed over the ranks, it is the mean loss of the step.
        """
        # 1 if all units are empty: the loss is divided by it.
        total = total_size(units, self.world) or 1
        weight = (total_weight(units, self.world) or 1) if self.job.task.has_weights else total
        self.update.clear()
        if self.world.size > 1:
            # For convs that draw from torch's generator, as attention dropout does: ranks must draw
            # different numbers.
            torch.manual_seed(ops.derive_key(self.settings.seed, self.num_steps, self.world.rank))

        # `own_threads` may leave torch one thread, which is too few for a long loss of the user's own.
        with own_threads(self.job) if self.job.task.is_mean else nullcontext():
            losses = [unit.forward_backward(weight) for unit in units]
            loss_sum = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
            loss = loss_sum / weight
            self._exchange(self.gradients.combine)
            self.update()
            self._exchange(self.gradients.after_step)

        for unit in units:
            unit.commit()
        return loss, total

    def _exchange(self, hook: CombineGradients) -> None:
        """Call a method of `gradients`, without autograd: it may change gradients and weights in place."""
        is_usual_sum = type(self.gradients) is Gradients
        if is_usual_sum and self.world.size == 1:
            return
        with torch.no_grad(), trace.span("exchange"):
            hook([p for p in self.model.parameters() if p.requires_grad], self.world)

    def _test(self) -> None:
        """Load the best weights, and evaluate them on the test split if there is one."""
        run = self.run
        run.best_epoch = self.keep_weights.restore(self, last_epoch=run.epochs)
        at_best = [evaluation for evaluation in run.evaluations if evaluation.epoch == run.best_epoch]
        run.valid = at_best[-1].metrics[self.metric] if at_best else math.nan
        if self.has("test"):
            evaluation = self.evaluator.evaluate(run.best_epoch, "test", exact=True)
            self.evaluator.act_on(evaluation)
            run.test = evaluation.metrics[self.metric]
            run.test_is_exact = not self.run_metric.is_own

    # ---- before the loop

    def _surroundings(self) -> list[AbstractContextManager[Any]]:
        """Contexts around a run. They restore what it changes of the process, and close what it opens."""
        return [
            outlive_output(),
            print_messages(self.settings.show),
            self.world.watch(),
            keep_freed_memory_within(),
            preserve_modes(self.model),
            preserve_all_rng(self.device),
            self.checkpoints,
            limit_cuda_memory(self.budget, self.device),
            self.folder,
        ]

    def _open(self, stack: ExitStack) -> dict[str, Any] | None:
        """Make the optimizer and its schedule, find the checkpoint to resume from, and set up the callbacks.

        Returns the state in the checkpoint. None for a new run. stack: closes what is opened.
        """
        check_hooks(self.job)
        # For convs that draw from torch's generator, as attention dropout does.
        torch.manual_seed(self.settings.seed)
        initialise_weights(self.job)
        self.optimizer = self.make_optimizer()
        self.update = Update(self.model, self.optimizer, self.settings.clip_norm, self.say)
        self.run_metric.try_test_step(self.job)
        self.run_metric.try_metric(self.job)
        self.schedule = make_schedule(self)
        checkpoint = self.checkpoints.find(self)

        self.times = RunTimes()
        self.keep_weights = KeepWeights(self.folder.path)
        added = callbacks_of(self, checkpoint)
        stack.enter_context(self.times.listen())
        evaluator_class = Evaluator if self.settings.evaluate == "blocking" else AsyncEvaluator
        self.evaluator: Evaluator = stack.enter_context(evaluator_class(self))
        self.active: list[Callback] = [*self.callbacks, *added, self.keep_weights, self.evaluator.waiting]
        return checkpoint

    def _begin(self, checkpoint: dict[str, Any] | None) -> None:
        """Describe the run to the user, and resume from the checkpoint if there is one."""
        self.weights_check = WeightsCheck(self.model)
        self._exchange(self.gradients.begin)
        describe_run(self)
        self.call("on_fit_start")
        if checkpoint is not None:
            self.checkpoints.resume(self, checkpoint)
        self.evaluator.begin()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the settings ask for. A subclass may return another, over the model's parameters."""
        return optimizer_of(self.job, self.settings, self.own_optimizer)

    # ---- evaluation

    def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
        """Return the metrics of a split, by name, with the weights that the model has now.

        Args:
            split: "train", "valid" or "test".
            exact: Whether to compute over every edge, rather than over edges that the method samples.

        Raises:
            ValueError: There is no such split, or arrays of the dataset were changed since the Trainer was
                made.
        """
        self._change_check.check()
        if split not in self.data.splits:
            raise ValueError(f"the dataset has no split {split!r}: choose one of {', '.join(self.data.splits)}")
        measure = replace(self.measure, split=split, exact=exact, show=self.settings.show)
        # keep: `Historical` may refresh its tables with the embeddings of exact evaluation.
        return measure(self.job, keep=self.work.keep_rows)

    @property
    def evaluates_exactly(self) -> bool:
        """Whether the run will compute outputs over every edge, if only for the test at its end."""
        validates_exactly = self.settings.inference == "exact" and self.has("valid")
        return self.task.test_step is None and (self.has("test") or validates_exactly)

    def is_evaluated(self, epoch: int) -> bool:
        """Whether the epoch that has just ended is validated, now or asynchronously."""
        return self._is_evaluation_due(epoch) and self.has("valid")

    def _is_evaluation_due(self, epoch: int) -> bool:
        is_last = epoch == self.settings.epochs or self.stop_reason is not None
        return is_last or epoch % self.settings.evaluate_every == 0

    # ---- for callbacks

    def stop(self, reason: str) -> None:
        """End training after the current epoch."""
        self.state.stop_reason = reason

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Say something through `logging`, on the first rank, and write it into the run's log."""
        if self.world.rank == 0:
            logger.log(level, text)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line into the run's log, if this rank has one open."""
        if self.folder.report is not None:
            self.folder.report.note(text)

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks of the run, in order."""
        for i, callback in enumerate(self.active):
            # After the user's, before those that store weights. What a step has changed is found at the epoch's end.
            if i == len(self.callbacks) and hook != "on_step_end":
                self.weights_check.check(is_trained=hook != "on_fit_start")
            getattr(callback, hook)(self, *args)

    def has(self, split: str) -> bool:
        """Whether the dataset has a split with nodes in it."""
        return split in self.data.splits and self.data.splits[split].numel() > 0

    @property
    def metric(self) -> str:
        """The name of the metric that chooses the best weights."""
        return self.run_metric.name

    @property
    def best_is(self) -> Mode:
        """Whether the largest or the smallest value of the metric is the best."""
        return self.run_metric.best_is

    def score(self, metrics: Mapping[str, float]) -> float:
        """The first metric, negated if lower is better. Best weights, early stopping and plateaus compare scores."""
        return self.run_metric.score(metrics)

    def evaluated_weights(self) -> Mapping[str, Tensor]:
        """In `on_evaluate_end`: the weights that were evaluated. The model's own may be of a later step."""
        return self.state.late_weights or self.model.state_dict()

    @property
    def device(self) -> torch.device:
        """The device that trains."""
        return self.world.device

    @property
    def num_seeds(self) -> int:
        """The number of training nodes."""
        return len(self.job.examples)

    @property
    def run(self) -> Run:
        """What `fit` returns, filled in as the run proceeds."""
        return self.state.run

    @property
    def position(self) -> Position:
        """The epoch that is trained, and how much of it is done."""
        return self.state.position

    @property
    def num_steps(self) -> int:
        """Optimizer steps since the run began, those before it was resumed included."""
        return self.state.num_steps

    @property
    def stop_reason(self) -> str | None:
        """Why training stops after the current epoch. None: it does not."""
        return self.state.stop_reason

    @property
    def has_steps_left(self) -> bool:
        """Whether anything is left to train. A resumed run may have been stopped, or have trained all epochs."""
        return self.state.has_steps_left(self.settings.epochs)


def _describe_last_epoch(num_epochs: int) -> str:
    return f"all {num_epochs} epochs are trained" if num_epochs > 1 else "1 epoch is trained"
