"""Trees: the layout of a sampled batch in which every drawn neighbour has a slot, so that shapes never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph
from hopline.core.row_handles import Readable, Rows
from hopline.core.sampler import check_ids
from hopline.ops.tree_slots import Slots
from hopline.util.config import check_fanouts


@dataclass(frozen=True, eq=False)
class Tree:
    """The trees of some seeds: the node at every slot, slots that no neighbour was drawn for being empty."""

    slots: Slots
    """How they are numbered."""
    nodes: Tensor
    """[num_slots] the node at each slot, -1 where it is empty; dtype of the graph's indices."""
    counts: Tensor
    """[slots with children] int32: how many of each one's children are there; they are the first ones."""
    edge_ids: Tensor | None = None
    """[num_slots - num_seeds] int64: each child's position in the graph's edge arrays, 0 where there is none."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Tree:
        if self.nodes.device == device:
            return self
        return Tree(
            self.slots,
            self.nodes.to(device, non_blocking=non_blocking),
            self.counts.to(device, non_blocking=non_blocking),
            None if self.edge_ids is None else self.edge_ids.to(device, non_blocking=non_blocking),
        )


def _when_asked(compute: Callable[[Any], Any]) -> Any:
    """The default of a field that is no argument: it is computed when it is first asked for, and kept."""
    return cached_property(compute)


@dataclass(frozen=True, eq=False, repr=False)
class TreeBlock(Block):
    """One layer's edges in the tree layout: the destinations are hops 0 .. `hop`, the sources reach one hop further.

    Every source but the seeds is the child of one destination. No edge leads out of an empty slot. It is a class of its
    own since its ids and edges are computed when they are asked for: a step on a GPU needs few of them, and counting
    edges there waits for the device.
    """

    src_ids: Tensor = field(init=False, default=_when_asked(lambda block: block._node_ids()))
    """[num_src] int64 global node ids; 0 at empty slots, so that rows can be read for them."""
    num_dst: int = field(init=False, default=_when_asked(lambda block: block.tree.slots.up_to(block.hop)))
    parts: tuple[Part, ...] = field(init=False, default=())
    in_graph_order: bool = field(init=False, default=False)
    tree: Tree = field(kw_only=True)
    """The slots of all layers of a batch."""
    hop: int = field(kw_only=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_src:,} -> {self.num_dst:,} nodes, {self.num_edges:,} edges)"

    def to(
        self, device: torch.device, non_blocking: bool = False, moved_parts: dict[int, Any] | None = None
    ) -> TreeBlock:
        moved_parts = {} if moved_parts is None else moved_parts
        if id(self.tree) not in moved_parts:  # the blocks of a batch share one tree
            moved_parts[id(self.tree)] = self.tree.to(device, non_blocking)
        tree = moved_parts[id(self.tree)]
        return self if tree is self.tree else replace(self, tree=tree)

    def handle(self, table: Readable) -> Rows:
        return TreeRows(table, self)

    def _node_ids(self) -> Tensor:
        return self.tree.nodes[: self.num_src].long().clamp(min=0)

    @property
    def num_src(self) -> int:
        return self.tree.slots.up_to(self.hop + 1)

    @property
    def counts(self) -> Tensor:
        """[num_dst] int32: how many of each destination's children are there."""
        return self.tree.counts[: self.num_dst]

    @property
    def present(self) -> Tensor:
        """[num_src] bool: which slots are not empty."""
        return self.tree.nodes[: self.num_src] >= 0

    @property
    def src_keys(self) -> Tensor:
        return self.tree.slots.ids(self.tree.nodes.device)[: self.num_src]

    @property
    def num_edges(self) -> int:
        return int(self.counts.sum())

    def tensors(self) -> list[Tensor | None]:
        return [self.tree.nodes, self.tree.counts, self.tree.edge_ids]

    @property
    def on_gpu(self) -> bool:
        """Whether shapes must not depend on what was drawn: asking the device for them would wait for it."""
        return self.tree.nodes.device.type != "cpu"

    @property
    def part(self) -> Part:
        """The edges that are there, for convs that do not know trees. On a GPU this waits for the device."""
        return self._compact

    @cached_property
    def _compact(self) -> Part:
        counts = self.counts.long()
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        first = self.tree.slots.first_children(counts.device)[: self.num_dst].long()
        shift = torch.repeat_interleave(first - indptr[:-1], counts)
        src_idx = torch.arange(int(indptr[-1]), device=counts.device) + shift
        if self.tree.edge_ids is None:
            return Part(indptr, src_idx.int())
        edge_ids = self.tree.edge_ids[src_idx - self.tree.slots.num_seeds]
        arrays = {} if self.graph is None else self.graph.edge
        edge = {name: rows[edge_ids.to(rows.device)].to(counts.device) for name, rows in arrays.items()}
        return Part(indptr, src_idx.int(), edge, edge_ids)

    @property
    def sampling_factor(self) -> Tensor:
        assert self.graph is not None
        return self.graph.in_degrees(self.dst_ids).clamp(min=1).double() / self.counts.clamp(min=1)

    @property
    def edge(self) -> Mapping[str, Tensor]:
        """By edge, or on a GPU by the slot that each edge comes out of."""
        return self.child_edges if self.on_gpu else self.part.edge

    @property
    def parents(self) -> Tensor:
        """[num_src] int32: the destination that each source is a child of; -1 at the seeds."""
        return self.tree.slots.parents(self.tree.nodes.device)[: self.num_src]

    @cached_property
    def padded(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(edge_index, edge arrays) with an edge for every slot: those out of empty ones lead to row `num_dst`."""
        num_seeds = self.tree.slots.num_seeds
        parents = self.parents[num_seeds:].long()
        dst = torch.where(self.present[num_seeds:], parents, self.num_dst)
        src = torch.arange(num_seeds, self.num_src, device=dst.device)
        return torch.stack([src, dst]), {name: rows[num_seeds:] for name, rows in self.child_edges.items()}

    @cached_property
    def child_edges(self) -> Mapping[str, Tensor]:
        """The graph's edge arrays by the slot that each edge comes out of; any value at seeds and empty slots."""
        if self.tree.edge_ids is None or self.graph is None:
            return {}
        num_seeds = self.tree.slots.num_seeds
        edge_ids = nn.functional.pad(self.tree.edge_ids[: self.num_src - num_seeds], (num_seeds, 0))
        device = edge_ids.device
        return {n: ops.gather_rows(rows, edge_ids.to(rows.device)).to(device) for n, rows in self.graph.edge.items()}


@dataclass(frozen=True, eq=False, repr=False)
class TreeRows(Rows):
    """A handle to the rows of all slots of a block in the tree layout."""

    ids: Tensor = field(init=False, default=_when_asked(lambda rows: rows.block.src_ids))
    block: TreeBlock

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.block.num_src, *self.table.shape[1:])


