"""Halo rows of stored and fresh ones: against the same in plain torch, and where nothing may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from hopline.contract import Job
from hopline.methods.historical.settings import Historical
from hopline.nn import GNN
from tests.equivalence.test_5_historical import GRAPH, MODELS, X, summed, work_of
from tests.helpers import dataset_of, randn, random_graph
from tests.methods.historical.test_work import model_of, trainer_of

MIXES: list[dict[str, Any]] = [
    {"momentum": 0.3},
    {"mixing": 0.8, "mixing_score": "constant"},
    {"mixing": 0.8, "mixing_score": "linear"},
    {"mixing": 0.8, "mixing_score": "convex"},
    {"mixing": 0.8, "mixing_score": "concave"},
]


def test_with_nothing_to_mix_it_is_plain_history_bit_for_bit():
    plain = trainer_of(model_of(dropout=0.3)).fit()
    off: list[dict[str, Any]] = [{"momentum": 0.0}, {"mixing": 0.0, "mixing_score": "linear"}]
    on: list[dict[str, Any]] = [{"momentum": 0.5}, {"mixing": 0.5}]
    for settings in off:
        assert [e.loss for e in trainer_of(model_of(dropout=0.3), **settings).fit().history] == [
            e.loss for e in plain.history
        ]
    for settings in on:
        assert trainer_of(model_of(dropout=0.3), **settings).fit().history[-1].loss != plain.history[-1].loss


def sums(x: Tensor, present: Tensor, convs: Any, l: int) -> Tensor:
    """A GIN layer over the edges between present nodes, in plain torch; rows of all nodes."""
    src, dst = GRAPH.edge_index()
    kept = present[src]
    total = torch.zeros_like(x).index_add_(0, dst[kept], x[src[kept]])
    return torch.relu(convs[l].nn(x + total))


@pytest.mark.parametrize("settings", MIXES, ids=str)
def test_mixed_rows_are_those_of_plain_torch(settings: dict[str, Any]):
    torch.manual_seed(0)
    convs = [pyg.GINConv(torch.nn.Linear(6, 8)), pyg.GINConv(torch.nn.Linear(8, 8)), pyg.GINConv(torch.nn.Linear(8, 3))]
    model = GNN(convs).double()
    work: Any = work_of(model, parts_per_batch=1, **settings)
    work.refresh()
    for table in work.histories.tables.values():
        table.mul_(1.1)  # old
    position = work.partition.position
    old = {l: table[position] for l, table in work.histories.tables.items()}
    made = work.batch((2,), None)
    unit = work.unit(made)
    unit.forward_backward(1)
    own, halo = made.nodes, made.block.src_ids[made.block.num_dst :]
    present = torch.zeros(60, dtype=torch.bool)
    present[made.block.src_ids] = True
    src, dst = GRAPH.edge_index()
    degree = GRAPH.in_degrees(torch.arange(60)).double()
    share = torch.zeros(60).double().index_add_(0, dst, present[src].double()) / degree.clamp(min=1)
    share[degree == 0] = 1
    score = {"constant": share**0, "linear": share, "convex": share**2, "concave": share * (2 - share)}
    weight = score[settings["mixing_score"]] * 0.8 if "mixing" in settings else torch.full_like(share, 0.3)
    rows = X
    with torch.no_grad():
        for l in (0, 1):
            fresh = sums(rows, present, convs, l)
            rows = torch.zeros_like(fresh)
            rows[own] = fresh[own]
            rows[halo] = (weight[:, None] * fresh + (1 - weight[:, None]) * old[l])[halo]
            torch.testing.assert_close(made.mixer.mixed[l], rows[halo], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(made.block.own[l], rows[own], rtol=1e-9, atol=1e-12)
            written = made.block.src_ids if "momentum" in settings else own
            old[l] = old[l].index_put((written,), rows[written])
    unit.commit()
    for l, table in work.histories.tables.items():  # momentum writes them back, mixing does not
        torch.testing.assert_close(table[position], old[l], rtol=1e-9, atol=1e-12)
    assert (work.histories.stamps(position[halo]) == 0).all()


DENSE = dataset_of(random_graph(num_nodes=24, num_edges=400), randn(24, 6))


@pytest.mark.parametrize("settings", [MIXES[0], MIXES[3]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_exact_tables_and_exact_fresh_rows_change_nothing(name: str, settings: dict[str, Any]):
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    job = Job(data=DENSE, model=model, module=model, train_ids=DENSE.splits["train"], train_step=summed)
    work = Historical(num_parts=2, parts_per_batch=1, partition="random", **settings).bind(job)
    work.refresh()
    before = {l: table.clone() for l, table in work.histories.tables.items()}
    for group in ((0,), (1,)):
        made = work.batch(group, None)
        assert made is not None
        assert made.mixer is not None
        around = made.mixer.block
        assert torch.equal(around.part.indptr.diff(), DENSE.graph.in_degrees(around.dst_ids))  # all their edges
        unit = work.unit(made)
        unit.forward_backward(1)
        unit.commit()
        assert len(made.mixer.mixed) == model.num_layers - 1
        for l, table in work.histories.tables.items():
            torch.testing.assert_close(table, before[l], rtol=1e-9, atol=1e-11)


def test_what_was_committed_meanwhile_is_not_mixed_over():
    trainer = trainer_of(momentum=0.5, parts_per_batch=3)
    work: Any = trainer.work
    work.refresh()
    first, second = (work.unit(work.batch(group, None)) for group in ((0, 1, 2), (3, 4, 5)))
    for unit in (first, second):
        unit.forward_backward(1)
    first.commit()
    second.commit()
    for unit in (first, second):
        for l, rows in unit.made.block.commits():
            assert torch.equal(torch.cat([work.histories.tables[l][slab] for slab in unit.made.block.slabs]), rows)
