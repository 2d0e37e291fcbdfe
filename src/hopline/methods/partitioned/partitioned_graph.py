"""A graph in parts, with tables of the rows between layers: the common base of Historical and FullBatch.

Nodes are ordered by part. A node's *position* is its number in that order, and the row of a node in every table:

    partition.order[position] = global id        partition.position[global id] = position
    a part is a row range                        a rank keeps consecutive parts, so a row range too

Tables are allocated when their first rows are written, or by all ranks together in `prepare`. In one process with a
GPU they lie on the device, in pinned host memory, or behind pinned buffers (`tables_at`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hopline.contract import Job
from hopline.core.batch import Batch, Block
from hopline.core.partition import Partition, make_partition
from hopline.core.sampler import full_block
from hopline.data.dataset import Dataset
from hopline.device.row_mover import RowMover
from hopline.device.snapshots import evaluating
from hopline.distributed.world import World
from hopline.layerwise.engine import Piece, Recorder, layer_rows
from hopline.methods.partitioned.batches import PartBatches
from hopline.methods.partitioned.parts import Parts, without_halo
from hopline.methods.partitioned.rank_histories import Owners, PartAssignment, SharedHistories
from hopline.nn.layered import ENCODED, Layered, State
from hopline.tables.allocators import MappedFiles, Where, allocator_at, choose_where
from hopline.tables.history import DTYPES, Histories
from hopline.util.config import format_size

MAX_PROBED_NODES = 8
"""Most nodes on which the model is run to find the widths of its rows."""


@dataclass(frozen=True, kw_only=True)
class PartsSpec:
    """Settings of a graph in parts: its partition, and the tables of rows between layers."""

    num_parts: int
    partition: Literal["metis", "streaming", "random", "range", "labels"]
    storage: str = "model"
    """Element type of the tables: a key of `DTYPES`."""
    tables: str = "auto"
    """The place of a GPU's tables: a value of the setting `tables`."""
    folder: Path | None = None
    """Folder of the tables as mapped files. None keeps them in memory."""
    with_gradients: bool = False
    """Whether gradients at the rows have tables too, as large as those of the rows."""
    parts_per_group: int = 1
    """Parts that are computed together."""
    has_halo: bool = True
    """Whether blocks have the edges from other parts."""
    with_edge_ids: bool = False
    """Whether blocks name their edges by global edge ids."""
    caches_blocks: bool | None = True
    """Whether the edges of all groups stay in memory. None: those of groups that come again, in a graph of few edges.
    False, within a budget: those of one group do, made for each layer."""


