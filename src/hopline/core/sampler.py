"""Neighbour sampling into blocks, and the blocks of exact inference, which take all edges.

    seeds --hop: draw in-edges of all known nodes--> block of the last layer --hop--> ... --hop--> block of the first

`NeighborSampler.sample` works from the seeds outwards. The sources of one hop are the destinations of the next, and
the blocks are returned in reverse, in the order of computation. An id map gives every node its local id when it is
first reached. So the destinations of a block come first among its sources, as `Block` requires.

All draws are functions of a key and the node: a batch can be drawn again, in any thread, with the same result.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph
from hopline.util.config import check_fanouts

WRONG_EDGE = "an edge index is out of range: check the dataset by `hopline verify FOLDER`"
"""The error for an edge whose source is not a node of the graph."""


class Subgraph(NamedTuple):
    """A sample of the neighbourhood of some seeds as one graph. Every node is in it once, in the order reached."""

    node_ids: Tensor
    """[num_nodes] int64: global ids, the seeds first."""
    edge_index: Tensor
    """[2, num_edges] int64: local ids, sources first; hop after hop, and sorted by destination in each hop."""
    edge_ids: Tensor
    """[num_edges] int64: each edge's position in the graph's `indices`."""
    num_nodes: list[int]
    """The number of nodes that each hop was the first to reach. Hop 0 is the seeds."""
    num_edges: list[int]
    """The number of edges that each hop drew."""


class NeighborSampler:
    """Samples blocks: every destination of a layer gets up to `fanout` of its in-edges.

    Any number of threads may use one sampler. Blocks are on the graph's device; if the graph is in host memory, they
    are on the device of the seeds.

    The sample of a node depends on the key, the pair of layers and the node alone. `ops.layer_key` says why layers
    come in pairs. The sample at a smaller fan-out is part of the sample at a larger one.

    Args:
        graph: The graph to sample from.
        fanouts: In-edges to draw per node, one number per layer, that of the seeds first; -1 takes all.
        replace: Whether to draw neighbours with replacement.
        edge_ids: Whether parts have `edge_ids`.
        one_list: Whether a node draws the same neighbours in all layers. For models on the union of the blocks.

    Raises:
        ValueError: A fan-out is not allowed. From `sample`: seeds are not distinct nodes, [n] int64.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> hl.extend.NeighborSampler(data.graph, [2, 2]).sample(torch.tensor([1]), key=0)
        (Block(3 -> 2 nodes, 2 edges), Block(2 -> 1 nodes, 1 edges))
    """

    def __init__(
        self,
        graph: Graph,
        fanouts: Sequence[int],
        *,
        replace: bool = False,
        edge_ids: bool = False,
        one_list: bool = False,
    ) -> None:
        check_fanouts(fanouts, replace)
        self.graph = graph
        self.fanouts = tuple(fanouts)
        self.replace = replace
        self.edge_ids = edge_ids
        self.one_list = one_list
        self._local = threading.local()

    def sample(self, seeds: Tensor, key: int | Tensor) -> tuple[Block, ...]:
        """One block per layer, in the order of computation: the destinations of the last one are the seeds.

        seeds: [n] int64, distinct.
        """
        seeds = _on_graph_device(self.graph, seeds)
        check_ids(seeds, self.graph.num_nodes)
        id_map = self._id_map(seeds.device)
        hops: list[Block] = []
        try:
            _add_seeds(id_map, seeds)
            dst_ids = id_map.ids()
            keys = hop_keys(key, len(self.fanouts), self.one_list)
            for fanout, hop_key in zip(self.fanouts, keys, strict=True):
                hops.append(self._hop(id_map, dst_ids, fanout, key, hop_key))
                dst_ids = hops[-1].src_ids
        finally:
            id_map.clear()
        return tuple(reversed(hops))

    def sample_subgraph(self, seeds: Tensor, key: int | Tensor) -> Subgraph:
        """One graph for all layers, as PyG's NeighborLoader samples it.

        The in-edges of a node are drawn once, at the hop after the one that reached it.
        """
        seeds = _on_graph_device(self.graph, seeds)
        check_ids(seeds, self.graph.num_nodes)
        graph = self.graph
        id_map = self._id_map(seeds.device)
        # One entry per hop.
        src_idx: list[Tensor] = []
        dst_idx: list[Tensor] = []
        edge_ids: list[Tensor] = []

        node_counts = [0]  # then the nodes in the id map: one entry before each hop, and one after the last
        try:
            _add_seeds(id_map, seeds)
            for fanout in self.fanouts:
                # The nodes that the hop before has reached: local ids start .. stop - 1.
                start = node_counts[-1]
                stop = id_map.size
                node_counts.append(stop)
                new_ids = id_map.ids()[start:]
                drawn = ops.sample_neighbors(graph.indptr, graph.indices, new_ids, fanout, key, self.replace)
                local_ids = torch.arange(start, stop, device=seeds.device)
                # With `output_size`, torch need not synchronise with a GPU to learn the number of edges.
                num_drawn = drawn.edge_ids.numel()
                dst_idx.append(torch.repeat_interleave(local_ids, drawn.indptr.diff(), output_size=num_drawn))
                src_idx.append(id_map.add(drawn.ids))
                edge_ids.append(drawn.edge_ids)
            node_ids = id_map.ids()
        finally:
            id_map.clear()
        node_counts.append(node_ids.numel())
        return Subgraph(
            node_ids=node_ids,
            edge_index=torch.stack([torch.cat(src_idx).long(), torch.cat(dst_idx)]),
            edge_ids=torch.cat(edge_ids),
            num_nodes=[after - before for before, after in itertools.pairwise(node_counts)],
            num_edges=[ids.numel() for ids in edge_ids],
        )

    def _hop(
        self, id_map: ops.AnyIdMap, dst_ids: Tensor, fanout: int, key: int | Tensor, hop_key: int | Tensor
    ) -> Block:
        """The block of one hop. Adds the drawn neighbours to the id map.

        dst_ids: all nodes of the id map, in its order.
        key: the key that the block carries, for dropout.
        hop_key: the key that decides the neighbours.
        """
        graph = self.graph
        drawn = ops.sample_neighbors(graph.indptr, graph.indices, dst_ids, fanout, hop_key, self.replace)
        src_idx = id_map.add(drawn.ids)
        edge = {name: ops.gather_rows(array, drawn.edge_ids) for name, array in graph.edge.items()}
        part = Part(drawn.indptr, src_idx, edge, drawn.edge_ids if self.edge_ids else None)
        return Block(id_map.ids(), dst_ids.numel(), (part,), graph, key, in_graph_order=fanout < 0)

    def _id_map(self, device: torch.device) -> ops.AnyIdMap:
        """The empty id map of this thread and device. Prefetching threads share no state, so they need no lock."""
        maps: dict[torch.device, ops.AnyIdMap] = self._local.__dict__.setdefault("id_maps", {})
        if device not in maps:
            maps[device] = ops.new_id_map(self.graph.num_nodes, device)
        return maps[device]


def hop_keys(key: int | Tensor, num_hops: int, one_list: bool) -> list[int | Tensor]:
    """The keys that decide the neighbours of each hop, that of the seeds first. one_list: as in `NeighborSampler`."""
    return [key if one_list else ops.layer_key(key, layer) for layer in reversed(range(num_hops))]


def _add_seeds(id_map: ops.AnyIdMap, seeds: Tensor) -> None:
    """Add seeds to an empty id map. Raises ValueError if they are not distinct."""
    id_map.add(seeds)
    # A repeated seed gets the local id that it has already, so the map stays smaller.
    if id_map.size != seeds.numel():
        raise ValueError("the seeds of a batch must be distinct: pass each node id once")


def _on_graph_device(graph: Graph, nodes: Tensor) -> Tensor:
    """The nodes on the graph's GPU. If the graph is in host memory, they stay on their device."""
    return nodes if graph.device.type == "cpu" else nodes.to(graph.device)


