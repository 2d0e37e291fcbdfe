"""Everything once, by public names only, in seconds: the first thing to run after a change."""

from __future__ import annotations

from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import hopline as hl


def tiny() -> hl.Dataset:
    """60 nodes in two rings; a node's class is its ring, which only its neighbours' features tell well."""
    node = torch.arange(60)
    ring, place = node // 30, node % 30
    edges = [torch.stack([ring * 30 + (place + hop) % 30, node]) for hop in (1, 2, 3)]
    noise = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    masks = {f"{name}_mask": node % 3 == k for k, name in enumerate(("train", "val", "test"))}
    return hl.from_pyg(Data(x=noise + ring[:, None], y=ring, edge_index=torch.cat(edges, dim=1), **masks))


def model_for(data: hl.Dataset) -> hl.nn.GNN:
    torch.manual_seed(0)
    return hl.nn.GNN([SAGEConv(data.num_features, 8), SAGEConv(8, data.num_classes)], dropout=0.2)


def test_opens_a_graph_by_name():
    data = hl.open("planted", num_nodes=100, num_edges=500, num_classes=2, num_train=20, num_valid=10)
    assert (data.num_nodes, data.num_edges, data.splits["test"].numel()) == (100, 500, 70)


def test_takes_a_pyg_graph():
    data = tiny()
    assert (data.num_nodes, data.num_edges, data.num_classes) == (60, 180, 2)
    assert sorted(data.splits) == ["test", "train", "valid"]


def test_trains_and_tests():
    data = tiny()
    run = hl.Trainer(
        model_for(data), data, hl.Sampled(fanouts=(3, 2), batch_size=8), epochs=15, lr=0.02, show=False
    ).fit()
    assert run.epochs == 15
    assert run.history[-1].loss < run.history[0].loss
    assert run.test > 0.8


def test_infers_at_all_nodes_and_at_some():
    data = tiny()
    model, ids = model_for(data), torch.tensor([3, 40])
    scores = hl.infer.exact(model, data)
    assert scores.shape == (60, 2)
    torch.testing.assert_close(hl.infer.exact(model, data, ids), scores[ids])


def test_loads_batches_for_a_loop_of_ones_own():
    data = tiny()
    batches = list(hl.Sampled(fanouts=(2, 2), batch_size=8).loader(data, "train"))
    assert [batch.num_seeds for batch in batches] == [8, 8, 4]
    assert sorted(torch.cat([batch.seeds for batch in batches]).tolist()) == data.splits["train"].tolist()
    assert model_for(data)(batches[0]).shape == (8, 2)


def test_saves_opens_and_verifies_a_folder(tmp_path: Path):
    data = tiny()
    data.save(tmp_path / "tiny")
    assert hl.verify(tmp_path / "tiny")
    again = hl.open(tmp_path / "tiny")
    assert torch.equal(again.graph.indices, data.graph.indices)
    model = model_for(data)
    torch.testing.assert_close(hl.infer.exact(model, again), hl.infer.exact(model, data))