class PartitionedGraph:
    """A graph in parts, divided over ranks, with tables of the rows between layers and of the gradients at them.

    A sweep computes the model on it. Owns the partition, the tables, and the mover that copies their rows to and from
    a GPU. Every rank makes one.
    """

    def __init__(self, job: Job, model: Layered, spec: PartsSpec, partition: Partition | None = None) -> None:
        self.job = job
        self.model = model
        self.spec = spec
        self.assignment = PartAssignment.of(job.world, spec.num_parts)
        self.partition = partition or partition_together(
            job.data, spec.num_parts, spec.partition, seed=job.seed, world=job.world
        )
        self.parts = Parts(
            graph=job.data.graph,
            partition=self.partition,
            assignment=self.assignment,
            per_group=spec.parts_per_group,
            has_halo=spec.has_halo,
            edge_ids=spec.with_edge_ids,
            caches_blocks=spec.caches_blocks,
        )
        self.owners = Owners(job.world, self.assignment, self.partition.ptr)
        self.batches = PartBatches(job, self.parts, model.num_layers)
        self.mover = None if job.device.type == "cpu" or job.world.size > 1 else RowMover(job.device)
        """Moves rows of both kinds of tables to and from a GPU. None on a CPU, and with several ranks."""
        self.empty_tables()

    # ---- tables

    def empty_tables(self) -> None:
        self.histories = self._new_histories("h")
        self.gradients = self._new_histories("gradient")

    def _new_histories(self, name: str) -> Histories:
        spec = self.spec
        device = self.job.device
        num_nodes = self.partition.num_nodes
        dtype = DTYPES[spec.storage]
        if self.job.world.size > 1:
            return SharedHistories(self.owners, name=name, dtype=dtype, folder=spec.folder)
        if device.type == "cpu":
            allocator = None if spec.folder is None else MappedFiles(spec.folder)
            return Histories(num_nodes, allocator, name=name, dtype=dtype)
        allocator = allocator_at(self.tables_at, device, spec.folder)
        return Histories(num_nodes, allocator, name=name, dtype=dtype, mover=self.mover)

    @cached_property
    def tables_at(self) -> Where:
        """The place of a GPU's tables, chosen by the setting and by what fits.

        The first access chooses it, and tells the user by `Job.say`.
        """
        dtype = DTYPES[self.spec.storage]
        row_bytes = sum((dtype or rows.dtype).itemsize * rows.shape[1:].numel() for rows in self._probe_rows().values())
        num_kinds = 2 if self.spec.with_gradients else 1
        num_bytes = num_kinds * row_bytes * self.partition.num_nodes
        where = choose_where(num_bytes, self.job.device, self.spec.tables, self.spec.folder)
        text = {"device": "on the device", "pinned": "pinned on the host", "host": "on the host, behind pinned buffers"}
        self.job.say(f"history: {format_size(num_bytes)} {text[where]}")
        return where

    def prepare(self) -> None:
        """Allocate the tables of several ranks. Collective, and done once.

        Ranks share tables, so they allocate them together, by widths that a probe of the model gives. One process
        allocates each table when it first writes.
        """
        if self.job.world.size == 1 or self.histories.tables:
            return
        for l, rows in self._probe_rows().items():
            if l < self.model.num_layers - 1:  # no layer reads the rows after the last one
                self.histories.table(l, rows)
            if self.spec.with_gradients:
                self.gradients.table(l, rows)

    def allocate_tables(self) -> None:
        """Allocate the tables of rows of one process now, so that they are no part of the first step."""
        for l, rows in enumerate(self.example_rows[:-1]):
            self.histories.table(l, rows)

    def _probe_rows(self) -> dict[int, Tensor]:
        """By layer: rows of up to `MAX_PROBED_NODES` nodes after it, with the width and dtype of all rows."""
        nodes = self.parts.nodes_of((0,))[:MAX_PROBED_NODES]  # of part 0
        recorder = Recorder()
        block = replace(without_halo(full_block(self.parts.sampler, nodes)), layer_hooks=recorder)
        with evaluating(self.model):
            batch = Batch(nodes, (block,) * self.model.num_layers, None, None).to(self.job.device)
            self.model(replace(batch, x=self.batches.inputs_of(batch.seeds)))
        return recorder.rows

    @cached_property
    def example_rows(self) -> list[Tensor]:
        """By layer: [1, ...], the row of one node after it, for shapes and dtypes."""
        return [rows[:1].detach() for _, rows in sorted(self._probe_rows().items())]

    @property
    def own_row_range(self) -> slice:
        return slice(self.owners.own.start, self.owners.own.stop)

    @cached_property
    def swept_positions(self) -> Tensor:
        """[n] int64 on the host, ascending: positions of all rows that a sweep of this rank reads."""
        if self.job.world.size == 1:
            return torch.arange(self.partition.num_nodes)
        positions = []
        for group in self.parts.own_groups:
            nodes = self.parts.nodes_of(group)
            block = self.parts.block_of(group, nodes)
            positions.append(self.partition.position[nodes])
            positions.append(self.batches.halo_positions(group, block))
        return torch.cat(positions).unique()

    # ---- one layer

    def layer_at(
        self, l: int, block: Block, inputs: Tensor | None = None, own: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Rows of a block's destinations after layer `l`, before dropout.

        inputs: rows of the block's sources after layer l - 1, before dropout. Layer 0 reads features instead.
        own: by layer, rows of the destinations that layer `l` reads besides.
        """
        if l == 0:
            state = self.model.encode(self.batches.inputs_of(block.src_ids), block.src_keys, block.key)
        else:
            assert inputs is not None
            encode = partial(self._encode_own, block) if ENCODED in self.model.reads(l).own else None
            sources = {l - 1: inputs.to(self.job.device, self.dtype)}
            state = self.model.state_of(l, sources, own or {}, encode, block)
        # The rows are not read or written by the engine, so the piece needs no positions in tables.
        return layer_rows(self.model, l, state, Piece(block, None, None))

    def _encode_own(self, block: Block) -> State:
        """What layers read of the encoded rows of a block's destinations."""
        keys = block.src_keys[: block.num_dst]
        return self.model.initial(self.model.encode(self.batches.inputs_of(block.dst_ids), keys, block.key))

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters())


def partition_together(data: Dataset, num_parts: int, how: str, *, seed: int, world: World) -> Partition:
    """The partition of a graph, made by the first rank and sent to all. Collective. how: as in the settings."""
    problem = ""
    part_of = torch.empty(data.num_nodes, dtype=torch.int32)
    try:
        if world.rank == 0:
            labels = _labels(data) if how == "labels" else None
            cache = None if data.folder is None else data.folder / "partitions"

            def make() -> Partition:
                return make_partition(data.graph, num_parts, how=how, seed=seed, labels=labels, cache=cache)

            # The plan of a budget needs the parts before the run does.
            partition = (
                make() if labels is not None else data.graph.get_cached(("partition", num_parts, how, seed), make)
            )
            if world.size == 1:
                return partition
            part_of = partition.part_of
    except ValueError as error:
        if world.size == 1:
            raise
        problem = str(error)
    # An error of the first rank must reach the others, which would otherwise wait for the partition.
    problem = world.broadcast_object(problem)
    if problem:
        raise ValueError(problem)
    world.broadcast_tensors([part_of])
    return Partition(part_of, num_parts, how)


def _labels(data: Dataset) -> Tensor:
    """[num_nodes] on the host: the class of each node, as its part."""
    y = data.y
    if y is None or y.dim() != 1 or y.is_floating_point():
        raise ValueError("partition=labels takes the classes for the parts, and there are none: choose another one")
    return y.cpu()
