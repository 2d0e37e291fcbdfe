"""`GNN` against its documented maths written out with plain PyG, and PyG's own models seen as layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.batch import Rows
from hopline.graph import Graph
from hopline.nn import GNN, as_walkable
from hopline.nn.gnn import out_width
from hopline.tables import SparseTable, TensorTable
from tests.helpers import (
    assert_close,
    assert_same_gradients,
    backward,
    batch_of,
    conv_of,
    randn,
    random_graph,
    stack_of,
    stock,
    twin,
)

GRAPH = random_graph(loops=True)
X = randn(50, 6)
SEEDS = torch.tensor([4, 0, 49, 17])


def plain(model: GNN, x: Tensor, graph: Graph) -> Tensor:
    """A GNN in evaluation, written out over the whole graph."""
    act = model.act if model.act is not None else lambda v: v
    if model.encoder is not None:
        x = act(model.encoder(x))
    x0, outputs, last = x, [], len(model.convs) - 1
    for l, conv in enumerate(model.convs):
        before = x
        x = conv(x, x0, graph.edge_index()) if isinstance(conv, pyg.GCN2Conv) else stock(conv, x, graph)
        if model.initial_residual and not isinstance(conv, pyg.GCN2Conv):
            x = (1 - model.initial_residual) * x + model.initial_residual * x0
        if l < last or model.acts_last:
            x = model.norms[l](act(x)) if model.act_first else act(model.norms[l](x))
            x = x + before if model.residual and x.shape == before.shape else x
        outputs.append(x)
    if hasattr(model, "jk"):
        x = model.jk(outputs)
    return model.lin(x) if hasattr(model, "lin") else x


def sage(*widths: int) -> list[nn.Module]:
    return stack_of("sage-mean", *widths)


OPTIONS: dict[str, tuple[list[nn.Module], dict[str, Any]]] = {
    "plain": (sage(6, 8, 8, 3), {}),
    "no-activation": (sage(6, 8, 3), {"act": None}),
    "elu": (sage(6, 8, 3), {"act": "elu"}),
    "module-activation": (sage(6, 8, 3), {"act": nn.PReLU().double()}),
    "batch-norm": (sage(6, 8, 8, 3), {"norm": "batch"}),
    "layer-norm": (sage(6, 8, 8, 3), {"norm": "layer"}),
    "act-first": (sage(6, 8, 8, 3), {"norm": "layer", "act_first": True}),
    "residual": (sage(6, 8, 8, 3), {"residual": True}),
    "residual-at-the-input": (sage(6, 6, 3), {"residual": True}),
    "jk-last": (sage(6, 8, 8), {"jk": "last", "norm": "batch", "head": nn.Linear(8, 3)}),
    "jk-cat": (sage(6, 8, 8), {"jk": "cat", "norm": "layer", "head": nn.Linear(16, 3)}),
    "jk-max": (sage(6, 8, 8), {"jk": "max", "head": nn.Linear(8, 3)}),
    "jk-lstm": (sage(6, 8, 8), {"jk": "lstm", "head": nn.Linear(8, 3)}),
    "head": (sage(6, 8, 8), {"head": nn.Linear(8, 3)}),
    "encoder": (sage(8, 8, 3), {"encoder": nn.Linear(6, 8)}),
    "initial-residual": (sage(8, 8, 8), {"encoder": nn.Linear(6, 8), "initial_residual": 0.2, "head": nn.Linear(8, 3)}),
    "initial-residual-of-the-input": (sage(6, 6, 6), {"initial_residual": 0.2}),
    "gcn2": (
        [pyg.GCN2Conv(8, 0.1, 0.5, layer).double() for layer in (1, 2, 3)],
        {"encoder": nn.Linear(6, 8), "head": nn.Linear(8, 3), "dropout": 0.5},
    ),
    "everything": (
        sage(8, 8, 8, 8),
        {
            "encoder": nn.Linear(6, 8),
            "initial_residual": 0.1,
            "residual": True,
            "norm": "batch",
            "act_first": True,
            "jk": "cat",
            "head": nn.Linear(24, 3),
            "dropout": 0.5,
            "input_dropout": 0.3,
        },
    ),
}


def model_of(name: str) -> GNN:
    torch.manual_seed(0)
    convs, options = OPTIONS[name]
    return twin(GNN(convs, **options).double())  # type: ignore[return-value]


def warmed(model: GNN) -> GNN:
    """Batch norms with statistics that are not those of a new module, in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
            module.running_mean.copy_(randn(module.num_features, seed=8) / 4)
    return model.eval()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("handle", [True, False], ids=["handle", "tensor"])
