"""What the table has rows for: every conv of PyG with the options that change how it reads its neighbours.

A row is a model of two layers of one conv, and what plain PyG makes of it. `conv("GCNConv", improved=True)` is one:
it is built as `GCNConv(in, out, improved=True)`, and called as `conv(x, edge_index)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import aggr

from hopline.data.dataset import Dataset
from hopline.nn import GNN
from tests.conv_table import own
from tests.conv_table.graph import ATTR_WIDTH, HIDDEN, NUM_CLASSES, NUM_FEATURES, NUM_TYPES, dataset
from tests.support.helpers import mlp

ARGUMENTS = {"weight": "edge_weight", "attr": "edge_attr", "type": "edge_type"}
"""Edge array of a graph -> argument of PyG's convs."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    kind: str
    """The class, as PyG calls it."""
    options: str
    """What it is built with beside its widths, as one types it."""
    make: Callable[[], nn.Module]
    """A new model. Raises ImportError where PyG needs a library that is not there."""
    plain: Callable[[nn.Module, Dataset], Tensor] | None
    """The model on the whole graph by PyG alone: [num_nodes, num_classes]. None if PyG needs more."""
    edge: tuple[str, ...] = ()
    """Edge arrays that the graph has."""
    uses: tuple[str, ...] = ()
    """Those of them that the model reads."""
    needs: str = ""
    """What PyG needs beside features, edges and edge arrays."""
    num_layers: int = 2

    @property
    def name(self) -> str:
        """Unlike any other case's: the class, its options, and edge arrays that it reads, or that it does not take."""
        takes = [ARGUMENTS[name] for name in self.uses]
        ignores = [f"{ARGUMENTS[name]} in the graph only" for name in self.edge if name not in self.uses]
        return " + ".join([f"{self.kind}({self.options})", *takes, *ignores])

    @property
    def exists(self) -> bool:
        """Whether the installed PyG has the class; those of users and of torch are always there."""
        pyg_has = any(hasattr(module, self.kind) for module in (pyg.conv, pyg.norm, pyg.models))
        return pyg_has or self.kind.startswith(("a ", "torch."))

    def data(self) -> Dataset:
        return dataset(*self.edge)

    def model(self) -> nn.Module:
        """A new model in float64, always with the same parameters."""
        torch.manual_seed(0)
        return self.make().double()


Build = Callable[[int, int], nn.Module]
"""(width of the input, width of the output) -> conv."""


def conv(
    kind: str,
    build: Build | None = None,
    *,
    text: str | None = None,
    uses: str | Sequence[str] = (),
    ignores: str | Sequence[str] = (),
    widths: Literal[0, 1, 2] = 2,
    encoder: bool = True,
    needs: str = "",
    **options: Any,
) -> Case:
    """A model of two convs.

    build: where the class is not built as `kind(in, out, **options)`. text: what it is built with, as one types it.
    uses, ignores: edge arrays of the graph that the conv reads, and those that it does not take.
    widths: how many the class is built with: 2, the input's and the output's; 1 or 0 if both are the same, and linear
    layers go before (unless encoder=False) and behind.
    needs: what PyG needs to call it beside these; nothing runs then.
    """
    uses = (uses,) if isinstance(uses, str) else tuple(uses)
    ignores = (ignores,) if isinstance(ignores, str) else tuple(ignores)
    make_conv: Build = build or (lambda *both: getattr(pyg.conv, kind)(*both[:widths], **options))

    def make() -> nn.Module:
        if widths == 2:
            return GNN([make_conv(NUM_FEATURES, HIDDEN), make_conv(HIDDEN, NUM_CLASSES)])
        width = HIDDEN if encoder else NUM_FEATURES
        first = nn.Linear(NUM_FEATURES, width) if encoder else None
        return GNN([make_conv(width, width) for _ in range(2)], encoder=first, head=nn.Linear(width, NUM_CLASSES))

    def plain(model: nn.Module, data: Dataset) -> Tensor:
        return plain_layers(model, data, uses)

    text = ", ".join(f"{name}={value!r}" for name, value in options.items()) if text is None else text
    edge = tuple(name for name in ARGUMENTS if name in uses + ignores)
    return Case(kind, text, make, None if needs else plain, edge, uses, needs)


