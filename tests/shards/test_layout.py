"""The layout of shards: every edge in the shard of its destination, and halos equal to what is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.core.partition import Partition, make_partition
from hopline.shards.layout import ShardLayout, shard_layouts, virtual_layout
from tests.support.helpers import random_graph

SHARDS = (1, 2, 3, 5)


def graph_and_parts(num_shards: int, how: str = "random") -> tuple[Graph, Partition]:
    graph = random_graph(weight=True, loops=True)
    return graph, make_partition(graph, num_shards, how, seed=1)


def edges_of(layout: ShardLayout, partition: Partition) -> Tensor:
    """[2, E] the graph's node ids at both ends of a layout's edges, part after part."""
    edges = []
    for k, part in enumerate(layout.parts):
        src, dst = part.edge_index
        positions = partition.ptr[layout.sender(k)] + layout.halos[k][src]
        edges.append(torch.stack([partition.order[positions], layout.own_ids[dst]]))
    return torch.cat(edges, dim=1)


@pytest.mark.parametrize("num_shards", SHARDS)
@pytest.mark.parametrize("how", ["random", "metis"])
def test_every_edge_is_in_the_shard_of_its_destination(num_shards: int, how: str) -> None:
    graph, partition = graph_and_parts(num_shards, how)
    edge_ids = []
    for rank, layout in enumerate(shard_layouts(graph, partition)):
        assert layout.rank == rank
        assert torch.equal(partition.part_of[layout.own_ids], torch.full((layout.num_own,), rank, dtype=torch.int32))
        assert torch.equal(edges_of(layout, partition), graph.edge_index()[:, layout.edge_ids])
        weight = torch.cat([part.edge["weight"] for part in layout.parts])
        assert torch.equal(weight, graph.edge["weight"][layout.edge_ids])
        counted = torch.stack([part.indptr.diff() for part in layout.parts]).sum(0)
        assert torch.equal(layout.degrees, counted)
        assert torch.equal(layout.degrees, graph.in_degrees(layout.own_ids))
        edge_ids.append(layout.edge_ids)
    assert torch.equal(torch.cat(edge_ids).sort().values, torch.arange(graph.num_edges))


@pytest.mark.parametrize("num_shards", SHARDS)
def test_a_halo_is_what_the_sender_sends(num_shards: int) -> None:
    layouts = shard_layouts(*graph_and_parts(num_shards))
    for layout in layouts:
        for k in range(num_shards):
            other = layouts[layout.sender(k)]
            assert other.receiver(k) == layout.rank
            assert torch.equal(other.sends[k], layout.halos[k])
            used = torch.unique(layout.parts[k].src_idx)
            assert k == 0 or used.numel() == layout.halos[k].numel()
        assert torch.equal(layout.halos[0], torch.arange(layout.num_own))


@pytest.mark.parametrize("num_shards", SHARDS)
def test_virtual_shards_are_parts_of_all_nodes(num_shards: int) -> None:
    graph, partition = graph_and_parts(num_shards)
    layout = virtual_layout(graph, partition)
    assert layout.num_own == graph.num_nodes
    assert torch.equal(edges_of(layout, partition), graph.edge_index()[:, layout.edge_ids])
    assert torch.equal(layout.edge_ids.sort().values, torch.arange(graph.num_edges))
    assert torch.equal(layout.degrees, graph.in_degrees()[layout.own_ids])
    stops = [layout.own_range(k)[1] for k in range(num_shards)]
    assert stops == partition.ptr[1:].tolist()


def test_own_rows_are_the_sources_of_the_first_part() -> None:
    layout = shard_layouts(*graph_and_parts(3))[1]
    assert [layout.own_range(k) for k in range(3)] == [(0, layout.num_own), (0, 0), (0, 0)]


def test_a_layout_that_does_not_fit_together_is_refused() -> None:
    layout = shard_layouts(*graph_and_parts(3))[0]
    with pytest.raises(ValueError, match="no shard 3 among 3"):
        replace(layout, rank=3)
    with pytest.raises(ValueError, match=r"halos .*3 shards"):
        replace(layout, halos=layout.halos[:2])
    with pytest.raises(ValueError, match="part 0 has"):
        replace(layout, own_ids=layout.own_ids[1:])


def test_a_layout_goes_to_a_device_with_its_edges() -> None:
    moved = shard_layouts(*graph_and_parts(2))[0].to("meta")
    assert moved.degrees.device.type == "meta"
    assert all(part.src_idx.device.type == "meta" for part in moved.parts)
