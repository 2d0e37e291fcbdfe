"""Layers cut to what some nodes need: the same outputs and gradients there, with fewer edges and fewer bytes."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from hopline.core.partition import make_partition
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.shards.convs.runner import ShardConvs
from hopline.shards.convs.trimming import trimmed_convs
from hopline.shards.layout import virtual_layout
from tests.shards.convs.trimming_ranks import NAMES, SEEDS, case, compare, on_ranks
from tests.support.grids import parametrize_pairwise
from tests.support.helpers import randn


@parametrize_pairwise(name=[*NAMES], mode=["sequential", "stored", "one_shot"], num_shards=[1, 3])
def test_virtual_shards_equal_plain_pyg(name: str, mode: str, num_shards: int) -> None:
    _, graph, _ = case(name)
    layout = virtual_layout(graph, make_partition(graph, num_shards, "random", seed=1))
    worst, traffic = compare(name, layout, World.alone(), mode=mode, chunk_bytes=4000)
    assert worst <= 1
    assert sum(traffic["True"]) < 0.8 * sum(traffic["False"])


def test_ranks_equal_plain_pyg() -> None:
    results = run(on_ranks, LaunchSettings(devices=2, timeout_s=60))
    assert {name: worst for name, (worst, _) in results.items() if not worst <= 1} == {}
    assert {name: share for name, (_, share) in results.items() if not share < 0.8} == {}


def test_layers_have_the_edges_that_lead_to_the_seeds() -> None:
    _, graph, _ = case("gcn")
    layout = virtual_layout(graph, make_partition(graph, 3, "random"))
    runners = trimmed_convs(ShardConvs.of(layout), torch.isin(layout.own_ids, SEEDS), 3)
    needed = set(SEEDS.tolist())
    src, dst = graph.edge_index()
    for convs in reversed(runners):
        mask = torch.isin(dst, torch.tensor(sorted(needed)))
        assert torch.equal(convs.layout.edge_ids.sort().values, mask.nonzero().view(-1))
        needed |= set(src[mask].tolist())


def test_trimmed_layers_run_where_no_node_is_needed() -> None:
    _, graph, x = case("gat")
    layout = virtual_layout(graph, make_partition(graph, 3, "random"))
    (convs,) = trimmed_convs(ShardConvs.of(layout), torch.zeros(60, dtype=torch.bool), 1)
    assert convs.block().num_edges == 0
    assert convs.run(pyg.GATConv(4, 3).double(), x).shape == (60, 3)


def test_a_conv_of_several_hops_is_refused_by_name() -> None:
    _, graph, _ = case("gcn")
    layout = virtual_layout(graph, make_partition(graph, 2, "random"))
    (convs,) = trimmed_convs(ShardConvs.of(layout), torch.isin(layout.own_ids, SEEDS), 1)
    with pytest.raises(ValueError, match=r"TAGConv .*trim=false"):
        convs.run(pyg.TAGConv(4, 3, K=2).double(), randn(60, 4))
    assert convs.run(pyg.TAGConv(4, 3, K=1).double(), randn(60, 4)).shape == (60, 3)


def test_runners_go_to_a_device_with_one_whole_graph() -> None:
    _, graph, _ = case("gcn")
    layout = virtual_layout(graph, make_partition(graph, 2, "random"))
    first, second = trimmed_convs(ShardConvs.of(layout), torch.isin(layout.own_ids, SEEDS), 2)
    moved = first.to(torch.device("meta"))
    assert moved.transport.layout is moved.layout
    assert moved.layout.degrees.device.type == "meta"
    assert first.whole is second.whole


def test_a_conv_with_a_mean_over_all_nodes_is_refused_by_name() -> None:
    class Centred(pyg.SAGEConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x - x.mean(0), edge_index)

    _, graph, _ = case("gcn")
    layout = virtual_layout(graph, make_partition(graph, 2, "random"))
    (convs,) = trimmed_convs(ShardConvs.of(layout), torch.isin(layout.own_ids, SEEDS), 1)
    with pytest.raises(ValueError, match=r"Centred .*mean over all nodes.*trim=false"):
        convs.run(Centred(4, 3).double(), randn(layout.num_own, 4))