def test_every_option_is_its_documented_maths(name: str, handle: bool) -> None:
    model = warmed(model_of(name))
    other = twin(model)
    batch = batch_of(GRAPH, X, (-1,) * model.num_layers, SEEDS, handle=handle)
    found, expected = model(batch), plain(other, X, GRAPH)[SEEDS]  # type: ignore[arg-type]
    assert_close(found, expected)
    backward(found)
    backward(expected)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["plain", "encoder", "gcn2", "residual-at-the-input", "everything"])
def test_features_of_any_precision(name: str, stored: torch.dtype) -> None:
    model = model_of(name).float().eval()
    x = X.to(stored)
    for handle in (True, False):
        batch = batch_of(GRAPH, x, (-1,) * model.num_layers, SEEDS, handle=handle)
        assert_close(model(batch), plain(model, x.float(), GRAPH)[SEEDS], 1e-4)


def test_sparse_features_pass_through_an_encoder_and_through_gcn() -> None:
    x = X * (X > 0)
    for model in (model_of("encoder"), GNN(stack_of("gcn", 6, 8, 3))):
        blocks = batch_of(GRAPH, None, (-1, -1), SEEDS)
        ids = blocks.input_ids
        outputs = [
            model.eval()(batch_with(blocks, rows)) for rows in (Rows(SparseTable.from_dense(x), ids), x[ids])
        ]
        assert_close(*outputs)


def batch_with(batch: Any, x: Rows | Tensor) -> Any:
    from dataclasses import replace

    return replace(batch, x=x)


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
    found = as_walkable(model)(batch_of(GRAPH, X, (-1, -1, -1), SEEDS))
    expected = other(X, GRAPH.edge_index())[SEEDS]
    assert_close(found, expected)
    backward(found)
    backward(expected)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("name", ["sage-max-batch-norm", "gcn-jk-lstm", "gat", "gin", "pna"])
