"""Modules that are not made of layers: those that batches would change are refused or reported."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline import infer
from tests.support.own_modules import opaque
from tests.support.runs import fit, method, sage, small


class Net(nn.Module):
    """Two convs and a ReLU, which cannot be taken apart into layers."""

    def __init__(self, make: Callable[[int, int], nn.Module], data: hl.Dataset, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = make(data.num_features, hidden)
        self.second = make(hidden, data.num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(opaque(x), edge_index).relu(), edge_index)


CACHED: dict[str, Callable[[int, int], nn.Module]] = {
    "GCNConv": lambda i, o: pyg.GCNConv(i, o, cached=True),
    "SGConv": lambda i, o: pyg.SGConv(i, o, cached=True),
    "SSGConv": lambda i, o: pyg.SSGConv(i, o, alpha=0.1, K=2, cached=True),
    "EGConv": lambda i, o: pyg.EGConv(i, o, num_heads=4, cached=True),
}


class LinearThenConv(nn.Module):
    """A linear layer, then one conv that has no weights."""

    def __init__(self, data: hl.Dataset, conv: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(data.num_features, data.num_classes)
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.lin(x), edge_index)


def cached_model(name: str, data: hl.Dataset) -> nn.Module:
    return LinearThenConv(data, pyg.APPNP(2, 0.1, cached=True)) if name == "APPNP" else Net(CACHED[name], data)


# ---- convs that cache the edges of a graph


@pytest.mark.parametrize("name", [*CACHED, "APPNP"])
def test_a_conv_that_caches_edges_is_refused_by_name_in_batches(name: str):
    data = small()
    model = cached_model(name, data)
    sentence = rf"{name}\(cached=True\) keeps the edges of the first batch .*: build it with cached=False"
    with pytest.raises(ValueError, match=sentence):
        fit(data, model)
    batch = next(iter(method().loader(data, data.splits["train"])))
    with pytest.raises(ValueError, match=sentence):
        hl.nn.as_batch_model(model)(batch)


def test_a_model_that_is_itself_a_caching_conv_is_refused_by_its_name_alone():
    data = small()
    batch = next(iter(method().loader(data, data.splits["train"])))
    with pytest.raises(ValueError, match="cached=False"):
        hl.nn.as_batch_model(pyg.SGConv(data.num_features, 2, cached=True))(batch)


@pytest.mark.parametrize("name", [*CACHED, "APPNP"])
def test_exact_inference_uses_no_cache_of_another_graph_and_leaves_the_caches_alone(name: str):
    data = small()
    other = small(num_nodes=300, num_edges=2000)
    model = cached_model(name, data).eval()
    expected = [
        cached_model(name, data).eval()(graph_data.to_pyg().x, graph_data.to_pyg().edge_index)
        for graph_data in (data, other)
    ]
    model(other.to_pyg().x, other.to_pyg().edge_index)  # fills the caches
    before = caches_of(model)
    assert any(value is not None for value in before)

    ours = [infer.exact(model, graph_data) for graph_data in (data, other)]

    for rows, expected_rows in zip(ours, expected, strict=True):
        torch.testing.assert_close(rows, expected_rows.detach())
    assert [a is b for a, b in zip(caches_of(model), before, strict=True)] == [True] * len(before)


def features_of(data: hl.Dataset) -> Tensor:
    return data.x.read(torch.arange(data.num_nodes))


def caches_of(model: nn.Module) -> list[object]:
    return [value for part in model.modules() for name, value in vars(part).items() if name.startswith("_cached_")]


def test_a_cache_that_is_switched_off_but_full_is_not_used_in_batches():
    data = small()
    model = Net(CACHED["GCNConv"], data).eval()
    fresh = Net(CACHED["GCNConv"], data).eval()
    model(data.to_pyg().x, data.to_pyg().edge_index)
    for net in (model, fresh):
        net.first.cached = net.second.cached = False  # type: ignore[assignment]
    batch = next(iter(method().loader(data, data.splits["train"])))
    torch.testing.assert_close(hl.nn.as_batch_model(model)(batch), hl.nn.as_batch_model(fresh)(batch))


# ---- modules whose outputs or arguments are others


class WrappedSAGE(nn.Module):
    """A SAGE conv whose output goes through a function."""

    def __init__(self, data: hl.Dataset, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = pyg.SAGEConv(data.num_features, data.num_classes)
        self.end = end

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.end(self.conv(x, edge_index))


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (lambda out: (out, out), r"WrappedSAGE.forward returned a tuple: return one tensor with a row per node"),
        (lambda out: {"out": out}, r"WrappedSAGE.forward returned a dict: return one tensor with a row per node"),
        (lambda out: None, r"WrappedSAGE.forward returned a NoneType: return one tensor"),
        (
            lambda out: out.mean(0, keepdim=True),
            r"WrappedSAGE.forward returned \[1, 4\] for \d+ nodes: return a row per node",
        ),
        (lambda out: out.mean(), r"WrappedSAGE.forward returned \[\] for \d+ nodes: return a row per node"),
    ],
)
def test_an_output_that_is_not_a_row_per_node_is_refused_before_training(end: Callable[[Tensor], Any], sentence: str):
    data = small()
    model = WrappedSAGE(data, end)
    with pytest.raises(ValueError, match=sentence):
        hl.Trainer(model, data, method(), show=False)
    with pytest.raises(ValueError, match=sentence):
        infer.exact(model, data)
    with pytest.raises(ValueError, match=sentence):
        hl.nn.as_batch_model(model)(next(iter(method().loader(data, data.splits["train"]))))


class NeedsMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, *, scale: float, edge_weight: Tensor) -> Tensor:
        return self.conv(x, edge_index)


class NeedsAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.NNConv(8, 4, nn.Linear(2, 32))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, **more: Any) -> Tensor:
        return self.conv(x, edge_index, edge_attr)


def test_further_arguments_that_must_be_given_are_refused_by_name():
    data = small()
    with pytest.raises(ValueError, match=r"NeedsMore\.forward needs batch, scale .*a default"):
        fit(data, NeedsMore())
    sentence = r"NeedsAttributes.forward needs edge_attr, and the graph has no edge array 'attr': give the dataset one"
    with pytest.raises(ValueError, match=sentence):
        fit(data, NeedsAttributes())
    with pytest.raises(ValueError, match=sentence):
        infer.exact(NeedsAttributes(), data)
    attr = torch.rand(data.num_edges, 2)
    graph = dataclasses.replace(data.graph, edge={"attr": attr})
    assert fit(dataclasses.replace(data, graph=graph), NeedsAttributes()).epochs == 2


class KeepsEdges(nn.Module):
    """A module with an edge cache of its own."""

    def __init__(self, data: hl.Dataset) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(data.num_features, data.num_classes)
        self.edges = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.edges is None:
            self.edges = edge_index  # type: ignore[assignment]
        return self.conv(x, self.edges)


class WeightPerNode(nn.Module):
    def __init__(self, data: hl.Dataset) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(8, data.num_classes)
        self.rows = nn.Embedding(data.num_nodes, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x + self.rows.weight[: x.size(0)], edge_index)


MEANINGLESS: dict[str, tuple[Callable[[hl.Dataset], nn.Module], str]] = {
    "linkx": (lambda data: pyg.LINKX(400, 8, 16, 4, 2), r"LINKX cannot run on a batch, .*SAGEConv"),
    "mesh": (lambda data: pyg.MeshCNNConv(8, 4), r"MeshCNNConv cannot run on a batch, .*SAGEConv"),
    "own cache": (KeepsEdges, "KeepsEdges cannot be trained in batches: it keeps something of the first graph"),
    "weights per node": (WeightPerNode, "WeightPerNode cannot be trained in batches: .* how nodes are numbered"),
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_a_module_that_means_nothing_in_batches_is_refused(name: str):
    make, sentence = MEANINGLESS[name]
    data = small()
    model = make(data)
    with pytest.raises(ValueError, match=sentence):
        hl.Trainer(model, data, method(), show=False)


def test_linkx_is_inferred_on_the_whole_graph():
    data = small()
    pyg_data = small().to_pyg()
    model = pyg.LINKX(400, 8, 16, 4, 2).eval()
    torch.testing.assert_close(infer.exact(model, data), model(pyg_data.x, pyg_data.edge_index).detach())


# ---- what a run says


class Centred(nn.Module):
    def __init__(self, data: hl.Dataset) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(data.num_features, data.num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.conv(x, edge_index)
        return out - out.mean(0)


SAID: dict[str, tuple[Callable[[hl.Dataset], nn.Module], list[str]]] = {
    "sage": (lambda data: Net(pyg.SAGEConv, data), []),
    "gat": (lambda data: Net(pyg.GATConv, data), []),
    "gcn": (
        lambda data: Net(pyg.GCNConv, data),
        ["Net in batches is an approximation of Net on the whole graph, .*border of a batch lack in-edges"],
    ),
    "pooling": (
        Centred,
        [
            r"Centred in batches is an approximation of Centred .* more than 2 hops around it: .*\(pooling",
            r"exact inference runs Centred on the whole graph at once, which takes about [\d.]+ \wi?B",
        ],
    ),
    "gnn": (sage, []),
}


@pytest.mark.parametrize("fanouts", [(4, 3), (-1, -1)])
@pytest.mark.parametrize("name", SAID)
def test_a_run_says_once_that_batches_are_an_approximation(
    name: str, fanouts: tuple[int, int], caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    make, lines = SAID[name]
    data = small()
    with caplog.at_level(logging.INFO):
        fit(data, make(data), method(fanouts=fanouts), out=tmp_path / "run")
    messages = [text for text in caplog.messages if "approximation" in text or "at once" in text]
    assert len(messages) == len(lines)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == messages[:1], "without set-up, logging shows warnings alone, and this must be seen"
    for text, expected in zip(messages, lines, strict=True):
        assert re.match(expected, text)
        assert text in (tmp_path / "run" / "run.log").read_text()


def test_the_message_about_approximation_is_true():
    """At full fan-out a SAGE module gives the whole graph's outputs, and a GCN module does not."""
    data = small(num_nodes=2000, num_edges=4000)
    pyg_data = small(num_nodes=2000, num_edges=4000).to_pyg()
    ids = data.splits["train"][:20]
    for make, is_equal in ((pyg.SAGEConv, True), (pyg.GCNConv, False)):
        model = Net(make, data).double().eval()
        (batch,) = hl.Sampled(fanouts=(-1, -1), batch_size=20, shuffle=False).loader(data, ids)
        ours = hl.nn.as_batch_model(model)(batch)
        expected = model(features_of(data).double(), pyg_data.edge_index)[ids]
        assert torch.allclose(ours, expected, rtol=1e-8) == is_equal
