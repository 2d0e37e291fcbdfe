"""`Batch`, `Block` and `Part`: the input of a training step. All are immutable.

    Batch                    seeds, labels, input rows
      blocks[0]              one block per layer, in the order of computation; blocks[0] reads the input rows
        parts[0]             the block's edges in CSC form
      ...
      blocks[-1]             its destinations are the seeds, or contain them

The sources of a block are the destinations of the one before it, and rows that `LayerHooks` may append. A block's
destinations come first among its sources, so a layer finds their own rows without a lookup. Input rows are usually
handles (`row_handles`), which are read where a layer needs them.

Layers of one batch may have one `Block` object in common, as on a whole graph. Functions here that move, change or
count blocks do so once per object (`each_once`).

A block may hold two objects of subclasses that other modules define. `LayerHooks` adds or records rows between
layers. `ConvRunner` runs convs whose source rows are partly in other shards.
"""

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
"""Attributes of PyG's NeighborLoader batches that a `Batch` lacks. Their AttributeError says what to use instead."""
INCLUSION = "inclusion"
"""Name of the edge array that draws by weight add to a part: the probability with which each edge was drawn."""
NO_EDGES = (
    "train_step asked for the edges of its batch, and here the outputs are computed part by part before the loss: use "
    "the batch's seeds, labels and tables, or with hl.FullBatch set aggregation=sequential, with other methods leave "
    "out budget="
)
"""The error of a block without parts. Such a block stands for seeds whose outputs are computed already."""


@dataclass(frozen=True, eq=False)
class Part:
    """Edges of a block in CSC form, sorted by destination.

    A block has one part, or over shards one for each shard that holds some of its source rows.

    Example:
        >>> part = hl.extend.Part(indptr=torch.tensor([0, 2, 3]), src_idx=torch.tensor([1, 2, 0], dtype=torch.int32))
        >>> part.edge_index.tolist()
        [[1, 2, 0], [0, 0, 1]]
    """

    indptr: Tensor
    """[num_dst + 1] int64: destination i has edges indptr[i] .. indptr[i + 1] - 1."""
    src_idx: Tensor
    """[num_edges] int32: each edge's source, as a position among the block's source rows. In `whole_block` it is the
    graph's `indices`, which may be int64."""
    edge: Mapping[str, Tensor] = field(default_factory=dict)
    """[num_edges, ...] each: the graph's edge arrays at these edges, by name: "weight", "attr", "time", "type"."""
    edge_ids: Tensor | None = None
    """[num_edges] int64: each edge's position in the graph's edge arrays; None unless the sampler is asked for it."""

    def __repr__(self) -> str:
        return f"Part({self.indptr.numel() - 1:,} destinations, {self.num_edges:,} edges)"

    @cached_property
    def cache(self) -> dict[Hashable, Any]:
        """Values that layers computed from these edges and need again, by name. It lives as long as the part."""
        return {}

    @property
    def num_edges(self) -> int:
        return self.src_idx.numel()

    @cached_property
    def edge_index(self) -> Tensor:
        """[2, num_edges] int64, sources first: PyG computes wrong gradients with int32."""
        in_degrees = self.indptr.diff()
        nodes = torch.arange(in_degrees.numel(), device=in_degrees.device)
        # Without `output_size`, torch would synchronise with a GPU to learn the sum of the degrees.
        dst = torch.repeat_interleave(nodes, in_degrees, output_size=self.num_edges)
        return torch.stack([self.src_idx.long(), dst])

    def destinations_from(self, first: int) -> Part:
        """The part of destinations `first`, `first + 1`, ... with their edges. Synchronises on a GPU."""
        start = int(self.indptr[first])
        edge = {name: rows[start:] for name, rows in self.edge.items()}
        edge_ids = None if self.edge_ids is None else self.edge_ids[start:]
        return Part(self.indptr[first:] - start, self.src_idx[start:], edge, edge_ids)

    def to(self, device: torch.device, non_blocking: bool = False) -> Part:
        """A copy on a device, with an empty `cache`."""
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device, non_blocking=non_blocking)
        return Part(
            self.indptr.to(device, non_blocking=non_blocking),
            self.src_idx.to(device, non_blocking=non_blocking),
            {name: rows.to(device, non_blocking=non_blocking) for name, rows in self.edge.items()},
            edge_ids,
        )


