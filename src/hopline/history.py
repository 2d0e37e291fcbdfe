"""Historical training of a job: its batches, its tables, and what is written into them when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline import ops, trace
from hopline.batch import Batch, Block, Rows
from hopline.graph import Graph
from hopline.halo import HaloBlock, Histories, RecordedBlock
from hopline.nn.gnn import GNN, State
from hopline.nn.norm import running_statistics
from hopline.nn.regularise import drop_edges, edges_where, spreads
from hopline.partition import Partition, make_partition
from hopline.sampling import NeighborSampler, full_block
from hopline.sweep import fill, go_back, measure_bias
from hopline.work import Job, Unit, autocast

if TYPE_CHECKING:
    from hopline.historical import Historical

KEPT_EDGES = 1 << 25
"""Up to that many edges the blocks of a sweep over all parts are kept from one to the next."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "model": None}


@dataclass(eq=False)
class HistoricalBatch:
    """A batch, and what is needed to write its rows and to hear from its neighbours."""

    batch: Batch
    block: HaloBlock
    nodes: Tensor
    """[n] int64: the batch's own nodes, part by part."""
    later: Block | None = None
    """With compensation: all in-edges of nodes outside the batch that have the batch's nodes among their sources."""


@dataclass(frozen=True, eq=False)
class Commit:
    """What a batch writes into the tables."""

    slabs: Sequence[slice]
    rows: Mapping[int, Tensor]
    """By layer, the batch's own rows."""
    gradients: Mapping[int, Tensor]
    step: int


