"""Modules that are not made of layers run on all sampled edges at once, or are refused."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.core.batch import Batch
from hopline.nn import GNN, Traced, Whole, as_batch_model
from tests.support.helpers import (
    assert_close,
    assert_same_gradients,
    backward,
    batch_of,
    conv_of,
    dataset_of,
    randn,
    random_graph,
    twin,
)
from tests.support.own_modules import opaque

GRAPH = random_graph(weight=True, attr=2, loops=True)
X = randn(50, 6)
SEEDS = torch.tensor([4, 0, 49, 17])


class TwoHops(nn.Module):
    """A module that is not made of layers."""

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.a = first or conv_of("sage-mean", 6, 8)
        self.b = conv_of("graph", 8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = opaque(x)
        h = self.a(x, edge_index).relu()
        return self.b(h, edge_index, edge_weight) + h[:, :3]


def test_a_module_sees_every_sampled_edge_at_once() -> None:
    module = TwoHops()
    batch = batch_of(GRAPH, X, (3, 2), SEEDS)
    square = batch.union()
    expected = module(X[batch.input_ids], square.edge_index, square.edge["weight"])[:4]
    for handle in (True, False):
        ours = as_batch_model(module)(batch_of(GRAPH, X, (3, 2), SEEDS, handle=handle))
        assert_close(ours, expected, 1e-14)


def test_a_second_argument_called_adj_t_is_given_edges() -> None:
    """As in OGB's examples: PyG's convs take edges there too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv_of("gcn", 6, 3)

        def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
            return self.conv(x, adj_t)

    module = Net()
    graph = random_graph(loops=True)
    ours = as_batch_model(module)(batch_of(graph, X, (-1,), torch.arange(50)))
    assert_close(ours, module(X, graph.edge_index()))
    data = dataset_of(graph, X)
    assert hl.Trainer(Net(), data, hl.Sampled(fanouts=(-1,), batch_size=50), epochs=1, show=False).fit().finished
    with pytest.raises(ValueError, match=r"forward\(x, edge_index, edge_weight\)"):
        as_batch_model(module)(batch_of(GRAPH, X, (-1,), SEEDS))


def test_on_all_edges_a_module_equals_itself_on_the_whole_graph() -> None:
    module = TwoHops()
    other = twin(module)
    ours = Whole(module)(batch_of(GRAPH, X, (-1, -1), SEEDS))
    expected = other(X, GRAPH.edge_index(), GRAPH.edge["weight"])[SEEDS]
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    assert_same_gradients(module, other)


def test_a_conv_alone_is_a_module_too() -> None:
    conv = pyg.GATConv(6, 3, edge_dim=2).double()
    ours = as_batch_model(conv)(batch_of(GRAPH, X, (-1,), SEEDS))
    assert_close(ours, conv(X, GRAPH.edge_index(), GRAPH.edge["attr"])[SEEDS])


def test_features_are_brought_to_the_precision_of_the_module() -> None:
    module = TwoHops()
    out = as_batch_model(module)(batch_of(GRAPH, X.float(), (2, 2), SEEDS))
    assert out.dtype == torch.float64


def test_parameters_and_mode_are_shared() -> None:
    module = TwoHops().eval()
    batch_model = as_batch_model(module)
    assert isinstance(batch_model, Whole)
    assert not batch_model.training
    assert [id(p) for p in batch_model.parameters()] == [id(p) for p in module.parameters()]
    assert as_batch_model(batch_model) is batch_model


def test_a_gnn_and_a_pyg_model_are_walked_layer_by_layer() -> None:
    gnn = GNN([pyg.SAGEConv(6, 3)])
    assert as_batch_model(gnn) is gnn
    assert isinstance(as_batch_model(pyg.models.GCN(6, 8, 2, 3)), GNN)


@pytest.mark.parametrize("module", [nn.Linear(6, 3), nn.Bilinear(6, 6, 3)], ids=lambda m: type(m).__name__)
def test_another_signature_is_refused_with_what_to_write(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"{type(module).__name__}.forward takes .*: write forward\(x, edge_index"):
        as_batch_model(module)


def test_a_batch_without_features_is_refused() -> None:
    with pytest.raises(ValueError, match="no features"):
        Whole(TwoHops())(batch_of(GRAPH, None, (2, 2)))


class Doubled(pyg.GraphSAGE):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(2 * x, edge_index)


def test_a_pyg_model_with_a_forward_of_its_own_is_run_by_that_forward():
    model = Doubled(8, 4, 2, 3)
    batch_model = as_batch_model(model)
    assert isinstance(batch_model, Traced)
    assert batch_model.module is model


def test_a_pyg_model_with_hooks_is_run_by_its_own_forward():
    model = pyg.GraphSAGE(8, 4, 2, 3)
    model.register_forward_hook(lambda *_: None)
    assert isinstance(as_batch_model(model), Whole)


def test_a_gnn_with_hooks_or_a_forward_put_on_it_is_refused():
    model = GNN([pyg.SAGEConv(6, 3)])
    model.register_forward_hook(lambda module, inputs, out: -out)
    with pytest.raises(ValueError, match="GNN has hooks"):
        as_batch_model(model)
    patched = GNN([pyg.SAGEConv(6, 3)])
    patched.forward = lambda batch: torch.zeros(1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="GNN overrides forward"):
        as_batch_model(patched)


def test_a_pyg_model_with_a_forward_put_on_it_runs_as_a_whole():
    model = pyg.GraphSAGE(6, 8, 2, 3)
    model.forward = lambda x, edge_index: x[:, :3]  # type: ignore[method-assign]
    assert isinstance(as_batch_model(model), Whole)


def test_a_gnn_with_a_forward_of_its_own_is_refused():
    class Negated(GNN):
        def forward(self, batch: Batch) -> Tensor:
            return -super().forward(batch)

    with pytest.raises(ValueError, match=r"Negated overrides forward.*encode, layer or decode"):
        as_batch_model(Negated([pyg.SAGEConv(8, 3)]))


def test_a_module_that_runs_on_all_edges_at_once_has_one_list_per_node() -> None:
    """Else a batch would have nodes that no kept edge leads from, and PyG's loaders have none."""
    data = dataset_of(random_graph(), X)
    loader = hl.Sampled(fanouts=(3, 3, 3), batch_size=5).loader(data, model=TwoHops())
    for batch in loader.epoch(1):
        square = batch.union()
        reached = torch.cat([torch.arange(batch.num_seeds), square.edge_index[0]]).unique()
        assert torch.equal(reached, torch.arange(square.num_src))
