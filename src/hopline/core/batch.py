"""`Block`, `Part`, `Rows` and `Batch`: what a training step consumes. All are immutable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.core.row_handles import Handle, Readable, ReducedRows, Rows, _lies_on

if TYPE_CHECKING:
    from hopline.core.graph import Graph


PYG_NAMES = ("edge_index", "edge_attr", "batch_size", "n_id", "e_id", "input_id", "num_sampled_nodes", "num_nodes")
"""What a batch of PyG's NeighborLoader has, and a `Batch` has not."""
NO_EDGES = (
    "train_step asked for the edges of its batch, and here the outputs are computed part by part before the loss: use "
    "the batch's seeds, labels and tables, or with hl.FullBatch set aggregation=sequential, with other methods leave "
    "out budget="
)
"""What a block without parts answers: it stands for seeds whose outputs are known."""


@dataclass(frozen=True, eq=False)
class Part:
    """Edges of a block whose source rows live in one place, sorted by destination.

    Example:
        >>> part = hl.extend.Part(indptr=torch.tensor([0, 2, 3]), src_idx=torch.tensor([1, 2, 0], dtype=torch.int32))
        >>> part.edge_index.tolist()
        [[1, 2, 0], [0, 0, 1]]
    """

    indptr: Tensor
    """[num_dst + 1] int64: destination i has edges indptr[i] .. indptr[i + 1]."""
    src_idx: Tensor
    """[num_edges] int32: each edge's source, as a position among the block's source rows."""
    edge: Mapping[str, Tensor] = field(default_factory=dict)
    """Rows of the graph's edge arrays for these edges: "weight", "attr", "time", "type"."""
    edge_ids: Tensor | None = None
    """[num_edges] int64: each edge's position in the graph's edge arrays, where it was asked for."""

    def __repr__(self) -> str:
        return f"Part({self.indptr.numel() - 1:,} destinations, {self.num_edges:,} edges)"

    @cached_property
    def cache(self) -> dict[Hashable, Any]:
        """What layers have computed from these edges and need again, by name; it goes with them."""
        return {}

    @property
    def num_edges(self) -> int:
        return self.src_idx.numel()

    @cached_property
    def edge_index(self) -> Tensor:
        """[2, num_edges] int64, sources first: PyG computes wrong gradients with int32."""
        counts = self.indptr.diff()
        nodes = torch.arange(counts.numel(), device=counts.device)
        dst = torch.repeat_interleave(nodes, counts, output_size=self.num_edges)  # else a GPU would be asked
        return torch.stack([self.src_idx.long(), dst])

    def rows_from(self, first: int) -> Part:
        """The edges of the destinations from `first` on."""
        start = int(self.indptr[first])
        edge = {name: rows[start:] for name, rows in self.edge.items()}
        edge_ids = None if self.edge_ids is None else self.edge_ids[start:]
        return Part(self.indptr[first:] - start, self.src_idx[start:], edge, edge_ids)

    def to(self, device: torch.device, non_blocking: bool = False) -> Part:
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device, non_blocking=non_blocking)
        return Part(
            self.indptr.to(device, non_blocking=non_blocking),
            self.src_idx.to(device, non_blocking=non_blocking),
            {name: rows.to(device, non_blocking=non_blocking) for name, rows in self.edge.items()},
            edge_ids,
        )


def edges_where(part: Part, kept: Tensor) -> Part:
    """The edges of a part at which a mask is true."""
    upto = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.long().cumsum(0)])
    edge = {name: rows[kept] for name, rows in part.edge.items()}
    edge_ids = None if part.edge_ids is None else part.edge_ids[kept]
    return Part(upto[part.indptr], part.src_idx[kept], edge, edge_ids)


class LayerHooks:
    """Takes part in a layer of whoever made the block: a training step is given a batch, and no other way leads there.

    A block refers to it, and many blocks may refer to one. This one does nothing.
    """

    def before_layer(self, l: int, model: Any, state: Any, block: Block) -> None:
        """Layer `l` of a `GNN` is about to be computed from a `State`."""

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        """The destinations' rows after layer `l`, before dropout, to the rows that the next layer reads.

        Rows of sources that the batch does not own come behind those of the destinations.
        """
        return h