def edges_where(part: Part, is_kept: Tensor) -> Part:
    """A part with only some of the edges, and with all destinations. is_kept: [num_edges] bool."""
    # num_kept[e] is the number of edges kept among the first e. Looked up at the old bounds, it gives the new ones.
    num_kept = torch.cat([is_kept.new_zeros(1, dtype=torch.int64), is_kept.long().cumsum(0)])
    edge = {name: rows[is_kept] for name, rows in part.edge.items()}
    edge_ids = None if part.edge_ids is None else part.edge_ids[is_kept]
    return Part(num_kept[part.indptr], part.src_idx[is_kept], edge, edge_ids)


class LayerHooks:
    """Callbacks before and after each layer, with which a training method adds or records rows.

    They hang on the block because a batch is all that hopline hands to a user's training step. Many blocks may refer
    to one object. This base class does nothing.
    """

    def before_layer(self, l: int, model: Any, state: Any, block: Block) -> None:
        """Called before layer `l` of a `GNN` is computed.

        state: the `nn.gnn.State` of the block's sources, that is their rows.
        """

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        """Called with the rows [num_dst, width] after layer `l`, before dropout. Returns the rows for the next layer.

        It may append rows of sources that the batch does not compute, such as historical embeddings of the halo. They
        come after those of the destinations.
        """
        return h


