"""Historical training of a job: the order of its batches, and when their rows are pushed into the tables.

A table per layer holds a row for every node: its embedding as of the last step that computed it. One *turn* is one
optimizer step, at which every rank has a batch of its own or none:

    units()                     HistoricalUnit                    commit() -> waiting -> flush()
    draw the turns,      ->     pull halo rows, forward,    ->    after the optimizer's step: push own rows,
    make each batch             backward                          `lag` turns later

Tables change in two places only: `flush`, which writes what batches push, and `refresh`, which computes all rows
exactly (exact evaluation may do the same, see `keep_rows`). A batch never sees rows that another rank computes at the
same turn. With several ranks, barriers around `flush` keep any rank from reading while another writes.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline import ops
from hopline.budget.plan import Plan
from hopline.contract import Guard, Job, KeepRows, Unit, Work, WorkDescription
from hopline.core.partition import Partition
from hopline.methods.historical.batches import HistoricalBatch, HistoricalBatches
from hopline.methods.historical.groups import Groups
from hopline.methods.historical.micro_batches import GuardedHistoricalUnit, LayerBytes
from hopline.methods.historical.staleness import RowDrift
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph, PartsSpec
from hopline.methods.partitioned.parts import Group
from hopline.methods.partitioned.sweep import Sweep
from hopline.nn.layered import Layered
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.methods.historical.settings import Historical


@dataclass(frozen=True, eq=False)
class Commit:
    """The rows that a batch writes into the tables, kept until they are written, `lag` turns later."""

    row_ranges: Sequence[slice]
    """Positions of the batch's own nodes in the tables, a range per part."""
    rows: Mapping[int, Tensor]
    """By layer: [num_own, ...], the batch's own rows after it."""
    gradients: Mapping[int, Tensor]
    """By layer: [num_own, ...], gradients of the summed loss at the own rows. Empty without compensation."""
    step: int
    """The step that computed the rows, which the tables record for their age."""
    computed: Any = None
    """The point in the device's work at which rows were ready, from `Histories.now`. None for rows on the host."""

    def state_dict(self) -> dict[str, Any]:
        """The commit for a checkpoint, with its tensors on the host."""
        return {
            "slabs": [[row_range.start, row_range.stop] for row_range in self.row_ranges],
            "rows": _on_host(self.rows),
            "gradients": _on_host(self.gradients),
            "step": self.step,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Commit:
        row_ranges = [slice(start, stop) for start, stop in state["slabs"]]
        return cls(row_ranges=row_ranges, rows=state["rows"], gradients=state["gradients"], step=state["step"])


class HistoricalWork(Work):
    """Historical training of one job.

    Ranks take their turns together. From the next turn on, or `lag` turns later, all of them see the rows that a batch
    commits.

    Owns the graph in parts, with its tables, and the commits that wait.
    """

    graph_class = PartitionedGraph

    def __init__(self, job: Job, model: Layered, method: Historical, partition: Partition | None = None) -> None:
        self.job = job
        self.model = model
        self.method = method
        self.partitioned = self.graph_class(job, model, _spec(method), partition)
        self.groups = Groups(method, self.partitioned.assignment, job.seed)
        self.batches = HistoricalBatches(method, self.partitioned)
        self.drift = RowDrift(self.partitioned)
        self.guard: Guard | None = None
        """Keeps the steps within a budget. None without a budget."""
        self.filled = False
        """Whether an epoch has begun, so that the tables may hold rows."""
        self.waiting: deque[Commit] = deque()
        """Commits that are not written yet, oldest first: those of the last `lag` turns."""
        self._epoch_hosts = self._hosts
        """By rank: its host, in the run that began the epoch. A checkpoint may be from a run with other ranks."""

    @property
    def _hosts(self) -> tuple[int, ...]:
        return self.partitioned.assignment.hosts

    def describe(self) -> WorkDescription:
        return WorkDescription(refreshes=self.method.refresh_every == 1)  # in every epoch

    def guarded(self, guard: Guard, plan: Plan) -> HistoricalWork:
        """This work, which from now on splits a batch into micro-batches if it would exceed the budget."""
        self.guard = guard
        # Computed now, or they would be part of the first step.
        _ = self.partitioned.example_rows, self.partitioned.partition.position
        return self

    # ---- batches

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        """The units of an epoch: one for each turn that has a gradient. All other turns only push rows.

        done: the number of units to leave out at the beginning: an interrupted run has trained them. examples: unused.
        """
        if epoch == 1 and not done:
            self._begin()
        self.partitioned.prepare()
        # Ranks and hosts decide which rank trains which batch. So within an epoch, a run resumes only with the same.
        if done and self._epoch_hosts != self._hosts:
            raise ValueError(
                f"this epoch was begun by {len(self._epoch_hosts)} ranks on {max(self._epoch_hosts) + 1} hosts: resume "
                "with as many, or from a checkpoint at the end of an epoch"
            )
        # A refresh in epochs 1, 1 + every, 1 + 2 * every, ...
        every = self.method.refresh_every
        is_refresh_due = isinstance(every, int) and (epoch - 1) % every == 0
        is_warm_up_due = self.method.warm_up and not self.filled
        if done == 0 and (is_refresh_due or is_warm_up_due):
            self.refresh()
        self.filled = True

        epoch_key = ops.derive_key(self.job.seed, epoch)
        rank = self.partitioned.assignment.rank
        num_units = 0  # units of the turns so far, this one included
        self.drift.begin_epoch()
        for step, turn in enumerate(self.groups.turns_of(epoch)):
            total: float = sum(self._num_examples(group) for group in turn)
            has_gradient = self.method.compensate or total > 0
            if has_gradient:
                num_units += 1
            # A turn without a unit leaves no trace in `done`. It is done if the next unit is.
            is_done = num_units <= done if has_gradient else num_units < done
            if is_done:
                continue  # trained and pushed before the run was interrupted
            if self.method.compensate:
                # With compensation a batch gives its part of the full gradient, however many examples it has. So every
                # batch stands for an equal share of the examples.
                num_batches = sum(group != () for group in turn)
                total = num_batches * len(self.job.examples) / self.groups.num_groups
            with trace.span("sample"):
                hist_batch = self.batch(turn[rank], ops.derive_key(epoch_key, step * len(turn) + rank))
            unit = self.unit(hist_batch, total)
            if has_gradient:
                yield unit
            else:  # no seeds to learn from, but other batches read its rows: push them without a step
                unit.push_only()
            self.drift.end_step()
        self.drift.end_epoch()

    def num_learning(self, epoch: int) -> int:
        """The number of units of an epoch: turns at which some rank has seeds, or all turns with compensation."""
        turns = self.groups.turns_of(epoch)
        if self.method.compensate:
            return len(turns)
        return len([turn for turn in turns if any(map(self._num_examples, turn))])

    def _begin(self) -> None:
        """Begin a run with empty tables: those of a run before hold rows of other weights."""
        if self.filled:
            self.partitioned.empty_tables()
            self.drift = RowDrift(self.partitioned)
            self.filled = False
            self.waiting.clear()

    def unit(self, hist_batch: HistoricalBatch | None, total: float | None = None) -> HistoricalUnit:
        """A batch as a unit of training. total: examples that the batches of all ranks at this turn stand for."""
        unit_class = HistoricalUnit if self.guard is None else GuardedHistoricalUnit
        return unit_class(self, hist_batch, total)

    @cached_property
    def mean_weight(self) -> float:
        """What the examples of a batch count in a mean, on average over the batches of an epoch."""
        return self.job.weight_of_all / self.groups.num_groups

    def _num_examples(self, group: Group) -> int:
        return int(self._examples_of_parts[list(group)].sum())

    @cached_property
    def _examples_of_parts(self) -> Tensor:
        partition = self.partitioned.partition
        return torch.bincount(partition.part_of[self.job.examples.nodes.cpu()], minlength=partition.num_parts)

    def batch(self, group: Group, key: int | None) -> HistoricalBatch | None:
        """A group's nodes with all their in-edges, or None for an empty group. See `HistoricalBatches.make`."""
        return self.batches.make(group, key)

    # ---- tables

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """Predicts the bytes of single layers, for batches that are split."""
        return LayerBytes(self.model, self.job.data.tables.get("x"))

    def refresh(self) -> None:
        """Compute all rows of the tables exactly with the weights of now, and with compensation all gradients too."""
        self.partitioned.prepare()
        self.flush(0)  # or commits that wait would later overwrite exact rows by older ones
        with trace.span("refresh"):
            self._fill_tables()

    def _fill_tables(self) -> None:
        sweep = Sweep(self.partitioned, keeps_gradients=self.method.compensate)
        sweep.forward()
        if self.method.compensate:
            # The sweep adds to the parameters' gradients, which belong to the step. So they are put aside: autograd
            # would add to them in place.
            gradients = [(p, p.grad) for p in self.job.module.parameters()]
            self.job.module.zero_grad(set_to_none=True)
            sweep.backward()
            for p, gradient in gradients:
                p.grad = gradient

    @property
    def keep_rows(self) -> KeepRows | None:
        """A callback by which exact evaluation writes its rows into the tables, which saves a refresh.

        None unless `refresh_every` is "evaluation".
        """
        if self.method.refresh_every != "evaluation":
            return None

        def keep(l: int, ids: Tensor, rows: Tensor) -> None:
            self.flush(0)  # older rows must not come later
            histories = self.partitioned.histories
            positions = self.partitioned.partition.position[ids.cpu()]
            histories.write(l, positions, rows)
            histories.written[positions] = histories.step

        return keep

    def commit(self, hist_batch: HistoricalBatch | None, gradients: Mapping[int, Tensor]) -> None:
        """End a turn: queue this rank's rows, if it had a batch, and write those that have waited `lag` turns.

        Collective: every rank calls it at every turn, also without a batch.
        """
        histories = self.partitioned.histories
        histories.step += 1
        self.waiting.append(
            Commit(
                row_ranges=() if hist_batch is None else hist_batch.halo.row_ranges,
                rows={} if hist_batch is None else dict(hist_batch.halo.commits()),
                gradients=gradients,
                step=histories.step,
                computed=histories.now(),
            )
        )
        self.flush(self.method.lag)
        # Ranks read each other's rows, so all must use the same running statistics of batch norms.
        self.job.world.broadcast_tensors(self.job.module.buffers())

    def flush(self, max_waiting: int) -> None:
        """Write the oldest commits until at most `max_waiting` wait. Collective: all ranks have queued equally many."""
        if len(self.waiting) <= max_waiting:
            return
        histories = self.partitioned.histories
        gradients = self.partitioned.gradients
        self.job.world.barrier()  # all ranks have read what their batches need
        while len(self.waiting) > max_waiting:
            commit = self.waiting.popleft()
            for l, rows in commit.rows.items():
                histories.write(l, commit.row_ranges, rows, commit.computed)
            for l, rows in commit.gradients.items():
                gradients.write(l, commit.row_ranges, rows, commit.computed)
            histories.stamp(commit.row_ranges, commit.step)
        self.job.world.barrier()  # all ranks have written: reading may begin

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs: tables, commits that wait, and the host of each rank.

        Collective. It is complete on the first rank, which writes the checkpoint.
        """
        return {
            "histories": self.partitioned.histories.state_dict(),
            "gradients": self.partitioned.gradients.state_dict(),
            "filled": self.filled,
            "waiting": self._gather_waiting(),
            "hosts": list(self._hosts),
        }

    def _gather_waiting(self) -> list[list[dict[str, Any]]]:
        """By rank, the commits that wait, as state dicts. Collective; empty on all ranks but the first."""
        world = self.job.world
        waiting = [commit.state_dict() for commit in self.waiting]
        if world.size == 1:
            return [waiting]
        # The first rank gathers them as bytes, by an all-to-all in which the others receive nothing.
        buffer = io.BytesIO()
        torch.save(waiting, buffer)
        sent = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        received = world.all_to_all([sent if rank == 0 else sent[:0] for rank in range(world.size)])
        return [torch.load(io.BytesIO(r.numpy().tobytes()), weights_only=True) for r in received if r.numel()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        waiting = state["waiting"]
        self._epoch_hosts = tuple(state["hosts"])
        # Commits that wait belong to one rank each, so they can only go back to as many ranks.
        if any(waiting) and self._epoch_hosts != self._hosts:
            raise ValueError(
                f"with lag= a run resumes with as many ranks and hosts as it had: {len(self._epoch_hosts)} ranks on "
                f"{max(self._epoch_hosts) + 1} hosts"
            )
        self.partitioned.histories.load_state_dict(state["histories"])
        self.partitioned.gradients.load_state_dict(state["gradients"])
        self.filled = state["filled"]
        own_waiting = waiting[self.partitioned.assignment.rank] if any(waiting) else ()
        self.waiting = deque(map(Commit.from_state, own_waiting))


def _spec(method: Historical) -> PartsSpec:
    return PartsSpec(
        num_parts=method.num_parts,
        partition=method.partition,
        storage=method.storage,
        tables=method.tables,
        folder=method.folder,
        with_gradients=method.compensate,
        parts_per_group=method.parts_per_batch,
        has_halo=method.halo != "drop",
        with_edge_ids=method.edge_dropout > 0,
        caches_blocks=True if method.groups == "fixed" else None,
    )


def _on_host(rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {l: tensor.cpu() for l, tensor in rows.items()}