class ConvRunner(ABC):
    """Runs convs on blocks whose source rows are not all here.

    A block refers to it, and many blocks may refer to one. It keeps what it has found out about the edges, so copies of
    a block share that.
    """

    over_ranks: bool = False
    """Whether some of the rows are in other processes, each of which must run the same convs."""

    def norms(self) -> AbstractContextManager[Any]:
        """Within, batch norms in training take their statistics from the rows of all ranks."""
        return nullcontext()

    @abstractmethod
    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        """The conv's output for the block's destinations.

        h: the rows that are here; x0: initial rows, whose first num_dst are the destinations'.
        """

    @abstractmethod
    def block_to(self, block: Block, device: torch.device) -> Block:
        """The block on a device, with all that convs need there."""


@dataclass(frozen=True, eq=False)
class Block:
    """One layer's bipartite edges. Its destinations are the first `num_dst` of its sources.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> (block,) = hl.extend.NeighborSampler(data.graph, [2]).sample(torch.tensor([1, 3]), key=0)
        >>> block
        Block(4 -> 2 nodes, 2 edges)
        >>> block.src_ids.tolist(), block.dst_ids.tolist(), block.edge_index.tolist()
        ([1, 3, 0, 2], [1, 3], [[2, 3], [0, 1]])
    """

    src_ids: Tensor
    """[num_src] int64 global node ids."""
    num_dst: int
    parts: tuple[Part, ...]
    """Empty where the block stands for seeds whose outputs are known."""
    graph: Graph | None = None
    """The graph the edges are from: a conv that normalises by degree takes the degrees from there."""
    key: int | Tensor | None = None
    """Key of this step's random draws, on the device [1] where a captured step changes it; None in evaluation."""
    scale_sums: bool = False
    """Whether sums over sampled edges are scaled up to the expectation of the full sum."""
    in_graph_order: bool = True
    """Whether a destination's edges come in the graph's order; sampled ones do not."""
    layer_hooks: LayerHooks | None = None
    """Adds rows of other nodes between two layers, or records rows; None in a block that owns all its sources."""
    convs: ConvRunner | None = None
    """Runs convs on this block, where source rows are on other shards; None: `nn.conv_adapter` does."""

    def __repr__(self) -> str:
        if not self.parts:
            return f"{type(self).__name__}({self.num_dst:,} nodes)"
        return f"{type(self).__name__}({self.num_src:,} -> {self.num_dst:,} nodes, {self.num_edges:,} edges)"

    def to(self, device: torch.device, non_blocking: bool = False, moved_parts: dict[int, Any] | None = None) -> Block:
        """The same block on a device; its graph stays where it is.

        moved_parts: by `id`, what was moved with other blocks of a batch and is shared with them.
        """
        if all(tensor is None or _lies_on(tensor, device) for tensor in self.tensors()):
            return self  # with what was found out about its edges
        if self.convs is not None:
            return self.convs.block_to(self, device)
        parts = tuple(part.to(device, non_blocking) for part in self.parts)
        return replace(self, src_ids=self.src_ids.to(device, non_blocking=non_blocking), parts=parts)

    def tensors(self) -> list[Tensor | None]:
        """What it holds."""
        found: list[Tensor | None] = [self.src_ids]
        for part in self.parts:
            found += [part.indptr, part.src_idx, part.edge_ids, *part.edge.values()]
        return found

    def scaling_sums(self, wanted: bool) -> Block:
        """The same block, with or without sums scaled up."""
        return self if self.scale_sums == wanted else replace(self, scale_sums=wanted)

    def handle(self, table: Readable) -> Rows:
        """A handle to the rows of its sources."""
        return Rows(table, self.src_ids)

    @property
    def num_src(self) -> int:
        return self.src_ids.numel()

    @property
    def dst_ids(self) -> Tensor:
        return self.src_ids[: self.num_dst]

    @property
    def src_keys(self) -> Tensor:
        """[num_src] int64: what the random draws at each source are keyed by, beside `key`."""
        return self.src_ids

    @property
    def present(self) -> Tensor | None:
        """[num_src] bool: which sources are nodes, where some are empty slots of a tree; None where all are."""
        return None

    @property
    def on_gpu(self) -> bool:
        return self.src_ids.is_cuda

    @property
    def num_edges(self) -> int:
        if not self.parts:
            raise ValueError(NO_EDGES)
        return sum(part.num_edges for part in self.parts)

    @property
    def part(self) -> Part:
        """The one part of a block whose source rows are all the batch's own."""
        if not self.parts:
            raise ValueError(NO_EDGES)
        (part,) = self.parts
        return part

    @property
    def is_divisible(self) -> bool:
        """Whether some of its destinations, with their edges and sources, make a block of their own."""
        return len(self.parts) == 1 and self.convs is None

    @property
    def edge_index(self) -> Tensor:
        """[2, num_edges] int64 local indices, sorted by destination."""
        return self.part.edge_index

    @property
    def sampling_factor(self) -> Tensor:
        """[num_dst] float64: in-edges in the graph over in-edges here, 1 where there are none."""
        assert self.graph is not None
        sampled = self.part.indptr.diff()
        return self.graph.in_degrees(self.dst_ids).clamp(min=1).double() / sampled.clamp(min=1)

    @property
    def edge(self) -> Mapping[str, Tensor]:
        return self.part.edge


