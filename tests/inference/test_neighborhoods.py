"""Exact inference of modules without layers: the hops around some nodes give the outputs of the whole graph.

The oracle is plain PyG on the whole graph (`run_plain_pyg`). `LOCAL` are modules that read no more than `hops=`
says, and `NOT_LOCAL` modules that read further or in other ways: these must be refused, not computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline import infer
from hopline.core.neighborhood import neighborhood
from hopline.device.meter import TensorMeter
from hopline.inference import neighborhoods as local
from hopline.inference import without_layers
from hopline.nn.whole_module import Whole
from hopline.run import train as run
from hopline.run.infer import predict
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import InferConfig
from tests.support.helpers import dataset_of, graph_of, randint, randn
from tests.support.own_modules import opaque
from tests.support.runs import method, quick, small

NUM_NODES = 300
NUM_FEATURES = 6


def irregular_dataset(weight: bool = False) -> hl.Dataset:
    """A sparse directed graph: loops, double edges, nodes without in-edges, isolated ones, and a hub."""
    src = randint(0, NUM_NODES - 5, 420, 1)
    dst = randint(0, NUM_NODES - 9, 420, 2)
    loops = torch.tensor([3, 3, 40, 150])
    hub = torch.full((60,), 7)
    src = torch.cat([src, src[:30], loops, randint(0, NUM_NODES - 5, 60, 3)])
    dst = torch.cat([dst, dst[:30], loops, hub])
    edge = {"weight": randn(src.numel(), seed=4).clamp(min=-1)} if weight else {}
    return dataset_of(graph_of(src, dst, NUM_NODES, **edge), randn(NUM_NODES, NUM_FEATURES))


class Net(nn.Module):
    """Convs with a ReLU after each, and a module at the end."""

    def __init__(self, make: Callable[[int, int], nn.Module], depth: int = 2, end: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [NUM_FEATURES, *[8] * depth]
        self.convs = nn.ModuleList(make(before, after) for before, after in pairwise(widths))
        self.end = nn.Linear(8, 3) if end is None else end

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = opaque(x)
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.end(x)


class Weighted(Net):
    """A `Net` whose convs take edge weights."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = opaque(x)
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight).tanh()
        return self.end(x)


class Centred(nn.Module):
    """Subtracts the mean over all nodes: an output that depends on the whole graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class OutDegree(nn.Module):
    """A mean that divides what a node sends by the number of its out-edges."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(width, out, aggr="sum")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        degree = torch.bincount(edge_index[0], minlength=x.size(0)).clamp(min=1)
        return self.conv(x / degree[:, None], edge_index)


LOCAL: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: Net(pyg.SAGEConv),
    "gcn": lambda: Net(pyg.GCNConv),
    "gcn, three layers": lambda: Net(pyg.GCNConv, 3),
    "gat": lambda: Net(pyg.GATConv),
    "tag": lambda: Net(lambda i, o: pyg.TAGConv(i, o, K=2), 1),
    "sgc": lambda: Net(lambda i, o: pyg.SGConv(i, o, K=2), 1),
    "cached": lambda: Net(lambda i, o: pyg.GCNConv(i, o, cached=True)),
    "batch norm": lambda: Net(pyg.GCNConv, 2, pyg.BatchNorm(8)),
    "max": lambda: Net(lambda i, o: pyg.SAGEConv(i, o, aggr="max")),
    "weights": lambda: Weighted(pyg.GraphConv),
    "nothing but its own row": lambda: Net(pyg.SAGEConv, 0, nn.Linear(NUM_FEATURES, 3)),
}
NOT_LOCAL: dict[str, Callable[[], nn.Module]] = {
    "pooling": lambda: Net(pyg.SAGEConv, 2, Centred()),
    "a norm over nodes": lambda: Net(pyg.SAGEConv, 2, pyg.PairNorm()),
    "more hops": lambda: Net(pyg.GCNConv, 4),
    "out-degrees": lambda: Net(OutDegree),
    "the largest degree": lambda: Net(lambda i, o: pyg.SAGEConv(i, o, aggr="lstm")),
    "ids in edges": lambda: Net(lambda i, o: pyg.EGConv(i, o, num_heads=4, aggregators=["mean"])),
}


