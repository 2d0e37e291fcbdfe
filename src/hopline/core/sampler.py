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
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph
from hopline.core.laws import law_of
from hopline.util.config import check_fanouts

NodeIds = Tensor | np.ndarray | Sequence[int]
"""Node ids as users give them: whole numbers, or a bool mask over the nodes."""
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

    The sample of a node depends on the key, the pair of layers and the node alone, or with law "labor" on the key, the
    layer and the node (`laws`). `ops.layer_key` says why layers come in pairs. A node with a self-loop draws anew in
    each layer (`ops.draw_ids`). The sample at a smaller fan-out is part of the sample at a larger one.

    Args:
        graph: The graph to sample from.
        fanouts: In-edges to draw per node, one number per layer, that of the seeds first; -1 takes all.
        replace: Whether to draw neighbours with replacement.
        edge_ids: Whether parts have `edge_ids`.
        one_list: Whether a node draws the same neighbours in all layers. For models on the union of the blocks.
        repeats: Whether a seed may come several times, as in PyG. Each time it is a node with the same in-edges.
        law: "uniform" or "labor", as in `hl.Sampled`.
        weight: Name of the edge array by which neighbours are drawn, as in `hl.Sampled`.

    Raises:
        ValueError: A fan-out or a law is not allowed. From `sample`: seeds are not distinct nodes, [n] int64.

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
        repeats: bool = False,
        law: str = "uniform",
        weight: str | None = None,
    ) -> None:
        check_fanouts(fanouts, replace)
        self.graph = graph
        self.fanouts = tuple(fanouts)
        self.replace = replace
        self.edge_ids = edge_ids
        self.one_list = one_list
        self.repeats = repeats
        self.law = law_of(graph, law, weight, replace)
        self._local = threading.local()

    def sample(self, seeds: Tensor, key: int | Tensor, draw_key: int | Tensor | None = None) -> tuple[Block, ...]:
        """One block per layer, in the order of computation: the destinations of the last one are the seeds.

        seeds: [n] int64, distinct unless `repeats` is set. draw_key: the key of the draws, if that is not `key`. The
        blocks carry `key`, for dropout.
        """
        seeds = _on_graph_device(self.graph, seeds)
        check_ids(seeds, self.graph.num_nodes)
        id_map = self._id_map(seeds.device)
        hops: list[Block] = []
        try:
            seed_idx = self._add_seeds(id_map, seeds)
            num_distinct = id_map.size
            dst_ids = id_map.ids()
            draws = key if draw_key is None else draw_key
            keys = hop_keys(draws, len(self.fanouts), self.one_list, self.law.key_per_layer)
            for fanout, hop_key in zip(self.fanouts, keys, strict=True):
                hops.append(self._hop(id_map, dst_ids, fanout, key, hop_key))
                dst_ids = hops[-1].src_ids
        finally:
            id_map.clear()
        if num_distinct < seeds.numel():
            hops = [_repeat_seeds(block, seed_idx, num_distinct) for block in hops]
        return tuple(reversed(hops))

    def sample_subgraph(self, seeds: Tensor, key: int | Tensor) -> Subgraph:
        """One graph for all layers, as PyG's NeighborLoader samples it.

        The in-edges of a node are drawn once, at the hop after the one that reached it.
        """
        seeds = _on_graph_device(self.graph, seeds)
        check_ids(seeds, self.graph.num_nodes)
        id_map = self._id_map(seeds.device)
        # One entry per hop.
        src_idx: list[Tensor] = []
        dst_idx: list[Tensor] = []
        edge_ids: list[Tensor] = []

        node_counts = [0]  # then the nodes in the id map: one entry before each hop, and one after the last
        try:
            seed_idx = self._add_seeds(id_map, seeds)
            for fanout in self.fanouts:
                # The nodes that the hop before has reached: local ids start .. stop - 1.
                start = node_counts[-1]
                stop = id_map.size
                node_counts.append(stop)
                new_ids = id_map.ids()[start:]
                drawn, _ = self.law.draw(new_ids, fanout, key)
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
        subgraph = Subgraph(
            node_ids=node_ids,
            edge_index=torch.stack([torch.cat(src_idx).long(), torch.cat(dst_idx)]),
            edge_ids=torch.cat(edge_ids),
            num_nodes=[after - before for before, after in itertools.pairwise(node_counts)],
            num_edges=[ids.numel() for ids in edge_ids],
        )
        if subgraph.num_nodes[0] < seeds.numel():
            return _repeat_seeds_of_subgraph(subgraph, seed_idx)
        return subgraph

    def _add_seeds(self, id_map: ops.AnyIdMap, seeds: Tensor) -> Tensor:
        """Add seeds to an empty id map. Returns [n] int32: the local id of each.

        Raises:
            ValueError: They are not distinct, and `repeats` is not set.
        """
        seed_idx = id_map.add(seeds)
        # A repeated seed gets the local id that it has already, so the map stays smaller.
        if id_map.size != seeds.numel() and not self.repeats:
            raise ValueError("the seeds of a batch must be distinct: pass each node id once")
        return seed_idx

    def _hop(self, id_map: ops.AnyIdMap, dst_ids: Tensor, fanout: int, key: int | Tensor, hop_key: HopKey) -> Block:
        """The block of one hop. Adds the drawn neighbours to the id map.

        dst_ids: all nodes of the id map, in its order.
        key: the key that the block carries, for dropout.
        """
        graph = self.graph
        draw_ids = None
        # In this order: where all edges are taken, nobody need know the loops, which costs a pass over the graph.
        if hop_key.loops_apart and fanout >= 0 and graph.has_loop is not None:
            draw_ids = ops.draw_ids(dst_ids, ops.gather_rows(graph.has_loop.to(dst_ids.device), dst_ids))
        drawn, of_law = self.law.draw(dst_ids, fanout, hop_key.key, draw_ids)
        src_idx = id_map.add(drawn.ids)
        edge = {name: ops.gather_rows(array, drawn.edge_ids) for name, array in graph.edge.items()}
        part = Part(drawn.indptr, src_idx, edge | of_law, drawn.edge_ids if self.edge_ids else None)
        return Block(id_map.ids(), dst_ids.numel(), (part,), graph, key, in_graph_order=fanout < 0)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling and copying, without the id maps of threads."""
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())

    def _id_map(self, device: torch.device) -> ops.AnyIdMap:
        """The empty id map of this thread and device. Prefetching threads share no state, so they need no lock."""
        maps: dict[torch.device, ops.AnyIdMap] = self._local.__dict__.setdefault("id_maps", {})
        if device not in maps:
            maps[device] = ops.new_id_map(self.graph.num_nodes, device)
        return maps[device]


class HopKey(NamedTuple):
    """What decides the neighbours that a hop draws."""

    key: int | Tensor
    """The key of the draws."""
    loops_apart: bool
    """Whether nodes with a self-loop draw by `ops.draw_ids`: in the second layer of a pair."""


def hop_keys(key: int | Tensor, num_hops: int, one_list: bool, key_per_layer: bool) -> list[HopKey]:
    """The keys of each hop, that of the seeds first. one_list: as in `NeighborSampler`. key_per_layer: as in `Law`."""
    if one_list:
        return [HopKey(key, loops_apart=False)] * num_hops
    if key_per_layer:  # 2 * layer, since the numbers of layers are counted in pairs
        return [HopKey(ops.layer_key(key, 2 * layer), loops_apart=False) for layer in reversed(range(num_hops))]
    return [HopKey(ops.layer_key(key, layer), loops_apart=layer % 2 == 1) for layer in reversed(range(num_hops))]


def _repeat_seeds(block: Block, seed_idx: Tensor, num_distinct: int) -> Block:
    """The block of distinct seeds, with each seed as often as it was given.

    Rows of the distinct seeds, which are the first, are replaced by one row for every seed given. Each has the
    in-edges of its node. An edge that starts at a repeated seed starts at one of its rows.

    seed_idx: [num_seeds] the local id in `block` of every seed given.
    """
    part = block.part
    rows = torch.cat([seed_idx.long(), torch.arange(num_distinct, block.num_dst, device=seed_idx.device)])
    num_edges = part.indptr.diff()[rows]
    indptr = torch.cat([num_edges.new_zeros(1), num_edges.cumsum(0)])
    # For every new edge its position among the old ones.
    edges = torch.repeat_interleave(part.indptr[rows] - indptr[:-1], num_edges)
    edges += torch.arange(edges.numel(), device=edges.device)
    new_part = Part(
        indptr,
        _new_local_ids(block.num_src, seed_idx, num_distinct)[part.src_idx[edges].long()].to(part.src_idx.dtype),
        {name: array[edges] for name, array in part.edge.items()},
        None if part.edge_ids is None else part.edge_ids[edges],
    )
    src_ids = torch.cat([block.src_ids[seed_idx.long()], block.src_ids[num_distinct:]])
    return replace(block, src_ids=src_ids, num_dst=rows.numel(), parts=(new_part,))


def _repeat_seeds_of_subgraph(subgraph: Subgraph, seed_idx: Tensor) -> Subgraph:
    """The subgraph of distinct seeds, with each seed as often as it was given. The seeds' edges are its first hop."""
    num_distinct = subgraph.num_nodes[0]
    num_first = subgraph.num_edges[0]
    dst = subgraph.edge_index[1, :num_first].contiguous()
    indptr = torch.cat([dst.new_zeros(1), torch.bincount(dst, minlength=num_distinct).cumsum(0)])
    first_hop = Part(indptr, subgraph.edge_index[0, :num_first], edge_ids=subgraph.edge_ids[:num_first])
    block = _repeat_seeds(Block(subgraph.node_ids, num_distinct, (first_hop,)), seed_idx, num_distinct)
    later = _new_local_ids(subgraph.node_ids.numel(), seed_idx, num_distinct)[subgraph.edge_index[:, num_first:]]
    assert block.part.edge_ids is not None
    return Subgraph(
        node_ids=block.src_ids,
        edge_index=torch.cat([block.edge_index, later], 1),
        edge_ids=torch.cat([block.part.edge_ids, subgraph.edge_ids[num_first:]]),
        num_nodes=[seed_idx.numel(), *subgraph.num_nodes[1:]],
        num_edges=[block.num_edges, *subgraph.num_edges[1:]],
    )


