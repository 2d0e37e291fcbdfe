"""Modules with a `forward` of their own, as users of PyG write them. `MODULES` names them all.

Every one takes rows of width 8 and puts out 4 columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv, GINConv, GraphConv, SAGEConv

import hopline as hl

IN, HIDDEN, OUT = 8, 8, 4


def opaque(x: Tensor) -> Tensor:
    """The rows as they are. A `forward` that calls it cannot be taken apart into layers."""
    if x.numel() and bool((x != x).all()):
        raise ValueError("no row has a number")
    return x


class OgbSage(nn.Module):
    """The shape of OGB's SAGE on arxiv and products: norms, ReLU, dropout, log-softmax."""

    def __init__(self, conv: Callable[..., nn.Module] = SAGEConv, norm: bool = False, p: float = 0.5) -> None:
        super().__init__()
        self.convs = nn.ModuleList([conv(IN, HIDDEN), conv(HIDDEN, HIDDEN), conv(HIDDEN, OUT)])
        self.bns = nn.ModuleList([nn.BatchNorm1d(HIDDEN) if norm else nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.dropout = p

    def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs[:-1]):
            x = conv(x, adj_t)
            x = self.bns[i](x)
            x = F.relu(x)
            x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.convs[-1](x, adj_t)
        return x.log_softmax(dim=-1)


class Gcn2(nn.Module):
    """GCNII of PyG's examples: a linear layer, initial rows in every layer, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)])
        self.convs = nn.ModuleList([GCN2Conv(HIDDEN, 0.1, 0.5, layer + 1) for layer in range(3)])

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.3, self.training)
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = F.dropout(x, 0.3, self.training)
            x = conv(x, x_0, edge_index)
            x = x.relu()
        x = F.dropout(x, 0.3, self.training)
        return self.lins[1](x)


class Jump(nn.Module):
    """Jumping knowledge, by `torch.cat` or by PyG's module."""

    def __init__(self, how: str = "", p: float = 0.2) -> None:
        super().__init__()
        self.p = p
        self.convs = nn.ModuleList([GATConv(IN, 4, heads=2), GATConv(8, 4, heads=2), GATConv(8, 4, heads=2)])
        self.jump = pyg.JumpingKnowledge(how, HIDDEN, 3) if how else None
        self.lin = nn.Linear(8 if how in ("max", "lstm") else 24, OUT)

    def forward(self, x, edge_index):
        xs = []
        for conv in self.convs:
            x = F.elu(conv(x, edge_index))
            x = F.dropout(x, self.p, training=self.training)
            xs += [x]
        return self.lin(torch.cat(xs, dim=-1) if self.jump is None else self.jump(xs))


class Inception(nn.Module):
    """Two convs on the same rows, side by side, and a residual from the features."""

    def __init__(self) -> None:
        super().__init__()
        self.a = SAGEConv(IN, HIDDEN)
        self.b = GCNConv(IN, HIDDEN)
        self.c = SAGEConv(2 * HIDDEN, HIDDEN)
        self.res = nn.Linear(IN, HIDDEN)
        self.out = nn.Linear(2 * HIDDEN, OUT)

    def forward(self, x, edge_index):
        h = torch.cat([self.a(x, edge_index), self.b(x, edge_index)], 1).relu()
        y = self.c(h, edge_index) + self.res(x)
        return self.out(torch.cat([y, h[:, :HIDDEN]], 1))


class Shared(nn.Module):
    """One conv that is called twice, and an operation that training alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(IN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = GCNConv(HIDDEN, OUT)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        h = self.conv(self.norm(h).relu(), edge_index)
        if self.training:
            h = h * 1.5
        return self.out(h, edge_index)


class SumOfConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList([SAGEConv(IN, HIDDEN), SAGEConv(HIDDEN, OUT)])
        self.b = nn.ModuleList([GraphConv(IN, HIDDEN), GraphConv(HIDDEN, OUT)])

    def forward(self, x, edge_index):
        x = (self.a[0](x, edge_index) + self.b[0](x, edge_index)).tanh()
        return self.a[1](x, edge_index) + 0.5 * self.b[1](x, edge_index)


class UnevenBranches(nn.Module):
    """Branches of one and of two convs, which meet."""

    def __init__(self) -> None:
        super().__init__()
        self.near = SAGEConv(IN, HIDDEN)
        self.far1 = SAGEConv(IN, HIDDEN)
        self.far2 = SAGEConv(HIDDEN, HIDDEN)
        self.lin = nn.Linear(2 * HIDDEN, OUT)

    def forward(self, x, edge_index):
        near = F.dropout(self.near(x, edge_index).relu(), 0.4, self.training)
        far = F.dropout(self.far1(x, edge_index).relu(), 0.4, self.training)
        far = self.far2(far, edge_index)
        return self.lin(torch.cat([near, far], dim=1))


class DenseNet(nn.Module):
    """Every conv reads the rows of all layers before, at its neighbours too."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(IN * (l + 1), HIDDEN) for l in range(3)])
        self.lin = nn.Linear(4 * HIDDEN, OUT)

    def forward(self, x, edge_index):
        for conv in self.convs:
            h = F.dropout(conv(x, edge_index).relu(), 0.3, self.training)
            x = torch.cat([x, h], dim=1)
        return self.lin(x)


class ResidualAfterDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(IN, HIDDEN) for _ in range(3)])
        self.lin = nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index):
        for conv in self.convs:
            h = F.dropout(conv(x, edge_index).relu(), 0.3, self.training)
            x = h + x if h.shape == x.shape else h
        return self.lin(x)