def run_plain_pyg(model: nn.Module, data: hl.Dataset) -> Tensor:
    """The oracle: the outputs of plain PyG on the whole graph."""
    pyg_data = data.to_pyg()
    arguments = {"edge_weight": pyg_data.edge_weight} if "weight" in data.graph.edge else {}
    with torch.no_grad():
        out = model.eval()(pyg_data.x, pyg_data.edge_index, **arguments)
    for module in model.modules():
        if hasattr(module, "_cached_edge_index"):
            module._cached_edge_index = None  # type: ignore[assignment]
    return out


@pytest.mark.parametrize("limits", [{}, {"chunk_edges": 60}, {"chunk_edges": 1}, {"chunk_bytes": "60KiB"}])
@pytest.mark.parametrize("name", LOCAL)
def test_the_hops_around_a_node_give_the_output_of_the_whole_graph(name: str, limits: dict[str, Any]):
    data = irregular_dataset(weight=name == "weights")
    model = LOCAL[name]().double()
    expected = run_plain_pyg(model, data)
    hops = 3 if "three" in name else 2
    for ids in (torch.tensor([7, 3, 299, 7, 292, 40]), torch.tensor([299], dtype=torch.int32), None):
        ours = infer.exact(model, data, ids, hops=hops, **limits)
        torch.testing.assert_close(ours, expected if ids is None else expected[ids], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_models_that_read_beyond_hops_are_refused(name: str):
    model = NOT_LOCAL[name]().double()
    with pytest.raises(ValueError, match="Net with hops=2 would not"):
        infer.exact(model, irregular_dataset(), torch.tensor([1]), hops=2)
    torch.testing.assert_close(
        infer.exact(model, irregular_dataset(), torch.tensor([1])), run_plain_pyg(model, irregular_dataset())[[1]]
    )


def test_zero_weights_do_not_hide_how_far_a_module_reads():
    model = Net(pyg.SAGEConv, 4).double()
    nn.init.zeros_(model.end.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hops=4, or no hops="):
        infer.exact(model, irregular_dataset(), torch.tensor([1]), hops=1)


def test_the_trial_changes_neither_the_module_nor_the_random_state():
    model = Net(pyg.GCNConv, 2, pyg.BatchNorm(8)).train()
    data = replace(irregular_dataset(), tables={"x": hl.table(randn(NUM_NODES, NUM_FEATURES).float())})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    infer.exact(model, data, torch.tensor([1]), hops=2)

    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


# ---- what is computed


def test_only_the_hops_around_the_ids_are_computed():
    data = irregular_dataset()
    ids = torch.tensor([5, 11])
    model = Net(pyg.SAGEConv).double()
    sizes = []
    reached = set(ids.tolist())
    for _ in range(2):
        reached |= {s for s, d in data.graph.edge_index().T.tolist() if d in reached}
    model.convs[0].register_forward_pre_hook(lambda conv, inputs: sizes.append(inputs[0].size(0)))
    infer.exact(model, data, ids, hops=2)  # the first call tries the module on copies, which call the hooks too
    sizes.clear()
    infer.exact(model, data, ids, hops=2)

    assert sizes == [len(reached)]
    assert len(reached) < NUM_NODES / 2


def test_a_chunk_keeps_to_chunk_edges_unless_it_is_one_node():
    data = irregular_dataset()
    model = Whole(Net(pyg.GCNConv).double())
    work = local.LocalInference(model, data, 3, torch.device("cpu"), chunk_edges=60)
    chunks = list(work._chunks(torch.arange(NUM_NODES)))
    assert torch.equal(torch.cat([seeds for seeds, _ in chunks]), torch.arange(NUM_NODES))

    several = [block for seeds, block in chunks if seeds.numel() > 1]
    assert len(several) > 5
    assert all(block.num_src + block.num_edges <= 60 for block in several)
    assert any(block.num_src + block.num_edges > 60 for _, block in chunks)


def test_all_ids_of_a_small_graph_take_one_forward_pass_over_it():
    data = irregular_dataset()
    sizes = []
    model = Net(pyg.SAGEConv).double()
    infer.exact(model, data, hops=2)
    model.register_forward_pre_hook(lambda net, inputs: sizes.append(inputs[0].size(0)))
    infer.exact(model, data, hops=2)
    assert sizes == [NUM_NODES]


@pytest.mark.parametrize("make", [pyg.GCNConv, pyg.GATConv])
def test_the_peak_of_a_chunk_keeps_to_chunk_bytes(make: Callable[[int, int], nn.Module]):
    data = dataset_of(graph_of(randint(0, 4000, 12000, 1), randint(0, 4000, 12000, 2), 4000), randn(4000, NUM_FEATURES))
    model = Net(make, 1).double().eval()
    peaks = []
    work = local.LocalInference(Whole(model), data, 2, torch.device("cpu"), chunk_bytes=300_000)
    compute = work._compute

    def compute_measured(block: Any) -> Tensor:
        with TensorMeter() as meter:
            out = compute(block)
        peaks.append(meter.peak_bytes)
        return out

    work._compute = compute_measured  # type: ignore[method-assign]
    with torch.no_grad():
        ours = work.rows(torch.arange(4000))

    torch.testing.assert_close(ours, run_plain_pyg(model, data), rtol=1e-10, atol=1e-12)
    assert max(peaks) <= 300_000
    assert max(peaks) > 100_000  # a third at least: the limit is used, not only kept


def test_whole_bytes_bounds_the_peak_of_a_pass_over_the_whole_graph():
    data = dataset_of(graph_of(randint(0, 4000, 30000, 1), randint(0, 4000, 30000, 2), 4000), randn(4000, NUM_FEATURES))
    for make in (pyg.GCNConv, pyg.GATConv, pyg.SAGEConv):
        batch_model = Whole(Net(make).double().eval())
        with torch.no_grad(), TensorMeter() as meter:
            without_layers.run_whole(batch_model, data, torch.device("cpu"))
        assert meter.peak_bytes <= without_layers.whole_bytes(batch_model, data) <= 20 * meter.peak_bytes


def test_a_neighbourhood_of_two_hops_has_all_in_edges_of_the_first_hop():
    data = irregular_dataset(weight=True)
    seeds = torch.tensor([7, 3, 299])
    graph = data.graph
    edges = [(s, d, w) for (s, d), w in zip(graph.edge_index().T.tolist(), graph.edge["weight"].tolist(), strict=True)]
    inner = set(seeds.tolist())
    inner |= {s for s, d, _ in edges if d in inner}
    block = neighborhood(graph, seeds, 2)
    assert block is not None
    assert torch.equal(block.src_ids[:3], seeds)
    assert set(block.src_ids.tolist()) == inner | {s for s, d, _ in edges if d in inner}

    src, dst = block.src_ids[block.edge_index]
    ours = sorted(zip(src.tolist(), dst.tolist(), block.edge["weight"].tolist(), strict=True))
    assert ours == sorted(edge for edge in edges if edge[1] in inner)

    size = block.num_src + block.num_edges
    assert neighborhood(graph, seeds, 2, size) is not None
    assert neighborhood(graph, seeds, 2, size - 1) is None


# ---- what is refused


@pytest.mark.parametrize("limits", [{"chunk_edges": 100}, {"chunk_bytes": "1MiB"}])
def test_limits_without_hops_are_refused_with_what_to_type(limits: dict[str, Any]):
    (name,) = limits
    with pytest.raises(ValueError, match=rf"{name}= .*hops .*Net reads, .*hops=2"):
        infer.exact(Net(pyg.GCNConv).double(), irregular_dataset(), **limits)
    with pytest.raises(ValueError, match=rf"{name}= .*hops .*leave it out, .*hl\.nn\.GNN"):
        infer.exact(NOT_LOCAL["pooling"]().double(), irregular_dataset(), **limits)


def test_hops_must_be_a_number_and_only_for_modules_without_layers():
    for hops in (-1, 1.5, True):
        with pytest.raises(ValueError, match=rf"hops must be .*not {hops}"):
            infer.exact(Net(pyg.SAGEConv).double(), irregular_dataset(), hops=hops)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hops= .*GNN is: leave it out"):
        infer.exact(hl.nn.GNN([pyg.SAGEConv(NUM_FEATURES, 3)]).double(), irregular_dataset(), hops=1)
    with pytest.raises(ValueError, match=r"Net .*keep="):
        infer.exact(Net(pyg.SAGEConv).double(), irregular_dataset(), keep=lambda l, nodes, rows: None)


# ---- in a run


class Plain(nn.Module):
    """Two convs, whose layers hopline cannot see."""

    def __init__(self, data: hl.Dataset, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = make(data.num_features, 8)
        self.second = make(8, data.num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = opaque(x)
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("evaluate", ["blocking", "async"])
@pytest.mark.parametrize("limits", [{}, {"budget": "2MiB"}])
def test_a_run_is_evaluated_as_over_the_whole_graph(evaluate: str, limits: dict[str, Any], caplog: Any):
    data = small()
    model = Plain(data, pyg.GCNConv)
    run = hl.Trainer(
        model,
        data,
        method(workers=0),
        epochs=2,
        lr=0.01,
        show=False,
        evaluate=evaluate,
        **limits,  # type: ignore[arg-type]
    ).fit()
    with torch.no_grad():
        scores = model.eval()(data.to_pyg().x, data.to_pyg().edge_index)
    for split in ("valid", "test"):
        ids = data.splits[split]
        assert getattr(run, split) == pytest.approx(hl.metrics.accuracy(scores[ids], data.labels[ids]))


def test_a_run_evaluates_over_the_whole_graph_where_the_model_reads_beyond_its_fan_outs():
    data = small()
    sizes = []
    model = Plain(data, lambda i, o: pyg.TAGConv(i, o, K=3))
    trainer = hl.Trainer(model, data, method(workers=0), epochs=1, lr=0.01, show=False)
    assert trainer.measure.part_hops is None

    model.register_forward_pre_hook(lambda net, inputs: sizes.append(inputs[0].size(0)))
    trainer.evaluate("valid")
    assert sizes == [data.num_nodes]
    assert hl.Trainer(Plain(data, pyg.GCNConv), data, method(), show=False).measure.part_hops == 3
    assert hl.Trainer(Plain(data, pyg.SAGEConv), data, method(), show=False).measure.part_hops == 2


def test_a_run_whose_evaluation_would_not_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch):
    data = small()
    model = Plain(data, lambda i, o: pyg.TAGConv(i, o, K=3))
    with pytest.raises(ValueError, match=r"Plain on the whole graph .*MiB"):
        hl.Trainer(model, data, method(), show=False, budget="2MiB")
    monkeypatch.setattr(without_layers, "WHOLE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"Plain .*test_step="):
        hl.Trainer(model, data, method(), show=False)
    hl.Trainer(model, data, method(), show=False, test_step=lambda model, data, ids: {"score": 0.0})
    hl.Trainer(Plain(data, pyg.GCNConv), data, method(), show=False)


def make_plain(spec: ModelSpec, data: hl.Dataset) -> nn.Module:
    """The model that the command line finds by its import path."""
    return Plain(data, pyg.GCNConv)


def test_the_infer_command_takes_hops_from_the_fan_outs_or_from_its_setting(tmp_path: Path):
    config = quick(tmp_path, model=ModelSpec(name="tests.inference.test_neighborhoods:make_plain"))
    folder = run.train(config).folder
    assert folder is not None

    def scores(**settings: Any) -> np.ndarray:
        out = tmp_path / "scores.npy"
        predict(folder, InferConfig(write="scores", trust=True, out=out, **settings))
        return np.load(out, allow_pickle=False)

    expected = scores()

    for settings in ({"hops": 2}, {"hops": 3}, {"chunk_bytes": "100KiB"}, {"hops": 2, "chunk_bytes": "50KiB"}):
        np.testing.assert_allclose(scores(**settings), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="Plain with hops=1 would not"):
        scores(hops=1)
    with pytest.raises(ValueError, match="hops= is for exact"):
        scores(hops=2, inference="sampled")
