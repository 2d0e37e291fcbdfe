"""`FullBatch`, the settings of exact full-batch training in shards.

Settings are plain data. Torch is imported only where a method is bound to a job, so that help and errors
about settings come at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from hopline.budget.plan import Budget, Outline, Plan
from hopline.contract import Job, Method, Work
from hopline.data.placement_settings import Placement, with_graph_on_host
from hopline.util.config import check_fields, settings

if TYPE_CHECKING:  # loaders need torch; the settings do not
    import torch
    from torch import nn

    from hopline.core.sampler import NodeIds
    from hopline.data.dataset import Dataset
    from hopline.distributed.world import World
    from hopline.methods.full_batch.loader import FullBatchLoader
    from hopline.nn.layered import Layered
    from hopline.nn.whole_module import Whole
    from hopline.shards.shard import Shard

Aggregation = Literal["auto", "sweep", "sequential", "stored", "one_shot"]


@settings
class FullBatch(Method):
    """One step per epoch, over every edge and every training node. Gradients are exact to rounding.

    Raises:
        ValueError: A field has a value that is not allowed, or does not go with another one. From the
            Trainer: the model is not made of layers.

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

    shares_steps: ClassVar[bool] = True

    num_shards: int = 8
    """Shards of the graph. With several ranks there is one shard per rank."""
    aggregation: Aggregation = "auto"
    """Way of a step. `sweep`: shard by shard and layer by layer, with rows in tables. `sequential`: convs get
    the rows of one other shard at a time, and get them again in backward. `stored`: these rows are kept for
    backward. `one_shot`: the rows of all shards come at once. Default: sweep in one process, unless a module
    needs all rows at once, else sequential."""
    partition: Literal["metis", "streaming", "random", "range", "labels"] = "metis"
    """Partitioner of the graph. `metis` has the fewest edges between parts, `streaming` works at any size,
    `range` goes by node id, `labels` by class."""
    trim: bool = False
    """Restriction of every layer to the rows that the training nodes need. The gradient stays the same."""
    compress: Literal["none", "bf16", "bf16_both"] = "none"
    """Compression of rows between ranks: `bf16` sends them as bfloat16, `bf16_both` their gradients too."""
    tables: Literal["auto", "device", "pinned", "host"] = "auto"
    """Memory of a sweep's tables for a GPU: `device`, `pinned` (host memory that the GPU reads itself), or
    `host`. Default: the first of these in which they fit."""
    folder: Path | None = None
    """Folder of a sweep's tables as memory-mapped files, if they exceed memory. Default: in memory."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, not {self.num_shards}")
        if self.folder is not None and self.aggregation not in ("auto", "sweep"):
            raise ValueError(f"folder= is for a sweep's tables, which aggregation={self.aggregation} has not")

    def for_graph(self, num_nodes: int) -> FullBatch:
        """A copy of these settings with one shard per node, if there are fewer nodes than default shards."""
        if self.num_shards != FullBatch.num_shards or num_nodes >= self.num_shards:
            return self  # a number that the user has set is followed or refused, never changed
        return replace(self, num_shards=num_nodes)

    def for_timing(self, folder: Path) -> FullBatch:
        return self if self.folder is None else replace(self, folder=folder)

    @classmethod
    def forms(cls, model: Layered | Whole, folder: Path) -> Sequence[FullBatch]:
        from hopline.nn.layered import Layered

        return (cls(), cls(folder=folder)) if isinstance(model, Layered) else ()

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
        ids: NodeIds | str = "train",
        *,
        model: nn.Module | None = None,
        num_layers: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> FullBatchLoader:
        """The batches alone, for a loop of your own.

        Write `for batch in FullBatch(...).loader(data, model=model): ...`.

        A batch has all nodes of this rank, and as seeds those of `ids` among them. It has a block per
        layer, whose convs fetch the rows of other shards. aggregation="auto" is "sequential" here, and
        "sweep" is refused.

        data: a dataset, or one rank's shard of it. model: a `GNN` or a PyG model. num_layers: given in
        place of `model` for a module of your own, which calls `hl.nn.convolve`. world: the ranks that share
        the graph (docs/loops_over_parts.md).
        """
        from hopline.methods.full_batch.loader import FullBatchLoader

        return FullBatchLoader(
            self, data, ids, model=model, num_layers=num_layers, seed=seed, device=device, world=world
        )