def plain_layers(model: nn.Module, data: Dataset, uses: Sequence[str]) -> Tensor:
    """A GNN over the whole graph, as a PyG user writes it."""
    assert isinstance(model, GNN)
    edge_index, device = data.graph.edge_index(), next(model.parameters()).device
    edge = {ARGUMENTS[name]: data.graph.edge[name].to(device) for name in uses}
    x = data.x.read(torch.arange(data.num_nodes)).to(device)
    if model.encoder is not None:
        x = model.encoder(x).relu()
    x0 = x
    for l, layer in enumerate(model.convs):
        initial = (x0,) if isinstance(layer, pyg.GCN2Conv | pyg.FAConv) else ()
        x = layer(x, *initial, edge_index.to(device), **edge)
        if l < len(model.convs) - 1:
            x = x.relu()
    return model.lin(x) if hasattr(model, "lin") else x


def degrees() -> Tensor:
    """PNA's histogram of in-degrees."""
    return torch.bincount(dataset().graph.in_degrees())


def sage(text: str, make_aggr: Callable[[int], Any]) -> Case:
    """SAGEConv with an aggregation that is built for its width."""
    return conv("SAGEConv", lambda a, b: pyg.SAGEConv(a, b, aggr=make_aggr(a)), text=f"aggr={text}")


def pna(a: int, b: int, **options: Any) -> nn.Module:
    aggregators = ["mean", "min", "max", "std", "var", "sum"]
    scalers = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
    return pyg.PNAConv(a, b, aggregators, scalers, degrees(), **options)


def nnconv(a: int, b: int, **options: Any) -> nn.Module:
    return pyg.NNConv(a, b, mlp(ATTR_WIDTH, 5, a * b), **options)


