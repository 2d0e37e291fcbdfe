"""Accuracy: sampled training is as good as full-batch PyG, and GNNs beat MLPs on the demo graph."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

import hopline as hl
from hopline.recipes import RECIPES, RunConfig
from hopline.run.models import make_model
from hopline.util.config import override

SEEDS = range(5)


class PlainGCN(nn.Module):
    """Two GCN layers in plain PyG, with dropout on the input and between the layers.

    The input is a sparse tensor: dropout of its entries is dropout of the dense rows, in a tenth of the time.
    """

    def __init__(self, data: hl.Dataset) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(data.num_features, 16), GCNConv(16, data.num_classes)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        dropped = nn.functional.dropout(x.values(), 0.5, self.training)
        x = torch.sparse_coo_tensor(x.indices(), dropped, x.shape, is_coalesced=True, check_invariants=True)
        x = self.convs[0](x, edge_index).relu()
        return self.convs[1](nn.functional.dropout(x, 0.5, self.training), edge_index)


def full_batch_accuracy(data: hl.Dataset, seed: int) -> float:
    """Test accuracy of the weights that are best on validation, by a plain PyG loop over the whole graph."""
    torch.manual_seed(seed)
    pyg = data.to_pyg()
    model = PlainGCN(data)
    x = torch.as_tensor(pyg.x).to_sparse().coalesce()
    y = torch.as_tensor(pyg.y)
    train_ids = data.splits["train"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    best = (-1.0, 0.0)
    for _ in range(200):
        model.train()
        optimizer.zero_grad()
        scores = model(x, pyg.edge_index)
        nn.functional.cross_entropy(scores[train_ids], y[train_ids]).backward()
        optimizer.step()
        with torch.no_grad():
            right = model.eval()(x, pyg.edge_index).argmax(dim=-1) == y
        valid, test = (right[data.splits[split]].double().mean().item() for split in ("valid", "test"))
        best = max(best, (valid, test), key=lambda pair: pair[0])
    return best[1]


def sampled_accuracy(data: hl.Dataset, seed: int) -> float:
    """The same by neighbour sampling: 5 in-edges a layer, 32 seeds a batch.

    80 epochs bring the training loss to where 200 full-batch steps bring it; after 50 it is still falling. That was
    found on the seeds of this test, where 50 epochs were 2 points short, so they are no clean measurement: on ten
    seeds that no setting was chosen by (200 to 209), both ways of training reach 81.9%.
    """
    torch.manual_seed(seed)
    convs = [GCNConv(data.num_features, 16), GCNConv(16, data.num_classes)]
    model = hl.nn.GNN(convs, dropout=0.5, input_dropout=0.5)
    method = hl.Sampled(fanouts=(5, 5), batch_size=32, workers=1)
    settings = {"epochs": 80, "lr": 0.01, "weight_decay": 5e-4, "seed": seed, "show": False}
    return hl.Trainer(model, data, method, **settings).fit().test


@pytest.mark.slow
def test_cora_by_sampling_is_as_good_as_by_full_batch_pyg(real_data: Path):
    data = hl.from_npz(real_data / "cora.npz").normalized()
    ours, theirs = ([train(data, seed) for seed in SEEDS] for train in (sampled_accuracy, full_batch_accuracy))
    ours = sum(ours) / len(ours)
    theirs = sum(theirs) / len(theirs)
    print(f"cora: sampled {ours:.4f}, full batch {theirs:.4f}")
    assert abs(ours - theirs) < 0.015
    assert ours > 0.79


def demo_accuracy(config: RunConfig) -> float:
    data = hl.open("demo")
    torch.manual_seed(0)
    model = make_model(config.model, data)
    settings = {"epochs": config.epochs, "lr": config.lr, "show": False, "evaluate_every": 5}
    return hl.Trainer(model, data, config.method, **settings).fit().test


@pytest.mark.slow
def test_on_the_demo_graph_a_gnn_is_far_above_an_mlp():
    recipe = RECIPES["demo"]()
    gnn = demo_accuracy(recipe)
    mlp = demo_accuracy(override(recipe, ["model=mlp", "method.fanouts=1,1"]))
    print(f"demo: GNN {gnn:.4f}, MLP {mlp:.4f}")
    assert gnn > mlp + 0.15


def sage_accuracy(
    data: hl.Dataset, seed: int, layout: Any, fanouts: tuple[int, ...], epochs: int, batch_size: int
) -> float:
    torch.manual_seed(seed)
    model = hl.nn.GNN([SAGEConv(data.num_features, 32), SAGEConv(32, data.num_classes)], dropout=0.5)
    method = hl.Sampled(fanouts=fanouts, batch_size=batch_size, layout=layout)
    settings = {"epochs": epochs, "lr": 0.01, "weight_decay": 5e-4, "seed": seed, "show": False}
    return hl.Trainer(model, data, method, evaluate_every=5, **settings).fit().test


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epochs", "batch_size"),
    [("cora", 15, 32), pytest.param("coauthor_physics", 10, 20, marks=pytest.mark.extended)],
)
def test_trees_blocks_and_whole_neighbourhoods_are_equally_good(
    real_data: Path, name: str, epochs: int, batch_size: int
):
    data = hl.from_npz(real_data / f"{name}.npz").normalized()
    accuracies = {}
    for way, layout, fanouts in (("tree", "tree", (8, 8)), ("block", "block", (8, 8)), ("whole", "block", (-1, -1))):
        accuracies[way] = [sage_accuracy(data, seed, layout, fanouts, epochs, batch_size) for seed in range(3)]
    means = {way: statistics.fmean(values) for way, values in accuracies.items()}
    print(name, {way: (round(means[way], 4), round(statistics.stdev(v), 4)) for way, v in accuracies.items()})
    spread = max(statistics.stdev(values) for values in accuracies.values())
    assert max(means.values()) - min(means.values()) < max(0.015, 3 * spread)
