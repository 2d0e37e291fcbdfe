"""The examples are short, and run."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from tests.support import own_loops
from tests.support.runs import losses, small

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def graph(tmp_path: Path) -> str:
    """A dataset with enough training nodes for a batch of the examples."""
    small(num_nodes=3000, num_edges=30_000, num_train=1500, num_valid=500).save(tmp_path / "graph")
    return str(tmp_path / "graph")


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_less_than_40_lines_that_are_not_blank(name: str):
    lines = [line for line in (FOLDER / f"{name}.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 40
    assert lines[-2] == 'if __name__ == "__main__":'


def test_every_example_is_run_here_or_with_its_framework():
    these_tests = Path(__file__).read_text()
    interop_tests = (FOLDER.parent / "tests" / "interop" / "test_examples.py").read_text()
    assert all(f'example("{name}"' in these_tests or f'"{name}": ' in interop_tests for name in NAMES)


def test_own_callback_stops_at_its_loss(graph: str, monkeypatch: pytest.MonkeyPatch):
    run = example("own_callback", monkeypatch).main(graph, epochs=40, target=1.2)
    assert run.reason == "the loss is below 1.2"
    assert losses(run)[-1] < 1.2
    assert all(loss >= 1.2 for loss in losses(run)[:-1])


def test_own_loop_learns(graph: str, monkeypatch: pytest.MonkeyPatch):
    assert example("own_loop", monkeypatch).main(graph, epochs=20) > 0.4


def assert_losses_of_trainer(results: dict[str, Any]) -> None:
    """The losses of all steps are the Trainer's, and each but the first depends on the gradients before it."""
    assert len(results["losses"]) == len(results["trainer"]) > 3
    assert results["losses"] == pytest.approx(results["trainer"], rel=1e-10)
    assert results["losses"][-1] < results["losses"][0]


@pytest.mark.parametrize("name", own_loops.NAMES)
def test_an_own_loop_has_the_losses_of_the_trainer(name: str, graph: str, tmp_path: Path):
    assert_losses_of_trainer(
        own_loops.losses_of_example_and_trainer(World.alone(), name, graph, str(tmp_path / "shards"))
    )


def test_own_loops_over_two_ranks_have_the_losses_of_the_trainer(graph: str, tmp_path: Path):
    settings = LaunchSettings(devices=2, timeout_s=60)
    results = run(own_loops.all_losses_of_examples_and_trainer, settings, graph, str(tmp_path / "shards"))
    for name in own_loops.NAMES:
        assert_losses_of_trainer(results[name])


def test_own_loops_run_by_themselves(graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert example("own_loop_historical", monkeypatch).main(graph, epochs=6)["test"] > 0.4
    assert example("own_loop_trimmed", monkeypatch).main(graph)["test"] > 0.4
    for results in (
        example("own_loop_layers", monkeypatch).main(graph, epochs=3),
        example("own_loop_one_shot", monkeypatch).main(graph, epochs=3),
        example("own_loop_shards", monkeypatch).main(graph, str(tmp_path / "shards"), epochs=2),
    ):
        assert results["losses"][-1] < results["losses"][0]


@pytest.mark.parametrize("devices", [1, 2])
def test_shards_inference_is_that_of_plain_pyg(
    devices: int, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = hl.open(graph)
    model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=data.num_classes)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    out = str(tmp_path / "scores")
    example("shards_inference", monkeypatch).main(
        graph, str(tmp_path / "shards"), str(tmp_path / "weights.pt"), out, devices
    )
    ours = torch.full((data.num_nodes, data.num_classes), float("nan"))
    for rank in range(devices):
        saved = torch.load(f"{out}-{rank}.pt", weights_only=True)
        ours[saved["ids"]] = saved["scores"]
    every = torch.arange(data.num_nodes)
    torch.testing.assert_close(ours, model(data.x[every], data.graph.edge_index()), rtol=1e-4, atol=1e-5)


def test_own_method_trains_by_its_own_steps(graph: str, monkeypatch: pytest.MonkeyPatch):
    run = example("own_method", monkeypatch).main(graph, epochs=2)
    assert run.epochs == 2
    assert losses(run)[1] < losses(run)[0]


def test_seeds_and_epochs_of_an_own_method_share_no_draws(monkeypatch: pytest.MonkeyPatch):
    make = example("own_method", monkeypatch).ByDegree
    data = small(num_train=150)
    job: Any = SimpleNamespace(data=data, train_ids=data.train_ids, world=World.alone())
    firsts: list[tuple[int, list[int]]] = []
    for seed, epoch in itertools.product(range(3), range(1, 4)):
        job.seed = seed
        batch = next(make(fanouts=(2,), batch_size=50).bind(job).units(epoch)).batch
        firsts.append((batch.key, batch.seeds.tolist()))
    assert len({key for key, _ in firsts}) == len({tuple(seeds) for _, seeds in firsts}) == 9


def test_own_conv_reads_blocks_and_equals_itself_on_the_whole_graph(graph: str, monkeypatch: pytest.MonkeyPatch):
    module = example("own_conv", monkeypatch)
    run = module.main(graph, epochs=2)
    assert losses(run)[1] < losses(run)[0]
    data = hl.open(graph)
    conv = module.DegreeSum()
    expected = conv(data.x[torch.arange(data.num_nodes)].double(), data.graph.edge_index())
    ours = hl.infer.exact(hl.nn.GNN([conv]), data, chunk_edges=500)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-6)

    class Wrong(module.DegreeSum):
        def on_block(self, x: Tensor, block: hl.extend.Block) -> Tensor:
            return self.forward(x, block.edge_index)[: block.num_dst]

    with pytest.raises(ValueError, match=r"Wrong\.on_block .*Wrong\.forward"):
        hl.infer.exact(hl.nn.GNN([Wrong()]), data)


