"""examples/own_sampler: random walks that know nothing of ranks, run in every way in which they can be run."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GraphConv

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.util.errors import RankError
from tests.support.own_sampler_ranks import FOLDER, example, train
from tests.support.runs import assert_refused, command, records, small
from tests.support.warm import run_python

TWO = LaunchSettings(devices=2, timeout_s=30)
EDGES = torch.tensor([[0, 1, 2, 3, 3, 3, 5, 0, 4, 4, 1], [1, 1, 1, 1, 1, 2, 2, 0, 5, 5, 5]])
"""A loop, double edges, and node 4, which no edge leads to."""


def ugly() -> hl.Dataset:
    generator = torch.Generator().manual_seed(1)
    return hl.from_edges(
        EDGES, x=torch.randn(6, 5, generator=generator, dtype=torch.float64), y=torch.tensor([0, 1, 2, 0, 1, 2])
    )


def weights_at(block: hl.extend.Block, node: int) -> dict[int, float]:
    """The weight of each source of a node's edges in a block."""
    sources, targets = block.edge_index
    at_node = block.dst_ids[targets] == node
    return dict(zip(block.src_ids[sources[at_node]].tolist(), block.edge["weight"][at_node].tolist(), strict=True))


def test_the_example_is_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")) < 120


def test_a_node_has_the_neighbours_that_its_walks_visit_most_whoever_else_is_in_the_batch() -> None:
    graph = ugly().graph
    every = torch.tensor([5, 0, 1, 4, 2, 3])
    every_node = set(range(6))
    reached = {0: set[int](), 1: every_node, 2: every_node, 3: set[int](), 4: set[int](), 5: every_node}
    for key in range(20):
        outer, inner = example.RandomWalks(neighbors=(2, 3)).bind(graph).sample(every, key)
        assert inner.dst_ids.tolist() == every.tolist()
        assert outer.dst_ids.tolist() == inner.src_ids.tolist()
        for node in range(6):
            (alone,) = example.RandomWalks(neighbors=(2,)).bind(graph).sample(torch.tensor([node]), key)
            weights = weights_at(inner, node)
            assert weights_at(alone, node) == weights
            assert set(weights) <= reached[node] - {node}
            assert len(weights) <= 2
            assert not weights or sum(weights.values()) == pytest.approx(1)


def test_visits_are_those_of_a_walk_with_restarts() -> None:
    """Many walks from node 1: the shares of visits are those of the powers of its walk."""
    graph = ugly().graph
    restart, length = 0.3, 3
    settings = example.RandomWalks(neighbors=(6,), walks=100_000, length=length, restart=restart)
    (block,) = settings.bind(graph).sample(torch.tensor([1]), 7)
    step = torch.zeros(6, 6, dtype=torch.float64)  # step[v, u]: the probability of going from v to u
    for source, target in EDGES.T.tolist():
        step[target, source] += 1 / int(graph.in_degrees(torch.tensor([target])))
    stuck = step.sum(1) == 0
    step[stuck, 1] = 1  # a walk without a way on is back at its node
    at = torch.zeros(6, dtype=torch.float64)
    at[1] = 1
    visits = torch.zeros(6, dtype=torch.float64)
    for _ in range(length):
        start = torch.zeros(6, dtype=torch.float64)
        start[1] = restart
        at = (start + (1 - restart) * at) @ step
        visits += at
    visits[1] = 0
    expected = visits / visits.sum()
    for node, weight in weights_at(block, 1).items():
        assert weight == pytest.approx(float(expected[node]), abs=0.01)