class ConvRunner(ABC):
    """Runs convs on a block in place of `nn.conv_adapter`, for example if some source rows are in other shards.

    Many blocks may refer to one runner. A runner caches what it has computed from the edges, so copies of a block
    share that cache.
    """

    over_ranks: bool = False
    """Whether some of the rows are in other processes. Then every process must run the same convs."""

    def global_norms(self) -> AbstractContextManager[Any]:
        """A context in which batch norms in training take their statistics from the rows of all ranks.

        Here it does nothing: all rows are in this process.
        """
        return nullcontext()

    @abstractmethod
    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        """The conv's output [num_dst, width] for the block's destinations.

        h: the source rows that this process holds.
        x0: initial rows, for convs that take them; the first `num_dst` are the destinations'.
        """

    @abstractmethod
    def block_to(self, block: Block, device: torch.device) -> Block:
        """The block on a device, with everything on that device that the convs read."""


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
    """[num_src] int64: global node ids of the sources, the destinations first."""
    num_dst: int
    """Number of destinations."""
    parts: tuple[Part, ...]
    """The edges. Empty in the tree layout, and in a block that stands for seeds whose outputs are known already."""
    graph: Graph | None = None
    """The graph that the edges are from. A conv that normalises by degree reads the full degrees from it."""
    key: int | Tensor | None = None
    """Key of this step's random draws; None in evaluation. In a captured step it is a tensor [1] on the device, which
    every replay changes."""
    scale_sums: bool = False
    """Whether sums over sampled edges are scaled up, so that their expectation is the sum over all in-edges."""
    in_graph_order: bool = True
    """Whether the edges of a destination are in the graph's order. Sampled edges are not."""
    layer_hooks: LayerHooks | None = None
    """Callbacks that add rows of other nodes between two layers, or record rows; None if there are none."""
    convs: ConvRunner | None = None
    """Runs the convs of this block, for example if source rows are in other shards; None: `nn.conv_adapter` does."""

    def __repr__(self) -> str:
        if not self.parts:
            return f"{type(self).__name__}({self.num_dst:,} nodes)"
        return f"{type(self).__name__}({self.num_src:,} -> {self.num_dst:,} nodes, {self.num_edges:,} edges)"

    def to(self, device: torch.device, non_blocking: bool = False, moved_parts: dict[int, Any] | None = None) -> Block:
        """The block on a device. Its graph stays on the device where it is.

        moved_parts: the copies made so far of what blocks of one batch share, by the `id` of the original. Only
        blocks in the tree layout share something: their tree.
        """
        if all(tensor is None or _lies_on(tensor, device) for tensor in self.tensors()):
            return self  # not a copy, whose parts would have empty caches
        if self.convs is not None:
            return self.convs.block_to(self, device)
        parts = tuple(part.to(device, non_blocking) for part in self.parts)
        return replace(self, src_ids=self.src_ids.to(device, non_blocking=non_blocking), parts=parts)

    def tensors(self) -> list[Tensor | None]:
        """All tensors of the block; None for those that it does not have."""
        tensors: list[Tensor | None] = [self.src_ids]
        for part in self.parts:
            tensors += [part.indptr, part.src_idx, part.edge_ids, *part.edge.values()]
        return tensors

    def with_scale_sums(self, scale_sums: bool) -> Block:
        """The block with this `scale_sums`."""
        return self if self.scale_sums == scale_sums else replace(self, scale_sums=scale_sums)

    def handle(self, table: Readable) -> Rows:
        """A handle to the table's rows of the block's sources."""
        return Rows(table, self.src_ids)

    @property
    def num_src(self) -> int:
        return self.src_ids.numel()

    @property
    def dst_ids(self) -> Tensor:
        """[num_dst] int64: global node ids of the destinations."""
        return self.src_ids[: self.num_dst]

    @property
    def src_keys(self) -> Tensor:
        """[num_src] int64: the number of each source that, together with `key`, decides its random draws."""
        return self.src_ids

    @property
    def present(self) -> Tensor | None:
        """[num_src] bool: which sources are nodes and not empty slots of a tree; None if all are nodes."""
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
        """The only part of the block. Raises ValueError if the block has none or several."""
        if not self.parts:
            raise ValueError(NO_EDGES)
        part, *others = self.parts
        if others:
            raise ValueError(
                f"the edges of this block are in {len(self.parts)} parts, one for each shard that owns their sources: "
                "read block.parts, whose edge_index counts the sources of each part from 0"
            )
        return part

    @property
    def is_divisible(self) -> bool:
        """Whether the block can be split by destinations into blocks of their own."""
        return len(self.parts) == 1 and self.convs is None

    @property
    def edge_index(self) -> Tensor:
        """[2, num_edges] int64: local ids, sources first, sorted by destination."""
        return self.part.edge_index

    @property
    def counts(self) -> Tensor:
        """[num_dst]: the number of in-edges of each destination in the block."""
        return self.part.indptr.diff()

    @property
    def sampling_factor(self) -> Tensor:
        """[num_dst] float64: in-edges in the graph divided by in-edges in the block.

        1 for a node without in-edges in the graph. Edges that were drawn by weight have factors of their own
        (`edge_factors`).
        """
        assert self.graph is not None
        return self.graph.in_degrees(self.dst_ids).clamp(min=1).double() / self.counts.clamp(min=1)

    @property
    def inclusion(self) -> Tensor | None:
        """[num_edges] float64: the probability with which each edge was drawn by weight; None for other draws."""
        if not self.parts or self.graph is None or INCLUSION in self.graph.edge:  # an array of the user's
            return None
        return self.parts[0].edge.get(INCLUSION)

    @property
    def edge_factors(self) -> Tensor:
        """[num_edges] float64: how often a scaled sum counts each edge, so that its expectation is the full sum."""
        if self.inclusion is not None:
            return 1 / self.inclusion
        part = self.part
        return torch.repeat_interleave(self.sampling_factor, part.indptr.diff(), output_size=part.num_edges)

    @property
    def edge(self) -> Mapping[str, Tensor]:
        """[num_edges, ...] each: the graph's edge arrays at the block's edges, by name."""
        return self.part.edge


