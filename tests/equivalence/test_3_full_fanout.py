"""Identity 3: full fan-out = full batch with plain PyG, outputs and all gradients."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from hopline.core.graph import Graph
from hopline.data.formats.npz import from_npz
from hopline.nn import GNN
from tests.support.helpers import (
    CONVS,
    assert_close,
    assert_same_gradients,
    backward,
    batch_of,
    randint,
    randn,
    random_graph,
    stack_of,
    stock_layers,
    twin,
)

DTYPES = [torch.int32, torch.int64]


def assert_equal_to_full_batch(name: str, graph: Graph, x: torch.Tensor, seeds: torch.Tensor) -> None:
    """A GNN on full neighbourhoods equals plain PyG on the whole graph: outputs at the seeds, and all gradients."""
    model = GNN(stack_of(name, x.size(1), 6, 6, 3))
    plain = twin(model)
    assert isinstance(plain, GNN)
    ours = model(batch_of(graph, x, (-1, -1, -1), seeds, handle=True))
    expected = stock_layers(list(plain.convs), x, graph)[seeds]
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    assert_same_gradients(model, plain)


# A block numbers its sources anew, so no conv sees the dtype of the graph's ids: each is tried with one of the two.
@pytest.mark.parametrize(("name", "dtype"), [*zip(CONVS, itertools.cycle(DTYPES), strict=False)], ids=str)
def test_full_fan_out_equals_plain_pyg_on_a_random_graph(name: str, dtype: torch.dtype) -> None:
    graph = random_graph(dtype=dtype, weight=True, attr=2, loops=True)
    for seeds in (torch.arange(50), torch.tensor([48, 7, 0, 49])):
        assert_equal_to_full_batch(name, graph, randn(50, 5), seeds)


@pytest.mark.parametrize("fanout", [100, 5000])
def test_a_fanout_above_every_degree_is_full_too(fanout: int) -> None:
    graph = random_graph(weight=True, loops=True)
    x = randn(50, 5)
    for name in ("sage-mean", "gcn", "gat"):
        model = GNN(stack_of(name, 5, 6, 3)).eval()
        sampled, full = (model(batch_of(graph, x, (k, k), torch.arange(0, 50, 7))) for k in (fanout, -1))
        assert_close(sampled, full)


@pytest.mark.parametrize("name", CONVS)
def test_full_fan_out_equals_plain_pyg_on_cora(name: str, real_data: Path) -> None:
    data = from_npz(real_data / "cora.npz")
    graph = data.graph
    if name.endswith("-edges"):
        graph = Graph(graph.indptr, graph.indices, {"attr": randn(graph.num_edges, 2)})
    x = data.x.read(torch.arange(data.num_nodes)).double()
    x = x @ randn(x.size(1), 8, seed=2)  # narrow, and no column is mostly zeros
    assert_equal_to_full_batch(name, graph, x, randint(0, data.num_nodes, 60, seed=1).unique())
