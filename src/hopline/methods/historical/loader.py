"""The batches of historical training, for a loop of the user's own: the model pulls, `commit` pushes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.contract import Job, KeepRows
from hopline.core.batch import Batch
from hopline.core.sampler import full_block
from hopline.data.dataset import Dataset
from hopline.distributed.world import World
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.partitioned.seeds import find_seeds
from hopline.nn.whole_module import tell_calls, unwrap
from hopline.units.job import make_job
from hopline.util.log import logger


class Turn:
    """What a batch of a user's loop has to write when its step is done."""

    def __init__(self, loader: HistoricalLoader, unit: HistoricalUnit) -> None:
        self.loader, self.unit = loader, unit
        self.is_over = False

    def end(self) -> None:
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
class HaloBatch(Batch):
    """A batch of some parts of the graph: the model reads stored rows of its halo, and `commit` writes its own."""

    turn: Turn | None = None
    """None in a batch that only reads."""

    def commit(self) -> None:
        """Push the rows that the model has computed for the batch's own nodes: after the optimizer's step.

        Over ranks all of them commit, in the same order.

        Raises:
            ValueError: The model was not called with this batch, or the batch was committed already.
        """
        if self.turn is None:
            raise ValueError("a batch of loader.reading(...) writes nothing: leave out batch.commit()")
        self.turn.end()


class HistoricalLoader:
    """Batches of some parts of the graph with all their in-edges. Iterating gives epoch after epoch.

    Usually made by `hl.Historical(...).loader(data, model=model)`. Calling the model with a batch reads the stored rows
    of its halo, the neighbours in other parts, between layers (pull). `batch.commit()` writes the rows of the batch's
    own nodes (push). Tables are filled exactly before the first batch, unless `warm_up` is off. Parts without seeds are
    run forward and pushed on the way, and are no batches of the loop.

    The ranks of a `world` take turns together: each has a batch of its own, or an empty one, and `batch.total_seeds`
    counts the seeds of all of them. Every rank calls the model, sums its gradients and commits at every turn.

    Args:
        data: What batches are made of.
        ids: [n] int64 nodes to train on, each once.
        method: The parts, and how their tables are kept.
        model: A `GNN` or a PyG model.
        seed: Of the partition and of every random draw, together with the epoch.
        device: Where batches come. The model must be there.
        world: The ranks. Default: this process alone.

    Raises:
        ValueError: The model is not made of layers, or the method has `compensate` or `lipschitz`, which change the
            loss by themselves. When an epoch begins: no batch of the one before was committed.

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

    def __init__(
        self,
        data: Dataset,
        ids: Tensor,
        method: Historical,
        model: nn.Module,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> None:
        for name in ("compensate", "lipschitz"):
            if getattr(method, name):
                raise ValueError(
                    f"{name}= adds terms to the loss by itself, which a loop of your own would leave out: train by "
                    f"hl.Trainer, or leave out {name}="
                )
        job: Job = make_job(
            model, data, train_ids=ids, seed=seed, device=torch.device(device), world=world, say=logger.info
        )
        self.data, self.world = data, job.world
        self.work = method.for_graph(data.num_nodes).bind(job)
        self.num_commits = 0
        """Batches that were committed in this epoch."""
        self._num_batches = 0
        self._next_epoch = 1

    def __len__(self) -> int:
        """Batches of the next epoch."""
        return self.work.num_learning(self._next_epoch)

    def __iter__(self) -> Iterator[HaloBatch]:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        return self.epoch(epoch)

    def epoch(self, epoch: int, done: int = 0) -> Iterator[HaloBatch]:
        """The batches of one epoch, counted from 1, but for the first `done` of them.

        Epoch 1 begins with new tables.
        """
        if self._num_batches and not self.num_commits:
            raise ValueError(
                "no batch of the epoch before was committed, so the tables hold rows of old weights: call "
                "batch.commit() after optimizer.step()"
            )
        self._num_batches, self.num_commits = 0, 0
        for unit in self.work.units(epoch, done):
            assert isinstance(unit, HistoricalUnit)
            self._num_batches += 1
            yield self._batch(unit)

    def _batch(self, unit: HistoricalUnit) -> HaloBatch:
        batch = self._empty() if unit.hist_batch is None else unit.hist_batch.batch
        assert unit.total is not None
        return _with_turn(replace(batch, total_seeds=int(unit.total)), Turn(self, unit))

    def _empty(self) -> Batch:
        """The batch of a rank for which no parts are left at a turn."""
        nodes, work = torch.empty(0, dtype=torch.int64), self.work
        block = replace(full_block(work.parts.sampler, nodes), graph=work.batches.graph)
        return work.batches.batch_of(block, nodes, None)

    # ---- the tables

    def refresh(self) -> None:
        """Fill the tables by an exact forward pass with the weights of now. Over ranks all of them call it."""
        self.work.refresh()

    @property
    def keep_rows(self) -> KeepRows | None:
        """For `hl.infer.exact(model, data, keep=loader.keep_rows)`, which then leaves its rows in the tables.

        None unless the method has refresh_every="evaluation".
        """
        return self.work.keep_rows

    def reading(self, ids: Tensor | str) -> Iterator[HaloBatch]:
        """Batches at other nodes, which read the tables and write nothing: for an estimate of exact inference.

        In one process. `hl.infer.sampled(model, loader.reading("valid"))` gives outputs in the order of the batches'
        seeds.
        """
        if self.world.size > 1:
            raise ValueError("loader.reading(...) is for one process: evaluate by hl.infer.exact on the first rank")
        work, seeds = self.work, find_seeds(self.data, ids)
        is_seed = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        is_seed[seeds.cpu()] = True
        for group in work.parts.sweep:
            hist_batch = work.batch(group, None)
            assert hist_batch is not None
            output_idx = is_seed[hist_batch.nodes].nonzero().view(-1)
            if output_idx.numel():
                chosen, y = hist_batch.nodes[output_idx], self.data.y
                labels = None if y is None else ops.gather_rows(y, chosen.to(y.device)).to(work.job.device)
                device = work.job.device
                yield _with_turn(
                    replace(hist_batch.batch, seeds=chosen.to(device), output_idx=output_idx.to(device), y=labels), None
                )

    def state_dict(self) -> dict[str, Any]:
        """The tables and the epoch, to go on from between two epochs; complete on the first rank, all call it."""
        return {"work": self.work.state_dict(), "next_epoch": self._next_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.work.load_state_dict(state["work"])
        self._next_epoch = state["next_epoch"]


def _with_turn(batch: Batch, turn: Turn | None) -> HaloBatch:
    return HaloBatch(
        batch.seeds, batch.blocks, batch.x, batch.y, batch.tables, batch.key, batch.total_seeds, batch.output_idx,
        batch.groups, turn,
    )  # fmt: skip


def make_loader(
    method: Historical,
    data: Dataset,
    ids: Tensor | str,
    *,
    model: nn.Module,
    seed: int,
    device: torch.device | str,
    world: World | None,
) -> HistoricalLoader:
    """The batches alone; `Historical.loader` says what the arguments are."""
    inner = unwrap(model)
    tell_calls(inner)
    return HistoricalLoader(data, find_seeds(data, ids), method, inner, seed, device, world)
