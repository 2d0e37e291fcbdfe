"""Models by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import APPNP, GCNConv

import hopline as hl
from hopline import infer
from hopline.run.model_settings import NAMES, ModelSpec
from hopline.run.models import make_model
from tests.support.runs import fit, losses, method, small


def build_model(data: hl.Dataset, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden": 8, "layers": 2} | settings
    return make_model(ModelSpec(**options), data)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_builds_a_model_that_trains_and_infers(name: str):
    data = small()
    model = build_model(data, name=name)
    before = [p.detach().clone() for p in model.parameters()]
    fit(data, model, method(batch_size=150), epochs=1)
    assert all(p.grad is not None for p in model.parameters())
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    scores = infer.exact(model, data)
    assert scores.shape == (data.num_nodes, data.num_classes)
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", ["sage", "gat", "gcnii"])
@pytest.mark.parametrize(
    "settings",
    [
        {"jk": "cat"},
        {"jk": "max"},
        {"jk": "lstm"},
        {"jk": "last"},
        {"norm": "batch"},
        {"norm": "layer", "residual": "after"},
    ],
    ids=str,
)
def test_options_combine_with_any_number_of_layers(name: str, settings: dict[str, Any]):
    data = small()
    for layers in (1, 3):
        how = method(fanouts=(3,) * layers)
        run = fit(data, build_model(data, name=name, layers=layers, dropout=0.1, **settings), how, epochs=3)
        assert losses(run)[-1] < losses(run)[0]


@pytest.mark.parametrize("aggr", ["mean", "max", "sum"])
def test_the_aggregation_reaches_the_convs(aggr: str):
    for name in ("sage", "graphconv"):
        model = build_model(small(), name=name, conv={"aggr": aggr})
        assert {conv.aggr for conv in model.convs} == {aggr}  # type: ignore[union-attr]


def test_appnp_is_pygs_own_after_two_linear_layers():
    data = small()
    model = build_model(data, name="appnp", layers=10, conv={"alpha": 0.2}).eval()
    x = model.encoder(data.x[torch.arange(400)])  # type: ignore[operator]
    expected = APPNP(K=10, alpha=0.2)(x, data.graph.edge_index())
    torch.testing.assert_close(infer.exact(model, data), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"appnp .*leave out model\.jk"):
        build_model(data, name="appnp", jk="cat")


@pytest.mark.parametrize("name", ["gcn", "pna", "gat"])
@pytest.mark.parametrize("jk", ["none", "cat", "max"])
def test_linear_layers_can_stand_before_and_after_the_convs(name: str, jk: str):
    data = small()
    model = build_model(data, name=name, linear=True, jk=jk, norm="batch", residual="before")
    assert model.lin.in_features == 8 * (3 if jk == "cat" else 1)  # type: ignore[union-attr]
    run = fit(data, model, method(), epochs=3)
    assert losses(run)[-1] < losses(run)[0]


def test_options_of_attention_gcnii_and_pna_reach_their_convs():
    data = small()
    gat: Any = build_model(data, name="gat", out_heads=3, act="elu", conv={"heads": 2, "dropout": 0.3, "bias": False})
    first, last = gat.convs
    assert (first.heads, first.concat, last.heads, last.concat) == (2, True, 3, False)
    assert (first.dropout, last.dropout) == (0.3, 0.3)
    assert (first.bias, last.bias) == (None, None)
    two: Any = build_model(data, name="gcnii", conv={"shared_weights": False})
    one: Any = build_model(data, name="gcnii")
    assert (two.convs[0].weight2 is None, one.convs[0].weight2 is None) == (False, True)
    pna: Any = build_model(data, name="pna", conv={"aggregators": "mean", "scalers": ["identity", "amplification"]})
    assert pna.convs[0].aggr_module.scaler == ["identity", "amplification"]
    assert pna.convs[0].post_nns[0][0].in_channels == 8 + 1 * 2 * 8, "a list of one may be typed without a comma"


def test_a_residual_is_added_before_or_after_the_activation():
    how = {
        residual: (model.residual, model.residual_first)
        for residual in ("none", "after", "before")
        for model in [build_model(small(), residual=residual)]
    }
    assert how == {"none": (False, False), "after": (True, False), "before": (True, True)}


def test_an_mlp_ignores_the_edges():
    data = small()
    model = build_model(data, name="mlp")
    none = dataclasses.replace(data, graph=hl.Graph(torch.zeros(401, dtype=torch.int64), torch.empty(0).int()))
    torch.testing.assert_close(infer.exact(model, data), infer.exact(model, none))
    assert not torch.equal(infer.exact(build_model(data), data), infer.exact(build_model(data), none))


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer"])
def test_heads_that_do_not_divide_the_width_are_refused(name: str):
    with pytest.raises(ValueError, match=r"model\.hidden=10 .*model\.conv\.heads=4"):
        build_model(small(), name=name, hidden=10)


def test_a_mistyped_name_gets_the_nearest_one():
    with pytest.raises(ValueError, match=r"'gatt'.*'gat'\?.*sage, gcn"):
        build_model(small(), name="gatt")


def test_a_dataset_without_labels_is_refused():
    with pytest.raises(ValueError, match=r"no labels .*convert"):
        build_model(dataclasses.replace(small(), y=None, num_classes=0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 0}, "must be at least 1"),
        ({"out_heads": 0}, "model.out_heads must be at least 1, not 0"),
        ({"layers": 0}, "must be at least 1"),
        ({"residual": True}, "'none' or 'after' or 'before', not True"),
        ({"conv": {"aggr": ("mean", "max")}}, "conv must be a dict"),
        ({"conv": {"dropout": float("inf")}}, "conv must be a dict"),
        ({"dropout": 1.5}, r"model.dropout must be between 0 and 1, not 1.5"),
        ({"input_dropout": -0.1}, r"model.input_dropout must be between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ModelSpec(**settings)


@pytest.mark.parametrize(
    ("name", "conv", "message"),
    [
        ("gat", {"head": 2}, r"Unknown key 'model.conv.head'. Did you mean 'heads'\? GATConv takes heads, negative_s"),
        ("sage", {"heads": 2}, r"Unknown key 'model.conv.heads'. SAGEConv takes aggr, normalize, root_weight, project"),
        ("gat", {"concat": True}, "Unknown key 'model.conv.concat'"),
        ("sage", {"in_channels": 3}, "Unknown key 'model.conv.in_channels'"),
        ("gcnii", {"layer": 1}, "Unknown key 'model.conv.layer'"),
        ("pna", {"deg": 1}, "Unknown key 'model.conv.deg'"),
        ("appnp", {"K": 2}, "Unknown key 'model.conv.K'"),
        ("mlp", {"aggr": "max"}, "Unknown key 'model.conv.aggr'. Alone takes no keywords"),
        ("gcn", {"bias": "flase"}, "model.conv.bias must be bool, not 'flase'"),
        ("gat", {"heads": 0}, "model.conv.heads must be at least 1, not 0"),
        ("gat", {"heads": "two"}, "model.conv.heads must be at least 1, not two"),
        ("gat", {"dropout": 2.0}, "model.conv.dropout must be between 0 and 1, not 2.0"),
        ("appnp", {"alpha": 0}, "set model.conv.alpha above 0"),
        ("gcnii", {"alpha": -1}, "model.conv.alpha must be between 0 and 1, not -1"),
        ("sage", {"aggr": "mode"}, "SAGEConv cannot be made with model.conv.aggr=mode: .*mode"),
        ("pna", {"scalers": []}, "model.conv.scalers must name at least one"),
    ],
)
def test_what_the_conv_does_not_take_is_refused(name: str, conv: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build_model(small(), name=name, conv=conv)


def one_layer(spec: ModelSpec, data: hl.Dataset) -> nn.Module:
    return hl.nn.GNN([GCNConv(data.num_features, data.num_classes)])


def no_model(spec: ModelSpec, data: hl.Dataset) -> str:
    return "a model"


def test_a_function_of_the_users_own_makes_the_model():
    data = small()
    model = build_model(data, name=f"{__name__}:one_layer")
    assert infer.exact(model, data).shape == (400, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:make", r"there is no module 'nowhere.at_all' here: .* type model=path/to/file.py:make"),
        (
            "tests.support.runs:methd",
            r"there is no 'methd' in tests.support.runs. Did you mean model=tests.support.runs:method?",
        ),
        (f"{__name__}:no_model", "returned str: return a torch.nn.Module"),
    ],
)
def test_what_is_no_function_for_a_model_is_refused(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        build_model(small(), name=name)