class Block(nn.Module):
    """A part of `Nested`: norm, activation, dropout and conv, with a residual, as in DeeperGCN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.drop = nn.Dropout(0.3)
        self.conv = SAGEConv(HIDDEN, HIDDEN)

    def forward(self, x, edge_index):
        return x + self.conv(self.drop(self.norm(x).relu()), edge_index)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Dropout(0.2), nn.Linear(HIDDEN, OUT))

    def forward(self, x, edge_index):
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x, edge_index)
        return self.head(x)


class DropoutEverywhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(IN, HIDDEN), SAGEConv(HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.25)
        self.lin = nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index):
        x = self.drop(x)
        x = self.drop(self.conv1(self.drop(x), edge_index))
        x = self.drop(x.relu())
        x = self.conv2(x, edge_index)
        return self.lin(self.drop(self.drop(x)))


class ByName(nn.Module):
    """Convs of a ModuleDict, called with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": SAGEConv(IN, HIDDEN), "last": SAGEConv(HIDDEN, OUT)})

    def forward(self, x, edge_index):
        h = self.parts["first"](x=x, edge_index=edge_index)
        return self.parts["last"](F.leaky_relu(h), edge_index=edge_index)


class OfPyg(nn.Module):
    """Convs in a Sequential of PyG."""

    def __init__(self) -> None:
        super().__init__()
        self.body = pyg.Sequential(
            "x, edge_index",
            [
                (SAGEConv(IN, HIDDEN), "x, edge_index -> x1"),
                nn.ReLU(inplace=True),
                (nn.Dropout(p=0.4), "x1 -> x1"),
                (SAGEConv(HIDDEN, HIDDEN), "x1, edge_index -> x2"),
                (lambda a, b: a + b, "x1, x2 -> x"),
                nn.Linear(HIDDEN, OUT),
            ],
        )

    def forward(self, x, edge_index):
        return self.body(x, edge_index)


class AroundPygModel(nn.Module):
    """A model of PyG within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = pyg.GraphSAGE(IN, HIDDEN, num_layers=2, dropout=0.3)
        self.mlp = pyg.MLP([HIDDEN, HIDDEN, OUT], norm=None, dropout=0.2)

    def forward(self, x, edge_index):
        return self.mlp(self.gnn(x, edge_index).relu())


class Gin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GINConv(nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)), train_eps=True)
        self.conv2 = GINConv(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)))

    def forward(self, x, edge_index):
        return self.conv2(F.gelu(self.conv1(x, edge_index)), edge_index)


class Parameters(nn.Module):
    """Parameters of the module itself: a gate, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(IN, HIDDEN), SAGEConv(HIDDEN, OUT)
        self.gate = nn.Parameter(torch.zeros(HIDDEN))
        self.scale = nn.Parameter(torch.ones(1))
        self.temperature = 2.0

    def forward(self, x, edge_index):
        g = torch.sigmoid(self.gate)
        h = self.conv1(x, edge_index).relu()
        h = g * h + (1 - g) * x
        return self.conv2(h * self.scale, edge_index) / self.temperature