def test_own_layerwise_computation_is_personalised_pagerank(graph: str, monkeypatch: pytest.MonkeyPatch):
    data = hl.open(graph)
    train = data.splits["train"]
    start = torch.zeros(data.num_nodes, data.num_classes, dtype=torch.float64)
    start[train, data.labels[train]] = 1
    src, dst = data.graph.edge_index()
    expected = start
    for _ in range(10):
        sums = torch.zeros_like(start).index_add_(0, dst, expected[src])
        expected = 0.9 * sums / data.graph.in_degrees().clamp(min=1)[:, None] + 0.1 * start
    for size in (1000, 77):
        ours = example("own_layerwise", monkeypatch).main(graph, size=size)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["local_sgd", "compressed_gradients"])
def test_gradients_over_two_ranks_learn(name: str, graph: str, monkeypatch: pytest.MonkeyPatch):
    modules = {"local_sgd": example("local_sgd", monkeypatch)}
    modules["compressed_gradients"] = example("compressed_gradients", monkeypatch)
    assert modules[name].main(graph, epochs=12) > 0.4


def test_own_table_trains_on_rows_that_it_makes(graph: str, monkeypatch: pytest.MonkeyPatch):
    module = example("own_table", monkeypatch)
    run = module.main(graph, epochs=2)
    assert losses(run)[1] < losses(run)[0]
    rows = hl.open(graph).x[torch.arange(50)]
    torch.testing.assert_close(module.Quantised(rows).read(torch.arange(50)), rows, rtol=0, atol=0.05)


def test_own_steps_report_their_metric(graph: str, monkeypatch: pytest.MonkeyPatch):
    run = example("own_steps", monkeypatch).main(graph, epochs=2)
    assert run.metric == "accuracy_of_3"
    assert run.test > 0.6


def test_subclass_has_its_own_rates_and_metrics(graph: str, monkeypatch: pytest.MonkeyPatch):
    run = example("subclass", monkeypatch).main(graph, epochs=2)
    last = run.evaluations[-1].metrics
    assert last["error"] == pytest.approx(1 - last["accuracy"])


class FakeNeighborLoader:
    """Yields batches as PyG's NeighborLoader does (seeds first, `batch_size`), where its library is missing."""

    def __init__(self, data: Data, num_neighbors: Sequence[int], input_nodes: Tensor, batch_size: int) -> None:
        self.data = data
        self.seeds = input_nodes.nonzero().view(-1)
        self.batch_size = batch_size
        self.sampler = hl.extend.NeighborSampler(hl.from_pyg(data).graph, num_neighbors)

    def __iter__(self) -> Iterator[Data]:
        for key, seeds in enumerate(self.seeds.split(self.batch_size)):
            block = hl.Batch(seeds, self.sampler.sample(seeds, key), None, None).union()
            x, y = (torch.as_tensor(rows)[block.src_ids] for rows in (self.data.x, self.data.y))
            yield Data(x=x, y=y, edge_index=block.edge_index, batch_size=seeds.numel())


def neighbor_loader_works() -> bool:
    data = Data(x=torch.zeros(2, 1), edge_index=torch.tensor([[0], [1]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that pyg-lib is not there, then looks for torch-sparse
        try:
            return next(iter(NeighborLoader(data, [1], batch_size=1))).batch_size == 1
        except ImportError:
            return False


def test_a_pyg_script_learns(graph: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert example("pyg_script", monkeypatch).main(graph, epochs=20) > 0.4
    assert "epoch 20: loss " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*pyg-lib")
def test_a_pyg_script_differs_from_pygs_by_the_import_of_the_loader(
    graph: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ours = (FOLDER / "pyg_script.py").read_text().splitlines()
    theirs = [line.partition("  # PyG: ")[2] or line for line in ours]
    changed = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert [(a.partition("  # ")[0], b) for a, b in changed] == [
        ("from hopline import NeighborLoader", "from torch_geometric.loader import NeighborLoader")
    ]
    (tmp_path / "pygs_script.py").write_text("\n".join(theirs))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("pygs_script")
    assert module.NeighborLoader is NeighborLoader
    if neighbor_loader_works():
        assert module.main(graph, epochs=20, num_workers=0) > 0.4


@pytest.mark.filterwarnings("ignore:.*pyg-lib")
def test_pyg_batches_train_a_pyg_model(graph: str, monkeypatch: pytest.MonkeyPatch):
    module = example("pyg_batches", monkeypatch)
    if not neighbor_loader_works():
        monkeypatch.setattr(module, "NeighborLoader", FakeNeighborLoader)
    run = module.main(graph, epochs=8)
    assert losses(run)[-1] < losses(run)[0]
    assert run.test > 0.4
