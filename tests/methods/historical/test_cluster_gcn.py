"""Cluster-GCN: a batch has the outputs and gradients of plain PyG on the subgraph of its nodes."""

from __future__ import annotations

import torch
from torch_geometric.data import Data
from torch_geometric.utils import subgraph

import hopline as hl
from tests.equivalence import reference_loops as plain
from tests.equivalence.training_cases import DATA, Scenario, dataset_of, make, plain_twin, two_sage
from tests.support.runs import in_float64, sage, small


def test_a_batch_is_plain_pyg_on_the_subgraph_of_its_nodes() -> None:
    data = dataset_of(Scenario())
    model = make(two_sage)
    theirs = plain_twin(model)
    method = hl.ClusterGCN(num_parts=6, parts_per_batch=2, partition="random")
    nodes_of_batches = []
    for batch in method.loader(data, model=model):
        nodes = batch.blocks[0].dst_ids.sort().values
        nodes_of_batches.append(nodes)
        edges, _ = subgraph(nodes, DATA.edge_index, relabel_nodes=True, num_nodes=data.num_nodes)
        part = Data(x=DATA.x[nodes], edge_index=edges)
        at_seeds = torch.searchsorted(nodes, batch.seeds)
        expected = plain.whole_graph(theirs, part, torch.arange(len(nodes)))[at_seeds]
        ours = model(batch)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
        for outputs, parameters in ((ours, model.parameters()), (expected, theirs.parameters())):
            outputs.square().sum().backward()
            assert all(p.grad is not None for p in parameters)
        for ours_p, theirs_p in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours_p.grad, theirs_p.grad, rtol=0, atol=1e-12)
        batch.commit()
    assert torch.equal(torch.cat(nodes_of_batches).sort().values, torch.arange(data.num_nodes))


def test_evaluation_uses_every_edge() -> None:
    data = in_float64(small())
    model = sage(data).double()
    run = hl.Trainer(model, data, "cluster_gcn", epochs=1, show=False).fit()
    ids = data.splits["test"]
    assert run.test == hl.metrics.accuracy(hl.infer.exact(model, data, ids), data.labels[ids])