@dataclass(frozen=True, eq=False)
class Batch:
    """Seeds, the blocks that lead to them, and handles to the rows they need.

    A `GNN` is called with one: `model(batch)` gives [num_seeds, num_outputs]. Any other model is called by
    `hl.nn.as_walkable(model)(batch)`. Batches are immutable; `to(device)` makes another one.

    Example:
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2), y=torch.tensor([0, 1, 0, 1])
        ... )
        >>> (batch,) = hl.Sampled(fanouts=(2,), shuffle=False).loader(data, torch.tensor([1, 3]))
        >>> batch.seeds.tolist(), batch.input_ids.tolist(), batch.labels.tolist()
        ([1, 3], [1, 3, 0, 2], [1, 1])
        >>> batch.blocks[0].edge_index.tolist()  # positions among `input_ids`, sources first
        [[2, 3], [0, 1]]
    """

    seeds: Tensor
    """[num_seeds] int64 global node ids."""
    blocks: tuple[Block, ...]
    """One per layer, in the order of computation: the first reads the input, the last leads to the seeds."""
    x: Rows | Tensor | None
    """Input rows [num_input, num_features] of `input_ids`, or the handle to them."""
    y: Tensor | None
    """Labels of the seeds."""
    tables: Mapping[str, Rows | Tensor] = field(default_factory=dict)
    """Rows of the dataset's other named tables for `input_ids`."""
    key: int | Tensor | None = None
    """Key of this step's random draws: (seed, epoch, global step)."""
    total_seeds: int | None = None
    """Seeds of this step over all ranks; None where this rank does not know."""
    output_idx: Tensor | None = None
    """[num_seeds] int64: the seeds among the last block's destinations; None where they are all of them, in order."""
    groups: tuple[Tensor, ...] = ()
    """Positions of seeds, on the host, that a budget lets run together; none where the batch runs whole."""

    def __repr__(self) -> str:
        arrays = [f"{name}={_shown(rows)}" for name, rows in {"x": self.x, "y": self.y, **self.tables}.items()]
        blocks = "".join(f"\n    {block!r}," for block in self.blocks)
        return f"Batch({self.num_seeds:,} seeds, {', '.join(arrays)}, blocks=({blocks}\n))"

    def __getattr__(self, name: str) -> Any:
        """Of a name that there is not: one that PyG's batches have gets an answer that helps."""
        if name in PYG_NAMES:
            raise AttributeError(
                f"a hopline Batch has no {name!r}, since each layer has edges of its own (batch.blocks): call "
                "hl.nn.as_walkable(model)(batch), or take PyG's batches from hl.NeighborLoader"
            )
        raise AttributeError(f"'Batch' object has no attribute {name!r}")

    @property
    def labels(self) -> Tensor:
        """`y`, where there must be one."""
        if self.y is None:
            raise ValueError("this dataset has no labels to train on: give it y, or pass train_step=")
        return self.y

    @property
    def input_rows(self) -> Rows | Tensor:
        """`x`, where there must be one."""
        if self.x is None:
            raise ValueError("this dataset has no features: give it a table named 'x'")
        return self.x

    @property
    def input_ids(self) -> Tensor:
        return self.blocks[0].src_ids

    @property
    def input_keys(self) -> Tensor:
        """What random draws at the input rows are keyed by: their ids, or their slots in a tree."""
        return self.blocks[0].src_keys

    @property
    def num_seeds(self) -> int:
        return self.seeds.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors this batch holds; handles that were not read count nothing."""
        return sum(t.numel() * t.element_size() for t in _tensors(self))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on a device; handles that were not read stay where their table is."""
        target = torch.device(device)
        if all(t.device == target for t in _tensors(self)):
            return self

        def move(value: Any) -> Any:
            return value.to(target, non_blocking=non_blocking) if isinstance(value, Tensor) else value

        moved_parts: dict[int, Any] = {}
        return replace(
            self,
            seeds=move(self.seeds),
            blocks=each_once(self.blocks, lambda block: block.to(target, non_blocking, moved_parts)),
            x=move(self.x),
            y=move(self.y),
            tables={name: move(rows) for name, rows in self.tables.items()},
            output_idx=move(self.output_idx),
        )

    def with_other_dropout(self, number: int = 1) -> Batch:
        """The same seeds and edges with another dropout, for each number another one.

        Dropout is drawn by step and node, so that it can be drawn again: two calls of a model with one batch have the
        same. A loss that compares two calls, as R-Drop's does, makes the second one with a redrawn batch.
        """
        if self.key is None:
            return self
        key = ops.another_key(self.key, number)
        return replace(self, key=key, blocks=each_once(self.blocks, lambda block: replace(block, key=key)))

    def union(self) -> Block:
        """All sampled edges as one square block over `input_ids`, for models that are not walked layer by layer.

        Each node keeps the edges of the layer nearest to the seeds, as in PyG's NeighborLoader.
        """
        known, tails = 0, []
        for block in reversed(self.blocks):
            tails.append(block.part.rows_from(known))
            known = block.num_dst
        last = self.blocks[0]
        counts = torch.cat([tail.indptr.diff() for tail in tails])
        indptr = counts.new_zeros(last.num_src + 1)  # the outermost nodes have no edges
        indptr[1 : known + 1] = counts.cumsum(0)
        indptr[known + 1 :] = indptr[known]
        edge = {name: torch.cat([tail.edge[name] for tail in tails]) for name in tails[0].edge}
        ids = [tail.edge_ids for tail in tails if tail.edge_ids is not None]
        part = Part(indptr, torch.cat([tail.src_idx for tail in tails]), edge, torch.cat(ids) if ids else None)
        return replace(last, num_dst=last.num_src, parts=(part,))


