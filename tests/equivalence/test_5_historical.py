"""Identity 5: with exact tables, historical batches equal the full batch.

Outputs of a batch are those of the full batch at its nodes. With tables of gradients too (`compensate`), gradients
of all batches add up to that of the full batch. A sweep over all parts computes both kinds of tables exactly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.contract import Job
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.core.row_handles import Rows
from hopline.core.sampler import NeighborSampler, full_block
from hopline.methods.historical.batches import HistoricalBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.historical.work import HistoricalWork
from hopline.methods.partitioned.sweep import Sweep
from hopline.nn import GNN
from tests.support.helpers import assert_same_gradients, dataset_of, own_task, randn, random_graph, twin

GRAPH = random_graph(num_nodes=60, num_edges=240, weight=True, loops=True)
X = randn(60, 6)
DATA = dataset_of(GRAPH, X)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the seeds."""
    return nn.functional.cross_entropy(model(batch), batch.labels)


def gcn2(i: int, o: int) -> GNN:
    """Four GCNII layers between an encoder and a head."""
    convs = [pyg.GCN2Conv(8, 0.1, theta=0.5, layer=l + 1) for l in range(4)]
    return GNN(convs, jk="last", encoder=nn.Linear(i, 8), head=nn.Linear(8, o))


MODELS = {
    "gcn": lambda i, o: GNN([pyg.GCNConv(i, 8), pyg.GCNConv(8, 8), pyg.GCNConv(8, o)]),
    "gat": lambda i, o: GNN([pyg.GATConv(i, 4, heads=2), pyg.GATConv(8, o, heads=2, concat=False)], act="elu"),
    "gin": lambda i, o: GNN([pyg.GINConv(nn.Linear(i, 8)), pyg.GINConv(nn.Linear(8, 8)), pyg.GINConv(nn.Linear(8, o))]),
    "sage": lambda i, o: GNN([pyg.SAGEConv(i, 8), pyg.SAGEConv(8, 12), pyg.SAGEConv(12, o)], norm="layer"),
    "gcnii": gcn2,
    "appnp": lambda i, o: GNN(
        [pyg.SimpleConv("mean") for _ in range(5)],
        encoder=nn.Linear(i, 8), initial_residual=0.1, act=None, jk="last", head=nn.Linear(8, o),
    ),
    "pna": lambda i, o: GNN(
        [pyg.PNAConv(a, b, ["mean", "max"], ["identity", "amplification"], deg=torch.bincount(GRAPH.in_degrees()))
         for a, b in ((i, 8), (8, o))]
    ),
    "pna jumping": lambda i, o: GNN(
        [pyg.PNAConv(a, 8, ["mean", "max"], ["identity"], deg=torch.bincount(GRAPH.in_degrees())) for a in (i, 8, 8)],
        jk="cat", head=nn.Linear(24, o), residual=True,
    ),
}  # fmt: skip


def work_of(model: GNN, **settings: Any) -> HistoricalWork:
    """Historical training on five random parts, two in a batch. settings: of `Historical`."""
    method = Historical(**({"num_parts": 5, "parts_per_batch": 2, "partition": "random"} | settings))
    ids = DATA.splits["train"]
    return method.bind(Job(data=DATA, model=model, module=model, examples=Examples(ids), task=own_task(mean_loss)))


def batches_of(work: HistoricalWork) -> list[HistoricalBatch]:
    """Batches that hold every node once. Without a key, nothing is drawn at random."""
    hist_batch = [work.batch(group, None) for group in work.partitioned.parts.own_groups]
    return [batch for batch in hist_batch if batch is not None]


def full_batch(model: GNN) -> Batch:
    """The oracle: all nodes and all edges as one batch; the loss is at the training nodes."""
    block = full_block(NeighborSampler(GRAPH, (-1,)), torch.arange(60))
    ids = DATA.splits["train"]
    return Batch(ids, (block,) * model.num_layers, Rows(DATA.x, block.src_ids), DATA.labels[ids], output_idx=ids)


@pytest.mark.parametrize("name", MODELS)
def test_with_exact_tables_outputs_are_those_of_the_full_batch(name: str):
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double().eval()
    work = work_of(model)
    work.refresh()
    with torch.no_grad():
        whole = replace(full_batch(model), output_idx=None)
        expected = model(whole)
        for hist_batch in batches_of(work):
            ours = model(replace(hist_batch.batch, output_idx=None))
            torch.testing.assert_close(ours, expected[hist_batch.nodes], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("groups", ["fixed", "redrawn"])
@pytest.mark.parametrize("name", MODELS)
def test_with_exact_tables_of_gradients_the_summed_gradient_is_that_of_the_full_batch(name: str, groups: Any):
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    plain: Any = twin(model)
    batch = full_batch(plain)
    (mean_loss(plain, batch) * batch.num_seeds).backward()
    work = work_of(model, compensate=True, groups=groups)
    work.refresh()
    for group in work.groups.groups_of(3):
        HistoricalUnit(work, work.batch(group, None)).forward_backward(1)

    assert_same_gradients(model, plain, 1e-8)


def test_without_compensation_the_summed_gradient_is_another():
    torch.manual_seed(0)
    model = MODELS["gcn"](6, 3).double()
    plain: Any = twin(model)
    batch = full_batch(plain)
    (mean_loss(plain, batch) * batch.num_seeds).backward()
    work = work_of(model)
    work.refresh()
    for hist_batch in batches_of(work):
        HistoricalUnit(work, hist_batch).forward_backward(1)
    ours, theirs = (torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, plain))

    assert 0.02 < float((ours - theirs).norm() / theirs.norm()) < 1


@pytest.mark.parametrize("name", MODELS)
def test_a_sweep_over_all_parts_gives_the_gradient_of_the_full_batch(name: str):
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    plain: Any = twin(model)
    batch = full_batch(plain)
    (mean_loss(plain, batch) * batch.num_seeds).backward()
    work = work_of(model)
    work.refresh()
    Sweep(work.partitioned, keeps_gradients=True).backward()

    assert_same_gradients(model, plain, 1e-9)
