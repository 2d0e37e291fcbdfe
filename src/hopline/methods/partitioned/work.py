"""A graph in parts, with tables of the rows between layers: what Historical and FullBatch stand on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
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
from hopline.distributed.world import World
from hopline.inference import evaluating
from hopline.layerwise.engine import Piece, Recorder, layer_rows
from hopline.methods.partitioned.batches import PartBatches
from hopline.methods.partitioned.parts import Parts, without_halo
from hopline.nn.gnn import GNN, State
from hopline.tables.allocators import MappedFiles, Where, allocator_at, choose_where
from hopline.tables.history import DTYPES, Histories
from hopline.tables.history_ranks import Owners, PartAssignment, SharedHistories
from hopline.util.config import format_size

PROBED = 8
"""Nodes on which the model is run to learn the widths of its rows."""


@dataclass(frozen=True, kw_only=True)
class PartsSpec:
    """How a graph is cut into parts, and where the rows between layers lie."""

    num_parts: int
    partition: Literal["metis", "streaming", "random", "range", "labels"]
    storage: str = "model"
    """Element type of the tables, a key of `DTYPES`."""
    tables: str = "auto"
    """Where a GPU's tables are."""
    folder: Path | None = None
    """Where tables are mapped files; None keeps them in memory."""
    with_gradients: bool = False
    """Whether there are tables of gradients, as large as those of rows."""


class PartsWork:
    """A graph in parts, divided over ranks, with tables of the rows between layers and of the gradients at them."""

    def __init__(self, job: Job, model: GNN, spec: PartsSpec, partition: Partition | None = None) -> None:
        self.job, self.model, self.spec = job, model, spec
        self.shares = PartAssignment.of(job.world, spec.num_parts)
        self.partition = partition or partition_together(
            job.data, spec.num_parts, spec.partition, seed=job.seed, world=job.world
        )
        self.parts = self._new_parts()
        self.owners = Owners(job.world, self.shares, self.partition.ptr)
        self.batches = self._new_batches()
        self.mover = None if job.device.type == "cpu" or job.world.size > 1 else RowMover(job.device)
        """Moves rows of both kinds of tables; None where they are shared by ranks, or where the model is on a CPU."""
        self.histories, self.gradients = self._new_histories("h"), self._new_histories("gradient")

    def _new_parts(self) -> Parts:
        return Parts(self.job.data.graph, self.partition, self.shares, keeps_blocks=True)

    def _new_batches(self) -> PartBatches:
        return PartBatches(self)

    # ---- tables

    def _new_histories(self, name: str) -> Histories:
        spec, device, num_nodes = self.spec, self.job.device, self.partition.num_nodes
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
        """Where the tables of a GPU are."""
        dtype, sizes = DTYPES[self.spec.storage], 1 + self.spec.with_gradients
        row = sum((dtype or like.dtype).itemsize * like[0].numel() for like in self._probe_rows().values())
        where = choose_where(
            sizes * row * self.partition.num_nodes, self.job.device, self.spec.tables, self.spec.folder
        )
        text = {"device": "on the device", "pinned": "pinned on the host", "host": "on the host, behind pinned buffers"}
        self.job.say(f"history: {format_size(sizes * row * self.partition.num_nodes)} {text[where]}")
        return where

    def prepare(self) -> None:
        """Several ranks make their tables together, so all of them must know the widths."""
        if self.job.world.size == 1 or self.histories.tables:
            return
        for l, like in self._probe_rows().items():
            if l < self.model.num_layers - 1:
                self.histories.table(l, like)
            if self.spec.with_gradients:
                self.gradients.table(l, like)

    def _probe_rows(self) -> dict[int, Tensor]:
        """By layer, rows of some nodes: as wide as all are."""
        nodes, recorder = self.parts.nodes_of((0,))[:PROBED], Recorder()
        block = replace(without_halo(full_block(self.parts.sampler, nodes)), layer_hooks=recorder)
        with evaluating(self.model):
            batch = Batch(nodes, (block,) * self.model.num_layers, None, None).to(self.job.device)
            self.model(replace(batch, x=self.batches.inputs_of(batch.seeds)))
        return recorder.rows

    @cached_property
    def row_of(self) -> list[Tensor]:
        """Some node's row, [1, ...], after each layer."""
        return [like[:1].detach() for _, like in sorted(self._probe_rows().items())]

    @property
    def own_row_range(self) -> slice:
        """The places of the rows that this rank keeps."""
        return slice(self.owners.own.start, self.owners.own.stop)

    @cached_property
    def swept_positions(self) -> Tensor:
        """Places of all rows that a sweep of this rank reads, ascending."""
        if self.job.world.size == 1:
            return torch.arange(self.partition.num_nodes)
        found = []
        for group in self.parts.sweep:
            nodes = self.parts.nodes_of(group)
            halo = self.batches.halo_positions(group, self.parts.block_of(group, nodes, None))
            found += [self.partition.position[nodes], halo]
        return torch.cat(found).unique()

    # ---- one layer

    def layer_at(self, l: int, block: Block, inputs: Tensor | None = None) -> Tensor:
        """Rows of a block's destinations after layer `l`, before dropout. inputs: the layer's, but for the first."""
        if l == 0:
            state = self.model.encode(self.batches.inputs_of(block.src_ids), block.src_keys, block.key)
        else:
            assert inputs is not None
            own, keys = self.batches.inputs_of(block.dst_ids), block.src_keys[: block.num_dst]
            x0 = self.model.encode(own, keys, block.key).x0 if self.model.encodes else None
            inputs = inputs.to(self.job.device, self.dtype)
            state = State(self.model.apply_dropout(inputs, block.src_keys, block.key, l - 1), x0)
        return layer_rows(self.model, l, state, Piece(block, None, None))

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(p.dtype for p in self.model.parameters())


def partition_together(data: Dataset, num_parts: int, how: str, *, seed: int, world: World) -> Partition:
    """The first rank divides the graph for all."""
    problem = ""
    part_of = torch.empty(data.num_nodes, dtype=torch.int32)
    try:
        if world.rank == 0:
            labels = _labels(data) if how == "labels" else None
            made = make_partition(data.graph, num_parts, how=how, seed=seed, labels=labels, cache=_cache_of(data))
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
    return Partition(part_of, num_parts, how)


def _labels(data: Dataset) -> Tensor:
    y = data.y
    if y is None or y.dim() != 1 or y.is_floating_point():
        raise ValueError("partition=labels takes the classes for the parts, and there are none: choose another one")
    return y.cpu()


def _cache_of(data: Dataset) -> Path | None:
    """Partitions of a dataset that lies in a folder are kept beside it."""
    return None if data.folder is None else data.folder / "partitions"
