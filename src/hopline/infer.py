"""Inference: exact, layer by layer over the whole graph or over what some nodes need; or sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hopline import metrics
from hopline.batch import Batch, Block, Part, Readable, Rows, as_tensor
from hopline.data.dataset import Dataset
from hopline.nn.gnn import GNN, State
from hopline.nn.whole import Whole, as_walkable
from hopline.progress import progress
from hopline.sampling import NeighborSampler, check_ids, full_block, in_neighborhood
from hopline.tables import TensorTable

CHUNK_EDGES = 1 << 20
"""Edges of one chunk of exact inference."""
DEVICE_SHARE = 0.25
"""The part of the free device memory that a layer's hidden rows may take; larger ones are kept on the host."""
CPU = torch.device("cpu")
WHOLE_BYTES = 2 << 30
"""A model without layers is run on the whole graph up to this size of its edge matrix."""


KeepRows = Callable[[int, Tensor, Tensor], None]
"""(layer, node ids, their rows after it): what somebody does with hidden rows."""


def exact(
    model: nn.Module,
    data: Dataset,
    ids: Tensor | None = None,
    *,
    chunk_edges: int = CHUNK_EDGES,
    device: torch.device | str = "cpu",
    show: bool = False,
    keep: KeepRows | None = None,
) -> Tensor:
    """The model's output for `ids` (all nodes by default), over every edge, in evaluation mode: [n, ...].

    Each layer is computed for all nodes it is needed at before the next one starts, in chunks of about `chunk_edges`
    edges; hidden rows are kept in tables, on the host or on a device with room. keep: is given the rows of every layer
    but the last, which are then computed at all nodes.
    """
    if ids is not None:
        check_ids(ids, data.num_nodes)
    if ids is not None and ids.numel() == 0:
        raise ValueError("there are no nodes to infer at: give ids that are not empty, or none for all nodes")
    walk = as_walkable(model)
    with evaluating(walk):
        if isinstance(walk, Whole):
            return _whole(walk, data, torch.device(device))[slice(None) if ids is None else ids]
        walk.check_blocks()
        return Layerwise(walk, data, chunk_edges, torch.device(device), keep).run(ids, show)