def test_a_layer_is_plain_pyg_on_the_edges_of_the_walks() -> None:
    data = ugly()
    torch.manual_seed(0)
    convs = [GraphConv(5, 4).double(), GraphConv(4, 3).double()]
    method = hl.Sampled(sampler=example.RandomWalks(neighbors=(9, 9)), shuffle=False, batch_size=6)
    (batch,) = method.loader(data, torch.tensor([5, 1, 4, 2]), seed=3)
    h = data.x[batch.input_ids]
    for conv, block in zip(convs, batch.blocks, strict=True):
        h = conv((h, h[: block.num_dst]), block.edge_index, block.edge["weight"].double())
        h = h.relu() if conv is convs[0] else h
    torch.testing.assert_close(hl.nn.GNN(convs)(batch), h, rtol=0, atol=1e-12)


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert ours["weights"] == pytest.approx(expected["weights"], abs=1e-12)
    assert ours["metrics"] == expected["metrics"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_are_one_process(accumulate: int) -> None:
    ours = run(train, TWO, "walks", {"accumulate": accumulate})
    assert_same(ours, train(World.alone(), "walks", {"accumulate": accumulate}))


def test_two_ranks_by_a_wrapped_sampler_are_two_ranks_by_hoplines_own_to_the_bit() -> None:
    assert run(train, TWO, "wrapped", {}) == run(train, TWO, "built in", {})


def test_a_run_whose_rank_was_killed_is_resumed(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint_s": 0.0, "out": str(tmp_path / "run")}
    with pytest.raises(RankError, match="rank 1"):
        run(train, TWO, "walks", {**changes, "kill": [1, 6]})
    assert_same(run(train, TWO, "walks", changes), train(World.alone(), "walks", {}))


def test_ranks_with_other_settings_of_a_sampler_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method\.sampler\.walks \(21 against 20\)"):
        run(train_with_as_many_walks_as_the_rank, TWO)


def train_with_as_many_walks_as_the_rank(world: World) -> None:
    data = small()
    model = hl.nn.GNN([GraphConv(8, 4), GraphConv(4, 4)])
    method = hl.Sampled(sampler=example.RandomWalks(walks=20 + world.rank))
    hl.Trainer(model, data, method, world=world, show=False)


@pytest.fixture
def graph(tmp_path: Path) -> str:
    small(num_nodes=3000, num_edges=30_000, num_train=1500, num_valid=500).save(tmp_path / "graph")
    return str(tmp_path / "graph")


def test_the_trainer_trains_alone_and_with_two_devices(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = importlib.import_module("train")
    one = run(program.train, LaunchSettings(), graph, 3)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "mean, 1 ranks",
        "by visits, 1 ranks",
    ]
    assert all(losses[-1] < losses[0] for losses in one.values())
    two = run(program.train, TWO, graph, 3)
    assert all(losses[-1] < losses[0] for losses in two.values())


@pytest.mark.process
def test_torchrun_and_devices_print_the_same(graph: str) -> None:
    printed = []
    for before, arguments in (([], ["2"]), (["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], ["1"])):
        launcher = ["-m", *before] if before else []
        process = run_python("-W", "ignore", *launcher, str(FOLDER / "train.py"), *arguments, graph)
        assert process.returncode == 0, process.stderr[-3000:]
        printed.append(re.findall(r"[\w ]+, 2 ranks: loss [\d.]+, test [\d.]+", process.stdout))
    assert len(printed[0]) == 2
    assert printed[0] == printed[1]


# ---- on the command line

SAMPLER = f"method.sampler={FOLDER}/sampler.py:RandomWalks"
SETTINGS = [
    *("model=sage", "model.layers=2", "model.hidden=16", "show=false", "epochs=2", "method.batch_size=500"),
    *(SAMPLER, "method.sampler.walks=10", "method.sampler.neighbors=5,5"),
]


def test_the_command_lists_the_settings_of_a_sampler() -> None:
    text = command("train", "--keys", SAMPLER).out
    assert "  method.sampler.walks=20\n      Walks from each node. (an integer)" in text
    assert (
        "package.module:Class or file.py:Class of your own or none" in command("train", "--keys", "method=sampled").out
    )


def test_the_command_trains_by_a_sampler_and_resumes(graph: str, tmp_path: Path) -> None:
    out = f"out={tmp_path / 'run'}"
    assert command("train", graph, *SETTINGS, out).status == 0
    losses = [record["loss"] for record in records(tmp_path / "run", "epoch")]
    assert losses[1] < losses[0]
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    sampler = stored["config"]["method"]["sampler"]
    assert sampler["kind"] == f"{FOLDER}/sampler.py:RandomWalks"
    assert (sampler["walks"], sampler["neighbors"]) == (10, [5, 5])
    assert {"method.sampler.kind", "method.sampler.walks"} <= set(stored["changed"])

    other = command("train", graph, *SETTINGS, "method.sampler.walks=11", "epochs=3", "resume=true", out)
    assert_refused(other, "walks")
    assert command("train", graph, *SETTINGS, "epochs=3", "resume=true", out).status == 0
    assert len(records(tmp_path / "run", "epoch")) == 3


@pytest.fixture
def fresh_modules() -> Iterator[None]:
    """The module of the example is not imported, as in a process of its own."""
    name = f"{FOLDER}/sampler.py"
    before = sys.modules.pop(name, None)
    yield
    sys.modules.pop(name, None)
    if before is not None:
        sys.modules[name] = before


def test_a_run_folder_imports_no_sampler_unless_it_is_trusted(graph: str, tmp_path: Path, fresh_modules: None) -> None:
    assert command("train", graph, *SETTINGS, f"out={tmp_path / 'run'}").status == 0
    sys.modules.pop(f"{FOLDER}/sampler.py")
    out = f"out={tmp_path / 'scores.npy'}"
    assert command("infer", tmp_path / "run", out, "write=scores").status == 0
    assert f"{FOLDER}/sampler.py" not in sys.modules
    refused = command("infer", tmp_path / "run", out, "write=scores", "inference=sampled", "nodes=test")
    assert_refused(refused, "sampler.py:RandomWalks", "trust=true")
    assert f"{FOLDER}/sampler.py" not in sys.modules
    trusted = command("infer", tmp_path / "run", out, "write=scores", "inference=sampled", "nodes=test", "trust=true")
    assert trusted.status == 0, trusted.err


def test_refusals_of_the_command_name_the_setting(graph: str, tmp_path: Path) -> None:
    both = command("train", graph, *SETTINGS, "method.fanouts=5,5", f"out={tmp_path / 'run'}")
    assert_refused(both, "RandomWalks", "leave out fanouts=")
    wrong = command("train", graph, f"method.sampler={FOLDER}/sampler.py:Walker")
    assert_refused(wrong, "method.sampler=", "hl.extend.SamplerSettings")
    by_weights = command("train", graph, *SETTINGS, "model=graphconv", f"out={tmp_path / 'run'}")
    assert_refused(by_weights, "weight", "test_step=")
