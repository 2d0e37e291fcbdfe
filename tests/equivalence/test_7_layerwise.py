"""Identity 7: layer-wise inference = forward in evaluation mode = plain PyG on the whole graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline import infer
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from hopline.tables import CachedTable, SparseTable, TensorTable
from tests.support.helpers import (
    CONVS,
    GNN_OPTIONS,
    assert_close,
    batch_of,
    conv_of,
    dataset_of,
    gnn_of,
    plain_gnn,
    randn,
    random_graph,
    stack_of,
    stock_layers,
    with_running_means,
)

GRAPH = random_graph(weight=True, attr=2, loops=True, dtype=torch.int32)
BARE = random_graph(loops=True)
X = randn(50, 6)
IDS = torch.tensor([17, 3, 49, 17, 0, 48])


@pytest.mark.parametrize("name", CONVS)
def test_layerwise_inference_of_every_conv_equals_plain_pyg(name: str) -> None:
    data = dataset_of(GRAPH, X)
    model = GNN(stack_of(name, 6, 5, 3)).train()
    expected = stock_layers(list(model.convs), X, GRAPH).detach()
    assert_close(infer.exact(model, data), expected)
    assert_close(infer.exact(model, data, IDS, chunk_edges=30), expected[IDS])


@pytest.mark.parametrize("name", GNN_OPTIONS)
def test_layerwise_inference_of_every_gnn_option_equals_plain_pyg(name: str) -> None:
    model = with_running_means(gnn_of(name))
    data = dataset_of(BARE, X)
    expected = plain_gnn(model, X, BARE).detach()
    forward = model(batch_of(BARE, X, (-1,) * model.num_layers)).detach()
    assert_close(forward, expected)

    model.train()
    for chunk_edges in (1, 40, 1 << 20) if name == "everything" else (40,):
        assert_close(infer.exact(model, data, chunk_edges=chunk_edges), expected)
        assert_close(infer.exact(model, data, IDS, chunk_edges=chunk_edges), expected[IDS])
    assert model.training


@pytest.mark.parametrize("chunk_edges", [1, 2, 3, 17, 100, 10**6])
def test_chunks_of_any_size_give_the_same_bits(chunk_edges: int) -> None:
    data = dataset_of(BARE, X)
    model = gnn_of("plain")
    assert_close(infer.exact(model, data, chunk_edges=chunk_edges), infer.exact(model, data), 1e-14)


@pytest.mark.parametrize("chunk_edges", [1, 10, 60])
def test_a_chunk_has_no_more_edges_than_it_may_unless_it_is_one_node(chunk_edges: int) -> None:
    calls: list[tuple[int, int]] = []

    class Counted(pyg.SAGEConv):
        def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:  # type: ignore[override]
            calls.append((len(x[1]), edge_index.size(1)))
            return super().forward(x, edge_index)

    model = GNN([Counted(6, 3)]).double()
    data = dataset_of(BARE, X)
    infer.exact(model, data)  # probes the conv
    calls.clear()
    infer.exact(model, data, chunk_edges=chunk_edges)

    assert sum(rows for rows, _ in calls) == 50
    assert sum(edges for _, edges in calls) == BARE.num_edges
    assert all(rows == 1 or edges <= chunk_edges for rows, edges in calls)
    assert len(calls) <= 2 * (BARE.num_edges + 50) // chunk_edges + 1


def test_only_rows_that_the_requested_nodes_need_are_computed() -> None:
    rows = []

    class Counted(pyg.SAGEConv):
        def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:  # type: ignore[override]
            rows.append(len(x[1]))
            return super().forward(x, edge_index)

    model = GNN([Counted(6, 4), Counted(4, 3)]).double()
    data = dataset_of(BARE, X)
    infer.exact(model, data, torch.tensor([3]))  # probes the convs
    rows.clear()
    infer.exact(model, data, torch.tensor([3]))
    first_hop = {3, *BARE.indices[int(BARE.indptr[3]) : int(BARE.indptr[4])].tolist()}

    assert rows == [len(first_hop), 1]


@pytest.mark.parametrize(
    "table",
    [
        TensorTable(X),
        CachedTable(TensorTable(X), torch.arange(9)),
        SparseTable.from_dense(X),
        TensorTable(X.float()),
    ],
    ids=["memory", "cached", "sparse", "float32"],
)
@pytest.mark.parametrize("name", ["plain", "encoder", "gcn"])
def test_the_kind_of_table_does_not_change_outputs(table: TensorTable, name: str) -> None:
    model = GNN(stack_of("gcn", 6, 4, 3)) if name == "gcn" else gnn_of(name)
    data = dataset_of(BARE, X)
    tolerance = 1e-6 if table.dtype == torch.float32 else 1e-10
    ours = infer.exact(model, replace(data, tables={"x": table}))
    assert_close(ours, infer.exact(model, data), tolerance)


@pytest.mark.parametrize("name", ["plain", "jk-cat", "everything", "gcn2", "batch-norm"])
@pytest.mark.parametrize("workers", [0, 2])
def test_sampled_inference_over_all_edges_is_exact(name: str, workers: int) -> None:
    model = with_running_means(gnn_of(name))
    data = dataset_of(BARE, X)
    method = Sampled(fanouts=(-1,) * model.num_layers, batch_size=4, shuffle=False, workers=workers)
    ids = torch.tensor([17, 3, 49, 20, 0, 48])
    ours = infer.sampled(model, method.loader(data, ids, model=model))
    assert_close(ours, infer.exact(model, data, ids))


def test_sampled_inference_at_finite_fanouts_is_forward_on_those_batches() -> None:
    model = gnn_of("plain").train()
    data = dataset_of(BARE, X)
    method = Sampled(fanouts=(2, 2, 2), batch_size=4, shuffle=False, workers=0)
    ours = infer.sampled(model, method.loader(data, IDS.unique()).epoch(1))
    assert model.training

    model.eval()
    with torch.no_grad():
        expected = torch.cat([model(b) for b in method.loader(data, IDS.unique()).epoch(1)])
    assert torch.equal(ours, expected)


def test_outputs_have_no_gradient_and_the_mode_is_restored_after_an_error() -> None:
    model = gnn_of("plain").train()
    data = dataset_of(BARE, X)
    assert not infer.exact(model, data).requires_grad
    with pytest.raises(ValueError, match="from 0 to 49"):
        infer.exact(model, data, torch.tensor([50]))
    assert model.training
    assert torch.is_grad_enabled()


def test_pyg_models_and_modules_without_layers_equal_plain_pyg() -> None:
    data = dataset_of(GRAPH, X)
    basic = pyg.models.GCN(6, 8, 2, 3, jk="cat", norm="batch_norm").double().eval()
    expected = basic(X, GRAPH.edge_index(), edge_weight=GRAPH.edge["weight"]).detach()
    assert_close(infer.exact(basic, data, IDS, chunk_edges=9), expected[IDS])

    conv = pyg.TAGConv(6, 3).double()
    expected = conv(X, GRAPH.edge_index(), GRAPH.edge["weight"]).detach()
    assert_close(infer.exact(conv, data, IDS), expected[IDS])
    assert_close(infer.exact(conv, data), expected)


def test_ids_and_masks_that_name_no_nodes_are_refused() -> None:
    data = dataset_of(BARE, X)
    for model in (gnn_of("plain"), conv_of("sage-mean", 6, 3)):
        with pytest.raises(ValueError, match="from 0 to 49"):
            infer.exact(model, data, torch.tensor([-1]))
        with pytest.raises(ValueError, match=r"mask must be \[50\]"):
            infer.exact(model, data, torch.ones(49, dtype=torch.bool))


def test_inference_on_a_graph_without_edges_equals_plain_pyg() -> None:
    indptr = torch.zeros(6, dtype=torch.int64)
    graph = type(BARE)(indptr, torch.empty(0, dtype=torch.int64))
    model = GNN(stack_of("sage-mean", 6, 4, 3), head=nn.Linear(3, 2)).double()
    assert_close(infer.exact(model, dataset_of(graph, X[:5])), plain_gnn(model, X[:5], graph).detach())