def heads(kind: str, **options: Any) -> dict[str, Any]:
    """Arguments of `conv` for two heads whose rows are put side by side in the first layer and averaged in the last."""

    def build(a: int, b: int) -> nn.Module:
        make = getattr(pyg.conv, kind)
        if b == HIDDEN:
            return make(a, b // 2, heads=2, **options)
        return make(a, b, heads=2, concat=False, **options)

    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return {"kind": kind, "build": build, "text": f"heads=2{more}"}


CONVS = [
    # ---- plain sums, means and maxima
    conv("SimpleConv", widths=0),
    conv("SimpleConv", widths=0, encoder=False, text="as the first layer"),
    conv("SimpleConv", widths=0, aggr="mean", combine_root="self_loop"),
    conv("SimpleConv", widths=0, aggr="max", combine_root="sum", uses="weight"),
    conv("SAGEConv"),
    conv("SAGEConv", ignores=("weight", "attr", "type")),
    *(conv("SAGEConv", aggr=name) for name in ("sum", "max", "min", "mul", "var", "std", "softmax", "powermean")),
    conv("SAGEConv", aggr="median"),
    conv("SAGEConv", aggr=["mean", "max", "std"]),
    conv("SAGEConv", aggr="lstm"),
    conv("SAGEConv", project=True),
    conv("SAGEConv", normalize=True),
    conv("SAGEConv", root_weight=False),
    conv("SAGEConv", lambda a, b: pyg.SAGEConv((a, a), b), text="in_channels=(in, in)"),
    conv("SAGEConv", flow="target_to_source"),
    sage("SoftmaxAggregation(learn=True)", lambda a: aggr.SoftmaxAggregation(learn=True)),
    sage("PowerMeanAggregation(learn=True)", lambda a: aggr.PowerMeanAggregation(learn=True)),
    sage("QuantileAggregation(0.3)", lambda a: aggr.QuantileAggregation(0.3)),
    sage("GRUAggregation", lambda a: aggr.GRUAggregation(a, a)),
    sage("MLPAggregation", lambda a: aggr.MLPAggregation(a, a, 20, num_layers=1)),
    sage("AttentionalAggregation", lambda a: aggr.AttentionalAggregation(nn.Linear(a, 1))),
    sage("DeepSetsAggregation", lambda a: aggr.DeepSetsAggregation(nn.Linear(a, a), nn.Linear(a, a))),
    sage("SetTransformerAggregation", lambda a: aggr.SetTransformerAggregation(a)),
    sage("GraphMultisetTransformer", lambda a: aggr.GraphMultisetTransformer(a, 2)),
    sage("EquilibriumAggregation", lambda a: aggr.EquilibriumAggregation(a, a, [3])),
    sage("LCMAggregation", lambda a: aggr.LCMAggregation(a, a)),
    sage("VariancePreservingAggregation", lambda a: aggr.VariancePreservingAggregation()),
    sage("PatchTransformerAggregation", lambda a: aggr.PatchTransformerAggregation(a, a, 2, 4)),
    sage("DegreeScalerAggregation", lambda a: aggr.DegreeScalerAggregation("mean", "linear", degrees())),
    conv("GraphConv"),
    *(conv("GraphConv", aggr=name, uses="weight") for name in ("sum", "mean", "max")),
    conv("GINConv", lambda a, b: pyg.GINConv(mlp(a, 5, b)), text=""),
    conv("GINConv", lambda a, b: pyg.GINConv(mlp(a, 5, b), train_eps=True), text="train_eps=True"),
    conv("GINEConv", lambda a, b: pyg.GINEConv(mlp(a, 5, b), edge_dim=2), text="edge_dim=2", uses="attr"),
    conv("LEConv"),
    conv("LEConv", uses="weight"),
    conv("MFConv"),
    conv("MFConv", max_degree=2),
    conv("WLConvContinuous", widths=0),
    conv("WLConvContinuous", widths=0, uses="weight"),
    conv("WLConv", widths=0, needs="node colours: whole numbers instead of rows"),
    # ---- norms by degree
    conv("GCNConv"),
    conv("GCNConv", uses="weight"),
    conv("GCNConv", improved=True, uses="weight"),
    conv("GCNConv", add_self_loops=False, uses="weight"),
    conv("GCNConv", normalize=False, uses="weight"),
    conv("GCNConv", cached=True),
    conv("GCN2Conv", widths=1, alpha=0.1, theta=0.5, layer=1),
    conv("GCN2Conv", widths=1, alpha=0.1, shared_weights=False, uses="weight"),
    conv("GCN2Conv", widths=1, alpha=0.1, add_self_loops=False),
    conv("GCN2Conv", widths=1, alpha=0.1, normalize=False, uses="weight"),
    conv("GCN2Conv", widths=1, alpha=0.1, cached=True),
    conv("LGConv", widths=0),
    conv("LGConv", widths=0, normalize=False, uses="weight"),
    conv("ClusterGCNConv"),
    conv("ClusterGCNConv", diag_lambda=0.5),
    conv("FAConv", widths=1),
    conv("FAConv", widths=1, add_self_loops=False),
    conv("FAConv", widths=1, normalize=False, uses="weight"),
    conv("FAConv", widths=1, cached=True),
    conv("PDNConv", edge_dim=2, hidden_channels=4, uses="attr"),
    conv("PDNConv", edge_dim=2, hidden_channels=4, add_self_loops=False, uses="attr"),
    conv("PDNConv", edge_dim=2, hidden_channels=4, normalize=False, uses="attr"),
    conv("EGConv", num_heads=1),
    conv("EGConv", num_heads=1, aggregators=["sum", "max", "var"]),
    conv("EGConv", num_heads=1, aggregators=["sum", "symnorm", "std"]),
    conv("EGConv", num_heads=1, aggregators=["mean"], add_self_loops=False),
    conv("EGConv", num_heads=1, cached=True),
    conv("HypergraphConv"),
    # ---- several hops in one layer
    conv("SGConv", K=1),
    conv("SGConv", K=2, uses="weight"),
    conv("SGConv", K=1, add_self_loops=False, uses="weight"),
    conv("SGConv", K=1, cached=True),
    conv("SGConv", K=2, cached=True),
    conv("SSGConv", alpha=0.1, K=1),
    conv("SSGConv", alpha=0.1, K=2, uses="weight"),
    conv("SSGConv", alpha=0.1, K=1, cached=True),
    conv("APPNP", widths=0, K=1, alpha=0.1),
    conv("APPNP", widths=0, K=1, alpha=0.1, uses="weight"),
    conv("APPNP", widths=0, K=1, alpha=0.1, normalize=False, uses="weight"),
    conv("APPNP", widths=0, K=1, alpha=0.1, cached=True),
    conv("APPNP", widths=0, K=3, alpha=0.1),
    conv("TAGConv", K=1),
    conv("TAGConv", K=2, uses="weight"),
    conv("TAGConv", K=2, normalize=False),
    conv("ChebConv", K=1),
    conv("ChebConv", K=2),
    conv("ChebConv", K=2, normalization=None, uses="weight"),
    conv("ARMAConv"),
    conv("ARMAConv", num_stacks=2, num_layers=2, uses="weight"),
    conv("MixHopConv", powers=[1]),
    conv("MixHopConv", powers=[2], uses="weight"),
    conv("GatedGraphConv", widths=1, num_layers=1, uses="weight"),
    conv("GatedGraphConv", widths=1, num_layers=2),
    # ---- attention
    conv("GATConv"),
    conv(**heads("GATConv")),
    conv("GATConv", add_self_loops=False),
    conv("GATConv", residual=True),
    conv("GATConv", edge_dim=2, uses="attr"),
    conv("GATConv", edge_dim=2, fill_value=0.5, uses="attr"),
    conv("GATConv", edge_dim=2, fill_value="max", uses="attr"),
    conv("GATConv", ignores="attr"),
    conv(**heads("GATv2Conv")),
    conv("GATv2Conv", share_weights=True, residual=True),
    conv("GATv2Conv", add_self_loops=False),
    conv("GATv2Conv", edge_dim=2, uses="attr"),
    conv("GATv2Conv", edge_dim=2, fill_value="max", uses="attr"),
    conv("TransformerConv"),
    conv(**heads("TransformerConv", beta=True)),
    conv("TransformerConv", edge_dim=2, root_weight=False, uses="attr"),
    conv("SuperGATConv"),
    conv(**heads("SuperGATConv", attention_type="SD")),
    conv("SuperGATConv", add_self_loops=False),
    conv("AGNNConv", widths=0),
    conv("AGNNConv", widths=0, add_self_loops=False),
    conv("FeaStConv", heads=2),
    conv("FeaStConv", heads=2, add_self_loops=False),
    conv("RGATConv", num_relations=NUM_TYPES, uses="type"),
    conv("RGATConv", num_relations=NUM_TYPES, edge_dim=2, attention_mechanism="within-relation", uses=("attr", "type")),
    # ---- gates, filters and features of edges
    conv("ResGatedGraphConv"),
    conv("ResGatedGraphConv", edge_dim=2, root_weight=False, uses="attr"),
    conv("ResGatedGraphConv", ignores="attr"),
    conv("GENConv", norm="layer"),
    conv("GENConv", norm="layer", ignores="attr"),
    conv("GENConv", norm="layer", edge_dim=2, uses="attr"),
    conv("GENConv", norm="layer", aggr="softmax", learn_t=True, msg_norm=True, learn_msg_scale=True),
    conv("GENConv", norm="layer", aggr="powermean", learn_p=True),
    conv("GENConv", norm="layer", aggr="max"),
    conv("GENConv", norm="layer", aggr=["mean", "std"]),
    conv("GENConv"),
    conv("GeneralConv"),
    conv("GeneralConv", ignores="attr"),
    conv("GeneralConv", in_edge_channels=2, uses="attr"),
    conv("GeneralConv", attention=True, l2_normalize=True),
    conv("GeneralConv", attention=True, attention_type="dot_product", skip_linear=True),
    conv("GeneralConv", directed_msg=False, aggr="mean"),
    conv("CGConv", widths=1),
    conv("CGConv", widths=1, ignores="attr"),
    conv("CGConv", widths=1, dim=2, uses="attr"),
    conv("CGConv", widths=1, batch_norm=True, aggr="mean"),
    conv("FiLMConv"),
    conv("FiLMConv", num_relations=NUM_TYPES, uses="type"),
    conv("NNConv", nnconv, text="nn=mlp", uses="attr"),
    conv(
        "NNConv",
        lambda a, b: nnconv(a, b, aggr="mean", root_weight=False),
        text="nn=mlp, aggr='mean', root_weight=False",
        uses="attr",
    ),
    conv("GMMConv", dim=2, kernel_size=3, uses="attr"),
    conv("GMMConv", dim=2, kernel_size=3, separate_gaussians=True, uses="attr"),
    conv("SplineConv", dim=2, kernel_size=3, uses="attr"),
    conv("EdgeConv", lambda a, b: pyg.EdgeConv(mlp(2 * a, 5, b)), text=""),
    conv("EdgeConv", lambda a, b: pyg.EdgeConv(mlp(2 * a, 5, b), aggr="mean"), text="aggr='mean'"),
    conv("PNAConv", pna, text=""),
    conv("PNAConv", lambda a, b: pna(a, b, edge_dim=2), text="edge_dim=2", uses="attr"),
    conv(
        "PNAConv",
        lambda a, b: pna(a, b, towers=2, divide_input=True) if b == HIDDEN else pna(a, b),
        text="towers=2, divide_input=True",
    ),
    conv(
        "PNAConv",
        lambda a, b: pna(a, b, train_norm=True, pre_layers=2, post_layers=2),
        text="train_norm=True, pre_layers=2, post_layers=2",
    ),
    # ---- types of edges
    conv("RGCNConv", num_relations=NUM_TYPES, uses="type"),
    conv("RGCNConv", num_relations=NUM_TYPES, num_bases=2, aggr="sum", uses="type"),
    conv("RGCNConv", num_relations=NUM_TYPES, aggr="max", root_weight=False, uses="type"),
    conv("FastRGCNConv", num_relations=NUM_TYPES, uses="type"),
    conv("RGCNConv", num_relations=NUM_TYPES, needs="edge_type"),
    # ---- convs around convs
    conv(
        "GPSConv", lambda a, b: pyg.GPSConv(a, pyg.SAGEConv(a, a), norm=None), widths=1, text="conv=SAGEConv, norm=None"
    ),
    conv("AntiSymmetricConv", widths=1),
    conv(
        "AntiSymmetricConv",
        lambda a, b: pyg.AntiSymmetricConv(a, pyg.SAGEConv(a, a), num_iters=2),
        widths=1,
        text="phi=SAGEConv, num_iters=2",
    ),
    conv("DirGNNConv", lambda a, b: pyg.DirGNNConv(pyg.SAGEConv(a, b)), text="conv=SAGEConv"),
    # ---- convs that users write
    conv("a conv of your own", own.Weighted, text="edge_attr as weights of a sum", uses="attr"),
    conv("a conv of your own", own.ByHand, text="a torch.nn.Module with index_add"),
    conv("a conv of your own", own.Loops, text="add_self_loops(edge_index) without num_nodes"),
    conv("a conv of your own", own.CountedLoops, text="add_self_loops(edge_index, num_nodes=x.size(0))"),
    conv("a conv of your own", own.Centred, text="rows less their mean over all nodes"),
    conv("a conv of your own", own.CentredMessages, text="messages less their mean over all edges"),
    conv("a conv of your own", own.OutDegrees, text="rows by the out-degree of their node"),
    conv("a conv of your own", own.PerNode, text="a sum divided by the number of nodes"),
    conv("a conv of your own", own.FirstEdge, text="the first edge of each node only"),
    conv("a conv of your own", own.Remembers, text="keeps the edges of its first call"),
    conv("a conv of your own", own.TwoHops, text="two rounds of propagate"),
    # ---- other inputs
    conv("GINEConv", lambda a, b: pyg.GINEConv(mlp(a, 5, b)), text="", needs="edge_attr"),
    conv("NNConv", nnconv, text="nn=mlp", needs="edge_attr"),
    conv("DNAConv", widths=1, needs="rows of all earlier layers"),
    conv("PANConv", filter_size=2, needs="a model that takes (x, M), which it returns"),
    conv("SignedConv", first_aggr=True, needs="positive and negative edges apart"),
    conv("PointNetConv", lambda a, b: pyg.PointNetConv(mlp(a + 3, 5, b)), text="", needs="positions of nodes"),
    conv("PointTransformerConv", needs="positions of nodes"),
    conv(
        "PointGNNConv",
        lambda a, b: pyg.PointGNNConv(mlp(a, 5, 3), mlp(a + 3, 5, a), mlp(a, 5, a)),
        widths=1,
        text="",
        needs="positions of nodes",
    ),
    conv("PPFConv", lambda a, b: pyg.PPFConv(mlp(a + 4, 5, b)), text="", needs="positions and normals of nodes"),
    conv("XConv", lambda a, b: pyg.XConv(a, b, 3, 2), text="", needs="positions of nodes, from which it finds edges"),
    conv(
        "DynamicEdgeConv",
        lambda a, b: pyg.DynamicEdgeConv(mlp(2 * a, 5, b), 2),
        text="",
        needs="no edges: it finds them by distance",
    ),
    conv(
        "GravNetConv", lambda a, b: pyg.GravNetConv(a, b, 2, 2, 2), text="", needs="no edges: it finds them by distance"
    ),
    conv("MeshCNNConv", needs="meshes: four edges at every node"),
    conv(
        "HEATConv",
        lambda a, b: pyg.HEATConv(a, b, 2, NUM_TYPES, 2, ATTR_WIDTH, 2, concat=False),
        text="",
        uses=("attr", "type"),
        needs="types of nodes",
    ),
    conv(
        "HGTConv",
        lambda a, b: pyg.HGTConv(a, b, (["n"], [("n", "to", "n")])),
        text="",
        needs="dicts by type of node and edge",
    ),
    conv(
        "HANConv",
        lambda a, b: pyg.HANConv(a, b, (["n"], [("n", "to", "n")])),
        text="",
        needs="dicts by type of node and edge",
    ),
    conv(
        "HeteroConv",
        lambda a, b: pyg.HeteroConv({("n", "to", "n"): pyg.SAGEConv(a, b)}),
        text="",
        needs="dicts by type of node and edge",
    ),
    # An instance of the class itself would change the `propagate` that all its subclasses are compiled from.
    conv(
        "MessagePassing", lambda a, b: own.WithoutForward(), text="", needs="a subclass: it has no forward of its own"
    ),
    conv(
        "FusedGATConv",
        lambda a, b: pyg.FusedGATConv(a, b, add_self_loops=False),
        text="add_self_loops=False",
        needs="the library dgNN, and edges as (csr, csc, perm)",
    ),
    conv("CuGraphSAGEConv", needs="the library pylibcugraphops, and edges as its EdgeIndex"),
    conv("CuGraphGATConv", needs="the library pylibcugraphops, and edges as its EdgeIndex"),
    conv("CuGraphRGCNConv", num_relations=NUM_TYPES, needs="the library pylibcugraphops, and edges as its EdgeIndex"),
]
"""Every class of `torch_geometric.nn.conv`, most of them with several options."""
