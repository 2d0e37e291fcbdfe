"""Historical training of a job: its batches, its tables, and what is written into them when."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline import ops
from hopline.contract import Guard, Job, Plan, Unit
from hopline.core.batch import Batch, Block
from hopline.core.partition import Partition, make_partition
from hopline.core.sampler import full_block
from hopline.inference import KeepRows, evaluating
from hopline.methods.historical.micro_batches import GuardedHistoricalUnit, LayerBytes
from hopline.methods.historical.staleness import RowDrift
from hopline.methods.historical.step import HistoricalBatch, HistoricalUnit
from hopline.methods.partitioned.batches import HistoricalBatches
from hopline.methods.partitioned.groups import Group, Parts, without_halo
from hopline.methods.partitioned.sweep import fill, go_back
from hopline.nn.gnn import GNN, State
from hopline.tables.history import HaloBlock, Histories, RecordedBlock
from hopline.tables.history_gpu import DeviceHistories, Where, choose_where
from hopline.tables.history_ranks import Owners, SharedHistories, Shares
from hopline.util import trace
from hopline.util.config import format_size

if TYPE_CHECKING:
    from hopline.methods.historical.settings import Historical

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "model": None}
PROBED = 8
"""Nodes on which the model is run to learn the widths of its rows."""


@dataclass(frozen=True, eq=False)
class Commit:
    """What a batch writes into the tables."""

    slabs: Sequence[slice]
    rows: Mapping[int, Tensor]
    """By layer, the batch's own rows."""
    gradients: Mapping[int, Tensor]
    step: int
    mark: Any = None
    """The moment of the computation when they were there."""

    def state_dict(self) -> dict[str, Any]:
        """On the host."""
        return {
            "slabs": [[slab.start, slab.stop] for slab in self.slabs],
            "rows": _on_host(self.rows),
            "gradients": _on_host(self.gradients),
            "step": self.step,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Commit:
        slabs = [slice(*ends) for ends in state["slabs"]]
        return cls(slabs, state["rows"], state["gradients"], state["step"])


class HistoricalWork:
    """Historical training of one job. With several ranks, all take their turns together.

    At a turn every rank has a batch of its own, or none; what it commits is seen by all from the next turn on.
    """

    def __init__(self, job: Job, model: GNN, method: Historical, partition: Partition | None = None) -> None:
        self.job, self.model, self.method = job, model, method
        graph = job.data.graph
        self.shares = Shares.of(job.world, method.num_parts)
        self.partition = partition or partition_together(job, method)
        self.parts = Parts(graph, self.partition, method, self.shares, job.seed)
        self.owners = Owners(job.world, self.shares, self.partition.ptr)
        self.batches = HistoricalBatches(self)
        self.histories, self.gradients = self._new_histories("h"), self._new_histories("gradient")
        self.drift = RowDrift(self)
        self.guard: Guard | None = None
        """Keeps the steps within a budget, where there is one."""
        self.filled = False
        self.waiting: deque[Commit] = deque()
        self._began_with = self.shares.hosts
        self._encoded: dict[tuple[int, ...], Tensor | None] | None = None

    def _new_histories(self, name: str) -> Histories:
        dtype, folder = DTYPES[self.method.storage], self.method.folder
        if self.job.world.size > 1:
            return SharedHistories(self.owners, name=name, dtype=dtype, folder=folder)
        num_nodes, device = self.partition.num_nodes, self.job.device
        if device.type == "cpu":
            return Histories(num_nodes, name=name, dtype=dtype, folder=folder)
        pool, rows = (None if value == "auto" else value for value in (self.method.pool_size, self.method.buffer_rows))
        return DeviceHistories(
            num_nodes, device, self.tables_at, pool_size=pool, buffer_rows=rows, name=name, dtype=dtype, folder=folder
        )

    @cached_property
    def tables_at(self) -> Where:
        """Where the tables of a GPU are."""
        dtype, sizes = DTYPES[self.method.storage], 1 + self.method.compensate
        row = sum((dtype or like.dtype).itemsize * like[0].numel() for like in self._probed().values())
        where = choose_where(
            sizes * row * self.partition.num_nodes, self.job.device, self.method.tables, self.method.folder
        )
        text = {"device": "on the device", "pinned": "pinned on the host", "host": "on the host, behind pinned buffers"}
        self.job.say(f"history: {format_size(sizes * row * self.partition.num_nodes)} {text[where]}")
        return where

    def guarded(self, guard: Guard, plan: Plan) -> HistoricalWork:
        """This work, whose batches go in micro-batches where they would take too much."""
        self.guard = guard
        return self

    # ---- batches

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        if epoch == 1 and not done:
            self._begin()
        self.prepare()
        if done and self._began_with != self.shares.hosts:
            raise ValueError(
                f"this epoch was begun by {len(self._began_with)} ranks on {max(self._began_with) + 1} hosts: go on "
                "with as many, or from a checkpoint at the end of an epoch"
            )
        every = self.method.refresh_every
        is_due = isinstance(every, int) and epoch % every == 1 % every
        if done == 0 and (is_due or (not self.filled and self.method.warm_up)):
            self.refresh()
        self.filled = True
        epoch_key, given, rank = ops.derive_key(self.job.seed, epoch), 0, self.shares.rank
        turns = self.parts.turns_of(epoch)
        self.drift.begin_epoch()
        for step, turn in enumerate(turns):
            size: float = sum(self._num_seeds(group) for group in turn)
            learns = self.method.compensate or size > 0
            given += learns
            if given <= done and (learns or given < done):
                continue  # it had its turn before the run was interrupted
            if self.method.compensate:
                # Each batch gives its part of the full gradient, whatever seeds it has: it stands for an equal share.
                num_batches = sum(group != () for group in turn)
                size = num_batches * self.job.train_ids.numel() / self.parts.num_groups
            with trace.span("sample"):
                made = self.batch(turn[rank], ops.derive_key(epoch_key, step * len(turn) + rank))
            unit = self.unit(made, size)
            if learns:
                yield unit
            else:  # nothing to learn from, but its neighbours read its rows
                unit.push_only()
            self.drift.end_step()
        self.drift.end_epoch()

    def _begin(self) -> None:
        """Leave nothing of a run before: its rows are of other weights."""
        if self.filled:
            self.histories, self.gradients = self._new_histories("h"), self._new_histories("gradient")
            self.drift, self.filled = RowDrift(self), False
            self.waiting.clear()

    def unit(self, made: HistoricalBatch | None, total: float | None = None) -> HistoricalUnit:
        kind = HistoricalUnit if self.guard is None else GuardedHistoricalUnit
        return kind(self, made, total)

    def _num_seeds(self, group: Group) -> int:
        return int(self._seeds_of_parts[list(group)].sum())

    @cached_property
    def _seeds_of_parts(self) -> Tensor:
        return torch.bincount(self.partition.part_of[self.batches.is_training], minlength=self.partition.num_parts)

    def batch(self, group: Group, key: int | None) -> HistoricalBatch | None:
        """All in-edges of the group's nodes: see `HistoricalBatches.make`."""
        return self.batches.make(group, key)

    # ---- tables

    def prepare(self) -> None:
        """Several ranks make their tables together, so all of them must know the widths."""
        if self.job.world.size == 1 or self.histories.tables:
            return
        for l, like in self._probed().items():
            if l < self.model.num_layers - 1:
                self.histories.table(l, like)
            if self.method.compensate:
                self.gradients.table(l, like)

    def _probed(self) -> dict[int, Tensor]:
        """By layer, rows of some nodes: as wide as all are."""
        nodes = self.parts.nodes_of((0,))[:PROBED]
        block = RecordedBlock(without_halo(full_block(self.parts.sampler, nodes)))
        blocks = (block,) * self.model.num_layers
        with evaluating(self.model):
            batch = Batch(nodes, blocks, None, None).to(self.job.device)
            self.model(replace(batch, x=self.batches.inputs_of(batch.seeds)))
        (block, *_) = batch.blocks
        assert isinstance(block, HaloBlock)
        return block.own

    @cached_property
    def row_of(self) -> list[Tensor]:
        """Some node's row, [1, ...], after each layer."""
        return [like[:1].detach() for _, like in sorted(self._probed().items())]

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """What layers take, for batches that are split."""
        return LayerBytes(self.model, self.job.data.tables.get("x"))

    def refresh(self) -> None:
        """Make the tables exact, those of gradients too where there are any."""
        self.prepare()
        self.settle(0)
        with trace.span("refresh"):
            fill(self)
            if self.method.compensate:
                weights = [(p, p.grad) for p in self.job.module.parameters()]
                go_back(self)
                for p, grad in weights:
                    p.grad = grad

    @property
    def keep_rows(self) -> KeepRows | None:
        """Where exact evaluation may leave its rows, which are those of a refresh."""
        if self.method.refresh_every != "evaluation":
            return None

        def keep(l: int, ids: Tensor, rows: Tensor) -> None:
            self.settle(0)  # older rows must not come later
            places = self.partition.position[ids.cpu()]
            self.histories.write_at(l, places, rows)
            self.histories.written[places] = self.histories.step

        return keep

    def all_batches(self, key: int | None = None, *, inputs: bool = True) -> Iterator[HistoricalBatch]:
        """Every node that this rank keeps, once; without a key nothing is drawn. inputs: with features and tables."""
        for group in self.parts.sweep:
            made = self.batches.make(group, key, pull=False, inputs=inputs)
            assert made is not None
            yield made

    @cached_property
    def swept_places(self) -> Tensor:
        """Places of all rows that a sweep of this rank reads, ascending."""
        if self.job.world.size == 1:
            return torch.arange(self.partition.num_nodes)
        return torch.cat([made.block.src_places for made in self.all_batches(inputs=False)]).unique()

    def layer_at(self, l: int, block: Block, src_ids: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Rows of a block's destinations after layer `l`, before dropout. inputs: the layer's, but for the first."""
        recorded = RecordedBlock(block)
        self.model.layer(l, self.state_of(l, block, src_ids, inputs), recorded)
        return recorded.own[l]

    def state_of(self, l: int, block: Block, src_ids: Tensor, inputs: Tensor | None) -> State:
        """What layer `l` reads: encoded input rows, or those given."""
        if l == 0:
            return self.model.encode(self.batches.inputs_of(src_ids), block.src_keys, block.key)
        assert inputs is not None
        x0 = self._initial_rows(block) if self.model.encodes else None
        return State(self.model.dropped(inputs.to(self.job.device, self.dtype), block.src_keys, block.key, l - 1), x0)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(p.dtype for p in self.model.parameters())

    def _initial_rows(self, block: Block) -> Tensor | None:
        """The destinations' encoded rows, where a layer uses them again."""
        place = tuple(slab.start for slab in block.slabs) if isinstance(block, HaloBlock) else ()
        if self._encoded is not None and place in self._encoded:
            return self._encoded[place]
        own = self.batches.inputs_of(block.dst_ids)
        x0 = self.model.encode(own, block.src_keys[: block.num_dst], block.key).x0
        if self._encoded is not None and place:
            self._encoded[place] = x0
        return x0

    @contextmanager
    def encoding_once(self) -> Iterator[None]:
        """Within, weights do not change: what the encoder made of a batch's rows is kept for its later layers."""
        self._encoded = {}
        try:
            yield
        finally:
            self._encoded = None

    def commit(self, made: HistoricalBatch | None, gradients: Mapping[int, Tensor]) -> None:
        """What this rank writes at the end of a turn, if it had a batch; all ranks end it together."""
        self.histories.step += 1
        slabs, rows = (), {}
        if made is not None:
            slabs, rows = made.block.slabs, dict(made.block.commits())
        self.waiting.append(Commit(slabs, rows, gradients, self.histories.step, self.histories.mark()))
        self.settle(self.method.lag)
        # Ranks that read each other's rows go by the same running statistics.
        self.job.world.broadcast_tensors(self.job.module.buffers())

    def settle(self, most: int) -> None:
        """Write commits until those of at most so many turns wait."""
        if len(self.waiting) <= most:
            return
        self.job.world.barrier()  # nobody reads any more
        while len(self.waiting) > most:
            commit = self.waiting.popleft()
            for l, rows in commit.rows.items():
                self.histories.write(l, commit.slabs, rows, commit.mark)
            for l, rows in commit.gradients.items():
                self.gradients.write(l, commit.slabs, rows, commit.mark)
            self.histories.stamp(commit.slabs, commit.step)
        self.job.world.barrier()  # all is written

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how training goes on: complete in the first rank, which writes it."""
        tables = {"histories": self.histories.state_dict(), "gradients": self.gradients.state_dict()}
        return {**tables, "filled": self.filled, "waiting": self._waiting_of_all(), "hosts": list(self.shares.hosts)}

    def _waiting_of_all(self) -> list[list[dict[str, Any]]]:
        """By rank, what waits."""
        waiting, world = [commit.state_dict() for commit in self.waiting], self.job.world
        if world.size == 1:
            return [waiting]
        buffer = io.BytesIO()
        torch.save(waiting, buffer)
        sent = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        got = world.swap([sent if rank == 0 else sent[:0] for rank in range(world.size)])
        return [torch.load(io.BytesIO(g.numpy().tobytes()), weights_only=True) for g in got if g.numel()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        waiting, self._began_with = state["waiting"], tuple(state["hosts"])
        if any(waiting) and self._began_with != self.shares.hosts:
            raise ValueError(
                f"with lag= a run goes on with as many ranks and hosts as it had: {len(self._began_with)} ranks on "
                f"{max(self._began_with) + 1} hosts"
            )
        self.histories.load_state_dict(state["histories"])
        self.gradients.load_state_dict(state["gradients"])
        self.filled = state["filled"]
        self.waiting = deque(map(Commit.from_state, waiting[self.shares.rank] if any(waiting) else ()))


def _on_host(rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {l: tensor.cpu() for l, tensor in rows.items()}


def partition_together(job: Job, method: Historical) -> Partition:
    """The first rank divides the graph for all."""
    world, problem = job.world, ""
    part_of = torch.empty(job.data.num_nodes, dtype=torch.int32)
    try:
        if world.rank == 0:
            labels = _labels(job) if method.partition == "labels" else None
            made = make_partition(
                job.data.graph, method.num_parts, how=method.partition, seed=job.seed, labels=labels,
                cache=_cache_of(job),
            )  # fmt: skip
            if world.size == 1:
                return made
            part_of = made.part_of
    except ValueError as error:
        if world.size == 1:
            raise
        problem = str(error)
    if problem := world.broadcast_object(problem):
        raise ValueError(problem)
    world.broadcast_tensors([part_of])
    return Partition(part_of, method.num_parts, method.partition)


def _labels(job: Job) -> Tensor:
    y = job.data.y
    if y is None or y.dim() != 1 or y.is_floating_point():
        raise ValueError("partition=labels takes the classes for the parts, and there are none: choose another one")
    return y.cpu()


def _cache_of(job: Job) -> Path | None:
    """Partitions of a dataset that lies in a folder are kept beside it."""
    return None if job.data.folder is None else job.data.folder / "partitions"
