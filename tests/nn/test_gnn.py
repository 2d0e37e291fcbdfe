"""`GNN` against its documented maths written out with plain PyG, and PyG's own models seen as layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from hopline.core.row_handles import Rows
from hopline.nn import GNN, as_batch_model
from hopline.nn.gnn import out_width
from hopline.tables import SparseTable, TensorTable
from tests.support.helpers import (
    GNN_OPTIONS,
    assert_close,
    assert_same_gradients,
    backward,
    batch_of,
    conv_of,
    gnn_of,
    plain_gnn,
    randn,
    random_graph,
    stack_of,
    twin,
    with_running_means,
)

GRAPH = random_graph(loops=True)
X = randn(50, 6)
SEEDS = torch.tensor([4, 0, 49, 17])


def sage(*widths: int) -> list[nn.Module]:
    return stack_of("sage-mean", *widths)


@pytest.mark.parametrize("name", GNN_OPTIONS)
@pytest.mark.parametrize("handle", [True, False], ids=["handle", "tensor"])
def test_every_option_is_its_documented_maths(name: str, handle: bool) -> None:
    model = with_running_means(gnn_of(name))
    other = twin(model)
    batch = batch_of(GRAPH, X, (-1,) * model.num_layers, SEEDS, handle=handle)
    ours = model(batch)
    expected = plain_gnn(other, X, GRAPH)[SEEDS]  # type: ignore[arg-type]
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["plain", "encoder", "gcn2", "residual-at-the-input", "everything"])
def test_features_of_any_precision_are_converted_to_that_of_the_model(name: str, stored: torch.dtype) -> None:
    model = gnn_of(name).float().eval()
    x = X.to(stored)
    for handle in (True, False):
        batch = batch_of(GRAPH, x, (-1,) * model.num_layers, SEEDS, handle=handle)
        assert_close(model(batch), plain_gnn(model, x.float(), GRAPH)[SEEDS], 1e-4)


def test_sparse_features_pass_through_an_encoder_and_through_gcn() -> None:
    x = X * (X > 0)
    norm_first = GNN(sage(6, 8, 3), encoder=nn.LayerNorm(6)).double()
    for model in (gnn_of("encoder"), norm_first, GNN(stack_of("gcn", 6, 8, 3))):
        blocks = batch_of(GRAPH, None, (-1, -1), SEEDS)
        ids = blocks.input_ids
        outputs = [model.eval()(replace(blocks, x=rows)) for rows in (Rows(SparseTable.from_dense(x), ids), x[ids])]
        assert_close(*outputs)


@pytest.mark.parametrize("name", ["gcn", "encoder", "gcn2"])
def test_input_dropout_of_sparse_features_is_that_of_dense_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = X * (X > 0)
    model = (GNN(stack_of("gcn", 6, 8, 3)).double() if name == "gcn" else gnn_of(name)).train()
    model.input_dropout = 0.6
    blocks = replace(batch_of(GRAPH, None, (-1,) * model.num_layers, SEEDS), key=5)
    ids = blocks.input_ids
    results = []
    for rows in (x[ids], Rows(SparseTable.from_dense(x), ids)):
        model.zero_grad()
        backward(out := model(replace(blocks, x=rows)))
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        monkeypatch.setattr(SparseTable, "read", None)  # what is stored sparse is never made dense
    for dense, sparse in zip(*results, strict=True):
        assert_close(sparse, dense)


# ---- PyG's own models

DEGREES = torch.tensor([3, 10, 20, 10, 5])
PNA = {"aggregators": ["mean", "max"], "scalers": ["identity", "attenuation"], "deg": DEGREES}
BASIC: dict[str, tuple[type, dict[str, Any]]] = {
    "sage": (pyg.models.GraphSAGE, {}),
    "sage-max-batch-norm": (pyg.models.GraphSAGE, {"aggr": "max", "norm": "batch_norm"}),
    "sage-layer-norm": (pyg.models.GraphSAGE, {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}),
    "sage-act-first": (pyg.models.GraphSAGE, {"norm": "batch_norm", "act_first": True, "act": "elu"}),
    "gcn": (pyg.models.GCN, {}),
    "gcn-jk-cat": (pyg.models.GCN, {"jk": "cat", "norm": "batch_norm"}),
    "gcn-jk-max": (pyg.models.GCN, {"jk": "max"}),
    "gcn-jk-lstm": (pyg.models.GCN, {"jk": "lstm"}),
    "gcn-jk-last": (pyg.models.GCN, {"jk": "last", "norm": "batch_norm"}),
    "gcn-no-output-width": (pyg.models.GCN, {"out_channels": None, "jk": "cat"}),
    "gat": (pyg.models.GAT, {"heads": 2}),
    "gatv2": (pyg.models.GAT, {"v2": True, "jk": "cat"}),
    "gin": (pyg.models.GIN, {}),
    "pna": (pyg.models.PNA, PNA),
    "edgecnn": (pyg.models.EdgeCNN, {}),
}


def basic(name: str) -> nn.Module:
    torch.manual_seed(0)
    make, options = BASIC[name]
    return make(6, 8, 3, **{"out_channels": 3, "dropout": 0.5, **options}).double()


@pytest.mark.parametrize("name", BASIC)
def test_a_pyg_model_equals_its_own_forward(name: str) -> None:
    model = basic(name).eval()
    other = twin(model)
    ours = as_batch_model(model)(batch_of(GRAPH, X, (-1, -1, -1), SEEDS))
    expected = other(X, GRAPH.edge_index())[SEEDS]
    assert_close(ours, expected)
    backward(ours)
    backward(expected)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("name", ["sage-max-batch-norm", "gcn-jk-lstm", "gat", "gin", "pna"])
def test_a_pyg_model_shares_its_parameters_and_their_names(name: str) -> None:
    model = basic(name)
    batch_model = as_batch_model(model)
    assert {n: id(p) for n, p in batch_model.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert batch_model.state_dict().keys() == model.state_dict().keys()
    assert isinstance(batch_model, GNN)
    assert batch_model.dropout == 0.5
    assert as_batch_model(batch_model) is batch_model


@pytest.mark.parametrize("training", [True, False])
def test_a_pyg_model_keeps_its_mode(training: bool) -> None:
    model = basic("sage").train(training)
    batch_model = as_batch_model(model)
    batch = batch_of(GRAPH, X, (-1, -1, -1), SEEDS)
    assert batch_model.training == training
    assert torch.equal(batch_model(batch), as_batch_model(model.eval())(batch)) != training


@pytest.mark.parametrize("weight", [False, True])
def test_a_pyg_gcn_uses_the_graphs_edge_weights(weight: bool) -> None:
    graph = random_graph(weight=weight, loops=True)
    model = basic("gcn").eval()
    expected = model(X, graph.edge_index(), edge_weight=graph.edge.get("weight"))
    assert_close(as_batch_model(model)(batch_of(graph, X, (-1, -1, -1))), expected)


# ---- dropout


def gnn_with_dropout(p: float = 0.5, **options: Any) -> GNN:
    return GNN([conv_of("sage-mean", 6, 32)], jk="last", head=nn.Identity(), dropout=p, **options).double()


@pytest.mark.parametrize(
    "model", [gnn_with_dropout(), gnn_with_dropout(0.0, input_dropout=0.5)], ids=["hidden", "input"]
)
def test_a_node_has_the_same_mask_in_different_batches_of_one_step(model: GNN) -> None:
    large = model(batch_of(GRAPH, X, (-1,), torch.arange(50), key=3))
    small = model(batch_of(GRAPH, X, (-1,), SEEDS, key=3))
    assert_close(small, large[SEEDS], 1e-12)
    assert not torch.allclose(small, model(batch_of(GRAPH, X, (-1,), SEEDS, key=4)))


def test_layers_and_input_drop_independently() -> None:
    """With one mask for all layers, a column lost in one would be lost in the next."""
    ones = [pyg.SAGEConv(64, 64) for _ in range(2)]
    for name, parameter in nn.ModuleList(ones).named_parameters():
        nn.init.constant_(parameter, float(name.endswith("bias")))
    model = GNN(ones, jk="cat", head=nn.Identity(), dropout=0.5).double()
    out = model(batch_of(GRAPH, randn(50, 64), (2, 2)))
    masks = (out != 0).double().split(64, dim=1)
    agree = float((masks[0] == masks[1]).double().mean())
    assert 0.45 < agree < 0.55


def test_evaluation_drops_nothing() -> None:
    model = gnn_with_dropout(input_dropout=0.5).eval()
    batch = batch_of(GRAPH, X, (-1,), SEEDS)
    assert torch.equal(model(batch), GNN(list(model.convs), jk="last", head=nn.Identity())(batch))


def test_dropout_does_not_touch_the_global_generator_where_there_is_a_key() -> None:
    model = gnn_with_dropout()
    batch = batch_of(GRAPH, X, (-1,), SEEDS)
    model(batch)
    state = torch.get_rng_state()
    model(batch)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"convs": []}, "at least one conv"),
        ({"dropout": 1.5}, "between 0 and 1"),
        ({"input_dropout": -0.1}, "between 0 and 1"),
        ({"jk": "cat"}, "needs head="),
        ({"norm": "group"}, "'batch', 'layer'"),
        ({"norm": [nn.Identity()] * 5}, "2 convs, 5 norms"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GNN(**{"convs": sage(6, 8, 3), **arguments})


def test_a_batch_with_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 layers .*2 blocks"):
        gnn_of("plain")(batch_of(GRAPH, X, (2, 2)))


def test_an_initial_residual_of_another_width_is_refused() -> None:
    model = GNN(sage(8, 1), encoder=nn.Linear(6, 8), initial_residual=0.1).double()
    with pytest.raises(ValueError, match=r"width 8 .*layer 0, .*1.*head="):
        model(batch_of(GRAPH, X, (2,)))


# ---- names and widths


def test_the_rest_is_encoder_and_head_or_the_last_conv() -> None:
    def names(model: GNN) -> set[str]:
        rest = {id(p) for p in model.rest_parameters()}
        return {name for name, p in model.named_parameters() if id(p) in rest}

    assert {n.rpartition(".lin_")[0] for n in names(gnn_of("plain"))} == {"convs.2"}
    assert names(gnn_of("gcn2")) == {"encoder.weight", "encoder.bias", "lin.weight", "lin.bias"}
    assert names(gnn_of("appnp")) == {"encoder.2.weight", "encoder.2.bias"}
    batch_model = as_batch_model(pyg.GCN(6, 8, 2, 3))
    assert isinstance(batch_model, GNN)
    assert names(batch_model) == {"convs.1.bias", "convs.1.lin.weight"}


def test_parameter_names_are_pygs_own() -> None:
    theirs = pyg.models.GraphSAGE(6, 8, 2, 3, jk="cat", norm="batch_norm")
    ours = GNN([pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 8)], norm="batch", jk="cat", head=nn.Linear(16, 3))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("conv", "width"),
    [
        (pyg.SAGEConv(4, 7), 7),
        (pyg.GATConv(4, 7, heads=3), 21),
        (pyg.GATConv(4, 7, heads=3, concat=False), 7),
        (pyg.GCN2Conv(7, 0.1), 7),
        (pyg.GINConv(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7))), 7),
        (pyg.GINConv(pyg.MLP([4, 9, 7])), 7),
    ],
    ids=["sage", "gat-concat", "gat-mean", "gcn2", "gin", "gin of PyG's MLP"],
)
def test_the_output_width_of_a_conv_is_found(conv: nn.Module, width: int) -> None:
    assert out_width(conv) == width


def test_convs_without_input_widths_are_initialised_by_the_first_batch() -> None:
    model = GNN([pyg.SAGEConv(-1, 8), pyg.GATConv(-1, 3)])
    batch = batch_of(GRAPH, X.float(), (-1, -1), SEEDS)
    assert_close(model(batch), plain_gnn(model, X.float(), GRAPH)[SEEDS], 1e-5)


def test_rows_read_by_the_first_conv_are_not_asked_for_otherwise() -> None:
    assert gnn_of("plain").reads_rows
    assert not gnn_of("encoder").reads_rows
    assert not gnn_of("initial-residual-of-the-input").keeps_handle(TensorTable(X))
    assert gnn_of("plain").keeps_handle(TensorTable(X))
    assert not gnn_of("plain").keeps_handle(TensorTable(X.half()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"convs": pyg.SAGEConv(6, 3)}, r"list of modules, not of SAGEConv.*write GNN\(\[SAGEConv"),
        ({"convs": [pyg.SAGEConv]}, "list of modules, not of <class"),
        ({"head": "lin"}, "list of modules, not of 'lin'"),
        ({"act": "nope"}, "act must be a function of torch.nn.functional"),
        ({"norm": nn.LayerNorm(8)}, r"write norm=\[LayerNorm"),
    ],
    ids=["conv", "class", "head", "act", "norm"],
)
def test_arguments_of_a_wrong_kind_are_refused_with_what_to_write(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"convs": [pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)], **wrong}
    with pytest.raises((TypeError, ValueError), match=message):
        GNN(**arguments)


def test_convs_and_norms_may_come_in_any_list_of_modules() -> None:
    norms = nn.Sequential(nn.LayerNorm(8), nn.Identity())
    assert GNN(nn.Sequential(pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)), norm=norms).num_layers == 2  # type: ignore[arg-type]