def _new_local_ids(num_nodes: int, seed_idx: Tensor, num_distinct: int) -> Tensor:
    """[num_nodes] int64: the local ids of the nodes once every seed given has a row."""
    new_ids = torch.arange(num_nodes, device=seed_idx.device) + (seed_idx.numel() - num_distinct)
    rows = torch.arange(seed_idx.numel(), device=seed_idx.device)
    # The first row of a repeated seed. A plain assignment may choose another in every run.
    return new_ids.scatter_reduce(0, seed_idx.long(), rows, "amin", include_self=False)


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


def as_node_ids(nodes: NodeIds, num_nodes: int) -> Tensor:
    """[n] int64: node ids that a user gives as a tensor, an array or a list, in their order, or as a bool mask.

    Raises ValueError if an entry is no node.
    """
    try:
        ids = nodes if isinstance(nodes, Tensor) else torch.as_tensor(np.asarray(nodes))
    except (TypeError, ValueError) as error:  # texts, lists of different lengths, objects
        raise ValueError(
            f"node ids must be whole numbers in a list, an array or a tensor, not {nodes!r:.60}: write [0, 1, 2]"
        ) from error
    if ids.dtype == torch.bool:
        if ids.shape != (num_nodes,):
            raise ValueError(f"a mask must be [{num_nodes}], one entry per node, not {list(ids.shape)}")
        return ids.nonzero().view(-1)
    # A mask of another library, such as one of zeros and ones from NumPy: as ids it would be nodes 0 and 1.
    has_length_of_mask = ids.shape == (num_nodes,) or ids.dtype == torch.uint8
    if has_length_of_mask and ids.numel() > 2 and bool(ids.max() <= 1):
        raise ValueError("these zeros and ones look like a mask, and would be read as nodes 0 and 1: give mask.bool()")
    is_whole = not (ids.dtype.is_floating_point or ids.dtype.is_complex)
    if is_whole or ids.numel() == 0:  # an empty list has become floats
        ids = ids.long()
    check_ids(ids, num_nodes)
    return ids


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