class TreeSampler:
    """Seeds to blocks in the tree layout; usable from many threads.

    `fanouts[0]` is at the seeds. A slot's draws depend on its id alone, so dividing a step's seeds over ranks or
    pieces divides the trees and changes nothing in them.
    """

    def __init__(self, graph: Graph, fanouts: Sequence[int], *, replace: bool = False, edge_ids: bool = False) -> None:
        check_fanouts(fanouts, replace)
        if -1 in fanouts:
            raise ValueError("a tree has a fixed number of slots, which fan-out -1 has not: set layout=block")
        self.graph = graph
        self.fanouts = tuple(fanouts)
        self.replace = replace
        self.with_edges = edge_ids or bool(graph.edge)

    def sample(self, seeds: Tensor, key: int | Tensor, first_seed: int = 0) -> tuple[TreeBlock, ...]:
        """One block per layer in the order of computation: the last one's destinations are the seeds.

        first_seed: where these seeds stand among all of the step's.
        """
        if seeds.device.type == "cpu":
            check_ids(seeds, self.graph.num_nodes)
        graph, slots = self.graph, Slots(seeds.numel(), self.fanouts, first_seed)
        drawn = ops.sample_tree(graph.indptr, graph.indices, seeds, slots, key, self.replace, self.with_edges)
        tree = Tree(slots, *drawn)
        return tuple(TreeBlock(tree=tree, hop=hop, graph=graph, key=key) for hop in reversed(range(len(self.fanouts))))