@dataclass(frozen=True, eq=False)
class Batch:
    """Seeds, the blocks that compute their outputs, and handles to the input rows of these blocks.

    A `GNN` is called with one: `model(batch)` gives [num_examples, num_outputs]. Any other model is called by
    `hl.nn.as_batch_model(model)(batch)`. Batches are immutable; `to(device)` makes another one.

    An example is a term of the loss, a seed is a node whose output is computed. They are the same, unless a node is an
    example several times.

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
    """[num_seeds] int64: global node ids."""
    blocks: tuple[Block, ...]
    """One block per layer, in the order of computation: the first reads the input, the last gives the seeds' rows."""
    x: Rows | Tensor | None
    """[num_input, num_features]: the input rows of `input_ids`, or a handle to them; None without features."""
    y: Tensor | None
    """[num_examples, ...]: labels of the examples; None without labels."""
    tables: Mapping[str, Rows | Tensor] = field(default_factory=dict)
    """[num_input, ...] each: rows of the dataset's other tables for `input_ids`, by name, or handles to them."""
    key: int | Tensor | None = None
    """Key of this step's random draws, derived from (seed, epoch, global step)."""
    total_seeds: int | None = None
    """Number of examples of this step over all ranks; None if this rank does not know it."""
    output_idx: Tensor | None = None
    """[num_examples] int64: each example's position among the last block's destinations. None: these are the examples,
    in order."""
    groups: tuple[Tensor, ...] = ()
    """The micro-batches into which a budget splits the batch: [n] int64 each, on the host, positions among the seeds.
    Empty if the batch runs whole."""

    def __repr__(self) -> str:
        arrays = [f"{name}={_shown(rows)}" for name, rows in {"x": self.x, "y": self.y, **self.tables}.items()]
        blocks = "".join(f"\n    {block!r}," for block in self.blocks)
        examples = f"{self.num_examples:,} examples of " if self.num_examples != self.num_seeds else ""
        return f"Batch({examples}{self.num_seeds:,} seeds, {', '.join(arrays)}, blocks=({blocks}\n))"

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError. For an attribute of PyG's batches, the error says what to use instead."""
        if name in PYG_NAMES:
            raise AttributeError(
                f"a hopline Batch has no {name!r}, since each layer has edges of its own (batch.blocks): call "
                "hl.nn.as_batch_model(model)(batch), or take PyG's batches from hl.NeighborLoader"
            )
        raise AttributeError(f"'Batch' object has no attribute {name!r}")

    @property
    def labels(self) -> Tensor:
        """`y`; raises ValueError if the dataset has no labels."""
        if self.y is None:
            raise ValueError("this dataset has no labels to train on: give it y, or pass train_step=")
        return self.y

    @property
    def input_rows(self) -> Rows | Tensor:
        """`x`; raises ValueError if the dataset has no features."""
        if self.x is None:
            raise ValueError("this dataset has no features: give it a table named 'x'")
        return self.x

    @property
    def input_ids(self) -> Tensor:
        """[num_input] int64: global ids of the nodes whose input rows the first block reads."""
        return self.blocks[0].src_ids

    @property
    def input_keys(self) -> Tensor:
        """[num_input] int64: the numbers that, with `key`, decide random draws at the input rows.

        They are the node ids, or in the tree layout the ids of the slots.
        """
        return self.blocks[0].src_keys

    @property
    def num_seeds(self) -> int:
        return self.seeds.numel()

    @property
    def num_examples(self) -> int:
        """The number of terms of the loss: rows of `model(batch)`, and labels."""
        return self.num_seeds if self.output_idx is None else self.output_idx.size(0)

    @property
    def example_ids(self) -> Tensor:
        """[num_examples] int64: the node of each example, in the order of `labels` and of `model(batch)`."""
        return self.seeds if self.output_idx is None else self.blocks[-1].dst_ids[self.output_idx]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that this batch holds. Handles do not count: their rows are not read yet."""
        return sum(t.numel() * t.element_size() for t in _tensors(self))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on a device. Handles stay as they are: no row is read, and no table moves."""
        target = torch.device(device)
        # `_tensors` leaves `output_idx` out.
        output_idx = [] if self.output_idx is None else [self.output_idx]
        if all(t.device == target for t in [*_tensors(self), *output_idx]):
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
        """The batch with other dropout masks; each `number` gives other ones. Seeds and edges stay.

        Dropout depends on step and node alone, so two calls of a model with one batch drop the same values. A loss
        that compares two calls with different dropout, such as R-Drop's, makes the second call with this batch.
        """
        if self.key is None:
            return self
        key = ops.another_key(self.key, number)
        return replace(self, key=key, blocks=each_once(self.blocks, lambda block: replace(block, key=key)))

    def union(self) -> Block:
        """All sampled edges as one square block over `input_ids`, for models that are not walked layer by layer.

        Each node keeps the edges of the layer nearest to the seeds, as in PyG's NeighborLoader.
        """
        # From the seeds outwards. The first `num_done` destinations of a block were destinations of the block after
        # it, and have their edges already. Only the edges of the others are new.
        num_done = 0
        new_parts = []
        for block in reversed(self.blocks):
            new_parts.append(block.part.destinations_from(num_done))
            num_done = block.num_dst
        input_block = self.blocks[0]
        in_degrees = torch.cat([part.indptr.diff() for part in new_parts])
        indptr = in_degrees.new_zeros(input_block.num_src + 1)
        indptr[1 : num_done + 1] = in_degrees.cumsum(0)
        indptr[num_done + 1 :] = indptr[num_done]  # the outermost nodes have no edges
        src_idx = torch.cat([part.src_idx for part in new_parts])
        edge = {name: torch.cat([part.edge[name] for part in new_parts]) for name in new_parts[0].edge}
        edge_ids = [part.edge_ids for part in new_parts if part.edge_ids is not None]
        union = Part(indptr, src_idx, edge, torch.cat(edge_ids) if edge_ids else None)
        return replace(input_block, num_dst=input_block.num_src, parts=(union,))