def sampled(model: nn.Module, batches: Iterable[Batch], *, num_nodes: int | None = None, show: bool = False) -> Tensor:
    """The model's output for the batches' seeds, in their order: an estimate over sampled edges.

    batches: for example `Sampled(fanouts=(20, 20), shuffle=False).loader(data, ids)`; num_nodes: for the progress bar.
    """
    walk = as_walkable(model)
    outputs = []
    with (
        evaluating(walk),
        progress("inference", num_nodes, "nodes", enabled=show, brief=True) as bar,
    ):
        for batch in batches:
            outputs.append(walk(batch).cpu())
            bar.advance(batch.num_seeds)
    return torch.cat(outputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def measure(data: Dataset, scores: Tensor, labels: Tensor) -> dict[str, float]:
    """The metric that goes with the dataset's task."""
    if data.task == "binary" and scores.size(-1) == 1:
        scores = scores.squeeze(-1)
    return {data.metric: metrics.METRICS[data.metric](scores.float(), labels)}


def _whole(walk: Whole, data: Dataset, device: torch.device) -> Tensor:
    graph = data.graph
    edge_bytes = graph.num_edges * data.num_features * 4
    if edge_bytes > WHOLE_BYTES:
        raise ValueError(
            f"{type(walk.module).__name__} has no layers that could be computed one by one, and the whole graph is too "
            "large for it: build it as hl.nn.GNN([...convs...]), or set inference=sampled"
        )
    part = Part(graph.indptr, graph.indices, graph.edge).to(device)
    block = Block(torch.arange(graph.num_nodes, device=device), graph.num_nodes, (part,), graph)
    return walk.on_block(_read_on(device, data.x, block.src_ids), block).cpu()


def _read_on(device: torch.device, table: Readable, ids: Tensor) -> Tensor:
    """Rows on a device, read where the table's memory can be read from."""
    storage = table.storage()
    if storage is not None and storage.device.type != "cpu":
        return table.read(ids.to(storage.device)).to(device)
    if device.type != "cpu" and table.tiers(device) is not None:
        return table.read(ids.to(device))
    return table.read(ids.cpu()).to(device)


@dataclass
class Tables:
    """The state of all nodes between two layers."""

    h: Readable
    x0: TensorTable | None = None
    jk: TensorTable | None = None


class Layerwise:
    """One layer after the other, over chunks of the nodes it is needed at."""

    def __init__(
        self, model: GNN, data: Dataset, chunk_edges: int, device: torch.device, keep: KeepRows | None = None
    ) -> None:
        self.model, self.data, self.device, self.keep = model, data, device, keep
        self.chunk_edges = chunk_edges
        self.sampler = NeighborSampler(data.graph, (-1,))

    def run(self, ids: Tensor | None, show: bool) -> Tensor:
        needed = self.needed(ids)
        total = sum(nodes.numel() for nodes in needed[1:])
        tables = self._encode(needed[0])
        with progress("inference", total, "rows", enabled=show, brief=True) as bar:
            for l, nodes in enumerate(needed[1:]):
                last = l == self.model.num_layers - 1
                new = _NewTables(self.data.num_nodes, self.device)
                for chunk in self._chunks(nodes):
                    block = full_block(self.sampler, chunk)
                    state = self.model.layer(l, self._state(tables, block), block.to(self.device))
                    new.write(chunk, State(self.model.decode(state)) if last else state)
                    if self.keep is not None and not last:
                        self.keep(l, chunk, as_tensor(state.h))
                    bar.advance(chunk.numel())
                tables = new.tables() if last else self.completed(new.tables())
        return _read_on(CPU, tables.h, torch.arange(self.data.num_nodes) if ids is None else ids)

    def completed(self, tables: Tables) -> Tables:
        """The rows between two layers; where others compute some of them, these are added."""
        return tables

    def needed(self, ids: Tensor | None) -> list[Tensor]:
        """Nodes whose rows are needed before each layer, and at the end."""
        home = self.data.graph.indptr.device
        everything = torch.arange(self.data.num_nodes, device=home)
        if ids is None:
            return [everything] * (self.model.num_layers + 1)
        needed = [torch.unique(ids.to(home))]
        if self.keep is not None:
            return [everything] * self.model.num_layers + needed
        for _ in range(self.model.num_layers):
            grown = (
                needed[0] if needed[0].numel() == everything.numel() else in_neighborhood(self.data.graph, needed[0])
            )
            needed.insert(0, grown)
        return needed

    def _encode(self, nodes: Tensor) -> Tables:
        if not self.model.encodes:
            return Tables(self.data.x)
        new = _NewTables(self.data.num_nodes, self.device)
        for chunk in nodes.split(max(1, self.chunk_edges // 16)):
            new.write(chunk, self.model.encode(self._on_device(Rows(self.data.x, chunk)), chunk, None))
        return new.tables()

    def _on_device(self, rows: Rows) -> Rows | Tensor:
        """Rows on another device than the CPU are read and sent; on the CPU a layer may read them itself."""
        return rows if self.device.type == "cpu" else _read_on(self.device, rows.table, rows.ids)

    def _state(self, tables: Tables, block: Block) -> State:
        """The state a layer needs: all sources' hidden rows, the destinations' own other rows."""
        others = [None if t is None else _read_on(self.device, t, block.dst_ids) for t in (tables.x0, tables.jk)]
        return State(self._on_device(Rows(tables.h, block.src_ids)), *others)

    def _chunks(self, nodes: Tensor) -> Iterator[Tensor]:
        """Runs of nodes with about `chunk_edges` in-edges; a node with more is a chunk of its own."""
        cost = (self.data.graph.in_degrees(nodes) + 1).cumsum(0)
        start = 0
        while start < nodes.numel():
            spent = int(cost[start - 1]) if start else 0
            stop = int(torch.searchsorted(cost, spent + self.chunk_edges, right=True))
            stop = max(stop, start + 1)
            yield nodes[start:stop]
            start = stop


class _NewTables:
    """Tables over all nodes that are made when the width of their rows is known: on the device where there is room."""

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.num_nodes, self.device = num_nodes, device
        self.made: dict[str, TensorTable] = {}

    def write(self, ids: Tensor, state: State) -> None:
        for name in ("h", "x0", "jk"):
            rows = getattr(state, name)
            if rows is None:
                continue
            rows = as_tensor(rows)
            if name not in self.made:
                self.made[name] = self._new(rows)
            table = self.made[name]
            table.write(ids.to(table.rows.device), rows.to(table.rows.device))

    def _new(self, rows: Tensor) -> TensorTable:
        shape = (self.num_nodes, *rows.shape[1:])
        home = CPU
        if self.device.type == "cuda":
            needed = torch.Size(shape).numel() * rows.element_size()
            home = self.device if needed < DEVICE_SHARE * torch.cuda.mem_get_info(self.device)[0] else CPU
        return TensorTable(torch.empty(shape, dtype=rows.dtype, device=home))

    def tables(self) -> Tables:
        return Tables(self.made["h"], self.made.get("x0"), self.made.get("jk"))
