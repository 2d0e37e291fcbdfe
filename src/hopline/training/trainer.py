"""`Trainer`: one loop over units of work, whatever the method."""

from __future__ import annotations

import inspect
import math
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from hopline import inference as infer
from hopline import ops
from hopline.budget.guard import Guard, capped, guard_of
from hopline.budget.memory_plan import RunOutline
from hopline.contract import Budget, Job, Method, Plan, TrainStep, Unit, Work, in_groups, units_from
from hopline.data.checks import check_training
from hopline.data.dataset import Dataset
from hopline.data.fingerprint import contents_of
from hopline.data.placement import describe, place
from hopline.data.placement_settings import Placement
from hopline.device.meter import find_device
from hopline.distributed.world import World
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.plan_within import plan_within
from hopline.methods.sampled.settings import Sampled
from hopline.metrics import Mode, mode_of
from hopline.nn.gnn import GNN
from hopline.nn.structure import structure_of
from hopline.nn.whole_module import Whole, as_walkable, num_wrapped_ranks, unwrapped
from hopline.nn.whole_module_probe import initialise
from hopline.report.bottleneck import PREPARED, TRAINED
from hopline.report.settings import changed_keys
from hopline.report.writer import Report, is_complete
from hopline.shards.data import ShardedData
from hopline.training import checkpoint
from hopline.training.async_evaluation import Beside, check_beside, evaluates_here, sent_data
from hopline.training.best_weights import KeepWeights
from hopline.training.callbacks import Callback, EarlyStop, EpochEnd, Run, StepEnd
from hopline.training.checkpoint import Checkpoints, Position
from hopline.training.evaluation import Blocking, Evaluations, Measure, TestStep, check_whole, part_hops_of, whole_lines
from hopline.training.lr_schedule import Scheduler
from hopline.training.optimizer import Update, make_optimizer, split_decay
from hopline.training.rank_steps import taken_together, total_size
from hopline.training.report_callbacks import ShowProgress, WatchBudget, WatchPipeline, WriteReport, peak_bytes
from hopline.training.run_lock import HANDOVER_S, RunLock
from hopline.training.settings import TrainSettings
from hopline.training.watch_staleness import WatchHistory
from hopline.units.batch_unit import checked, own_threads, supervised
from hopline.util import trace
from hopline.util.config import check_names, kind_of, removed_settings, to_dict
from hopline.util.files import remove_unfinished
from hopline.util.host import freed_memory_kept
from hopline.util.log import logger

GivenBudget = Budget | str | Mapping[str, str] | None


def _checked_method(method: Method | None) -> Method:
    """The method, or the usual one; what is no method is refused with what to write."""
    if isinstance(method, Method | None):
        return method or Sampled()
    known = {kind_of(kind): kind.__name__ for kind in (Sampled, Historical, FullBatch)}
    meant = get_close_matches(kind_of(method) if isinstance(method, type) else str(method).lower(), known, n=1)
    example = known[meant[0]] if meant else "Sampled"
    kind = "the class" if isinstance(method, type) else "the string" if isinstance(method, str) else "the object"
    raise ValueError(f"method must be a Method such as hl.{example}(), not {kind} {method!r}")


def _own_module(model: nn.Module, world: World | None) -> nn.Module:
    """The user's module out of its wrapper, whose work the Trainer does itself over the ranks that it knows of."""
    ranks = num_wrapped_ranks(model)
    if ranks > 1 and (world is None or world.size != ranks):
        raise ValueError(
            f"the model is wrapped for {ranks} ranks, and the Trainer knows of {1 if world is None else world.size}: "
            "give it the plain model and world=, as hopline.distributed.launch.run hands it out (docs/shards.md)"
        )
    return unwrapped(model)


def _versions_of(data: Dataset) -> dict[str, int | None]:
    """By the names of a dataset's arrays, how often each was changed in place."""
    if isinstance(data, ShardedData):
        return {}
    return {**data.graph.versions, **{f"table {name!r}": table.version for name, table in data.tables.items()}}


@contextmanager
def _modes_and_draws_restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A context after which each module is in the mode that it was in, and torch's generators are where they were."""
    modes = [(module, module.training) for module in model.modules()]
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" or torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


