"""Seeds to trees: the other layout of a sampled batch, in which shapes never change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.core.sampler import check_ids
from hopline.core.tree import Tree, TreeBlock
from hopline.methods.sampled.settings import check_fanouts
from hopline.ops.tree_slots import Slots


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
        return tuple(TreeBlock(tree, hop, graph, key) for hop in reversed(range(len(self.fanouts))))