def _shown(rows: Handle | Tensor | None) -> str:
    """Shape and kind of an array, whose values nobody reads."""
    if rows is None:
        return "None"
    kind = str(rows.dtype).removeprefix("torch.") if isinstance(rows, Tensor) else "not read yet"
    where = f" on {rows.device}" if isinstance(rows, Tensor) and rows.device.type != "cpu" else ""
    return f"{list(rows.shape)} {kind}{where}"


def each_once(blocks: Iterable[Block], changed: Callable[[Block], Block]) -> tuple[Block, ...]:
    """All blocks changed, each once: layers that have one block in common have one afterwards."""
    blocks = tuple(blocks)
    found = {id(block): changed(block) for block in _distinct(blocks)}
    return tuple(found[id(block)] for block in blocks)


def _distinct(blocks: Iterable[Block]) -> Iterable[Block]:
    """Each block once: the layers of a batch may have one block in common."""
    return {id(block): block for block in blocks}.values()


def _tensors(batch: Batch) -> list[Tensor]:
    found = [batch.seeds, batch.x, batch.y, *batch.tables.values()]
    for block in _distinct(batch.blocks):
        found += block.tensors()
    if isinstance(batch.x, ReducedRows):
        found.append(batch.x.reduced_and_own)
    return list({id(t): t for t in found if isinstance(t, Tensor)}.values())  # blocks may be one and the same