class Trainer:
    """Trains a model on a dataset by a method.

    Extend it by callbacks, by a `Method` of your own, by `train_step` and `test_step`, or by overriding `step`,
    `evaluate` and `make_optimizer`.

    Args:
        model: A `GNN`, a PyG model, or any module with forward(x, edge_index). It is trained in place.
        data: With a "train" split, and with "valid" and "test" for what they are used for.
        method: `hl.Sampled` (default), `hl.Historical`, `hl.FullBatch`, or one of your own.
        callbacks: Called around steps, epochs and evaluations.
        train_step: (model, batch) -> mean loss over the batch's seeds, a scalar. Default: cross entropy, or binary
            cross entropy for several labels or a single score.
        test_step: (model, data, ids) -> metrics by name, the first of which chooses the best weights. Default: the
            metric of the task.
        metric_mode: Whether the first metric of `test_step` is best at its "max" or its "min". Only needed where its
            name does not tell, as "accuracy" and "loss" do.
        out: A folder for the report, checkpoints and the best weights. Default: nothing is written.
        config: Settings that made this run, for the report.
        world: The ranks that train together, as `hopline.distributed.launch` hands it out. Default: this process alone.
        placement: Where a GPU finds graph and features.
        budget: Memory that the run may take: "8GiB", or `hl.Budget(...)`.
        settings: Fields of `hl.extend.TrainSettings`: epochs, lr, patience, seed, device, show, ...

    Raises:
        ValueError: A setting, a split or a label is not allowed, or the method cannot train this model or dataset.

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

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        method: Method | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        train_step: TrainStep | None = None,
        test_step: TestStep | None = None,
        metric_mode: Mode | None = None,
        out: Path | str | None = None,
        config: Any = None,
        world: World | None = None,
        placement: Placement | None = None,
        budget: GivenBudget = None,
        **settings: Any,
    ) -> None:
        if not isinstance(data, Dataset):
            raise ValueError(f"data must be a hopline Dataset, not {type(data).__name__}: for PyG, hl.from_pyg(data)")
        model = _own_module(model, world)
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
        own = [name for name, p in inspect.signature(Trainer).parameters.items() if p.kind is p.KEYWORD_ONLY]
        names = [*own, *(field.name for field in fields(TrainSettings))]
        check_names("Trainer", settings, names, removed_settings(TrainSettings))
        self.settings = TrainSettings(**settings)
        self.device = find_device(self.settings.device) if world is None else world.device
        self.world = World.alone(self.device) if world is None else world
        self.model = model.to(self.device)
        self.method = self.asked = _checked_method(method).for_model(as_walkable(model)).for_graph(data.num_nodes)
        self.test_step = test_step
        self.metric_mode: Mode | None = self._checked_mode(metric_mode)
        self.sent = sent_data(self, data)
        self.data, self.metric = data, data.metric
        self.contents, self.structure = self._fingerprints(data) if out is not None else ({}, "")
        self._given, self._versions = weakref.ref(data), _versions_of(data)  # weak: on a GPU it is needed no more
        self._report: Report | None = None
        if isinstance(callbacks, Callback):
            raise ValueError(f"callbacks must be a list: write callbacks=[{type(callbacks).__name__}(...)]")
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ValueError(f"callbacks must be objects of classes derived from hl.Callback, not {callback!r}")
        self.callbacks = list(callbacks)
        self.usual_loss = train_step is None
        self.out = None if out is None else Path(out)
        self.config = config
        self.num_seeds = data.train_ids.numel()
        if self.settings.patience is not None and not self.has("valid"):
            raise ValueError("patience= stops by the validation metric: give the dataset a 'valid' split, or set none")
        check_training(data, [*["train"] * (train_step is None), *["valid", "test"] * (test_step is None)])
        self.budget = None if budget is None else Budget.of(budget)
        self.plan: Plan | None = None
        self.guard: Guard | None = None
        self.work = self._bound(train_step, placement or Placement())
        self.part_hops = part_hops_of(self.job, self.method)
        if self._evaluates_exactly:
            check_whole(self.job, self.part_hops, self.chunks.get("chunk_bytes"))
        if self.settings.evaluate == "async":
            check_beside(self, own_way=type(self).evaluate is not Trainer.evaluate)
        self.stop_reason: str | None = None
        self.num_steps = 0
        self.position = Position()
        self.checkpoints = Checkpoints(self.out, self.settings, self.world)
        self._found: dict[str, Any] | None = None
        """The checkpoint that the run goes on from."""

    def _bound(self, train_step: TrainStep | None, placement: Placement) -> Work:
        """The method's work, with the data where it is read fastest; with a budget, as a plan has it."""
        data = self.data
        self.job = Job(
            data=data,
            model=as_walkable(self.model),
            module=self.model,
            train_ids=data.train_ids,
            train_step=supervised(data.task, data.num_classes) if train_step is None else checked(train_step),
            usual_loss=self.usual_loss,
            seed=self.settings.seed,
            device=self.device,
            bf16=self.settings.precision == "bf16",
            world=self.world,
            say=self.say,
        )
        if self.budget is None:
            self._place(placement)
            return self.method.bind(self.job)
        beside = evaluates_here(self)
        outline = RunOutline(job=self.job, optimizer=self.settings.optimizer, placement=placement, beside=beside)
        self.plan = plan_within(self.method, outline, self.budget)
        self.method = self.plan.method
        self._place(self.plan.placement or placement)
        self.guard = guard_of(self.plan, self.budget, self.job, outline)
        work = self.method.bind(self.job)
        return work if self.guard is None else work.guarded(self.guard, self.plan)

    # ---- the loop

    def fit(self) -> Run:
        """Train, keep the best weights in the model, and test them.

        Whether it ends well, by an error or by Ctrl-C, it leaves the process as it was: signal handlers, torch's
        threads, the state of torch's random generators, each module's mode (`train()` or `eval()`), and how glibc
        treats freed memory. The settings and weights of the model are what training has made of them.

        Returns:
            Scores at the best epoch, and what happened in each epoch. All ranks get the same numbers.

        Raises:
            ValueError: The loss is not finite, the method gives no batches, or arrays of the dataset were changed
                meanwhile.
        """
        run, began = Run(metric=self.metric, folder=self.out, rank=self.world.rank), time.perf_counter()
        timers, counters = trace.Timers(), trace.Counters()
        with ExitStack() as stack:
            stack.enter_context(freed_memory_kept())
            stack.enter_context(_modes_and_draws_restored(self.model, self.device))
            keep = self._start(stack, timers, counters)
            kind = Beside if self.settings.evaluate == "async" else Blocking
            self.evaluations: Evaluations = stack.enter_context(kind(self, run))
            try:
                self._loop(run, timers, counters)
                self._test(run, keep)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self.evaluations.salvage()
                run.reason = ": ".join(filter(None, (type(error).__name__, str(error))))
                raise
            finally:
                run.metric, run.stages = self.metric, timers.statistics()
                run.seconds, run.peak_bytes = self._earlier_s + time.perf_counter() - began, peak_bytes(self.device)
                with ExitStack() as ends:  # all of them, also after one has failed: one closes the progress bar
                    for callback in reversed(self.active):
                        ends.callback(callback.on_fit_end, self, run)
        return run

    def _loop(self, run: Run, timers: trace.Timers, counters: trace.Counters) -> None:
        self.optimizer = self.make_optimizer()
        self.update = Update(self.model, self.optimizer, self.settings.clip_norm, self.say)
        self.schedule = Scheduler(self.settings.schedule, self.optimizer, self.settings.epochs)
        if self.device.type == "cuda" and not isinstance(self.data, ShardedData):
            self.say(describe(self.data))
        for line in [] if self.plan is None else self.plan.lines():
            self.say(line)
        for line in whole_lines(self.job, self.method, self.part_hops, evaluates=self._evaluates_exactly):
            self.say(line)
        self.call("on_fit_start")
        if self._found is not None:
            self.checkpoints.resume(self, run, self._found)
            self._found = None
        self._earlier_s = self.position.seconds + sum(one.seconds for one in [*run.history, *run.evaluations])
        self.evaluations.begin()
        if self.stop_reason is None and self.position.epoch <= self.settings.epochs:
            with self.checkpoints.holding_signals():
                self._train_epochs(run, timers, counters)
        self.evaluations.finish()
        num_epochs = self.settings.epochs
        run.reason = self.stop_reason or (
            f"all {num_epochs} epochs are trained" if num_epochs > 1 else "1 epoch is trained"
        )
        run.finished = True

    def _train_epochs(self, run: Run, timers: trace.Timers, counters: trace.Counters) -> None:
        for epoch in range(self.position.epoch, self.settings.epochs + 1):
            try:
                ended = self._train_epoch(epoch, run, timers, counters)
            except Exception:
                if not self.evaluations.end_before():
                    raise
                return
            if ended is None:
                return
            run.epochs = epoch
            run.history.append(ended)
            self.call("on_epoch_end", ended)
            due = self._is_due(epoch)
            value = self.evaluations.validate(epoch) if self.is_evaluated(epoch) else None
            self.schedule.step(-ended.loss if value is None else value, evaluated=due)
            timers.next_epoch()  # evaluation belongs to the epoch it follows; the final test to none
            self.position = Position(epoch=epoch + 1)
            self.evaluations.arrive()
            if self.evaluations.ended_after is not None:
                return
            is_last = epoch == self.settings.epochs or self.stop_reason is not None
            self.checkpoints.write_if_due(self, run, at_end=is_last)
            if is_last:
                return

    def step(self, units: Sequence[Unit]) -> tuple[Tensor, float]:
        """One optimizer step over some units: (mean loss, seeds)."""
        total = total_size(units, self.world) or 1
        self.update.clear()
        if self.world.size > 1:  # what convs draw by themselves, such as attention dropout, differs between ranks
            torch.manual_seed(ops.derive_key(self.settings.seed, self.num_steps, self.world.rank))
        with own_threads(self.job) if self.usual_loss else nullcontext():
            losses = [unit.forward_backward(total) for unit in units]
            loss = (losses[0] if len(losses) == 1 else torch.stack(losses).sum()) / total
            if self.world.size > 1:
                with trace.span("exchange"):
                    self.world.sum_gradients(self.model.parameters())
            self.update()
        for unit in units:
            unit.commit()
        return loss, total

    def _train_epoch(self, epoch: int, run: Run, timers: trace.Timers, counters: trace.Counters) -> EpochEnd | None:
        """Train an epoch, or the rest of it; None if an evaluation that came in has ended the run before."""
        self._check_unchanged()
        self.job.model.train()
        self.model.train()
        at, started = self.position, time.perf_counter() - self.position.seconds
        with closing(self._groups(epoch)) as groups:
            for group in groups:
                loss, size = self.step(group)
                at.loss_sum = torch.add(torch.as_tensor(at.loss_sum, dtype=torch.float64), loss, alpha=size)
                at.seeds, at.units = at.seeds + size, at.units + len(group)
                at.seconds = time.perf_counter() - started
                self.num_steps += 1
                self.call("on_step_end", StepEnd(epoch=epoch, step=self.num_steps, loss=loss, size=size))
                self.evaluations.arrive(between_steps=True)
                if self.evaluations.ended_after is not None:
                    return None
                self.checkpoints.write_if_due(self, run, in_epoch=True)
        if not at.seeds:
            raise ValueError("the method gave no batches: make batch_size smaller or set drop_last=false")
        mean_loss = self.world.sum([float(at.loss_sum)])[0] / at.seeds
        trace.end_device_spans()
        ops.check_device_errors()
        for table in self.data.tables.values():
            table.end_epoch()
        if not math.isfinite(mean_loss):
            raise ValueError(
                f"the loss became {mean_loss} in epoch {epoch}: lower lr=, set clip_norm=, and check the features by "
                "`hopline verify`"
            )
        seconds, stages = time.perf_counter() - started, timers.this_epoch()
        load = getattr(getattr(self.work, "loader", None), "load", None)  # of the threads that prepared batches
        work = {name: s for name, s in stages.items() if name in (*PREPARED, *TRAINED)}  # waiting is none
        work |= {} if load is None else load.stages
        counters.next_epoch()
        return EpochEnd(
            epoch=epoch,
            loss=mean_loss,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            seconds=seconds,
            seeds_per_s=at.seeds / seconds,
            slowest_stage=max(work, key=lambda name: work[name], default=""),
            stages=stages,
            work=work,
            counters=counters.last_epoch(),
        )

    def _check_unchanged(self) -> None:
        """Methods and GPUs have copies of the dataset: a change that only some of them see is refused."""
        data = self._given()
        found = self._versions if data is None else _versions_of(data)
        changed = [name for name, version in found.items() if version != self._versions.get(name)]
        if changed:
            raise ValueError(
                f"{changed[0]} of the dataset was changed in place after the Trainer was made, which has copies of it: "
                "make a new Trainer after the change"
            )

    # ---- evaluation

    def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
        """Return the metrics of a split, by name, with the weights that the model has now.

        Args:
            split: "train", "valid" or "test".
            exact: Over every edge, or over edges that the method samples.

        Raises:
            ValueError: There is no such split, or arrays of the dataset were changed since the Trainer was made.
        """
        self._check_unchanged()
        if split not in self.data.splits:
            raise ValueError(f"the dataset has no split {split!r}: choose one of {', '.join(self.data.splits)}")
        measure = Measure(self.method, self.test_step, split, exact, self.settings.show, **self.chunks)
        return measure(self.job, getattr(self.work, "keep_rows", None))  # of a method that has a use for hidden rows

    @property
    def chunks(self) -> dict[str, Any]:
        """How exact evaluation keeps to a plan."""
        if self.plan is None:
            return {"part_hops": self.part_hops}
        on_disk = self.plan.hidden_at == "disk"
        return {"part_hops": self.part_hops, "chunk_bytes": self.plan.chunk_bytes, "rows_on_disk": on_disk}

    @property
    def _evaluates_exactly(self) -> bool:
        """Whether the run will compute outputs over every edge, if only for the test at its end."""
        exact = self.settings.inference == "exact"
        return self.test_step is None and (self.has("test") or (exact and self.has("valid")))

    def evaluated_weights(self) -> Mapping[str, Tensor]:
        """The weights that the evaluation at hand is of: those of its epoch, however far training has gone on."""
        return self.evaluations.weights or self.model.state_dict()

    def _checked_mode(self, mode: Mode | None) -> Mode | None:
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"metric_mode must be 'max' or 'min', not {mode!r}")
        if mode == "min" and self.test_step is None and type(self).evaluate is Trainer.evaluate:
            raise ValueError("metric_mode='min' is for a metric of your own: give test_step=, or leave it out")
        return mode

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
        """The metric that weights, early stopping and schedules go by, with its sign turned where lower is better."""
        value = metrics[self.metric]
        return value if self.best_is == "max" else -value

    def _is_due(self, epoch: int) -> bool:
        return (
            epoch % self.settings.evaluate_every == 0 or epoch == self.settings.epochs or self.stop_reason is not None
        )

    def is_evaluated(self, epoch: int) -> bool:
        """Whether the epoch that has just ended is one whose validation metrics will come."""
        return self._is_due(epoch) and self.has("valid")

    def has(self, split: str) -> bool:
        return split in self.data.splits and self.data.splits[split].numel() > 0

    # ---- beginning and end

    def stop(self, reason: str) -> None:
        """End training after the current epoch."""
        self.stop_reason = reason

    def say(self, text: str) -> None:
        """Tell something through `logging`, and in the run's log."""
        if self.world.rank == 0:
            logger.info(text)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line into the run's log."""
        if self._report is not None:
            self._report.note(text)

    def make_optimizer(self) -> torch.optim.Optimizer:
        s, rest = self.settings, []
        if s.weight_decay_rest is not None:
            if not isinstance(self.job.model, GNN):
                raise ValueError(
                    f"weight_decay_rest= is for the last layer, and {type(self.model).__name__} is not made of layers: "
                    "leave it out, or use hl.nn.GNN or a PyG model such as GCN"
                )
            rest = self.job.model.rest_parameters()
        return make_optimizer(s.optimizer, split_decay(self.model, rest, s.weight_decay, s.weight_decay_rest), s.lr)

    def _start(self, stack: ExitStack, timers: trace.Timers, counters: trace.Counters) -> KeepWeights:
        """Open the report and set up the run's own callbacks."""
        if type(as_walkable(self.model)) is not type(self.job.model):  # which is seen as layers, and no longer is
            raise ValueError(
                f"hooks were put on {type(self.model).__name__} after the Trainer was made: put them on before"
            )
        self.stop_reason, self.num_steps, self.position, self._earlier_s = None, 0, Position(), 0.0
        self.active = [*self.callbacks]
        if self.settings.patience is not None:
            self.active.append(EarlyStop(self.settings.patience))
        stack.enter_context(self.checkpoints)
        stack.enter_context(capped(self.budget, self.device))
        if self.out is not None and self.world.rank == 0:
            resumes = self.settings.resume
            stack.enter_context(RunLock(self.out, HANDOVER_S if resumes else 0.0))
            if (self.out / "metrics.jsonl").exists() and not resumes:
                raise ValueError(
                    f"{self.out} holds a run already: go on with it by resume=true, or choose another folder with out="
                )
        torch.manual_seed(self.settings.seed)  # for draws inside convs, such as attention dropout
        self._initialise()
        self._found = self.checkpoints.find(self)
        if self.out is not None and self.world.rank == 0:
            remove_unfinished(self.out)
            if self._found is None or not (
                checkpoint.is_over(self._found, self.settings.epochs) and is_complete(self.out)
            ):  # else it is only tested again, and its folder has everything
                self._open_report(stack, self.out)
        self.active += [WatchBudget(self._report), WatchPipeline(self._report), WatchHistory(self._report)]
        if self.settings.show and self.world.rank == 0:
            self.active.append(ShowProgress())
        keep = KeepWeights(self.out if self.world.rank == 0 else None)
        self.active.append(keep)
        stack.enter_context(trace.listen(timers))
        stack.enter_context(trace.listen(counters))
        return keep

    def _open_report(self, stack: ExitStack, folder: Path) -> None:
        """Begin the records of the run, or go on with those of what the checkpoint holds."""
        found = self._found
        if found is None:
            report = Report(folder, **self._stored_settings())
        else:
            is_kept = partial(checkpoint.was_recorded, state=found)
            report = Report(folder, **self._stored_settings(), resume=True, is_kept=is_kept)
        self._report = report
        stack.callback(setattr, self, "_report", None)
        stack.push(lambda kind, *_: report.discard() if kind and found is None and not self.num_steps else None)
        stack.enter_context(report)
        stack.enter_context(trace.listen(report))
        self.active.append(WriteReport(report))

    # ---- going on after an end that was not planned

    def identity(self) -> dict[str, Any]:
        """What a checkpoint of this run must agree with."""
        described = self._describe()
        return checkpoint.identity(
            self.model, self.data, described["method"], described["train"], self.contents, self.structure
        )

    def _fingerprints(self, data: Dataset) -> tuple[dict[str, str], str]:
        """(of the dataset, of the model), before training, in which a module may count something."""
        contents = {"cut": data.shard.cut} if isinstance(data, ShardedData) else contents_of(data)
        return contents, structure_of(self.model)

    def _groups(self, epoch: int) -> Generator[list[Unit], None, None]:
        """The units of the epoch that are not done yet, by steps."""
        units = units_from(self.work, epoch, self.position.units, round(self.position.seeds))
        return taken_together(in_groups(units, self.settings.accumulate), self.world)

    def _test(self, run: Run, keep: KeepWeights) -> None:
        """The best weights, tested."""
        run.best_epoch = keep.restore(self, run.epochs)
        at_best = [e for e in run.evaluations if e.epoch == run.best_epoch]
        run.valid = at_best[-1].metrics[self.metric] if at_best else math.nan
        if self.has("test"):
            run.test = self.evaluations.evaluate_now(run.best_epoch, "test", exact=True).metrics[self.metric]

    def _initialise(self) -> None:
        """A forward pass gives lazily built layers their parameters; ranks begin with the first one's weights."""
        if any(isinstance(p, nn.UninitializedParameter) for p in self.model.parameters()):
            if isinstance(self.job.model, Whole):
                with infer.evaluating(self.job.model):
                    initialise(self.job.model, self.data.x, self.data.graph.edge)
            else:
                infer.exact(self.job.model, self.data, self.job.train_ids[:1], device=self.device)
        self.world.broadcast_tensors(self.model.state_dict().values())

    def _place(self, placement: Placement) -> None:
        """The data where the device reads it fastest; data that is on a GPU already stays as it is."""
        data = self.data
        stays = isinstance(data, ShardedData) or (placement == Placement() and data.graph.device.type == "cuda")
        if self.device.type != "cuda" or stays:
            return
        drawn = {name: getattr(self.method, name) for name in ("fanouts", "batch_size") if hasattr(self.method, name)}
        self.data = place(data, self.method.placement(placement), self.device, **drawn)
        self.job = replace(self.job, data=self.data)

    def _describe(self) -> dict[str, Any]:
        method = {"kind": type(self.asked).__name__}  # not as a plan has it: what is learnt does not depend on that
        try:
            method |= to_dict(self.asked)
        except (TypeError, ValueError):  # a user's own method need not be a dataclass
            method["repr"] = repr(self.asked)
        return {
            "data": self.data.name,
            "method": method,
            "train": to_dict(self.settings),
            "model": repr(self.model),
        }

    def _stored_settings(self) -> dict[str, Any]:
        """What config.json keeps: all settings, and which of them were changed from their defaults."""
        if self.config is not None:
            return {"config": to_dict(self.config), "changed": changed_keys(self.config)}
        described = self._describe()
        changed = ["data", "model", *(f"train.{key}" for key in changed_keys(self.settings))]
        if not isinstance(self.asked, Sampled) or "repr" in described["method"]:
            changed.append("method.kind")
        of_method = ["repr"] if "repr" in described["method"] else changed_keys(self.asked)
        return {"config": described, "changed": [*changed, *(f"method.{key}" for key in of_method)]}

    def call(self, hook: str, *args: Any) -> None:
        for callback in self.active:
            getattr(callback, hook)(self, *args)