def test_a_pyg_model_shares_its_parameters_and_their_names(name: str) -> None:
    model = basic(name)
    walk = as_walkable(model)
    assert {n: id(p) for n, p in walk.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert walk.state_dict().keys() == model.state_dict().keys()
    assert isinstance(walk, GNN)
    assert walk.dropout == 0.5
    assert as_walkable(walk) is walk


@pytest.mark.parametrize("training", [True, False])
def test_a_pyg_model_keeps_its_mode(training: bool) -> None:
    model = basic("sage").train(training)
    walk = as_walkable(model)
    batch = batch_of(GRAPH, X, (-1, -1, -1), SEEDS)
    assert walk.training == training
    assert torch.equal(walk(batch), as_walkable(model.eval())(batch)) != training


@pytest.mark.parametrize("weight", [False, True])
def test_a_pyg_gcn_uses_the_graphs_edge_weights(weight: bool) -> None:
    graph = random_graph(weight=weight, loops=True)
    model = basic("gcn").eval()
    expected = model(X, graph.edge_index(), edge_weight=graph.edge.get("weight"))
    assert_close(as_walkable(model)(batch_of(graph, X, (-1, -1, -1))), expected)


@pytest.mark.parametrize("norm", ["graph_norm", "pair_norm", "layer_norm"])
def test_a_pyg_model_with_a_norm_over_all_nodes_is_refused(norm: str) -> None:
    walk = as_walkable(pyg.models.GraphSAGE(6, 8, 2, 3, norm=norm))
    with pytest.raises(ValueError, match="averages over all nodes"):
        walk.check_blocks()


# ---- dropout


def dropping(p: float = 0.5, **options: Any) -> GNN:
    return GNN([conv_of("sage-mean", 6, 32)], jk="last", head=nn.Identity(), dropout=p, **options).double()


@pytest.mark.parametrize("model", [dropping(), dropping(0.0, input_dropout=0.5)], ids=["hidden", "input"])
def test_a_node_has_the_same_mask_in_different_batches_of_one_step(model: GNN) -> None:
    large = model(batch_of(GRAPH, X, (-1,), torch.arange(50), key=3))
    small = model(batch_of(GRAPH, X, (-1,), SEEDS, key=3))
    assert_close(small, large[SEEDS], 1e-12)
    assert not torch.allclose(small, model(batch_of(GRAPH, X, (-1,), SEEDS, key=4)))


def test_layers_and_input_drop_independently() -> None:
    """With one mask for all layers, a column lost in one would be lost in the next."""
    identity = nn.ModuleList([pyg.SAGEConv(64, 64) for _ in range(2)]).double()
    for conv in identity.children():
        for lin in (conv.lin_l, conv.lin_r):
            nn.init.zeros_(lin.weight)
            if lin.bias is not None:
                nn.init.ones_(lin.bias)
    masks = []
    model = GNN(identity, jk="cat", head=nn.Identity(), dropout=0.5).double()
    out = model(batch_of(GRAPH, randn(50, 64), (2, 2)))
    masks = (out != 0).double().split(64, dim=1)
    agree = float((masks[0] == masks[1]).double().mean())
    assert 0.45 < agree < 0.55


def test_evaluation_drops_nothing() -> None:
    model = dropping(input_dropout=0.5).eval()
    batch = batch_of(GRAPH, X, (-1,), SEEDS)
    assert torch.equal(model(batch), GNN(list(model.convs), jk="last", head=nn.Identity())(batch))


def test_dropout_does_not_touch_the_global_generator_where_there_is_a_key() -> None:
    model, batch = dropping(), batch_of(GRAPH, X, (-1,), SEEDS)
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
    with pytest.raises(ValueError, match="3 layers but the batch has 2 blocks"):
        model_of("plain")(batch_of(GRAPH, X, (2, 2)))


def test_an_initial_residual_of_another_width_is_refused() -> None:
    model = GNN(sage(8, 1), encoder=nn.Linear(6, 8), initial_residual=0.1).double()
    with pytest.raises(ValueError, match=r"width 8 into layer 0, whose width is 1.*head="):
        model(batch_of(GRAPH, X, (2,)))


@pytest.mark.parametrize("conv", [pyg.TAGConv(6, 3), pyg.ChebConv(6, 3, 3)], ids=lambda c: type(c).__name__)
def test_a_conv_of_several_hops_is_refused_by_name(conv: nn.Module) -> None:
    with pytest.raises(ValueError, match=type(conv).__name__):
        GNN([conv.double()])(batch_of(GRAPH, X, (2,)))


@pytest.mark.parametrize("norm", [pyg.GraphNorm(8), pyg.PairNorm(), pyg.LayerNorm(8, mode="graph")])
def test_norms_over_all_nodes_are_refused_by_name(norm: nn.Module) -> None:
    with pytest.raises(ValueError, match=type(norm).__name__):
        GNN(sage(6, 8, 3), norm=[norm]).check_blocks()


# ---- names and widths


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
    ],
    ids=["sage", "gat-concat", "gat-mean", "gcn2", "gin"],
)
def test_the_width_of_a_conv(conv: nn.Module, width: int) -> None:
    assert out_width(conv) == width


def test_convs_without_input_widths() -> None:
    model = GNN([pyg.SAGEConv(-1, 8), pyg.GATConv(-1, 3)])
    batch = batch_of(GRAPH, X.float(), (-1, -1), SEEDS)
    assert_close(model(batch), plain(model, X.float(), GRAPH)[SEEDS], 1e-5)


def test_rows_read_by_the_first_conv_are_not_asked_for_otherwise() -> None:
    assert model_of("plain").reads_rows
    assert not model_of("encoder").reads_rows
    assert not model_of("initial-residual-of-the-input").keeps_handle(TensorTable(X))
    assert model_of("plain").keeps_handle(TensorTable(X))
    assert not model_of("plain").keeps_handle(TensorTable(X.half()))