class HistoricalWork:
    """Historical training of one job."""

    def __init__(self, job: Job, model: GNN, method: Historical, partition: Partition | None = None) -> None:
        self.job, self.model, self.method = job, model, method
        graph = job.data.graph
        self.partition = partition or make_partition(
            graph, method.num_parts, how=method.partition, seed=job.seed, cache=_cache_of(job)
        )
        self.sampler = NeighborSampler(graph, (-1,), edge_ids=method.edge_dropout > 0)
        dtype = DTYPES[method.storage]
        self.histories = Histories(graph.num_nodes, dtype=dtype, folder=method.folder)
        self.gradients = Histories(graph.num_nodes, name="gradient", dtype=dtype, folder=method.folder)
        self.is_training = torch.zeros(graph.num_nodes, dtype=torch.bool)
        self.is_training[job.train_ids] = True
        self.filled = False
        self.waiting: deque[Commit] = deque()
        self._kept: dict[tuple[int, ...], tuple[Block, Block | None]] = {}
        self._place = torch.full((graph.num_nodes,), -1, dtype=torch.int64)
        parts = torch.arange(method.num_parts).split(method.parts_per_batch)
        self._sweep_groups = {tuple(group.tolist()): None for group in parts}  # a set that keeps its order
        self._encoded: dict[tuple[int, ...], Tensor | None] | None = None

    # ---- batches

    def groups_of(self, epoch: int) -> list[tuple[int, ...]]:
        """The parts of each batch of an epoch, in order."""
        method, key = self.method, ops.derive_key(self.job.seed, epoch)
        parts = torch.arange(method.num_parts)
        if method.groups == "redrawn":
            parts = ops.permutation(key, method.num_parts)
        groups = [tuple(sorted(group.tolist())) for group in parts.split(method.parts_per_batch)]
        if method.groups == "fixed":
            groups = [groups[i] for i in ops.permutation(key, len(groups)).tolist()]
        return groups[: method.max_batches]

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        every = self.method.refresh_every
        if done == 0 and (
            (not self.filled and self.method.warm_up) or (every is not None and epoch % every == 1 % every)
        ):
            self.refresh()
        self.filled = True
        epoch_key, given = ops.derive_key(self.job.seed, epoch), 0
        groups = self.groups_of(epoch)
        for step, group in enumerate(groups):
            learns = self.method.compensate or any(bool(self.is_training[self._nodes_of(p)].any()) for p in group)
            given += learns
            if given <= done and (learns or given < done):
                continue  # it had its turn before the run was interrupted
            with trace.span("sample"):
                made = self.batch(group, ops.derive_key(epoch_key, step))
            unit = self.unit(made, self._share(step, len(groups)) if self.method.compensate else None)
            if learns:
                yield unit
            else:  # nothing to learn from, but its neighbours read its rows
                unit.push_only()
        if self.method.measure_bias:
            for name, error in measure_bias(self).items():
                trace.count(f"bias.{name}", error)

    def exact_twin(self) -> HistoricalWork:
        """The same parts with all their edges and tables of its own: what this work is compared with."""
        method = replace(self.method, halo="history", compensate=False, storage="model", folder=None)
        return HistoricalWork(self.job, self.model, method, self.partition)

    def unit(self, made: HistoricalBatch, share: int | None = None) -> HistoricalUnit:
        return HistoricalUnit(self, made, share)

    def _share(self, step: int, steps: int) -> int:
        """Seeds that a batch stands for where each gives its part of the full gradient: an equal share of all."""
        seeds = self.job.train_ids.numel()
        return max(1, seeds * (step + 1) // steps - seeds * step // steps)

    def _nodes_of(self, part: int) -> Tensor:
        p = self.partition
        return p.order[int(p.ptr[part]) : int(p.ptr[part + 1])]

    def batch(self, group: tuple[int, ...], key: int | None) -> HistoricalBatch:
        """All in-edges of the group's nodes."""
        nodes = torch.cat([self._nodes_of(part) for part in group])
        plain, later = self._blocks_of(group, nodes)
        if self.method.edge_dropout and key is not None:
            plain = drop_edges(plain, self.method.edge_dropout, key)
            later = None if later is None else drop_edges(later, self.method.edge_dropout, key)
        ptr, position = self.partition.ptr, self.partition.position
        slabs = [slice(int(ptr[part]), int(ptr[part + 1])) for part in group]
        last = self.model.num_layers - 1
        places = position[plain.src_ids[plain.num_dst :]]
        block = HaloBlock(replace(plain, key=key), slabs, places, self.histories, last, self.method.compensate)
        data = self.job.data
        output_idx = self.is_training[nodes].nonzero().view(-1)
        seeds = nodes[output_idx]
        x = Rows(data.tables["x"], block.src_ids) if "x" in data.tables else None
        others = {name: Rows(t, block.src_ids) for name, t in data.tables.items() if name != "x"}
        y = None if data.y is None else ops.gather_rows(data.y, seeds)
        blocks = (block,) * self.model.num_layers
        batch = Batch(seeds, blocks, x, y, others, key, seeds.numel(), output_idx)
        return HistoricalBatch(batch, block, nodes, later)

    def _blocks_of(self, group: tuple[int, ...], nodes: Tensor) -> tuple[Block, Block | None]:
        if group in self._kept:
            return self._kept[group]
        block = full_block(self.sampler, nodes)
        if self.method.halo == "drop":
            block = without_halo(block)
        later = full_block(self.sampler, self._readers_of(nodes)) if self.method.compensate else None
        if self.method.groups == "fixed" or (group in self._sweep_groups and graph_is_small(self.job.data.graph)):
            self._kept[group] = (block, later)
        return block, later

    def _readers_of(self, nodes: Tensor) -> Tensor:
        """Nodes outside the batch that have an in-edge from inside."""
        graph = self.job.data.graph
        if not hasattr(self, "_out"):
            indptr, edges = ops.group_edges(graph.indices, graph.num_nodes)
            self._out = indptr, torch.searchsorted(graph.indptr, edges, right=True) - 1
        indptr, readers = self._out
        _, positions = ops.row_positions(indptr, nodes)
        found = torch.zeros(graph.num_nodes, dtype=torch.bool)
        found[readers[positions]] = True
        found[nodes] = False
        return found.nonzero().view(-1)

    # ---- tables

    def refresh(self) -> None:
        """Make the tables exact, those of gradients too where there are any."""
        self.settle(0)
        fill(self)
        if self.method.compensate:
            weights = [(p, p.grad) for p in self.job.module.parameters()]
            go_back(self)
            for p, grad in weights:
                p.grad = grad

    def all_batches(self) -> Iterator[HistoricalBatch]:
        """Every node once, without a key: nothing is drawn."""
        for group in self._sweep_groups:
            yield self.batch(group, None)

    def layer_at(self, l: int, block: Block, src_ids: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Rows of a block's destinations after layer `l`, before dropout, from the tables or from given inputs."""
        recorded = RecordedBlock(block)
        self.model.layer(l, self.state_of(l, block, src_ids, inputs), recorded)
        return recorded.own[l]

    def state_of(self, l: int, block: Block, src_ids: Tensor, inputs: Tensor | None) -> State:
        """What layer `l` reads: encoded input rows, or those of the table before it."""
        x = Rows(self.job.data.x, src_ids)
        if l == 0:
            return self.model.encode(x, block.src_keys, block.key)
        x0 = self._initial_rows(block) if self.model.encodes else None
        rows = self.histories.tables[l - 1][self.partition.position[src_ids]] if inputs is None else inputs
        dtype = next(p.dtype for p in self.model.parameters())
        return State(self.model.dropped(rows.to(dtype), block.src_keys, block.key, l - 1), x0)

    def _initial_rows(self, block: Block) -> Tensor | None:
        """The destinations' encoded rows, where a layer uses them again."""
        place = tuple(slab.start for slab in block.slabs) if isinstance(block, HaloBlock) else ()
        if self._encoded is not None and place in self._encoded:
            return self._encoded[place]
        own = Rows(self.job.data.x, block.dst_ids)
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

    def settle(self, most: int) -> None:
        """Write commits until at most so many wait."""
        while len(self.waiting) > most:
            commit = self.waiting.popleft()
            for l, rows in commit.rows.items():
                self.histories.write(l, commit.slabs, rows)
            for l, rows in commit.gradients.items():
                self.gradients.write(l, commit.slabs, rows)
            self.histories.stamp(commit.slabs, commit.step)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how training goes on."""
        waiting = [
            {"slabs": [[s.start, s.stop] for s in c.slabs], "rows": c.rows, "gradients": c.gradients, "step": c.step}
            for c in self.waiting
        ]
        tables = {"histories": self.histories.state_dict(), "gradients": self.gradients.state_dict()}
        return {**tables, "filled": self.filled, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.histories.load_state_dict(state["histories"])
        self.gradients.load_state_dict(state["gradients"])
        self.filled = state["filled"]
        self.waiting = deque(
            Commit([slice(*pair) for pair in c["slabs"]], c["rows"], c["gradients"], c["step"])
            for c in state["waiting"]
        )


@dataclass(eq=False)
class HistoricalUnit(Unit):
    """One batch: its rows are pushed in `commit`, after the optimizer's step."""

    work: HistoricalWork
    made: HistoricalBatch
    share: int | None = None
    """Seeds that it stands for; those that are in it by default."""
    pushed: dict[int, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.made.batch.num_seeds

    @property
    def total_size(self) -> int:
        return self.size if self.share is None else self.share

    def forward_backward(self, total: int) -> Tensor:
        work, job, block = self.work, self.work.job, self.made.block
        work.settle(work.method.lag)
        work.histories.report_ages(block.halo_places)
        with autocast(job), trace.span("forward"):
            with spreads(work.model, work.method.lipschitz > 0) as found:
                # A batch without seeds learns from others' messages only.
                loss = job.train_step(job.model, self.made.batch) if self.size else job.model(self.made.batch).sum()
            objective = loss * self.size
            if found:
                objective = objective + work.method.lipschitz * self.size * torch.stack(found).mean()
            if work.method.compensate:
                objective = objective + self._missing_messages()
        with trace.span("backward"):
            (objective / total).backward()
        if work.method.compensate:
            self.pushed = {l: h.grad * total for l, h in block.own.items() if h.grad is not None}
        return loss.detach() * self.size

    def push_only(self) -> None:
        """Bring the tables up to date without learning anything."""
        self.work.settle(self.work.method.lag)
        with torch.no_grad(), autocast(self.work.job):
            self.work.model(self.made.batch)
        self.commit()

    def _missing_messages(self) -> Tensor:
        """A sum whose gradient at the batch's rows is what nodes outside would have sent back, by the tables."""
        total = torch.zeros(())
        later, own, work = self.made.later, self.made.block.own, self.work
        if later is None or not later.num_dst:
            return total
        work._place[self.made.nodes] = torch.arange(self.made.nodes.numel())
        inside = work._place[later.src_ids]
        work._place[self.made.nodes] = -1
        ours = (inside >= 0).nonzero().view(-1)
        position = work.partition.position
        for l in range(work.model.num_layers - 1):
            fresh = own[l].detach().requires_grad_()
            rows = work.histories.read(l, position[later.src_ids], fresh).index_put((ours,), fresh[inside[ours]])
            with _norms_as_in_evaluation(work.model, l + 1):
                out = work.layer_at(l + 1, replace(later, key=self.made.batch.key), later.src_ids, rows)
            given = work.gradients.read(l + 1, position[later.dst_ids], out)
            (sent,) = torch.autograd.grad(out, fresh, given)
            total = total + (own[l] * sent).sum()
        return total

    def commit(self) -> None:
        work, block = self.work, self.made.block
        work.histories.step += 1
        work.waiting.append(Commit(block.slabs, dict(block.commits()), self.pushed, work.histories.step))
        work.settle(work.method.lag)


def graph_is_small(graph: Graph) -> bool:
    """Whether blocks that together hold all its edges may be kept."""
    return graph.num_edges <= KEPT_EDGES


def _norms_as_in_evaluation(model: GNN, l: int) -> AbstractContextManager[None]:
    """Nodes outside the batch must not enter its statistics."""
    return running_statistics([model.convs[l], model.norms[l]], only_if=True)


def without_halo(block: Block) -> Block:
    """The edges among a block's destinations alone, and no other sources."""
    inner = edges_where(block.part, block.part.src_idx < block.num_dst)
    return replace(block, src_ids=block.src_ids[: block.num_dst], parts=(inner,))


def _cache_of(job: Job) -> Path | None:
    """Partitions of a dataset that lies in a folder are kept beside it."""
    return None if job.data.folder is None else job.data.folder / "partitions"
