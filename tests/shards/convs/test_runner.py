"""Convs over virtual shards and over ranks equal plain PyG; those that cannot are refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.core.batch import Batch
from hopline.core.graph import Graph
from hopline.core.partition import make_partition
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.nn.conv_adapter import convolve
from hopline.shards.convs.runner import ShardConvs, find_rule, run_conv
from hopline.shards.layout import contiguous_layout, virtual_layout
from tests.shards.cases import SUITE, TIES, case, error, model, on_ranks, plain, sharded
from tests.support.helpers import batch_of, mlp, pna, randn, random_graph


@pytest.mark.parametrize("name", SUITE)
def test_virtual_shards_equal_plain_pyg(name: str) -> None:
    for discrete in (False, True) if name in TIES else (False,):
        graph, x = case(name, discrete)
        conv = model(name, discrete)
        expected = plain(conv, graph, x)
        many = virtual_layout(graph, make_partition(graph, 8, "metis" if discrete else "random", seed=1))
        few = virtual_layout(graph, make_partition(graph, 3, "metis", seed=1))
        for mode, layout in (("sequential", many), ("stored", many), ("one_shot", few)):
            ours = sharded(conv, graph, x, layout, None, mode=mode)
            assert error(ours, expected, layout) <= 1, (mode, layout is many, discrete)


def test_one_rank_equals_plain_pyg() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        results = on_ranks(World.alone(), list(SUITE))
    finally:
        dist.destroy_process_group()
    assert {name: worst for name, worst in results["errors"].items() if not worst <= 1} == {}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_ranks_equal_plain_pyg(size: int) -> None:
    results = run(on_ranks, LaunchSettings(devices=size, timeout_s=60), list(SUITE))
    assert {name: worst for name, worst in results["errors"].items() if not worst <= 1} == {}
    traffic = results["traffic"]
    bytes_of_rows = traffic["halo"]["rows"] * 4 * 8  # four columns of float64
    assert traffic["sage-mean sequential"] == {"forward": bytes_of_rows, "refetch": 0, "gradient": bytes_of_rows}
    bytes_of_heads = (
        traffic["halo"]["rows"] * 2 * (4 + 1) * 8
    )  # two heads: projected rows, and their part of the logits
    assert traffic["gat sequential"] == {
        "forward": bytes_of_heads,
        "refetch": bytes_of_heads,
        "gradient": bytes_of_heads,
    }
    assert (
        traffic["gat stored"]
        == traffic["gat one_shot"]
        == {"forward": bytes_of_heads, "refetch": 0, "gradient": bytes_of_heads}
    )


def small(**options: Any) -> tuple[ShardConvs, Graph]:
    graph = random_graph(40, 220, loops=True)
    layout = contiguous_layout(graph, torch.tensor([0, 11, 30, 40]))
    return ShardConvs.of(layout, **{"chunk_bytes": 4000, **options}), graph


@pytest.mark.parametrize("edges", [0, 1, 2500])
def test_random_multigraphs_with_metis_parts_equal_plain_pyg(edges: int) -> None:
    src, dst = torch.randint(0, 1000, (2, edges), generator=torch.Generator().manual_seed(0))
    order = torch.argsort(dst, stable=True)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(dst, minlength=1000).cumsum(0)])
    graph = Graph(indptr, src[order])
    x = randn(1000, 10)
    for conv in (pyg.GraphConv(10, 10).double(), pyg.GATConv(10, 10).double(), pyg.SAGEConv(10, 4, "max").double()):
        for num_shards in (1, 2, 4):
            layout = virtual_layout(graph, make_partition(graph, num_shards, "metis"))
            ours = run_conv(conv, x[layout.own_ids], ShardConvs.of(layout))
            torch.testing.assert_close(ours, conv(x, graph.edge_index())[layout.own_ids], rtol=1e-10, atol=1e-12)


def test_the_rule_of_a_conv_is_probed_and_not_listed() -> None:
    class Renamed(pyg.GCNConv):
        pass

    convs, _ = small()
    rules = {
        name: find_rule(conv, 4, convs, None)
        for name, conv in {
            "sage": pyg.SAGEConv(4, 3),
            "gat": pyg.GATConv(4, 3),
            "gat-no-loops": pyg.GATConv(4, 3, add_self_loops=False),
            "gcn": Renamed(4, 3),
            "gcn-no-norm": pyg.GCNConv(4, 3, normalize=False),
            "tag": pyg.TAGConv(4, 3),
        }.items()
    }
    assert rules == {
        "sage": "plain",
        "gat": "loops",
        "gat-no-loops": "plain",
        "gcn": "gcn",
        "gcn-no-norm": "plain",
        "tag": "gcn",
    }


REFUSED = {
    "ChebConv": (lambda: pyg.ChebConv(4, 3, 2), "edge_index itself"),
    "SuperGATConv": (lambda: pyg.SuperGATConv(4, 3), "edge_index itself"),
    "ClusterGCNConv": (lambda: pyg.ClusterGCNConv(4, 3), "edge_index itself"),
    "SAGEConv": (lambda: pyg.SAGEConv(4, 3, aggr="lstm"), "LSTMAggregation needs all edges"),
    "EdgeConv": (lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))), "BatchNorm1d"),
    "GraphConv": (lambda: pyg.GraphConv(4, 3, flow="target_to_source"), "default flow"),
    "GINConv": (lambda: pyg.GINConv(mlp(4, 4, 3), aggr="mul"), "'mul'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_conv_that_cannot_run_is_refused_by_name_with_those_that_can(name: str) -> None:
    make, reason = REFUSED[name]
    convs, _ = small()
    with pytest.raises(ValueError, match=f"^{name} .*aggregation=sequential: .*{reason}.*PNAConv"):
        run_conv(make(), torch.randn(40, 4), convs)


def test_no_conv_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear cannot .*conv\(x, edge_index\)"):
        run_conv(nn.Linear(4, 3), torch.randn(40, 4), small()[0])


@pytest.mark.parametrize("aggr", ["lstm", "median", "mul"])
def test_any_aggregation_runs_in_one_shot(aggr: str) -> None:
    convs, graph = small(mode="one_shot")
    conv = pyg.SAGEConv(4, 3, aggr=aggr).double()
    x = randn(40, 4)
    torch.testing.assert_close(run_conv(conv, x, convs), conv(x, graph.edge_index()), rtol=1e-10, atol=1e-12)


def test_a_batch_norm_in_messages_runs_in_evaluation() -> None:
    convs, graph = small()
    conv = pyg.EdgeConv(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))).double().eval()
    x = randn(40, 4)
    torch.testing.assert_close(run_conv(conv, x, convs), conv(x, graph.edge_index()), rtol=1e-10, atol=1e-12)


def test_a_batch_norm_after_the_aggregation_runs_in_training() -> None:
    convs, graph = small()
    norm = nn.BatchNorm1d(5)
    conv = pyg.GINConv(nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3))).double()
    other = copy.deepcopy(conv)
    x = randn(40, 4)
    ours = run_conv(conv, x, convs)
    torch.testing.assert_close(ours, other(x, graph.edge_index()), rtol=1e-10, atol=1e-12)
    assert torch.allclose(norm.running_mean, other.state_dict()["nn.1.running_mean"])  # type: ignore[arg-type]


def test_the_conv_and_the_random_numbers_are_left_as_they_were() -> None:
    convs, _ = small()
    for conv in (pyg.TransformerConv(4, 3).double(), pyg.GCNConv(4, 3).double(), pna(4, 3).double()):
        names = set(conv.__dict__)
        state = torch.get_rng_state()
        weights = {k: v.clone() for k, v in conv.state_dict().items()}
        run_conv(conv, randn(40, 4).requires_grad_(), convs).sum().backward()
        assert set(conv.__dict__) == names
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(weights[k], v) for k, v in conv.state_dict().items())
        copy.deepcopy(conv)  # no tensor of the computation is kept on it


@pytest.mark.parametrize("make", [pyg.GATConv, pyg.GCNConv])
@pytest.mark.parametrize("mode", ["sequential", "one_shot"])
def test_training_after_inference_has_the_gradients_of_plain_pyg(make: Any, mode: str) -> None:
    convs, graph = small(mode=mode)
    conv = make(4, 3).double()
    x = randn(40, 4)
    with torch.inference_mode():
        torch.testing.assert_close(run_conv(conv, x, convs), conv(x, graph.edge_index()), rtol=1e-10, atol=1e-12)
    h = x.clone().requires_grad_()
    run_conv(conv, h, convs).sum().backward()
    torch.testing.assert_close(h.grad, torch.autograd.grad(conv(h, graph.edge_index()).sum(), h)[0])


def test_a_weights_gradient_is_there_after_an_evaluation_without() -> None:
    weight = torch.rand(226, dtype=torch.float64, requires_grad=True)
    convs = small(edge_rows={"weight": weight})[0]
    conv = pyg.GCNConv(4, 3).double()
    with torch.no_grad():
        run_conv(conv, randn(40, 4), convs)
    run_conv(conv, randn(40, 4), convs).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_weights_that_are_no_numbers_any_more_are_not_the_convs_fault() -> None:
    conv = pyg.GATConv(4, 3)
    with torch.no_grad():
        conv.att_src.fill_(float("nan"))
    assert run_conv(conv, torch.randn(40, 4), small()[0]).isnan().any()


def test_degrees_are_exchanged_once_where_they_have_no_gradient() -> None:
    convs, _ = small()
    conv = pyg.GCNConv(4, 4).double()
    for _ in range(3):
        run_conv(conv, randn(40, 4).requires_grad_(), convs).sum().backward()
    assert convs.transport.traffic["degrees"] == 40 * 8
    assert convs.transport.traffic["refetch"] == 0


def test_a_gnn_takes_the_block_like_any_other() -> None:
    graph = random_graph(40, 220, weight=True)
    x = randn(40, 4)
    torch.manual_seed(1)
    convs = [pyg.SAGEConv(4, 6, aggr="max"), pyg.GCNConv(6, 6), pyg.GATConv(6, 3)]
    gnn = hl.nn.GNN(convs, dropout=0.4, norm="layer").double()
    whole = batch_of(graph, x, (-1, -1, -1), key=5)
    expected = _gradients(gnn, whole)
    layout = virtual_layout(graph, make_partition(graph, 3, "random"))
    block = ShardConvs.of(layout, chunk_bytes=4000).block(key=5)
    ours = _gradients(gnn, Batch(layout.own_ids, (block,) * 3, x[layout.own_ids], None, key=5))
    torch.testing.assert_close(ours[0], expected[0][layout.own_ids], rtol=1e-10, atol=1e-12)
    for own_gradient, plain_gradient in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(own_gradient, plain_gradient, rtol=1e-9, atol=1e-11)


def _gradients(gnn: nn.Module, batch: Batch) -> list[Tensor]:
    gnn.zero_grad()
    out = gnn(batch)
    (out * randn(40, 3, seed=3)[batch.seeds]).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in gnn.parameters() if p.grad is not None)]


def test_a_conv_that_takes_initial_rows_equals_plain_pyg() -> None:
    convs, graph = small()
    conv = pyg.GCN2Conv(4, 0.2).double()
    x = randn(40, 4)
    x0 = randn(40, 4, seed=1)
    ours = run_conv(conv, x, convs, x0)
    torch.testing.assert_close(ours, conv(x, x0, graph.edge_index()), rtol=1e-10, atol=1e-12)


def test_a_conv_without_its_input_width_gets_it_from_the_rows() -> None:
    convs, graph = small()
    conv = pyg.SAGEConv(-1, 3)
    x = randn(40, 4, dtype=torch.float32)
    torch.testing.assert_close(run_conv(conv, x, convs), conv(x, graph.edge_index()))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="sequential, stored, one_shot"):
        small(mode="twice")
    with pytest.raises(ValueError, match="depth=-1"):
        small(depth=-1)


def test_a_block_goes_to_a_device_with_its_layout() -> None:
    convs, _ = small(edge_rows={"weight": torch.ones(226)})
    block = convs.block(key=3)
    meta = torch.device("meta")
    assert block.to(torch.device("cpu")) is block
    moved = block.to(meta)
    assert isinstance(moved.convs, ShardConvs)
    assert moved.convs.edge_rows["weight"].device == moved.convs.layout.degrees.device == moved.src_ids.device == meta
    assert moved.parts is moved.convs.layout.parts
    assert moved.key == 3


def test_blocks_of_other_draws_share_what_was_found_out_about_the_edges() -> None:
    convs, _ = small()
    first = convs.block(key=1)
    second = replace(convs.block(key=1), key=2)
    convolve(pyg.GCNConv(4, 4).double(), randn(40, 4), first)
    convolve(pyg.GCNConv(4, 4).double(), randn(40, 4), second)
    assert convs.transport.traffic["degrees"] == 40 * 8