def full_block(sampler: NeighborSampler, nodes: Tensor) -> Block:
    """The block of all in-edges of `nodes`, for exact inference.

    sampler: one with the fan-outs (-1,).
    """
    assert sampler.fanouts == (-1,)
    # Any key will do: at fan-out -1 nothing is drawn.
    (block,) = sampler.sample(nodes, 0)
    return Block(block.src_ids, block.num_dst, block.parts, block.graph, key=None)


def whole_block(graph: Graph) -> Block:
    """The block of all nodes and edges. It shares the graph's tensors, so it costs no memory but the node ids."""
    if not _all_inside(graph.indices, graph.num_nodes):
        raise ValueError(WRONG_EDGE)
    nodes = torch.arange(graph.num_nodes, device=graph.indptr.device)
    return Block(nodes, graph.num_nodes, (Part(graph.indptr, graph.indices, dict(graph.edge)),), graph, key=None)


def in_neighborhood(graph: Graph, nodes: Tensor) -> Tensor:
    """[n] int64: `nodes` and all their in-neighbours, each once, ascending."""
    nodes = _on_graph_device(graph, nodes)
    # Fan-out -1 takes all in-edges, so the key 0 decides nothing.
    in_edges = ops.sample_neighbors(graph.indptr, graph.indices, nodes, -1, 0)
    if not _all_inside(in_edges.ids, graph.num_nodes):
        raise ValueError(WRONG_EDGE)
    is_inside = torch.zeros(graph.num_nodes, dtype=torch.bool, device=nodes.device)
    is_inside[nodes] = True
    is_inside[in_edges.ids.long()] = True
    return is_inside.nonzero().view(-1)


def check_ids(ids: Tensor, num_nodes: int) -> None:
    """Raise ValueError unless `ids` is a 1-D integer tensor of nodes of the graph."""
    if not isinstance(ids, Tensor):
        raise ValueError(f"node ids must be a 1-D int64 tensor, not a {type(ids).__name__}: write torch.tensor([...])")
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"node ids must be a 1-D int64 tensor, not {list(ids.shape)} {ids.dtype}: "
            "turn a mask into ids by mask.nonzero().view(-1)"
        )
    if not _all_inside(ids, num_nodes):
        raise ValueError(f"an id is not a node: ids go from 0 to {num_nodes - 1}")


def _all_inside(ids: Tensor, num_nodes: int) -> bool:
    """Whether all ids are from 0 to num_nodes - 1. Synchronises on a GPU."""
    if ids.numel() == 0:
        return True
    lowest, highest = torch.stack(torch.aminmax(ids)).tolist()  # stacked, to synchronise once
    return lowest >= 0 and highest < num_nodes