def _shown(rows: Handle | Tensor | None) -> str:
    """Shape, dtype and device of an array for `repr`; a handle is not read for it."""
    if rows is None:
        return "None"
    kind = str(rows.dtype).removeprefix("torch.") if isinstance(rows, Tensor) else "not read yet"
    where = f" on {rows.device}" if isinstance(rows, Tensor) and rows.device.type != "cpu" else ""
    return f"{list(rows.shape)} {kind}{where}"


def each_once(blocks: Iterable[Block], change: Callable[[Block], Block]) -> tuple[Block, ...]:
    """The results of `change` for the blocks. It is called once per object.

    Layers that have one block in common have one new block in common.
    """
    # A tuple holds the blocks while their ids are keys: no other object can get the same id meanwhile.
    blocks = tuple(blocks)
    new_blocks = {id(block): change(block) for block in _distinct(blocks)}
    return tuple(new_blocks[id(block)] for block in blocks)


def _distinct(blocks: Iterable[Block]) -> Iterable[Block]:
    """The blocks without repetition: layers of a batch may have one block in common."""
    return {id(block): block for block in blocks}.values()


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors that a batch holds, each once. Those of `key`, `output_idx` and `groups` are left out."""
    values = [batch.seeds, batch.x, batch.y, *batch.tables.values()]
    for block in _distinct(batch.blocks):
        values += block.tensors()
    if isinstance(batch.x, ReducedRows):
        values.append(batch.x.reduced_and_own)
    return list({id(t): t for t in values if isinstance(t, Tensor)}.values())  # blocks may share tensors
