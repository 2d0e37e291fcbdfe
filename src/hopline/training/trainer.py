"""`Trainer`: one training loop for all methods.

    fit
        make the optimizer, open the run folder and the report      _open_run
        describe the run, resume if there is a checkpoint           _begin_training
        for each epoch:                                             _train_epochs
            for each step:                                          _train_epoch
                unit.forward_backward, for the units of the step    step
                combine the gradients of the ranks
                the optimizer's step
                unit.commit, for the units of the step
                callbacks, results of evaluations, checkpoint
            callbacks, validation, learning rate, checkpoint
        wait for evaluations that are not done                      _await_evaluations
        load the best weights, and test them                        _test

The loop does not know which method trains. A method yields *units*: work that ends in gradients, such as a
batch (`contract.Unit`). A step runs `settings.accumulate` of them.

With evaluate="async" a thread validates while training continues, so results come late. The run still has
the outcome of evaluate="blocking". Callbacks see the weights that were evaluated (`act_on`). If a result
ends the run, everything trained since is dropped (`_drop_after`).

`inputs` checks the arguments of a user. `run_facts` collects what config.json and checkpoints store.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hopline import inference as infer
from hopline import ops
from hopline.budget.guard import BudgetGuard, guard_of, limit_cuda_memory
from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget, Plan
from hopline.contract import Method, TrainStep, Unit, Work, in_groups
from hopline.data.checks import check_training
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.placement import describe
from hopline.data.placement_settings import Placement
from hopline.device.snapshots import preserve_all_rng, preserve_modes
from hopline.distributed.gradients import CombineGradients, Gradients, have_same_bits
from hopline.distributed.world import World
from hopline.inference.captured_forward import CapturedInferences
from hopline.methods.plan_within import plan_within
from hopline.metrics import Mode, mode_of
from hopline.nn.attributes import set_attributes
from hopline.nn.gnn import GNN
from hopline.nn.whole_module import Whole, as_batch_model
from hopline.nn.whole_module_probe import initialise
from hopline.report.bottleneck import PREPARING_STAGES, TRAINING_STAGES
from hopline.report.writer import Report, has_run, is_complete
from hopline.shards.data import ShardedData
from hopline.training import checkpoint
from hopline.training.async_evaluation import AsyncEvaluator, check_async
from hopline.training.best_weights import KeepWeights
from hopline.training.callbacks import Callback, EarlyStop, EpochEnd, Evaluation, Run, StepEnd
from hopline.training.checkpoint import Checkpoints, Position
from hopline.training.evaluation import (
    Measure,
    TestStep,
    as_metrics,
    check_whole,
    part_hops_of,
    run_test_step,
    whole_notes,
)
from hopline.training.inputs import (
    KEYWORDS_ELSEWHERE,
    InPlaceChangeCheck,
    WeightsCheck,
    bind_method,
    check_callbacks,
    check_extra_state,
    check_gradients,
    check_hooks,
    check_method,
    check_metric_mode,
    check_optimizer,
    check_schedule,
    check_storable,
    check_world,
    unwrap_model,
)
from hopline.training.lr_schedule import MakeScheduler, OwnScheduler, Scheduler
from hopline.training.optimizer import MakeOptimizer, Update, describe_call, make_optimizer, split_decay
from hopline.training.overwrite import ReplaceRun, restore_overwritten
from hopline.training.rank_steps import align_groups, total_size
from hopline.training.report_callbacks import ShowProgress, WatchBudget, WatchPipeline, WriteReport, peak_bytes
from hopline.training.run_facts import check_trainer_ranks, fingerprints, name_of, settings_of, stored_settings
from hopline.training.settings import Schedule, TrainSettings
from hopline.training.validation import BlockingEvaluator, Evaluator, Result
from hopline.training.watch_staleness import WatchHistory
from hopline.units.job import make_job
from hopline.units.own_threads import own_threads
from hopline.util import trace
from hopline.util.config import CHANGES_TRAINING, check_names
from hopline.util.errors import NotCopied
from hopline.util.file_lock import FileLock
from hopline.util.files import remove_unfinished
from hopline.util.host import host_memory, keep_freed_memory_within, refuse_after_fork
from hopline.util.log import logger, print_messages
from hopline.util.output import outlive_output

HANDOVER_S = 5.0
"""Seconds that a resumed run waits for the earlier run to end and release the folder. Ranks may need seconds to
end after their launcher was stopped."""
NUM_TRIED_NODES = 64
"""Validation nodes at which a `test_step` is tried before training."""
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
        train_step: (model, batch) -> mean loss over the batch's seeds, a scalar. Default: cross entropy, or
            binary cross entropy for several labels or a single score.
        test_step: (model, data, ids) -> metrics by name, the first of which chooses the best weights. It
            needs evaluate="blocking". Default: the metric of the task.
        metric_mode: Whether the first metric of `test_step` is best at its "max" or its "min". Only needed
            where its name does not tell, as "accuracy" and "loss" do.
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
        parameters = inspect.signature(Trainer).parameters.values()
        keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        setting_names = [field.name for field in fields(TrainSettings)]
        check_names("Trainer", settings, [*keywords, *setting_names], KEYWORDS_ELSEWHERE)
        self.own_optimizer = check_optimizer(optimizer, settings)
        self.own_schedule = check_schedule(schedule, schedule_every)
        self.schedule_every: Literal["epoch", "step"] = schedule_every
        self.schedule_name = "" if self.own_schedule is None else describe_call(self.own_schedule)
        """Name of the user's function until it has made a scheduler, then of that one's class."""
        if self.own_optimizer is None:
            settings["optimizer"] = optimizer
        elif isinstance(optimizer, torch.optim.Optimizer):
            first_group = optimizer.param_groups[0]
            settings |= {name: float(first_group[name]) for name in ("lr", "weight_decay") if name in first_group}
        if self.own_schedule is None:
            settings["schedule"] = schedule
        self.settings = TrainSettings(**settings)
        if self.settings.overwrite and out is None:
            raise ValueError("overwrite=True replaces the run in out=: give out=, or leave it out")
        self.world = check_world(world, self.settings.device, device_is_given="device" in settings)
        self.device = self.world.device

        self.model = unwrap_model(model, self.world).to(self.device)
        # The model as the library runs it, called with a batch. It shares its parameters with `self.model`.
        batch_model = as_batch_model(self.model)
        given_method = check_method(method)
        # As the user asked for it. A plan for a budget may replace `method`.
        self.requested_method = given_method.for_model(batch_model).for_graph(data.num_nodes)
        self.method = self.requested_method
        self.gradients = check_gradients(gradients, self.method, self.world)
        self.budget = None if budget is None else Budget.of(budget)
        self.test_step = test_step
        overrides_evaluate = type(self).evaluate is not Trainer.evaluate
        own_metric = test_step is not None or overrides_evaluate
        self.metric_mode: Mode | None = check_metric_mode(metric_mode, own_metric=own_metric)

        self.data = data
        self.metric = data.metric
        # Before all other collective calls: a rank that differs sends messages of other sizes.
        try:
            check_trainer_ranks(self, given_method, train_step)
        except ValueError:
            if world is None:  # else it is the user's, who may go on with it
                self.world.close()
            raise
        self.out = None if out is None else Path(out)
        # Only the first rank writes, so its folder decides whether all ranks take part in checkpoints.
        first_out = self.world.broadcast_object(None if out is None else str(out))
        self.checkpoints = Checkpoints(None if first_out is None else Path(first_out), self.settings, self.world)
        self.contents: dict[str, str] = {}
        """Fingerprints of the dataset's arrays by name, for checkpoints. Empty without a run folder."""
        self.code: dict[str, dict[str, str]] = {}
        """Fingerprints of the model, apart from its weights, and of the user's functions and classes, for checkpoints.
        Empty without a run folder."""
        if first_out is not None:
            own_code: dict[str, Any] = {"train_step": train_step, "test_step": test_step, "gradients": gradients}
            own_classes = {"method": type(self.method), "Trainer": type(self)}
            if self.own_optimizer is not None:
                own_code["optimizer"] = self.own_optimizer.parts(self.model)
            if self.own_schedule is not None:
                own_code["schedule"] = self.own_schedule
            self.contents, self.code = fingerprints(self.model, data, own_code | own_classes)
            check_extra_state(self.model)
        self._change_check = InPlaceChangeCheck(data)
        self.weights_check = WeightsCheck(self.model)
        self._report: Report | None = None
        self.callbacks = check_callbacks(callbacks)
        self.config = config
        self.num_seeds = data.train_ids.numel()
        if self.settings.patience is not None and not self.has("valid"):
            raise ValueError(
                f"patience={self.settings.patience} needs a validation metric, and the dataset has no 'valid' split: "
                "add one, or leave out patience="
            )
        splits_to_check = []
        if train_step is None:
            splits_to_check.append("train")
        if test_step is None:
            splits_to_check += ["valid", "test"]
        check_training(data, splits_to_check)

        self.plan: Plan | None = None
        self.guard: BudgetGuard | None = None
        self.job = make_job(
            self.model,
            data,
            model=batch_model,
            train_step=train_step,
            seed=self.settings.seed,
            device=self.device,
            bf16=self.settings.precision == "bf16",
            world=self.world,
            say=self.say,
        )
        with print_messages(self.settings.show):
            self.work = self._bind_method(placement or Placement())
        self.part_hops = part_hops_of(self.job, self.method)
        self.captured_inferences = CapturedInferences()
        if self._evaluates_exactly:
            check_whole(self.job, self.part_hops, self.measure_options.get("chunk_bytes"))
        if self.settings.evaluate == "async":
            check_async(self, overrides_evaluate=overrides_evaluate)

        # The state of a run. `fit` and `_open_run` start all of it anew.
        self.stop_reason: str | None = None
        """Why training stops after the current epoch. None: it does not."""
        self.num_steps = 0
        """Optimizer steps since the run began, those before it was resumed included."""
        self.position = Position()
        """The epoch that is trained, and how much of it is done."""
        self.active: list[Callback] = []
        """All callbacks of the run: the user's, and those that the settings add."""
        self.run = Run(metric=self.metric)
        """What `fit` returns, filled in as the run proceeds."""
        self._earlier_s = 0.0
        """Seconds that the run took before it was resumed."""
        self._timers = trace.Timers()
        self._counters = trace.Counters()
        self._keep_weights = KeepWeights(None)
        self._write_report: WriteReport | None = None
        self._ending_result: Result | None = None
        """A result that ended the run after training had continued past its epoch. None until one does."""
        self._evaluated_weights: Mapping[str, Tensor] | None = None
        """The weights that a late result is of, while callbacks see that result. Otherwise None."""

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
        run = self.run = Run(metric=self.metric, folder=self.out, rank=self.world.rank)
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(outlive_output())
            stack.enter_context(print_messages(self.settings.show))
            stack.enter_context(self.world.watch())
            stack.enter_context(keep_freed_memory_within())
            stack.enter_context(preserve_modes(self.model))
            stack.enter_context(preserve_all_rng(self.device))
            resume_state = self._open_run(stack)
            try:
                self._begin_training(resume_state)
                if self.has_steps_left:
                    with self.checkpoints.hold_signals():
                        self._train_epochs()
                self._await_evaluations()
                run.reason = self.stop_reason or _describe_last_epoch(self.settings.epochs)
                run.finished = True
                self._test()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    # Evaluations that are done still count. Their errors must not hide the interruption.
                    with suppress(Exception):
                        self.act_on(self.evaluations.take_ready())
                run.reason = ": ".join(filter(None, (type(error).__name__, str(error))))
                raise
            finally:
                run.metric = self.metric
                run.stages = self._timers.statistics()
                run.seconds = self._earlier_s + time.perf_counter() - started
                run.peak_bytes = peak_bytes(self.device)
                # A stack calls all of them even if one raises: one of them closes the progress bar. A stack
                # calls in reverse, so the loop is reversed too, and callbacks end in their order.
                with ExitStack() as ends:
                    for callback in reversed(self.active):
                        ends.callback(callback.on_fit_end, self, run)
        return run

    @property
    def has_steps_left(self) -> bool:
        """Whether anything is left to train. A resumed run may have been stopped, or have trained all epochs."""
        if self._ending_result is not None or self.position.epoch > self.settings.epochs:
            return False
        # A run that was stopped within an epoch is trained to the end of that epoch.
        return self.stop_reason is None or self.position.units > 0

    def _train_epochs(self) -> None:
        """Train and validate epoch by epoch: up to the last one, or until something stops the run."""
        for epoch in range(self.position.epoch, self.settings.epochs + 1):
            try:
                epoch_end = self._train_epoch(epoch)
            except Exception:
                # With asynchronous evaluation, a result that is yet to come may end the run with an earlier
                # epoch. A blocking run would then never have met this error. Waiting for results is a
                # collective call, so several ranks do not: the others may not have failed.
                if self.world.size == 1:
                    self.act_on(self.evaluations.wait_all())
                if self._ending_result is None:
                    raise
                return
            if epoch_end is None:  # the result of an earlier epoch ended the run
                return
            self.run.epochs = epoch
            self.run.history.append(epoch_end)
            self.call("on_epoch_end", epoch_end)

            # Asked before the evaluation, whose callbacks may stop the run and so change the answer.
            is_evaluation_due = self._is_evaluation_due(epoch)
            evaluations: list[Evaluation] = []
            if self.is_evaluated(epoch):
                evaluations = self.act_on(self.evaluations.validate(epoch))
            # Empty without a "valid" split, if no evaluation was due, or if its result comes later. Only
            # the plateau schedule reads the value below. It needs evaluate="blocking", and goes by the loss
            # if there is no "valid" split.
            scores = [self.score(evaluation.metrics) for evaluation in evaluations if evaluation.epoch == epoch]
            self.schedule.step(scores[0] if scores else -epoch_end.loss, evaluated=is_evaluation_due)
            # Here, so that the time of an evaluation counts for the epoch that it follows.
            self._timers.next_epoch()

            self.position = Position(epoch=epoch + 1)
            self.act_on(self.evaluations.poll())
            if self._ending_result is not None:
                return
            is_last = epoch == self.settings.epochs or self.stop_reason is not None
            self.checkpoints.write_if_due(self, self.run, at_end=is_last)
            if is_last:
                return

    def _train_epoch(self, epoch: int) -> EpochEnd | None:
        """Train an epoch, or what is left of it after a resume.

        Returns None if the result of an asynchronous evaluation ended the run meanwhile.
        """
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
                self.num_steps += 1
                self.schedule.after_step()
                self.call("on_step_end", StepEnd(epoch=epoch, step=self.num_steps, loss=loss, size=size))

                self.act_on(self.evaluations.poll(between_steps=True))
                if self._ending_result is not None:
                    return None
                self.checkpoints.write_if_due(self, self.run, in_epoch=True)

        if self._must_combine:
            self._exchange(self.gradients.after_epoch)
            self._check_same_weights(epoch)
        return self._end_epoch(epoch, started)

    def step(self, units: Sequence[Unit]) -> tuple[Tensor, float]:
        """Make one optimizer step over some units.

        Returns (loss, number of seeds). The seeds are those of all ranks. The loss is this rank's share of
        the mean over them: summed over the ranks, it is the mean loss of the step.
        """
        # 1 if all units are empty: the loss is divided by it.
        total = total_size(units, self.world) or 1
        self.update.clear()
        if self.world.size > 1:
            # For convs that draw from torch's generator, as attention dropout does: ranks must draw
            # different numbers.
            torch.manual_seed(ops.derive_key(self.settings.seed, self.num_steps, self.world.rank))

        # `own_threads` may leave torch one thread, which is too few for a long loss of the user's own.
        with own_threads(self.job) if self.job.usual_loss else nullcontext():
            losses = [unit.forward_backward(total) for unit in units]
            loss_sum = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
            loss = loss_sum / total
            if self._must_combine:
                self._exchange(self.gradients.combine)
            self.update()
            if self._must_combine:
                self._exchange(self.gradients.after_step)

        for unit in units:
            unit.commit()
        return loss, total

    @property
    def _must_combine(self) -> bool:
        """Whether `gradients` has anything to do. It has not for the usual sum over a single rank."""
        return self.world.size > 1 or type(self.gradients) is not Gradients

    def _exchange(self, hook: CombineGradients) -> None:
        """Call a method of `gradients`, without autograd: it may change gradients and weights in place."""
        with torch.no_grad(), trace.span("exchange"):
            hook([p for p in self.model.parameters() if p.requires_grad], self.world)

    def _check_same_weights(self, epoch: int) -> None:
        """Refuse gradients of the user's own that give ranks different weights.

        Only the first rank's weights are evaluated, so all ranks must have the same. The usual sum does
        give the same.
        """
        is_usual_sum = type(self.gradients) is Gradients
        if is_usual_sum or have_same_bits(self.model.parameters(), self.world):
            return
        raise ValueError(
            f"after epoch {epoch} the ranks have different weights, and {name_of(self.gradients)} combines their "
            "gradients: let combine leave the same gradients on every rank, added in the same order, or bring the "
            "weights together in after_epoch"
        )

    def _end_epoch(self, epoch: int, started: float) -> EpochEnd:
        """Synchronise with the device, check the epoch for errors, and collect its loss, times and counters.

        started: the reading of `time.perf_counter` when the epoch began.
        """
        num_seeds = self.position.seeds
        if not num_seeds:
            raise ValueError(
                f"the method gave no batches for {self.num_seeds:,} training nodes: set drop_last=false, or make "
                f"batch_size smaller {CHANGES_TRAINING}"
            )
        mean_loss = self.world.sum([float(self.position.loss_sum)])[0] / num_seeds
        trace.end_device_spans()
        ops.check_device_errors()
        # Tables report counters of this epoch, so this comes before `_counters.next_epoch`.
        for table in self.data.tables.values():
            table.end_epoch()
        if not math.isfinite(mean_loss):
            raise ValueError(
                f"the loss became {mean_loss} in epoch {epoch}: lower lr=, set clip_norm=, and check the features by "
                "`hopline verify`"
            )

        epoch_s = time.perf_counter() - started
        stages = self._timers.this_epoch()
        # Stages that work, without those that wait. For stages in threads, `prepare_s` leaves out the time
        # in which a thread had no core.
        work_s = {name: seconds for name, seconds in stages.items() if name in (*PREPARING_STAGES, *TRAINING_STAGES)}
        work_s |= self.work.describe().prepare_s
        self._counters.next_epoch()
        return EpochEnd(
            epoch=epoch,
            loss=mean_loss,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            seconds=epoch_s,
            seeds_per_s=num_seeds / epoch_s,
            slowest_stage=max(work_s, key=lambda name: work_s[name], default=""),
            stages=stages,
            work=work_s,
            counters=self._counters.last_epoch(),
        )

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
        measure = Measure(
            method=self.method,
            test_step=self.test_step,
            split=split,
            exact=exact,
            show=self.settings.show,
            captured=self.captured_inferences,
            **self.measure_options,
        )
        # keep: `Historical` may refresh its tables with the embeddings of exact evaluation.
        return measure(self.job, keep=self.work.keep_rows)

    def evaluate_now(self, epoch: int, split: str, *, exact: bool) -> Evaluation:
        """Evaluate the model with the weights that it has now.

        All ranks call this and get the same metrics. The first rank computes them. If the dataset is
        sharded, all ranks compute them together.
        """
        started = time.perf_counter()
        with trace.span("evaluate"):
            computes = self.world.rank == 0 or isinstance(self.data, ShardedData)
            metrics = as_metrics(self.evaluate(split, exact=exact)) if computes else {}
            metrics = self.world.broadcast_object(metrics)
        return Evaluation(epoch=epoch, split=split, metrics=metrics, seconds=time.perf_counter() - started)

    def act_on(self, results: Iterator[Result]) -> list[Evaluation]:
        """Act on results one by one, as if training had waited for each. Return their evaluations.

        Results after the one that ends the run are not asked for.
        """
        evaluations: list[Evaluation] = []
        if self._ending_result is not None:
            return evaluations
        for result in results:
            self._act_on_one(result)
            evaluations.append(result.evaluation)
            if self._ending_result is not None:
                break
        return evaluations

    def _act_on_one(self, result: Result) -> None:
        """Let callbacks see a result, and add it to the run.

        While they do, `stop_reason` and `evaluated_weights` are those of the epoch that was evaluated.
        Training may be further by now, and may have found a later reason to stop. That reason stands, unless
        callbacks stop at this result.
        """
        evaluation = result.evaluation
        reason_now = self.stop_reason
        self.metric = next(iter(as_metrics(evaluation.metrics)))
        if evaluation.split == "valid":
            # Raises if the metric may be better either way, before any callback compares it.
            self.score(evaluation.metrics)

        self.stop_reason = result.reason
        self._evaluated_weights = result.weights
        try:
            self.call("on_evaluate_end", evaluation)
        finally:
            self._evaluated_weights = None
        self.run.evaluations.append(evaluation)
        if not result.is_late:
            return
        if self.stop_reason is None:
            self.stop_reason = reason_now
        else:
            self._ending_result = result

    def _await_evaluations(self) -> None:
        """Wait for the results of all epochs. Drop what was trained after one that ends the run.

        Results that come here are not in the last checkpoint. So if any come, another one is written.
        """
        epochs_without_result = self.evaluations.waiting.snapshots
        had_to_wait = bool(epochs_without_result)
        self.act_on(self.evaluations.wait_all())
        if self._ending_result is not None:
            epochs_without_result.clear()
            self._drop_after(self._ending_result)
        if had_to_wait or self._ending_result is not None:
            self.checkpoints.write(self, self.run)

    def _drop_after(self, result: Result) -> None:
        """Drop what was trained after the epoch that ended the run: from model, run and folder."""
        run = self.run
        epoch = result.evaluation.epoch
        assert result.weights is not None
        self.model.load_state_dict(result.weights)
        set_attributes(self.model, result.attributes)

        run.dropped = run.epochs - epoch
        has_begun_another = self.position.units > 0
        if has_begun_another:
            run.dropped += 1
        if not run.dropped:
            return
        self.say(f"the run has ended with epoch {epoch}: what was trained while it was evaluated is dropped")
        run.epochs = epoch
        run.history = [epoch_end for epoch_end in run.history if epoch_end.epoch <= epoch]
        self.position = Position(epoch=epoch + 1)
        self._keep_weights.save_last(self)
        if self._write_report is not None:
            self._write_report.drop_after(epoch)

    def _test(self) -> None:
        """Load the best weights, and evaluate them on the test split if there is one."""
        run = self.run
        run.best_epoch = self._keep_weights.restore(self, last_epoch=run.epochs)
        at_best = [evaluation for evaluation in run.evaluations if evaluation.epoch == run.best_epoch]
        run.valid = at_best[-1].metrics[self.metric] if at_best else math.nan
        if self.has("test"):
            evaluation = self.evaluate_now(run.best_epoch, "test", exact=True)
            self._act_on_one(Result(evaluation, weights=None, reason=self.stop_reason))
            run.test = evaluation.metrics[self.metric]
            run.test_is_exact = self.test_step is None and type(self).evaluate is Trainer.evaluate

    # ---- for callbacks

    def stop(self, reason: str) -> None:
        """End training after the current epoch."""
        self.stop_reason = reason

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Say something through `logging`, on the first rank, and write it into the run's log."""
        if self.world.rank == 0:
            logger.log(level, text)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line into the run's log, if this rank has one open."""
        if self._report is not None:
            self._report.note(text)

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

    def is_evaluated(self, epoch: int) -> bool:
        """Whether the epoch that has just ended is validated, now or asynchronously."""
        return self._is_evaluation_due(epoch) and self.has("valid")

    def _is_evaluation_due(self, epoch: int) -> bool:
        """Whether the epoch that has just ended is the last one, or one of every `evaluate_every`."""
        is_last = epoch == self.settings.epochs or self.stop_reason is not None
        return is_last or epoch % self.settings.evaluate_every == 0

    @property
    def best_is(self) -> Mode:
        """Whether the largest or the smallest value of the metric is the best."""
        mode = self.metric_mode or mode_of(self.metric)
        if mode is None:
            raise ValueError(
                f"the name of the metric {self.metric!r} does not tell whether higher or lower is better: give the "
                "Trainer metric_mode='max' or metric_mode='min'"
            )
        return mode

    def score(self, metrics: Mapping[str, float]) -> float:
        """The first metric, negated if lower is better.

        Best weights, early stopping and the plateau schedule compare scores.
        """
        value = metrics[self.metric]
        return value if self.best_is == "max" else -value

    def evaluated_weights(self) -> Mapping[str, Tensor]:
        """In `on_evaluate_end`: the weights that were evaluated. The model's own may be of a later step."""
        return self._evaluated_weights or self.model.state_dict()

    # ---- before the loop: data, plan and work

    def _bind_method(self, placement: Placement) -> Work:
        """Place the data where it is read fastest, and bind the method to the job.

        With a budget, a plan decides on the placement and on settings of the method. The work keeps to it.
        """
        if self.budget is None:
            self._place(placement)
            return bind_method(self.method, self.job)
        outline = RunOutline(
            job=self.job,
            optimizer=self.settings.optimizer if self.own_optimizer is None else "own",
            placement=placement,
            async_evaluation=self.settings.evaluate == "async",
        )
        self.plan = plan_within(self.method, outline, self.budget)
        self.method = self.plan.method
        self._place(self.plan.placement or placement)
        self.guard = guard_of(self.plan, self.budget, self.job, outline)
        work = bind_method(self.method, self.job)
        return work if self.guard is None else work.guarded(self.guard, self.plan)

    def _place(self, placement: Placement) -> None:
        """Place the data where a GPU reads it fastest.

        Shards stay where they are. So does data that is on a GPU already, unless the user asks for a
        placement.
        """
        if self.device.type != "cuda" or isinstance(self.data, ShardedData):
            return
        is_placed = self.data.graph.device.type == "cuda"
        if is_placed and placement == Placement():
            return
        self.data = self.method.place(self.data, placement, self.device)
        self.job = replace(self.job, data=self.data)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the settings ask for.

        A subclass may return another, over the model's parameters.
        """
        settings = self.settings
        rest_parameters = []
        if settings.weight_decay_rest is not None:
            if not isinstance(self.job.model, GNN):
                raise ValueError(
                    f"weight_decay_rest= is for the last layer, and {type(self.model).__name__} is not made of layers: "
                    "leave it out, or use hl.nn.GNN or a PyG model such as GCN"
                )
            rest_parameters = self.job.model.rest_parameters()
        decays = split_decay(self.model, rest_parameters, settings.weight_decay, settings.weight_decay_rest)
        if self.own_optimizer is not None:
            return self.own_optimizer.make(decays, settings.lr)
        return make_optimizer(settings.optimizer, decays, settings.lr)

    def _make_schedule(self, knows_metric: bool) -> Scheduler | OwnScheduler:
        """The schedule of the optimizer's rate, by the settings or by the user's function.

        knows_metric: whether `metric` is the one that evaluations will give.
        """
        if self.own_schedule is None:
            return Scheduler(self.settings.schedule, self.optimizer, self.settings.epochs)
        mode: Mode | None = "min"  # of the loss, without a validation split
        if self.has("valid"):
            mode = self.metric_mode or (mode_of(self.metric) if knows_metric else None)
        schedule = OwnScheduler(self.own_schedule, self.optimizer, self.schedule_every, mode)
        self.schedule_name = schedule.name
        if schedule.plateau is not None and self.settings.evaluate == "async":
            raise ValueError("ReduceLROnPlateau needs each evaluation before the next epoch: set evaluate='blocking'")
        if self.checkpoints.path is not None:
            check_storable(f"the state of {schedule.name}", schedule.state_dict())
        return schedule

    @property
    def measure_options(self) -> dict[str, Any]:
        """Arguments of `Measure`: in which parts evaluation runs, and where its embeddings are kept."""
        if self.plan is None:
            return {"part_hops": self.part_hops}
        return {
            "part_hops": self.part_hops,
            "chunk_bytes": self.plan.chunk_bytes,
            "rows_on_disk": self.plan.hidden_place == "disk",
        }

    @property
    def _evaluates_exactly(self) -> bool:
        """Whether the run will compute outputs over every edge, if only for the test at its end."""
        validates_exactly = self.settings.inference == "exact" and self.has("valid")
        return self.test_step is None and (self.has("test") or validates_exactly)

    # ---- before the loop: report, callbacks, and the checkpoint from which a run resumes

    def _open_run(self, stack: ExitStack) -> dict[str, Any] | None:
        """Make the optimizer and its schedule, open the run folder and the report, and set up the callbacks.

        Returns the state of the checkpoint to resume from. None for a new run.

        stack: closes all of it at the end of `fit`.
        """
        check_hooks(self.job)
        self.stop_reason = None
        self.num_steps = 0
        self.position = Position()
        self._earlier_s = 0.0
        self._ending_result = None
        self._write_report = None
        self._timers = trace.Timers()
        self._counters = trace.Counters()
        self.active = [*self.callbacks]
        if self.settings.patience is not None:
            self.active.append(EarlyStop(self.settings.patience))
        stack.enter_context(self.checkpoints)
        stack.enter_context(limit_cuda_memory(self.budget, self.device))

        # Only the first rank writes into the run folder.
        folder = self.out if self.world.rank == 0 else None
        if folder is not None:
            resumes = self.settings.resume
            # A run that resumes waits for the processes of the earlier one to release the folder.
            wait_s = HANDOVER_S if resumes else 0.0
            stack.enter_context(FileLock(folder / "run.lock", folder, wait_s, "choose another folder with out="))
            restore_overwritten(folder)
            if has_run(folder) and not (resumes or self.settings.overwrite):
                raise ValueError(
                    f"{folder} already holds a run. Resume it with resume=true, replace it with overwrite=true, or "
                    "choose another folder with out="
                )
        # For convs that draw from torch's generator, as attention dropout does.
        torch.manual_seed(self.settings.seed)
        self._initialise()
        self.optimizer = self.make_optimizer()
        self.update = Update(self.model, self.optimizer, self.settings.clip_norm, self.say)
        knows_metric = self._try_test_step()
        self.schedule = self._make_schedule(knows_metric)
        state = self.checkpoints.find(self)
        if folder is not None:
            remove_unfinished(folder)
            if self.settings.overwrite and has_run(folder):
                replace_run = ReplaceRun(folder)
                self.active.append(replace_run)
                stack.callback(lambda: replace_run.end(has_trained=self.num_steps > 0))
            is_over = state is not None and checkpoint.is_over(state, self.settings.epochs)
            # A run that is over is only tested again. Its folder has all records, so no report is opened.
            if not (is_over and is_complete(folder)):
                self._open_report(stack, folder, state)

        self.active += [WatchBudget(self._report), WatchPipeline(self._report), WatchHistory(self._report)]
        if self.settings.show and self.world.rank == 0:
            self.active.append(ShowProgress())
        self._keep_weights = KeepWeights(folder)
        self.active.append(self._keep_weights)
        stack.enter_context(trace.listen(self._timers))
        stack.enter_context(trace.listen(self._counters))
        evaluator_class = BlockingEvaluator if self.settings.evaluate == "blocking" else AsyncEvaluator
        self.evaluations: Evaluator = stack.enter_context(evaluator_class(self))
        self.active.append(self.evaluations.waiting)
        return state

    def _try_test_step(self) -> bool:
        """Call the user's `test_step` at a few nodes, to refuse what it returns before anything is trained.

        Returns whether `metric` is known now. An error of `test_step` counts for nothing, since so few nodes may be
        too few for it.
        """
        if self.test_step is None or self.metric_mode is not None or not self.has("valid"):
            return self.test_step is None and type(self).evaluate is Trainer.evaluate
        metric = ""
        problem = ""
        if self.world.rank == 0 or isinstance(self.data, ShardedData):
            tried: list[Any] = []
            with suppress(Exception):
                ids = self.data.splits["valid"][:NUM_TRIED_NODES]
                tried.append(run_test_step(self.test_step, self.job, ids))
            try:
                metric = next(iter(as_metrics(tried[0]))) if tried else ""
            except ValueError as error:
                problem = str(error)
        metric, problem = self.world.broadcast_object([metric, problem])
        if problem:
            raise ValueError(problem)
        if metric:
            self.metric = metric
            self.score({metric: 0.0})  # raises if the name does not tell what is best
        return metric != ""

    def _open_report(self, stack: ExitStack, folder: Path, state: dict[str, Any] | None) -> None:
        """Start the records of the run, or continue those that are in the checkpoint.

        state: the checkpoint. None for a new run.
        """
        if state is None:
            report = Report(folder, **stored_settings(self))
        else:
            is_kept = partial(checkpoint.was_recorded, state=state)
            report = Report(folder, **stored_settings(self), resume=True, is_kept=is_kept)
        self._report = report
        stack.callback(setattr, self, "_report", None)

        # Pushed before the report, so that it runs after the report is closed.
        def discard_if_failed(kind: type[BaseException] | None, *_: object) -> None:
            """Remove the records of a new run that failed before its first step."""
            has_trained = state is not None or self.num_steps > 0
            if kind is not None and not has_trained:
                report.discard()

        stack.push(discard_if_failed)
        stack.enter_context(report)
        stack.enter_context(trace.listen(report))
        self._write_report = WriteReport(report)
        self.active.append(self._write_report)

    def _initialise(self) -> None:
        """Create the parameters of lazy layers by a forward pass. All ranks get the first rank's weights."""
        has_lazy_layers = any(isinstance(p, nn.UninitializedParameter) for p in self.model.parameters())
        if has_lazy_layers:
            if isinstance(self.job.model, Whole):
                # A module without layers. `infer.exact` would run it on the whole graph, not on a tiny one.
                with infer.evaluating(self.job.model):
                    initialise(self.job.model, self.data.x, self.data.graph.edge)
            else:
                infer.exact(self.job.model, self.data, self.job.train_ids[:1], device=self.device)
        # What modules add by `get_extra_state` need be no tensors.
        self.world.broadcast_tensors(w for w in self.model.state_dict().values() if isinstance(w, Tensor))

    def _begin_training(self, state: dict[str, Any] | None) -> None:
        """Describe the run to the user, and resume from the checkpoint.

        state: the checkpoint. None for a new run.
        """
        self.weights_check = WeightsCheck(self.model)
        if self._must_combine:
            self._exchange(self.gradients.begin)

        if self.device.type == "cuda" and not isinstance(self.data, ShardedData):
            self.say(describe(self.data))
        if self.plan is not None:
            for line in self.plan.lines():
                self.say(line, logging.WARNING if line == self.plan.price_warning else logging.INFO)
            warning = self.plan.excess_warning(host_memory().total)
            if warning:
                self.say(warning, logging.WARNING)
        notes = whole_notes(self.job, self.method, self.part_hops, evaluates=self._evaluates_exactly)
        if notes.approximation:
            self.say(notes.approximation, logging.WARNING)
        if notes.evaluation:
            self.say(notes.evaluation)

        self.call("on_fit_start")
        if state is not None:
            self.checkpoints.resume(self, self.run, state)
        earlier = [*self.run.history, *self.run.evaluations]
        self._earlier_s = self.position.seconds + sum(event.seconds for event in earlier)
        # Results of epochs that the earlier run had left to evaluate.
        self.act_on(self.evaluations.begin())

    def identity(self) -> dict[str, Any]:
        """Facts that a checkpoint stores. A run resumes only from a checkpoint with the same facts."""
        settings = settings_of(self)
        identity = checkpoint.identity(
            self.model,
            self.data,
            method=settings["method"],
            settings=settings["train"],
            contents=self.contents,
            code=self.code,
        )
        return identity | {"gradients": settings["gradients"]}

    def take_over(
        self,
        *,
        position: Position,
        num_steps: int,
        stop_reason: str | None,
        metric: str,
        history: list[EpochEnd],
        evaluations: list[Evaluation],
    ) -> None:
        """Continue at the position of a checkpoint.

        The caller restores the model, the optimizer, the callbacks and the work.
        """
        self.position = position
        self.num_steps = num_steps
        self.stop_reason = stop_reason
        self.metric = metric
        self.run.history = history
        self.run.evaluations = evaluations
        self.run.epochs = len(history)


def _describe_last_epoch(num_epochs: int) -> str:
    """The reason for the end of a run that trained all its epochs."""
    return f"all {num_epochs} epochs are trained" if num_epochs > 1 else "1 epoch is trained"
