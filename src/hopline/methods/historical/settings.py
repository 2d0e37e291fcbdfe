"""`Historical`, the settings of training with historical embeddings.

Settings are plain data, and importing them does not import torch, which is slow. So help and errors about
settings come without a delay. `bind` and `loader` import the modules that train: `bind` joins the settings
to a `Job`, which has the model, the data and the ranks of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hopline.budget.plan import Budget, Outline, Plan
from hopline.contract import Job, Method
from hopline.data.placement_settings import Placement, with_graph_on_host
from hopline.util.config import check_fields, settings

if TYPE_CHECKING:  # what is bound to a job needs torch; the settings do not
    import torch
    from torch import nn

    from hopline.core.sampler import NodeIds
    from hopline.data.dataset import Dataset
    from hopline.distributed.world import World
    from hopline.methods.historical.loader import HistoricalLoader
    from hopline.methods.historical.work import HistoricalWork
    from hopline.nn.layered import Layered
    from hopline.nn.whole_module import Whole


@settings
class Historical(Method):
    """Historical embeddings: each batch is some parts of the graph with all their in-edges.

    Embeddings of neighbours outside the batch (its *halo*) are not computed. They are read from tables into
    which earlier batches pushed them (GNNAutoScale). Every edge is used once per epoch. The memory of a
    step is that of the batch and its halo, whatever the number of layers.

    Raises:
        ValueError: A field has a value that is not allowed, or does not go with another one. From the
            Trainer: the model is not made of layers, and its `forward` lacks calls of `hl.nn.push_and_pull`.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> method = hl.Historical(num_parts=2, parts_per_batch=1, partition="range")
        >>> model = hl.nn.GNN([SAGEConv(4, 8), SAGEConv(8, 2)])
        >>> hl.Trainer(model, data, method, epochs=1, show=False).fit().finished
        True
    """

    KNOWN_AS: ClassVar = {"cluster": {"halo": "drop"}, "clustergcn": {"halo": "drop"}, "gas": {}, "gnnautoscale": {}}
    """Names of papers and other libraries, by their letters -> settings. `method=cluster_gcn` takes them."""
    num_parts: int = 40
    """Parts of the graph."""
    parts_per_batch: int = 10
    """Parts per batch."""
    partition: Literal["metis", "streaming", "random", "range", "labels"] = "metis"
    """Partitioner of the graph. `metis` has the fewest edges between parts, `streaming` works at any size,
    `range` goes by node id, `labels` by class."""
    groups: Literal["redrawn", "fixed"] = "redrawn"
    """Groups of parts that make a batch: `redrawn` in each epoch, or `fixed`, with cached blocks."""
    halo: Literal["history", "drop"] = "history"
    """Embeddings of neighbours in other parts: `history` reads them from the tables, `drop` leaves them and
    their edges out (Cluster-GCN)."""
    warm_up: bool = True
    """Exact forward pass before the first epoch, which fills the tables."""
    refresh_every: int | Literal["evaluation"] | None = None
    """Epochs between exact forward passes that fill the tables. `evaluation`: exact evaluation fills them,
    in one process only. Default: after the warm-up, batches alone write them."""
    compensate: bool = False
    """Compensation for the backward messages from outside a batch, by tables of gradients (LMC)."""
    max_batches: int | None = None
    """Batches per epoch, over all ranks. Every epoch draws the order of its batches, so later epochs train
    other parts. Default: all."""
    edge_dropout: float = 0.0
    """Share of a batch's edges that is dropped in training, drawn anew for each batch."""
    lipschitz: float = 0.0
    """Weight of a penalty in the loss: how far noise on a layer's input moves its output. Smooth layers pass
    on less of the error of historical embeddings."""
    lag: int = 0
    """Delay of table writes, in steps. Batch t reads what batches up to t - 1 - lag wrote."""
    storage: Literal["model", "float32", "bf16", "fp16"] = "model"
    """Element type of the tables. `model`: that of the embeddings."""
    tables: Literal["auto", "device", "pinned", "host"] = "auto"
    """Memory of a GPU's tables: `device`, `pinned` (host memory that the GPU reads itself), or `host`.
    Default: the first of these in which they fit."""
    folder: Path | None = None
    """Folder of the tables as memory-mapped files, for tables larger than memory. Default: in memory."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_parts", "parts_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.parts_per_batch > self.num_parts:
            raise ValueError(
                f"parts_per_batch={self.parts_per_batch} is more than num_parts={self.num_parts}: make it smaller"
            )
        if isinstance(self.refresh_every, int) and self.refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, 'evaluation' or none, not {self.refresh_every}")
        if self.max_batches is not None and self.max_batches < 1:
            raise ValueError(f"max_batches must be at least 1 or none, not {self.max_batches}")
        for name in ("lag", "lipschitz"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.folder is not None and self.tables in ("device", "pinned"):
            raise ValueError(f"tables={self.tables} are not files: set tables=host, or leave out folder=")
        if not 0 <= self.edge_dropout < 1:
            raise ValueError(f"edge_dropout must be at least 0 and below 1, not {self.edge_dropout}")
        if self.compensate and self.halo == "drop":
            raise ValueError(
                "compensate=true adds messages of the halo, which halo=drop leaves out: choose one of them"
            )

    def for_graph(self, num_nodes: int) -> Historical:
        """A copy of these settings with one part per node, if there are fewer nodes than default parts."""
        if self.num_parts != Historical.num_parts or num_nodes >= self.num_parts:
            # Another number than the default is the user's, and `make_partition` refuses it if it is too large.
            # The default's own value looks the same whether the user typed it or not.
            return self
        return replace(self, num_parts=num_nodes, parts_per_batch=min(self.parts_per_batch, num_nodes))

    def for_timing(self, folder: Path) -> Historical:
        # The pass that fills the tables runs once per run, not per epoch.
        return replace(self, warm_up=False, folder=None if self.folder is None else folder)

    @classmethod
    def forms(cls, model: Layered | Whole, folder: Path) -> Sequence[Historical]:
        from hopline.nn.layered import Layered

        return (cls(), cls(folder=folder)) if isinstance(model, Layered) else ()

    def placement(self, requested: Placement) -> Placement:
        return with_graph_on_host(requested, "method=historical makes its batches on the host")

    def plan(self, outline: Outline, budget: Budget) -> Plan:
        from hopline.methods.historical.memory_plan import plan

        return plan(self, outline, budget)

    def bind(self, job: Job) -> HistoricalWork:
        from hopline.methods.historical.own_forward import OwnForwardWork
        from hopline.methods.historical.work import HistoricalWork
        from hopline.nn.whole_module import Whole

        if self.refresh_every == "evaluation" and job.world.size > 1:
            raise ValueError(
                "refresh_every=evaluation is for one process, since the first rank evaluates alone: set "
                "refresh_every=1 instead, which all ranks share"
            )
        # The Trainer asks `placement` for the graph on the host. `loader` takes the dataset as it is.
        if job.data.graph.device.type != "cpu":
            raise ValueError("method=historical makes its batches on the host: give it a graph that is there")
        job.model.check_blocks(job.data.num_features, job.data.graph.edge)
        if isinstance(job.model, Whole):
            return OwnForwardWork(job, job.model, self)
        job.model.check_history(job.data.num_features, job.data.graph.edge)
        layers = range(1, job.model.num_layers)
        if self.compensate and any(job.model.reads(l).sources != (l - 1,) for l in layers):
            raise ValueError(
                "compensate=true is for models whose convs read the rows of the layer before, and a conv here reads "
                "rows of earlier layers at its neighbours: leave it out"
            )
        return HistoricalWork(job, job.model, self)

    def loader(
        self,
        data: Dataset,
        ids: NodeIds | str = "train",
        *,
        model: nn.Module,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> HistoricalLoader:
        """The batches alone, for a loop of your own.

        Write `for batch in Historical(...).loader(data, model=model): ...`.

        Calling the model with a batch pulls historical embeddings of its halo between layers.
        `batch.commit()`, after the optimizer's step, pushes the embeddings of its own nodes.

        ids: the seeds, as node ids or as the name of a split. model: a `GNN`, a PyG model, or a module of your own
        with `hl.nn.push_and_pull`, called by `hl.nn.as_batch_model(model)(batch)`. With `warm_up`
        or a number for `refresh_every`, an exact forward pass of it fills the tables. world: the ranks that
        train together. At each step every rank has a batch, which may be empty (docs/loops_over_parts.md).
        """
        from hopline.methods.historical.loader import HistoricalLoader

        return HistoricalLoader(self, data, ids, model=model, seed=seed, device=device, world=world)


def ClusterGCN(**settings: Any) -> Historical:
    """Cluster-GCN: each batch is some parts of the graph and the edges among their nodes.

    It is `hl.Historical(halo="drop")`, and takes its other settings. PyG's `ClusterData(num_parts=1500)` with
    `ClusterLoader(batch_size=20)` is `hl.ClusterGCN(num_parts=1500, parts_per_batch=20)`.

    Raises:
        TypeError: `hl.Historical` has no such setting.
        ValueError: A setting has a value that is not allowed.

    Example:
        >>> hl.ClusterGCN(num_parts=1500, parts_per_batch=20).halo
        'drop'
    """
    return Historical(halo="drop", **settings)
