"""Batches of historical training for a loop of the user's own.

    for batch in loader:
        model(batch)         pulls: historical embeddings of the halo, between layers
        optimizer.step()
        batch.commit()       pushes: the rows that the model computed for the batch's own nodes

The push is a call of its own, because only the loop knows when the optimizer's step is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.contract import Job, KeepRows
from hopline.core.batch import Batch
from hopline.core.examples import ExampleIndex, Examples
from hopline.core.sampler import NodeIds, full_block
from hopline.data.dataset import Dataset
from hopline.distributed.world import World
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.partitioned.seeds import find_seeds
from hopline.nn.whole_module import refuse_batches, unwrap
from hopline.units.job import make_job
from hopline.units.rank_facts import check_loader_ranks
from hopline.util.errors import NotCopied
from hopline.util.log import logger


class Turn:
    """The turn of one batch in a user's loop: one optimizer step, which all ranks make together.

    `end` pushes the batch's rows, once, and counts the commit.
    """

    def __init__(self, loader: HistoricalLoader, unit: HistoricalUnit) -> None:
        self.loader = loader
        self.unit = unit
        self.is_over = False

    def end(self) -> None:
        """Push the rows. An error if that was done before, or if the model was not called."""
        if self.is_over:
            raise ValueError("this batch was committed already: call batch.commit() once, after optimizer.step()")
        hist_batch = self.unit.hist_batch
        if hist_batch is not None and not hist_batch.halo.rows:
            raise ValueError(
                "there are no rows to push, since no model was called with this batch: call model(batch) before "
                "batch.commit(), on a rank without seeds too"
            )
        self.unit.commit()
        if hist_batch is not None:
            hist_batch.halo.reset()
        self.is_over = True
        self.loader.num_commits += 1


@dataclass(frozen=True, eq=False, repr=False)
class HaloBatch(NotCopied, Batch):
    """A batch of parts of the graph. The model pulls the rows of its halo; `commit` pushes those of its own nodes."""

    instead = (
        "it reads and writes the tables of its loader, which a copy would not share. Take it from "
        "hl.Historical(...).loader(data, model=model) in the process that trains"
    )

    turn: Turn | None = None
    """The turn that `commit` ends. None in a batch that only reads."""

    def commit(self) -> None:
        """Push the rows that the model has computed for the batch's own nodes. Call it after the optimizer's step.

        Collective: all ranks commit, in the same order.

        Raises:
            ValueError: The model was not called with this batch, or the batch was committed already.
        """
        if self.turn is None:
            raise ValueError("a batch of loader.reading(...) writes nothing: leave out batch.commit()")
        self.turn.end()


class HistoricalLoader(NotCopied):
    """Batches of parts of the graph, with all their in-edges. Each iteration over the loader is the next epoch.

    Usually made by `hl.Historical(...).loader(data, model=model)`. Calling the model with a batch pulls: between
    layers it reads historical embeddings of the halo, the neighbours in other parts. `batch.commit()` pushes: it
    writes the rows of the batch's own nodes.

    Tables are filled exactly before the first batch, unless `warm_up` is off. Groups of parts without seeds are run
    forward and pushed by the loader itself. The loop does not see them.

    The ranks of a `world` take turns together. At each turn a rank has a batch of its own, or an empty one, and
    `batch.total_seeds` counts the seeds of all ranks. Every rank calls the model, sums its gradients and commits at
    every turn.

    Args:
        method: The settings: parts, groups and tables.
        data: The dataset.
        ids: The nodes to train on, as node ids or as the name of a split. One may come several times.
        model: A `GNN`, a PyG model, or a module of your own with `hl.nn.push_and_pull`.
        seed: Seed of the partition and, together with the epoch, of every random draw.
        device: The device of the batches and of the model.
        world: The ranks. Default: this process alone.

    Raises:
        ValueError: The model is not made of layers, or the method has `compensate` or `lipschitz`, which change the
            loss by themselves. When an epoch begins: no batch of the epoch before was committed.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> model = hl.nn.GNN([SAGEConv(4, 8), SAGEConv(8, 2)])
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> loader = hl.Historical(num_parts=2, parts_per_batch=1, partition="range").loader(data, model=model)
        >>> for batch in loader:
        ...     torch.nn.functional.cross_entropy(model(batch), batch.labels).backward()
        ...     optimizer.step()
        ...     batch.commit()
        >>> len(loader)
        2
    """

    instead = (
        "its tables belong to one model. Make another by hl.Historical(...).loader(data, model=model), and give it "
        "loader.state_dict() by load_state_dict"
    )

    def __init__(
        self,
        method: Historical,
        data: Dataset,
        ids: NodeIds | str = "train",
        *,
        model: nn.Module,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> None:
        seeds = find_seeds(data, ids)
        check_loader_ranks(world, method, data, ids, seed=seed, model=model)
        inner = unwrap(model)
        refuse_batches(inner)  # a user's model that is called with a batch, which it cannot read, raises with advice
        for name in ("compensate", "lipschitz"):
            if getattr(method, name):
                raise ValueError(
                    f"{name}= adds terms to the loss by itself, which a loop of your own would leave out: train by "
                    f"hl.Trainer, or leave out {name}="
                )
        job: Job = make_job(
            inner, data, examples=seeds, seed=seed, device=torch.device(device), world=world, say=logger.info
        )
        self.data = data
        self.world = job.world
        self.work = method.for_graph(data.num_nodes).bind(job)
        self.num_commits = 0
        """The number of batches that were committed in this epoch."""
        self._num_batches = 0
        """The number of batches that the loop was given in this epoch."""
        self._next_epoch = 1

    def __len__(self) -> int:
        """The number of batches of the next epoch."""
        return self.work.num_learning(self._next_epoch)

    def __iter__(self) -> Iterator[HaloBatch]:
        epoch = self._next_epoch
        self._next_epoch += 1
        return self.epoch(epoch)

    def epoch(self, epoch: int, done: int = 0) -> Iterator[HaloBatch]:
        """The batches of one epoch, counted from 1, without the first `done` of them.

        Epoch 1 begins with new tables.
        """
        if self._num_batches and not self.num_commits:
            raise ValueError(
                "no batch of the epoch before was committed, so the tables hold rows of old weights: call "
                "batch.commit() after optimizer.step()"
            )
        self._num_batches = 0
        self.num_commits = 0
        for unit in self.work.units(epoch, done):
            assert isinstance(unit, HistoricalUnit)
            assert unit.total is not None
            self._num_batches += 1
            batch = self._make_empty_batch() if unit.hist_batch is None else unit.hist_batch.batch
            yield _with_turn(replace(batch, total_seeds=int(unit.total)), Turn(self, unit))

    def _make_empty_batch(self) -> Batch:
        """A batch without nodes, for a rank that has no parts left at a turn."""
        partitioned = self.work.partitioned
        nodes = torch.empty(0, dtype=torch.int64)
        block = replace(full_block(partitioned.parts.sampler, nodes), graph=partitioned.batches.graph)
        return partitioned.batches.batch_of(block, nodes, None)

    # ---- the tables

    def refresh(self) -> None:
        """Fill the tables by an exact forward pass with the current weights. Collective: all ranks call it."""
        self.work.refresh()

    @property
    def keep_rows(self) -> KeepRows | None:
        """A callback for `hl.infer.exact(model, data, keep=loader.keep_rows)`, which writes its rows into the tables.

        None unless the method has refresh_every="evaluation".
        """
        return self.work.keep_rows

    def reading(self, ids: Tensor | str) -> Iterator[HaloBatch]:
        """Batches whose seeds are other nodes, and which only read the tables: for approximate inference.

        For one process. `hl.infer.sampled(model, loader.reading("valid"))` gives outputs in the order of the batches'
        seeds.
        """
        if self.world.size > 1:
            raise ValueError("loader.reading(...) is for one process: evaluate by hl.infer.exact on the first rank")
        device = self.work.job.device
        y = self.data.y
        index = ExampleIndex(Examples(find_seeds(self.data, ids)), self.data.num_nodes)
        all_groups = self.work.partitioned.parts.own_groups  # of this rank, which is the only one
        for group in all_groups:
            hist_batch = self.work.batch(group, key=None)  # no random draws
            assert hist_batch is not None
            found = index.find(hist_batch.nodes)
            output_idx = found.output_idx
            if not output_idx.numel():
                continue
            seeds = hist_batch.nodes[found.seed_idx]
            labels = None if y is None else ops.gather_rows(y, hist_batch.nodes[output_idx].to(y.device)).to(device)
            batch = replace(hist_batch.batch, seeds=seeds.to(device), output_idx=output_idx.to(device), y=labels)
            yield _with_turn(batch, None)

    def state_dict(self) -> dict[str, Any]:
        """The tables and the number of the next epoch, to resume between two epochs.

        Collective. It is complete on the first rank.
        """
        return {"work": self.work.state_dict(), "next_epoch": self._next_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self.work.load_state_dict(state["work"])
        self._next_epoch = state["next_epoch"]


def _with_turn(batch: Batch, turn: Turn | None) -> HaloBatch:
    return HaloBatch(**{field.name: getattr(batch, field.name) for field in fields(Batch)}, turn=turn)
