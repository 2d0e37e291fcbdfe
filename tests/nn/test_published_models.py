"""Models in the shape in which they were published, and the table of docs/bring_your_module.md that says what runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

import hopline as hl
from tests.support.helpers import dataset_of, randn, random_graph
from tests.support.own_modules import Gcn2, Jump

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_module.md"
DATA = dataset_of(random_graph(num_nodes=60, num_edges=300, loops=True), randn(60, 8), num_classes=4)
METHODS: dict[str, hl.extend.Method] = {
    "`Sampled`": hl.Sampled(batch_size=10),
    "`Historical`": hl.Historical(num_parts=4, parts_per_batch=2, partition="random"),
    "`FullBatch`": hl.FullBatch(num_shards=3, partition="random"),
}


class Arxiv(nn.Module):
    """GCN and SAGE of OGB on arxiv: batch norms, and convs that keep the graph."""

    def __init__(self, conv: Callable[..., nn.Module], **options: bool) -> None:
        super().__init__()
        widths = [8, 16, 16, 4]
        self.convs = nn.ModuleList([conv(a, b, **options) for a, b in itertools.pairwise(widths)])
        self.bns = nn.ModuleList([nn.BatchNorm1d(16) for _ in range(2)])
        self.dropout = 0.5

    def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs[:-1]):
            x = conv(x, adj_t)
            x = self.bns[i](x)
            x = F.relu(x)
            x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.convs[-1](x, adj_t)
        return x.log_softmax(dim=-1)


class Proteins(nn.Module):
    """GCN of OGB on proteins: edges with weights that were normalised before, and outputs without softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(8, 16, normalize=False), GCNConv(16, 4, normalize=False)])

    def forward(self, x, adj_t):
        for conv in self.convs[:-1]:
            x = F.dropout(F.relu(conv(x, adj_t)), p=0.3, training=self.training)
        return self.convs[-1](x, adj_t)


class Adjs(nn.Module):
    """SAGE of SALIENT and of OGB's products with PyG's old NeighborSampler: the edges of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 4)])

    def forward(self, x, adjs):
        for i, (edge_index, _, size) in enumerate(adjs):
            x_target = x[: size[1]]
            x = self.convs[i]((x, x_target), edge_index)
            if i != len(self.convs) - 1:
                x = F.relu(x)
                x = F.dropout(x, p=0.5, training=self.training)
        return torch.log_softmax(x, dim=-1)


class OfData(nn.Module):
    """The first example of PyG: a forward of the whole `Data`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(8, 16), GCNConv(16, 4)

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = F.relu(self.conv1(x, edge_index))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


class Sar(nn.Module):
    """GraphSage of SAR's examples, in PyG's convs."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 16), SAGEConv(16, 4)])
        self.dropout = nn.Dropout(0.5)

    def forward(self, features, edge_index):
        h = features
        for idx, layer in enumerate(self.convs):
            h = layer(h, edge_index)
            if idx < len(self.convs) - 1:
                h = F.relu(h)
                h = self.dropout(h)
        return h


class Transformer(nn.Module):
    """SGFormer and Polynormer: attention of every node to all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(8, 16)
        self.q, self.k = nn.Linear(8, 16), nn.Linear(8, 16)
        self.lin = nn.Linear(16, 4)

    def forward(self, x, edge_index):
        attention = torch.softmax(self.q(x) @ self.k(x).t(), dim=-1)
        return self.lin(self.conv(x, edge_index) + attention @ self.q(x))


class Gas(nn.Module):
    """GCN of GNNAutoScale's examples, with its calls between two convs."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(8, 16), GCNConv(16, 4)])

    def forward(self, x, adj_t):
        for conv in self.convs[:-1]:
            x = conv(x, adj_t).relu_()
            x = hl.nn.push_and_pull(x)
            x = F.dropout(x, p=0.5, training=self.training)
        return self.convs[-1](x, adj_t)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN of OGB (arxiv)": lambda: Arxiv(GCNConv, cached=True),
    "SAGE of OGB (arxiv, products)": lambda: Arxiv(SAGEConv),
    "GCN of OGB (proteins)": Proteins,
    "SAGE of SALIENT, `forward(x, adjs)`": Adjs,
    "GCN of PyG's tutorial, `forward(data)`": OfData,
    "GraphSage of SAR, in PyG's convs": Sar,
    "GCNII of PyG's examples": Gcn2,
    "JKNet": Jump,
    "GCN of GNNAutoScale": Gas,
    "GraphSAGE of PyG": lambda: pyg.GraphSAGE(8, 16, 2, 4, dropout=0.5),
    "SGFormer, Polynormer": Transformer,
}


def cell(name: str, method: hl.extend.Method) -> str:
    """ "layers", "as a whole" or "refused": how a model trains by a method. Its weights come back."""
    torch.manual_seed(0)
    module = MODELS[name]().double()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    try:
        assert hl.Trainer(module, DATA, method, epochs=1, show=False).fit().finished
    except ValueError as error:
        return "refused" if type(module).__name__ in str(error) else f"another error: {error}"
    MODELS[name]().double().load_state_dict(module.state_dict())
    assert any(not torch.equal(value, before[key]) for key, value in module.state_dict().items())
    return "as a whole" if isinstance(hl.nn.as_batch_model(module), hl.nn.Whole) else "layers"


@pytest.mark.parametrize("name", MODELS)
def test_the_page_says_how_a_published_model_trains(name: str):
    found = [cell(name, method) for method in METHODS.values()]
    assert f"| {name} | {' | '.join(found)} |" in PAGE.read_text()


def test_a_module_that_takes_data_is_its_forward():
    torch.manual_seed(0)
    module = OfData().double().eval()
    expected = module(DATA.to_pyg())
    assert isinstance(hl.nn.as_batch_model(module), hl.nn.Traced)
    torch.testing.assert_close(hl.infer.exact(module, DATA), expected.detach())


def test_a_module_that_takes_the_edges_of_every_layer_is_its_forward():
    torch.manual_seed(0)
    module = Adjs().double().eval()
    edge_index = DATA.graph.edge_index()
    expected = module(DATA.x[torch.arange(60)], [(edge_index, None, (60, 60))] * 2).detach()
    loader = hl.Sampled(fanouts=(-1, -1), batch_size=7).loader(DATA, "test", model=module)
    with torch.no_grad():
        for batch in loader:
            torch.testing.assert_close(hl.nn.as_batch_model(module)(batch), expected[batch.seeds])
    torch.testing.assert_close(hl.infer.exact(module, DATA), expected)
