"""Rows of the other two tables: norms and jumping knowledge in a model of layers, and the models that PyG brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.data.dataset import Dataset
from hopline.nn import GNN
from tests.conv_table import own
from tests.conv_table.cases import ARGUMENTS, Case, conv, degrees
from tests.conv_table.graph import ATTR_WIDTH, HIDDEN, NUM_CLASSES, NUM_FEATURES, NUM_NODES
from tests.support.helpers import mlp

# ---- norms and jumping knowledge


def norm(kind: str, text: str, make_norm: Callable[[int], nn.Module], needs: str = "") -> Case:
    """A norm between two layers of SAGEConv."""

    def make() -> nn.Module:
        convs = [pyg.SAGEConv(NUM_FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, NUM_CLASSES)]
        return GNN(convs, norm=[make_norm(HIDDEN)])

    def plain(model: nn.Module, data: Dataset) -> Tensor:
        assert isinstance(model, GNN)
        x, edge_index = _inputs(data)
        x = model.norms[0](model.convs[0](x, edge_index)).relu()
        return model.convs[1](x, edge_index)

    return Case(kind, text, make, None if needs else plain, needs=needs)


def jumping(text: str, jk: Any) -> Case:
    """Jumping knowledge over two layers of SAGEConv."""

    def make() -> nn.Module:
        convs = [pyg.SAGEConv(NUM_FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, HIDDEN)]
        return GNN(convs, jk=jk, head=nn.Linear(2 * HIDDEN if jk == "cat" else HIDDEN, NUM_CLASSES))

    def plain(model: nn.Module, data: Dataset) -> Tensor:
        assert isinstance(model, GNN)
        x, edge_index = _inputs(data)
        first = model.convs[0](x, edge_index).relu()
        last = model.convs[1](first, edge_index).relu()
        return model.lin(last if jk == "last" else model.jk([first, last]))

    return Case("JumpingKnowledge", text, make, plain)


def _inputs(data: Dataset) -> tuple[Tensor, Tensor]:
    return data.x.read(torch.arange(data.num_nodes)), data.graph.edge_index()


NORMS = [
    norm("BatchNorm", "", pyg.BatchNorm),
    norm("BatchNorm", "track_running_stats=False", lambda c: pyg.BatchNorm(c, track_running_stats=False)),
    norm("torch.nn.BatchNorm1d", "", nn.BatchNorm1d),
    norm("torch.nn.SyncBatchNorm", "", nn.SyncBatchNorm),
    norm("torch.nn.Sequential", "BatchNorm1d, Linear", lambda c: nn.Sequential(nn.BatchNorm1d(c), nn.Linear(c, c))),
    norm("LayerNorm", "mode='node'", lambda c: pyg.LayerNorm(c, mode="node")),
    norm("LayerNorm", "mode='graph'", lambda c: pyg.LayerNorm(c, mode="graph")),
    norm("torch.nn.LayerNorm", "", nn.LayerNorm),
    norm("torch.nn.RMSNorm", "", nn.RMSNorm),
    norm("torch.nn.GroupNorm", "2 groups", lambda c: nn.GroupNorm(2, c)),
    norm("GraphNorm", "", pyg.GraphNorm),
    norm("torch.nn.Sequential", "GraphNorm", lambda c: nn.Sequential(pyg.GraphNorm(c))),
    norm("PairNorm", "", lambda c: pyg.PairNorm()),
    norm("PairNorm", "scale_individually=True", lambda c: pyg.PairNorm(scale_individually=True)),
    norm("InstanceNorm", "", pyg.InstanceNorm),
    norm("GraphSizeNorm", "", lambda c: pyg.GraphSizeNorm()),
    norm("MeanSubtractionNorm", "", lambda c: pyg.MeanSubtractionNorm()),
    norm("DiffGroupNorm", "groups=2", lambda c: pyg.DiffGroupNorm(c, 2)),
    norm("MessageNorm", "", lambda c: pyg.MessageNorm(), needs="messages beside rows: it is part of GENConv"),
    norm("HeteroBatchNorm", "num_types=2", lambda c: pyg.HeteroBatchNorm(c, 2), needs="types of nodes"),
    norm("HeteroLayerNorm", "num_types=2", lambda c: pyg.HeteroLayerNorm(c, 2), needs="types of nodes"),
    norm("a norm of your own", "rows less their mean over all nodes", lambda c: own.CentredNorm()),
    norm("a norm of your own", "each row by its own length", lambda c: own.ScaledNorm()),
    *(jumping(f"'{mode}'", mode) for mode in ("cat", "max", "lstm", "last")),
]
"""Every class of `torch_geometric.nn.norm`, and others."""


# ---- models


def basic(kind: str, *, uses: str = "", ignores: str = "", text: str | None = None, **options: Any) -> Case:
    """A model of PyG that is made of layers."""

    def make() -> nn.Module:
        return getattr(pyg.models, kind)(NUM_FEATURES, HIDDEN, 2, NUM_CLASSES, **options)

    text = ", ".join(f"{name}={value!r}" for name, value in options.items()) if text is None else text
    used = (uses,) if uses else ()
    return Case(kind, text, make, _call(used), (uses or ignores,) if uses or ignores else (), used)


def module(kind: str, text: str, make: Callable[[], nn.Module], *, uses: str = "", needs: str = "") -> Case:
    """Any other module. needs: what PyG needs to call it beside (x, edge_index)."""
    used = (uses,) if uses else ()
    return Case(kind, text, make, None if needs else _call(used), used, used, needs)


def _call(uses: tuple[str, ...]) -> Callable[[nn.Module, Dataset], Tensor]:
    def plain(model: nn.Module, data: Dataset) -> Tensor:
        return model(*_inputs(data), **{ARGUMENTS[name]: data.graph.edge[name] for name in uses})

    return plain


def _encoder() -> nn.Module:
    return pyg.GCN(NUM_FEATURES, HIDDEN, 2)


PNA = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": degrees()}
PNA_TEXT = "aggregators=['mean', 'max', 'std'], scalers=['identity', 'amplification']"
NODE_NORM = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
LINKS = "pairs of nodes, whose links it predicts"
GRAPHS = "a batch vector: it makes one row per graph"
MOLECULES = "atoms and their positions"
WALKS = "random walks instead of features"
PAIR = "(x, pos_edge_index, neg_edge_index)"

MODELS = [
    basic("GCN"),
    basic("GCN", uses="weight"),
    basic("GCN", ignores="attr"),
    *(basic("GCN", jk=mode) for mode in ("cat", "max", "lstm", "last")),
    basic("GCN", norm="batch_norm"),
    basic("GCN", norm="layer_norm"),
    basic("GCN", **NODE_NORM, act_first=True, act="elu"),
    basic("GCN", norm="graph_norm"),
    basic("GCN", cached=True),
    basic("GraphSAGE"),
    basic("GraphSAGE", aggr="max", jk="cat"),
    basic("GraphSAGE", norm="batch_norm", jk="max"),
    basic("GraphSAGE", aggr="lstm"),
    basic("GIN"),
    basic("GIN", norm="batch_norm"),
    basic("GIN", **NODE_NORM, train_eps=True),
    basic("GAT"),
    basic("GAT", v2=True, heads=2, jk="cat"),
    basic("GAT", edge_dim=2, uses="attr"),
    basic("GAT", residual=True, ignores="attr"),
    basic("PNA", **PNA, text=PNA_TEXT),
    basic("PNA", **PNA, jk="lstm", text=f"{PNA_TEXT}, jk='lstm'"),
    basic("EdgeCNN"),
    basic("EdgeCNN", norm="batch_norm"),
    basic("EdgeCNN", **NODE_NORM, jk="max"),
    module("a module of your own", "two SAGEConv", lambda: own.Module(pyg.SAGEConv)),
    module("a module of your own", "two GATConv", lambda: own.Module(pyg.GATConv)),
    module("a module of your own", "two GCNConv", lambda: own.Module(pyg.GCNConv)),
    module(
        "a module of your own",
        "two GCNConv(cached=True)",
        lambda: own.Module(lambda a, b: pyg.GCNConv(a, b, cached=True)),
    ),
    module("a module of your own", "SAGEConv and a mean over all nodes", lambda: own.Pooling(pyg.SAGEConv)),
    module("a module of your own", "forward returns a tuple", lambda: own.Tuple(pyg.SAGEConv), needs="one output"),
    module(
        "a module of your own", "forward(x, edge_index, scale)", lambda: own.Argument(pyg.SAGEConv), needs="`scale`"
    ),
    conv(
        "DeepGCNLayer",
        lambda a, b: pyg.DeepGCNLayer(pyg.SAGEConv(a, a), pyg.LayerNorm(a, mode="node"), nn.ReLU()),
        widths=1,
        text="SAGEConv, LayerNorm(mode='node')",
    ),
    conv(
        "GroupAddRev",
        lambda a, b: pyg.GroupAddRev(pyg.SAGEConv(a // 2, a // 2), num_groups=2, disable=True),
        widths=1,
        text="SAGEConv, num_groups=2, disable=True",
    ),
    module("GraphUNet", "depth=1", lambda: pyg.GraphUNet(NUM_FEATURES, HIDDEN, NUM_CLASSES, 1)),
    replace(module("RECT_L", "", lambda: pyg.models.RECT_L(NUM_FEATURES, HIDDEN)), num_layers=1),
    module("PMLP", "num_layers=2, norm=False", lambda: pyg.PMLP(NUM_FEATURES, HIDDEN, NUM_CLASSES, 2, norm=False)),
    module("LINKX", "num_layers=1", lambda: pyg.LINKX(NUM_NODES, NUM_FEATURES, HIDDEN, NUM_CLASSES, 1)),
    module("LabelPropagation", "num_layers=2, alpha=0.9", lambda: pyg.LabelPropagation(2, 0.9)),
    module(
        "CorrectAndSmooth",
        "",
        lambda: pyg.CorrectAndSmooth(1, 0.5, 1, 0.5),
        needs="predictions and labels: call it on those of a run",
    ),
    module("MLP", "", lambda: pyg.MLP([NUM_FEATURES, NUM_CLASSES]), needs="no graph"),
    module("MetaLayer", "", lambda: pyg.MetaLayer(), needs="one output: it returns (x, edge_attr, u)"),
    module("GAE", "", lambda: pyg.GAE(_encoder()), needs=f"{LINKS}; its encoder can be trained"),
    module("VGAE", "", lambda: pyg.VGAE(_encoder()), needs=f"{LINKS}; its encoder can be trained"),
    module(
        "ARGA", "", lambda: pyg.ARGA(_encoder(), mlp(HIDDEN, HIDDEN, 1)), needs=f"{LINKS}; its encoder can be trained"
    ),
    module(
        "ARGVA", "", lambda: pyg.ARGVA(_encoder(), mlp(HIDDEN, HIDDEN, 1)), needs=f"{LINKS}; its encoder can be trained"
    ),
    module(
        "DeepGraphInfomax",
        "",
        lambda: pyg.DeepGraphInfomax(HIDDEN, _encoder(), lambda z, *_: z.mean(0), lambda *a: a),
        needs="a corrupted graph beside its own",
    ),
    module("InnerProductDecoder", "", lambda: pyg.InnerProductDecoder(), needs=LINKS),
    module("ARLinkPredictor", "", lambda: pyg.models.ARLinkPredictor(NUM_FEATURES, HIDDEN), needs=LINKS),
    module("LPFormer", "", lambda: pyg.models.LPFormer(NUM_FEATURES, HIDDEN), needs=LINKS),
    module(
        "LightGCN", "", lambda: pyg.LightGCN(NUM_NODES, HIDDEN, 2), needs="no features: it is called with edges alone"
    ),
    module("Node2Vec", "", lambda: pyg.Node2Vec(torch.tensor([[0, 1], [1, 0]]), HIDDEN, 2, 2), needs=WALKS),
    module(
        "MetaPath2Vec",
        "",
        lambda: pyg.MetaPath2Vec({("a", "to", "a"): torch.tensor([[0, 1], [1, 0]])}, HIDDEN, [("a", "to", "a")], 2, 2),
        needs=WALKS,
    ),
    module(
        "SignedGCN",
        "",
        lambda: pyg.SignedGCN(NUM_FEATURES, HIDDEN, 2),
        needs=f"positive and negative edges apart, {PAIR}",
    ),
    module(
        "SGFormer",
        "",
        lambda: pyg.models.SGFormer(NUM_FEATURES, HIDDEN, NUM_CLASSES),
        needs="a batch vector: it attends to all nodes of a graph",
    ),
    module(
        "Polynormer",
        "",
        lambda: pyg.models.Polynormer(NUM_FEATURES, HIDDEN, NUM_CLASSES),
        needs="a batch vector: it attends to all nodes of a graph",
    ),
    module(
        "AttentiveFP",
        "",
        lambda: pyg.AttentiveFP(NUM_FEATURES, HIDDEN, NUM_CLASSES, ATTR_WIDTH, 2, 2),
        uses="attr",
        needs=GRAPHS,
    ),
    module(
        "NeuralFingerprint",
        "",
        lambda: pyg.models.NeuralFingerprint(NUM_FEATURES, HIDDEN, NUM_CLASSES, 2),
        needs="graphs: it makes one row of each",
    ),
    module("SchNet", "", lambda: pyg.SchNet(HIDDEN, HIDDEN, 1, 2), needs=MOLECULES),
    module("DimeNet", "", lambda: pyg.DimeNet(HIDDEN, 1, 1, 1, 2, 2), needs=MOLECULES),
    module("DimeNetPlusPlus", "", lambda: pyg.DimeNetPlusPlus(HIDDEN, 1, 1, 1, 1, 1, 2, 2), needs=MOLECULES),
    module("GNNFF", "", lambda: pyg.GNNFF(HIDDEN, HIDDEN, 1), needs=MOLECULES),
    module("ViSNet", "", lambda: pyg.models.ViSNet(num_layers=1, hidden_channels=8), needs=MOLECULES),
    module("RENet", "", lambda: pyg.RENet(NUM_NODES, 2, HIDDEN, 2), needs="events in time"),
    module(
        "TGNMemory",
        "",
        lambda: pyg.TGNMemory(
            NUM_NODES, 1, HIDDEN, 1, pyg.models.tgn.IdentityMessage(1, HIDDEN, 1), pyg.models.tgn.LastAggregator()
        ),
        needs="events in time",
    ),
    module("GPSE", "", lambda: pyg.models.GPSE(dim_inner=8, layers_mp=1), needs=GRAPHS),
    module(
        "GPSENodeEncoder",
        "",
        lambda: pyg.models.GPSENodeEncoder(8, 4, 4, NUM_FEATURES),
        needs="position encodings of GPSE",
    ),
    module("MaskLabel", "", lambda: pyg.MaskLabel(NUM_CLASSES, NUM_FEATURES), needs="labels as inputs"),
    module(
        "HeteroJumpingKnowledge",
        "",
        lambda: pyg.models.HeteroJumpingKnowledge(["n"], "cat"),
        needs="dicts by type of node",
    ),
    module(
        "JumpingKnowledge",
        "",
        lambda: pyg.JumpingKnowledge("cat"),
        needs="the outputs of layers: give it to hl.nn.GNN as jk=",
    ),
]
"""Every class of `torch_geometric.nn.models`, and modules that users write."""
