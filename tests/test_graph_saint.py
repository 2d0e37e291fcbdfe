"""examples/graph_saint: subgraphs whose norms make sums and losses right on average, as a sampler of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GCNConv, GraphConv

import hopline as hl
from tests.support.runs import fit, in_float64, losses, small

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "graph_saint"
sys.path.append(str(FOLDER))
SaintWalks: Any = importlib.import_module("saint").SaintWalks
sys.path.remove(str(FOLDER))  # another example has a module of the name `train` too


def program() -> Any:
    """The script of the example. Another example has one of the same name."""
    spec = importlib.util.spec_from_file_location("train_by_saint", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weighted(data: hl.Dataset) -> hl.Dataset:
    return program().with_mean_weights(in_float64(data))


DATA = weighted(small(num_edges=1500))


def test_the_counted_subgraphs_have_the_sums_and_losses_of_the_whole_graph_on_average() -> None:
    """The mean of a node's sum over the subgraphs that have it, and of all losses, as the paper defines the norms."""
    saint = SaintWalks(DATA, batch_size=120, samples=100)
    values = torch.rand(DATA.num_nodes, dtype=torch.float64)
    loss = torch.rand(DATA.num_nodes, dtype=torch.float64)
    sums = torch.zeros(DATA.num_nodes, dtype=torch.float64)
    num_drawn = torch.zeros(DATA.num_nodes, dtype=torch.float64)
    is_drawn = torch.zeros(DATA.num_edges, dtype=torch.bool)
    mean_loss = 0.0
    for number in range(100):
        nodes, edges, src_idx, dst_idx = saint.drawn_before(number)
        weight = DATA.graph.edge["weight"][edges] * saint.edge_norm[edges].double()
        sums.index_add_(0, nodes[dst_idx], weight * values[nodes[src_idx]])
        num_drawn[nodes] += 1
        is_drawn[edges] = True
        mean_loss += float((loss[nodes] * saint.loss_norm[nodes].double()).sum()) / 100
    src, dst = DATA.graph.edge_index()
    expected = torch.zeros_like(sums).index_add_(0, dst, DATA.graph.edge["weight"] * values[src])
    # Of nodes whose in-edges have all been drawn.
    num_missing = torch.zeros_like(sums).index_add_(0, dst, (~is_drawn).double())
    is_whole = (num_missing == 0) & (num_drawn > 0)
    assert is_whole.sum() > 100
    torch.testing.assert_close((sums / num_drawn)[is_whole], expected[is_whole], rtol=1e-6, atol=1e-6)
    assert num_drawn[DATA.train_ids].min() > 0
    assert mean_loss == pytest.approx(float(loss[DATA.train_ids].mean()), rel=1e-6)


def test_a_subgraph_has_all_edges_between_its_nodes() -> None:
    saint = SaintWalks(DATA, batch_size=40, samples=2)
    seeds = DATA.train_ids[:30]
    nodes, edges, src_idx, dst_idx = saint.subgraph(seeds, 5)
    assert nodes[:30].tolist() == seeds.tolist()
    assert nodes.unique().numel() == nodes.numel()
    src, dst = DATA.graph.edge_index()
    expected = (torch.isin(src, nodes) & torch.isin(dst, nodes)).nonzero().view(-1)
    assert edges.sort().values.tolist() == expected.tolist()
    assert torch.equal(nodes[src_idx], src[edges])
    assert torch.equal(nodes[dst_idx], dst[edges])


def test_the_loss_and_its_gradients_are_those_of_plain_pyg_on_the_subgraph() -> None:
    saint = SaintWalks(DATA, batch_size=40, samples=10)
    method = hl.Sampled(sampler=saint, batch_size=40, drop_last=True, shuffle=False)
    torch.manual_seed(0)
    convs = [GraphConv(8, 6).double(), GraphConv(6, 4).double()]
    model = hl.nn.GNN(convs)
    job = hl.Trainer(model, DATA, method, train_step=saint.train_step(DATA.labels), show=False).job
    batch = next(iter(method.loader(DATA, model=model, seed=2)))
    hl.extend.BatchUnit(job, batch).forward_backward(40)
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert batch.key is not None
    nodes, edges, src_idx, dst_idx = saint.subgraph(batch.seeds, int(batch.key))
    weight = DATA.graph.edge["weight"][edges] * saint.edge_norm[edges]
    edge_index = torch.stack([src_idx, dst_idx])
    hidden = convs[0](DATA.x[nodes], edge_index, weight).relu()
    outputs = convs[1](hidden, edge_index, weight)
    each = cross_entropy(outputs, DATA.labels[nodes], reduction="none")
    expected = torch.autograd.grad((each * saint.loss_norm[nodes]).sum(), list(model.parameters()))
    for our, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(our, other, rtol=1e-10, atol=1e-12)


def test_it_trains_and_is_evaluated_on_the_whole_graph() -> None:
    saint = SaintWalks(DATA, batch_size=50, samples=20)
    torch.manual_seed(1)
    model = hl.nn.GNN([GraphConv(8, 16), GraphConv(16, 4)])
    method = hl.Sampled(sampler=saint, batch_size=50, drop_last=True)
    run = fit(DATA, model.double(), method, epochs=8, train_step=saint.train_step(DATA.labels))
    assert losses(run)[-1] < losses(run)[0]
    assert run.test is not None
    assert run.test > 0.5


def test_the_script_runs(tmp_path: Path) -> None:
    small(num_nodes=2000, num_edges=20_000, num_train=600).save(tmp_path / "graph")
    run = program().main(str(tmp_path / "graph"), epochs=1, batch_size=200)
    assert run.finished


def test_gcn_is_refused_since_in_edges_are_not_equally_likely() -> None:
    saint = SaintWalks(DATA, batch_size=50, samples=2)
    model = hl.nn.GNN([GCNConv(8, 16), GCNConv(16, 4)]).double()
    with pytest.raises(ValueError, match=r"GCNConv takes degrees"):
        fit(DATA, model, hl.Sampled(sampler=saint, batch_size=50), train_step=saint.train_step(DATA.labels))