class Heads(nn.Module):
    """Rows as matrices between two convs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GATConv(IN, 4, heads=2), GATConv(8, OUT, heads=2, concat=False)
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index).view(-1, 2, 4)
        h = F.normalize(h * self.weight, dim=-1)
        h = h.reshape(x.size(0), -1)
        return self.conv2(h, edge_index)


class Chunks(nn.Module):
    """Gated units: the output of a conv in two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(IN, 2 * HIDDEN), SAGEConv(HIDDEN, OUT)

    def forward(self, x, edge_index):
        a, b = self.conv1(x, edge_index).chunk(2, dim=-1)
        return self.conv2(a * torch.sigmoid(b), edge_index)


class Weighted(nn.Module):
    """A weight per edge, which the graph must have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConv(IN, HIDDEN), GraphConv(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_weight):
        x = self.conv1(x, edge_index, edge_weight).relu()
        return self.conv2(x, edge_index, edge_weight=edge_weight)


class MaybeWeighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(IN, HIDDEN), GraphConv(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_weight=None):
        x = self.conv1(x, edge_index).relu()  # without weights in any case
        return self.conv2(x, edge_index, edge_weight)


class Attributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GATConv(IN, HIDDEN, edge_dim=3)
        self.conv2 = pyg.TransformerConv(HIDDEN, OUT, edge_dim=3)

    def forward(self, x, edge_index, edge_attr):
        return self.conv2(self.conv1(x, edge_index, edge_attr).relu(), edge_index, edge_attr=edge_attr)


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.RGCNConv(IN, HIDDEN, 2), pyg.RGCNConv(HIDDEN, OUT, 2)

    def forward(self, x, edge_index, edge_type):
        return self.conv2(self.conv1(x, edge_index, edge_type).relu(), edge_index, edge_type)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(IN, OUT)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).relu()


class Pushes(nn.Module):
    """Calls of `push_and_pull`, which a module that is made of layers does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(IN, HIDDEN), SAGEConv(HIDDEN, OUT)

    def forward(self, x, edge_index):
        x = hl.nn.push_and_pull(self.conv1(x, edge_index).relu())
        return self.conv2(F.dropout(x, 0.5, self.training), edge_index)


class NormAfterDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(IN, HIDDEN), SAGEConv(HIDDEN, OUT)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x, edge_index):
        x = F.dropout(self.conv1(x, edge_index), 0.3, self.training)
        return self.conv2(self.norm(x).relu(), edge_index)


class InitialMix(nn.Module):
    """The features' own rows mixed into every layer, as APPNP and GCNII do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.conv = GCNConv(HIDDEN, HIDDEN, cached=True)

    def forward(self, x, edge_index):
        h = x0 = F.dropout(self.lin1(x).relu(), 0.4, self.training)
        for _ in range(3):
            h = 0.9 * self.conv(h, edge_index) + 0.1 * x0
        return self.lin2(h)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "OGB SAGE": OgbSage,
    "OGB GCN": lambda: OgbSage(GCNConv),
    "batch norms": lambda: OgbSage(norm=True),
    "GAT": lambda: OgbSage(GATConv),
    "PNA of moments": lambda: OgbSage(lambda i, o: SAGEConv(i, o, aggr=["mean", "max", "std"])),
    "max": lambda: OgbSage(lambda i, o: SAGEConv(i, o, aggr="max", normalize=True)),
    "Transformer": lambda: OgbSage(pyg.TransformerConv),
    "lazy": lambda: OgbSage(lambda i, o: SAGEConv(-1, o)),
    "GCNII": Gcn2,
    "initial rows": InitialMix,
    "jump by cat": Jump,
    "jump by PyG": lambda: Jump("cat"),
    "jump by max": lambda: Jump("max"),
    "jump by LSTM": lambda: Jump("lstm"),
    "inception": Inception,
    "shared conv": Shared,
    "sum of convs": SumOfConvs,
    "uneven branches": UnevenBranches,
    "dense net": DenseNet,
    "residual after dropout": ResidualAfterDropout,
    "nested": Nested,
    "dropout everywhere": DropoutEverywhere,
    "ModuleDict": ByName,
    "Sequential of PyG": OfPyg,
    "around a PyG model": AroundPygModel,
    "GIN": Gin,
    "own parameters": Parameters,
    "matrices": Heads,
    "chunks": Chunks,
    "weights": Weighted,
    "optional weights": MaybeWeighted,
    "attributes": Attributed,
    "types": Typed,
    "one conv": Single,
    "push and pull": Pushes,
    "norm after dropout": NormAfterDropout,
}
HAS_BATCH_NORM = ("batch norms", "norm after dropout")
NEEDS_ARRAY = {"weights": "weight", "optional weights": "weight", "attributes": "attr", "types": "type"}
"""By module: the edge array of the graph on which it is tested."""
