"""examples/own_sampler: a sampler that knows nothing of ranks, run in every way in which it can be run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.util.errors import RankError
from tests.support.own_sampler_ranks import FOLDER, METHODS, example, train
from tests.support.runs import command, records, small
from tests.support.warm import run_python

TWO = LaunchSettings(devices=2, timeout_s=30)
EDGES = torch.tensor([[0, 1, 2, 3, 3, 3, 5, 0, 4, 4, 1], [1, 1, 1, 1, 1, 2, 2, 0, 5, 5, 5]])
"""A loop, double edges, and node 4, which no edge leads to."""


def ugly() -> hl.Dataset:
    generator = torch.Generator().manual_seed(1)
    return hl.from_edges(
        EDGES, x=torch.randn(6, 5, generator=generator, dtype=torch.float64), y=torch.tensor([0, 1, 2, 0, 1, 2])
    )


def edges_at(block: hl.extend.Block, node: int) -> list[int]:
    """The sources of a node's edges in a block, ascending."""
    sources, targets = block.edge_index
    return sorted(block.src_ids[sources[block.dst_ids[targets] == node]].tolist())


def test_the_example_is_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")) < 120


@pytest.mark.parametrize("name", ["share", "hubs"])
def test_a_node_takes_as_many_of_its_edges_as_its_fanout_whoever_else_is_in_the_batch(name: str) -> None:
    graph = ugly().graph
    every = torch.tensor([5, 0, 1, 4, 2, 3])
    for key in range(20):
        method = METHODS[name](fanouts=(2, 3))
        outer, inner = method.sample(graph, every, key)
        assert inner.dst_ids.tolist() == every.tolist()
        assert outer.dst_ids.tolist() == inner.src_ids.tolist()
        for node in range(6):
            (alone,) = METHODS[name](fanouts=(2,)).sample(graph, torch.tensor([node]), key)
            in_edges = EDGES[0, EDGES[1] == node].tolist()
            sources = edges_at(inner, node)
            assert len(sources) == min(2, len(in_edges))
            assert all(sources.count(source) <= in_edges.count(source) for source in sources)
            assert edges_at(alone, node) == sources


def test_a_fanout_for_all_edges_is_plain_pyg() -> None:
    data = ugly()
    torch.manual_seed(0)
    convs = [SAGEConv(5, 4).double(), SAGEConv(4, 3).double()]
    model = hl.nn.GNN(convs)
    seeds = torch.tensor([5, 1, 4, 2])
    blocks = METHODS["share"](fanouts=(9, 9)).sample(data.graph, seeds, 0)
    batch = hl.Batch(seeds, blocks, hl.extend.Rows(data.x, blocks[0].src_ids), data.labels[seeds])
    x = data.x[torch.arange(6)]
    expected = convs[1](convs[0](x, EDGES).relu(), EDGES)[seeds]
    torch.testing.assert_close(model(batch), expected, rtol=0, atol=1e-12)


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert ours["weights"] == pytest.approx(expected["weights"], abs=1e-12)
    assert ours["metrics"] == expected["metrics"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_are_one_process(name: str, accumulate: int) -> None:
    ours = run(train, TWO, name, {"accumulate": accumulate})
    assert_same(ours, train(World.alone(), name, {"accumulate": accumulate}))


def test_an_option_of_the_subclass_changes_what_is_drawn() -> None:
    graph = small().graph
    seeds = torch.arange(100)
    mean_degrees: list[float] = []
    for power in (0.0, 2.0):
        (block,) = example.HubsFirst(fanouts=(3,), power=power).sample(graph, seeds, 0)
        sources = block.src_ids[block.edge_index[0]]
        mean_degrees.append(float(graph.in_degrees(sources).double().mean()))
    assert mean_degrees[1] > 1.1 * mean_degrees[0]
    plain = example.SharedDraws(fanouts=(3,)).sample(graph, seeds, 0)[0]
    assert torch.equal(example.HubsFirst(fanouts=(3,), power=0.0).sample(graph, seeds, 0)[0].src_ids, plain.src_ids)


def test_a_run_whose_rank_was_killed_is_resumed(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint_s": 0.0, "out": str(tmp_path / "run")}
    with pytest.raises(RankError, match="rank 1"):
        run(train, TWO, "hubs", {**changes, "kill": [1, 6]})
    assert_same(run(train, TWO, "hubs", changes), train(World.alone(), "hubs", {}))


@pytest.fixture
def graph(tmp_path: Path) -> str:
    small(num_nodes=3000, num_edges=30_000, num_train=1500, num_valid=500).save(tmp_path / "graph")
    return str(tmp_path / "graph")


def test_the_trainer_and_its_subclass_train_alone_and_with_two_devices(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = importlib.import_module("train")
    one = run(program.train, LaunchSettings(), graph, 3)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Trainer, 1 ranks",
        "SmoothTrainer, 1 ranks",
    ]
    assert all(losses[-1] < losses[0] for losses in one.values())
    two = run(program.train, TWO, graph, 3)
    for name in ("Trainer", "SmoothTrainer"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)


@pytest.mark.process
def test_torchrun_and_devices_print_the_same(graph: str) -> None:
    printed = []
    for before, arguments in (([], ["2"]), (["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], ["1"])):
        launcher = ["-m", *before] if before else []
        process = run_python("-W", "ignore", *launcher, str(FOLDER / "train.py"), *arguments, graph)
        assert process.returncode == 0, process.stderr[-3000:]
        printed.append(re.findall(r"\w+, 2 ranks: loss [\d.]+, test [\d.]+", process.stdout))
    assert len(printed[0]) == 2
    assert printed[0] == printed[1]


def test_the_command_trains_by_the_example(graph: str, tmp_path: Path) -> None:
    method = f"method={FOLDER}/sampler.py:HubsFirst"
    text = command("train", "--keys", method).out
    assert (
        "  method.power=0.5\n      An option more: how much sooner nodes of high degree are drawn. (a number)" in text
    )
    typed = [method, "method.power=0.25", "method.fanouts=5,5", "model.layers=2", "model.hidden=16", "show=false"]
    assert command("train", graph, *typed, "epochs=2", f"out={tmp_path / 'run'}").status == 0
    losses = [record["loss"] for record in records(tmp_path / "run", "epoch")]
    assert losses[1] < losses[0]
