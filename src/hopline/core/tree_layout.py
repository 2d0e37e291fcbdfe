"""The tree layout: a sampled batch with a slot for every possible draw, so that shapes never change.

Seeds are the roots. A slot of hop h has fanouts[h] child slots in hop h + 1. With two seeds and fan-outs (2, 1):

    hop 0     slots 0 1             the seeds
    hop 1     slots 2 3 | 4 5       children of slots 0 and 1
    hop 2     slots 6 | 7 | 8 | 9   children of slots 2, 3, 4 and 5

A node with fewer in-neighbours than the fan-out leaves its last child slots empty. A node that is drawn twice has two
slots. So the layout computes some rows twice, where a `Block` would hold each node once. In return, shapes and the
position of every child follow from the fan-outs alone. Nothing needs to synchronise with a GPU, and a step can be
captured as a CUDA graph.

    TreeSampler.sample   ->   one `Tree` (the nodes at all slots)   ->   a `TreeBlock` per layer, views of the tree

`ops.tree_slots` has the arithmetic of the slots.
"""

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
    """The node at every slot of the trees of some seeds. The blocks of a batch share one tree."""

    slots: Slots
    """The numbering of the slots."""
    nodes: Tensor
    """[num_slots], dtype of the graph's indices: the global id of the node at each slot; -1 means empty."""
    counts: Tensor
    """[slots with children] int32: how many child slots of each slot are not empty. Those come before empty ones."""
    edge_ids: Tensor | None = None
    """[num_slots - num_seeds] int64: the edge from each slot after the seeds to its parent, as a position in the
    graph's edge arrays; 0 for an empty slot. None if no edge array is needed."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Tree:
        """The tree on a device."""
        if self.nodes.device == device:
            return self
        return Tree(
            self.slots,
            self.nodes.to(device, non_blocking=non_blocking),
            self.counts.to(device, non_blocking=non_blocking),
            None if self.edge_ids is None else self.edge_ids.to(device, non_blocking=non_blocking),
        )


def _on_first_access(compute: Callable[[Any], Any]) -> Any:
    """The default of a dataclass field with init=False: its value is computed at the first access, and cached.

    `__init__` leaves such a field alone, so the class attribute stays in effect, here a `cached_property`.
    """
    return cached_property(compute)


@dataclass(frozen=True, eq=False, repr=False)
class TreeBlock(Block):
    """The edges of one layer in the tree layout.

    Destinations are the slots of hops 0 .. hop, and sources are those of hops 0 .. hop + 1. Every source but the
    seeds is the child of one destination. No edge leads out of an empty slot.

    Ids and edges are computed at the first access, and not by the sampler. A step on a GPU needs few of them, and to
    count edges it would have to synchronise.
    """

    src_ids: Tensor = field(init=False, default=_on_first_access(lambda block: block._node_ids()))
    """[num_src] int64: global node ids. Empty slots have 0, a valid id, so that rows can be read for all slots."""
    num_dst: int = field(init=False, default=_on_first_access(lambda block: block.tree.slots.up_to(block.hop)))
    """Number of destination slots, empty ones included."""
    parts: tuple[Part, ...] = field(init=False, default=())
    """Always empty. `part` computes the edges when they are needed."""
    in_graph_order: bool = field(init=False, default=False)
    """Always false: the edges are sampled."""
    tree: Tree = field(kw_only=True)
    """The tree of the whole batch, which all its blocks share."""
    hop: int = field(kw_only=True)
    """The last hop among the destinations; 0 in the block whose destinations are the seeds."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_src:,} -> {self.num_dst:,} nodes, {self.num_edges:,} edges)"

    def to(
        self, device: torch.device, non_blocking: bool = False, moved_parts: dict[int, Any] | None = None
    ) -> TreeBlock:
        """The block on a device. Its graph stays on the device where it is."""
        moved_parts = {} if moved_parts is None else moved_parts
        # The blocks of a batch share one tree: it is copied once, by the first of them.
        if id(self.tree) not in moved_parts:
            moved_parts[id(self.tree)] = self.tree.to(device, non_blocking)
        tree = moved_parts[id(self.tree)]
        return self if tree is self.tree else replace(self, tree=tree)

    def handle(self, table: Readable) -> Rows:
        """A handle to the table's rows of all slots."""
        return TreeRows(table, self)

    def _node_ids(self) -> Tensor:
        return self.tree.nodes[: self.num_src].long().clamp(min=0)

    @property
    def num_src(self) -> int:
        """Number of source slots, empty ones included."""
        return self.tree.slots.up_to(self.hop + 1)

    @property
    def counts(self) -> Tensor:
        """[num_dst] int32: the number of children of each destination that are not empty."""
        return self.tree.counts[: self.num_dst]

    @property
    def present(self) -> Tensor:
        """[num_src] bool: which slots are not empty."""
        return self.tree.nodes[: self.num_src] >= 0

    @property
    def src_keys(self) -> Tensor:
        """[num_src] int64: the ids of the slots, which decide random draws. A node in two slots has two draws."""
        return self.tree.slots.ids(self.tree.nodes.device)[: self.num_src]

    @property
    def num_edges(self) -> int:
        """The number of edges. Synchronises on a GPU."""
        return int(self.counts.sum())

    def tensors(self) -> list[Tensor | None]:
        """The tensors of the whole tree, which the blocks of a batch share."""
        return [self.tree.nodes, self.tree.counts, self.tree.edge_ids]

    @property
    def on_gpu(self) -> bool:
        """Whether the tree is on a GPU. Then shapes must not depend on the draws: to learn them would synchronise."""
        return self.tree.nodes.device.type != "cpu"

    @property
    def part(self) -> Part:
        """The edges without those of empty slots, for convs that do not know trees. Synchronises on a GPU."""
        return self._compact

    @cached_property
    def _compact(self) -> Part:
        """The result of `part`, cached.

        The children of destination d that are not empty are the slots first[d], first[d] + 1, ... The edges of d are
        e = indptr[d] .. indptr[d + 1] - 1. So edge e of d has the source first[d] + e - indptr[d].
        """
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
    def edge(self) -> Mapping[str, Tensor]:
        """The graph's edge arrays by name: [num_edges, ...] on a CPU, [num_src, ...] as in `child_edges` on a GPU."""
        return self.child_edges if self.on_gpu else self.part.edge

    @property
    def parents(self) -> Tensor:
        """[num_src] int32: the destination that each source is a child of; -1 at the seeds."""
        return self.tree.slots.parents(self.tree.nodes.device)[: self.num_src]

    @cached_property
    def padded(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(edge_index [2, num_src - num_seeds] int64, edge arrays by name) with an edge for every slot but the seeds.

        Edges out of empty slots lead to destination `num_dst`, one more than there are. So the number of edges does
        not depend on the draws.
        """
        num_seeds = self.tree.slots.num_seeds
        parents = self.parents[num_seeds:].long()
        dst = torch.where(self.present[num_seeds:], parents, self.num_dst)
        src = torch.arange(num_seeds, self.num_src, device=dst.device)
        return torch.stack([src, dst]), {name: rows[num_seeds:] for name, rows in self.child_edges.items()}

    @cached_property
    def child_edges(self) -> Mapping[str, Tensor]:
        """[num_src, ...] each: the graph's edge arrays by name, at the edge from each slot to its parent.

        Rows of seeds and of empty slots have arbitrary values.
        """
        if self.tree.edge_ids is None or self.graph is None:
            return {}
        num_seeds = self.tree.slots.num_seeds
        edge_ids = nn.functional.pad(self.tree.edge_ids[: self.num_src - num_seeds], (num_seeds, 0))
        device = edge_ids.device
        return {n: ops.gather_rows(rows, edge_ids.to(rows.device)).to(device) for n, rows in self.graph.edge.items()}


@dataclass(frozen=True, eq=False, repr=False)
class TreeRows(Rows):
    """A handle to the rows of all slots of a block in the tree layout."""

    ids: Tensor = field(init=False, default=_on_first_access(lambda rows: rows.block.src_ids))
    """[num_src] int64: the row ids, 0 at empty slots. Computed at the first access."""
    block: TreeBlock
    """The block whose sources are the rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.block.num_src, *self.table.shape[1:])


class TreeSampler:
    """Samples blocks in the tree layout. Any number of threads may use one sampler.

    `fanouts[0]` is the fan-out of the seeds. The draws at a slot depend on the key and the slot's id alone. So if the
    seeds of a step are split over ranks or micro-batches, every seed keeps its tree.
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
        """One block per layer, in the order of computation: the destinations of the last one are the seeds.

        first_seed: the position of the first of these seeds among all seeds of the step.
        """
        # Ids on a GPU are not checked: that would synchronise.
        if seeds.device.type == "cpu":
            check_ids(seeds, self.graph.num_nodes)
        graph = self.graph
        slots = Slots(seeds.numel(), self.fanouts, first_seed)
        drawn = ops.sample_tree(graph.indptr, graph.indices, seeds, slots, key, self.replace, self.with_edges)
        tree = Tree(slots, *drawn)
        return tuple(TreeBlock(tree=tree, hop=hop, graph=graph, key=key) for hop in reversed(range(len(self.fanouts))))
