"""`FullBatch`, the settings of exact full-batch training in shards: plain data, so that reading them needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from hopline.contract import Budget, Job, Method, Outline, Plan, Work
from hopline.data.placement_settings import Placement, with_graph_on_host
from hopline.util.config import RemovedSetting, check_fields, settings

if TYPE_CHECKING:  # loaders need torch; the settings do not
    import torch
    from torch import Tensor, nn

    from hopline.data.dataset import Dataset
    from hopline.distributed.world import World
    from hopline.methods.full_batch.loader import FullBatchLoader
    from hopline.shards.shard import Shard

Aggregation = Literal["auto", "sweep", "sequential", "stored", "one_shot"]

FEWER_BYTES = "set compress=bf16, which sends every row in fewer bytes"
"""What replaces the settings that sent some rows of each message."""


@settings
class FullBatch(Method):
    """One step per epoch, over every edge and every training node; gradients are exact to rounding.

    Raises:
        ValueError: A field has a value that is not allowed, or does not go with another one. From the Trainer: the
            model is not made of layers.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> model = hl.nn.GNN([SAGEConv(4, 8), SAGEConv(8, 2)])
        >>> trainer = hl.Trainer(model, data, hl.FullBatch(num_shards=2, partition="range"), epochs=3, show=False)
        >>> trainer.fit().finished, trainer.num_steps
        (True, 3)
    """

    REMOVED: ClassVar = {
        "depth": RemovedSetting(1, "the rows of one shard are always asked for ahead, so leave it out"),
        "chunk": RemovedSetting("4MiB", "the messages of a chunk of edges always take about 4 MiB, so leave it out"),
        "topk": RemovedSetting(0.25, FEWER_BYTES),
        "compress=topk": RemovedSetting(None, FEWER_BYTES),
        "compress_gradients": RemovedSetting(False, "set compress=bf16_both, which rounds rows and their gradients"),
        "boundary_rate": RemovedSetting(1.0, FEWER_BYTES),
        "stale": RemovedSetting(
            False, "rows of this epoch are always used, so leave it out; compress=bf16 makes messages smaller"
        ),
    }
    num_shards: int = 8
    """Shards that the graph is cut into; with several ranks, as many as these."""
    aggregation: Aggregation = "auto"
    """`sweep`: by parts, layer by layer, rows in tables; `sequential`: other shards' rows come one shard at a time and
    again in backward; `stored`: they are kept; `one_shot`: they come all at once; `auto`: sweep in one process."""
    partition: Literal["metis", "streaming", "random", "range", "labels"] = "metis"
    """How the graph is cut; `metis` needs pymetis, `streaming` takes any size, `labels` takes y for the parts."""
    trim: bool = False
    """Compute and send, layer by layer, only what the training nodes need; the gradient stays the same."""
    compress: Literal["none", "bf16", "bf16_both"] = "none"
    """How rows travel between ranks: as they are, as bfloat16, or with their gradients as bfloat16 too."""
    tables: Literal["auto", "device", "pinned", "host"] = "auto"
    """Where a GPU's tables of a sweep are: on it, `pinned` in host memory that it reads, `host`, or what fits."""
    folder: Path | None = None
    """Where a sweep's tables are kept as mapped files, for those larger than memory; in memory by default."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, not {self.num_shards}")
        if self.folder is not None and self.aggregation not in ("auto", "sweep"):
            raise ValueError(f"folder= is for a sweep's tables, which aggregation={self.aggregation} has not")

    def for_graph(self, num_nodes: int) -> FullBatch:
        """The same settings, with a shard per node where there are fewer nodes than shards by default."""
        if self.num_shards != FullBatch.num_shards or num_nodes >= self.num_shards:
            return self  # a number that was given is followed or refused
        return replace(self, num_shards=num_nodes)

    def placement(self, requested: Placement) -> Placement:
        return with_graph_on_host(requested, "method=full_batch cuts the graph on the host")

    def plan(self, outline: Outline, budget: Budget) -> Plan:
        from hopline.methods.full_batch.memory_plan import plan

        return plan(self, outline, budget)

    def bind(self, job: Job) -> Work:
        from hopline.methods.full_batch.work import bind

        return bind(self, job)

    def loader(
        self,
        data: Dataset | Shard,
        ids: Tensor | str = "train",
        *,
        model: nn.Module | None = None,
        num_layers: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> FullBatchLoader:
        """The batches alone, for a loop of your own: `for batch in FullBatch(...).loader(data, model=model): ...`.

        A batch has all nodes of this rank, a block per layer whose convs fetch the rows of other shards, and as seeds
        the rank's nodes of `ids`. aggregation="auto" is "sequential" here, and "sweep" is refused.
        model: a `GNN` or a PyG model; num_layers: in its place, of a module of your own (`hl.nn.convolve`).
        data: a dataset, or a rank's shard of one. world: the ranks that share the graph (docs/own_loops.md).
        """
        from hopline.methods.full_batch.loader import make_loader

        return make_loader(self, data, ids, model=model, num_layers=num_layers, seed=seed, device=device, world=world)
