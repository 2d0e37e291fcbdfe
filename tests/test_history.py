"""Historical training: its batches, what is written when, and going on after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import hopline as hl
from hopline.data import planted
from hopline.historical import Historical
from hopline.history import HistoricalWork, without_halo
from hopline.nn import GNN
from hopline.sampling import NeighborSampler, full_block
from tests.helpers import dataset_of, randn, random_graph

GRAPH = random_graph(num_nodes=60, num_edges=300)
DATA = dataset_of(GRAPH, randn(60, 6))


def model_of(dropout: float = 0.0, **options: Any) -> GNN:
    torch.manual_seed(0)
    convs = [pyg.GCNConv(6, 8), pyg.GCNConv(8, 8), pyg.GCNConv(8, 3)]
    return GNN(convs, dropout=dropout, **options).double()


def trainer_of(
    model: nn.Module | None = None, *, epochs: int = 3, out: Path | None = None, **settings: Any
) -> hl.Trainer:
    train = {name: settings.pop(name) for name in ("resume",) if name in settings}
    method = Historical(**({"num_parts": 6, "parts_per_batch": 2, "partition": "random"} | settings))
    return hl.Trainer(model or model_of(), DATA, method, epochs=epochs, show=False, out=out, **train)


def test_nothing_is_written_before_the_optimizers_step():
    trainer = trainer_of(warm_up=False)
    work: Any = trainer.work
    unit = next(iter(work.units(1)))
    unit.forward_backward(unit.total_size)
    assert not work.histories.tables[0].any()
    unit.commit()
    for slab in unit.made.block.slabs:
        assert work.histories.tables[0][slab].any()
        assert (work.histories.written[slab] == 1).all()
    assert int((work.histories.written < 0).sum()) == 60 - unit.made.nodes.numel()


def test_a_commit_is_seen_after_the_stated_lag():
    trainer = trainer_of(warm_up=False, lag=2)
    work: Any = trainer.work
    seen = []
    for unit in work.units(1):
        unit.forward_backward(unit.total_size)
        unit.commit()
        seen.append(int((work.histories.written >= 0).sum()))
    assert seen[:2] == [0, 0]
    assert seen[2] > 0


def test_fixed_groups_keep_their_blocks_and_redrawn_ones_do_not():
    fixed: Any = trainer_of(groups="fixed").work
    redrawn: Any = trainer_of().work
    for work in (fixed, redrawn):
        for epoch in (1, 2):
            for group in work.groups_of(epoch):
                work.batch(group, 0)
    assert len(fixed._kept) == 3
    assert set(redrawn._kept) <= {(0, 1), (2, 3), (4, 5)}  # those of a sweep over all parts, if they were drawn
    assert {frozenset(g) for g in fixed.groups_of(1)} == {frozenset(g) for g in fixed.groups_of(2)}


def test_fewer_batches_an_epoch_leave_the_others_to_later_ones():
    work: Any = trainer_of(max_batches=2).work
    groups = [work.groups_of(epoch) for epoch in range(1, 9)]
    assert all(len(of_epoch) == 2 for of_epoch in groups)
    assert {part for of_epoch in groups for group in of_epoch for part in group} == set(range(6))


@pytest.mark.parametrize("settings", [{}, {"compensate": True}, {"halo": "drop"}], ids=str)
def test_edges_are_dropped_in_training_only(settings: dict[str, Any]):
    work: Any = trainer_of(edge_dropout=0.5, **settings).work
    (group, *_) = work.groups_of(1)
    every, some = work.batch(group, None), work.batch(group, 7)
    other = work.batch(group, 8)
    assert 0.3 < some.block.num_edges / every.block.num_edges < 0.7
    assert some.block.part.edge_ids.tolist() != other.block.part.edge_ids.tolist()
    assert torch.equal(some.block.src_ids, every.block.src_ids)
    if every.later is not None:
        assert some.later.num_edges < every.later.num_edges


def test_the_penalty_is_added_to_what_is_minimised():
    gradients = []
    for weight in (0.0, 1.0, 2.0):
        trainer = trainer_of(lipschitz=weight)
        unit = next(iter(trainer.work.units(1)))
        loss = unit.forward_backward(unit.total_size)
        gradients.append((loss, [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]))
    (loss, none), (_, one), (same, two) = gradients
    assert loss == same  # what is reported is the loss itself
    for a, b, c in zip(none, one, two, strict=True):
        torch.testing.assert_close(c - a, 2 * (b - a))
    assert any(not torch.equal(a, b) for a, b in zip(none, one, strict=True))


def test_a_batch_without_training_nodes_still_pushes():
    few = dataset_of(GRAPH, randn(60, 6))
    few.splits["train"] = torch.tensor([3])
    method = Historical(num_parts=6, parts_per_batch=1, partition="random", warm_up=False)
    trainer = hl.Trainer(model_of(), few, method, epochs=1, show=False)
    trainer.fit()
    work: Any = trainer.work
    assert (work.histories.written >= 0).all()


def test_the_halo_can_be_dropped():
    nodes = torch.tensor([4, 9, 2, 30])
    inner = without_halo(full_block(NeighborSampler(GRAPH, (-1,)), nodes))
    assert torch.equal(inner.src_ids, nodes)
    src, dst = GRAPH.edge_index()
    among = torch.isin(src, nodes) & torch.isin(dst, nodes)
    found = sorted(map(tuple, nodes[inner.edge_index].t().tolist()))
    assert found == sorted(map(tuple, torch.stack([src, dst])[:, among].t().tolist()))
    run = trainer_of(halo="drop").fit()
    assert run.history[-1].loss < run.history[0].loss


@pytest.mark.parametrize(
    "settings", [{}, {"compensate": True}, {"groups": "fixed", "refresh_every": 1}, {"lag": 1}], ids=str
)
def test_it_learns(settings: dict[str, Any]):
    data = planted(num_nodes=400, num_edges=4000, num_classes=3, num_features=8, homophily=0.8, signal=2.0, seed=2)
    torch.manual_seed(0)
    model = GNN([pyg.SAGEConv(8, 16), pyg.SAGEConv(16, 3)])
    method = Historical(num_parts=6, parts_per_batch=2, partition="random", **settings)
    run = hl.Trainer(model, data, method, epochs=10, lr=0.01, show=False).fit()
    assert run.history[-1].loss < 0.6 * run.history[0].loss
    assert run.test > 0.8
    assert run.history[-1].counters["history.rows"] > 0


REGULAR = {"edge_dropout": 0.3, "lipschitz": 0.1, "max_batches": 2}


@pytest.mark.parametrize("settings", [{}, {"compensate": True}, {"lag": 1, "storage": "bf16"}, REGULAR], ids=str)
def test_a_run_goes_on_as_if_it_had_never_stopped(settings: dict[str, Any], tmp_path: Path):
    whole = trainer_of(model_of(dropout=0.3), epochs=4, out=tmp_path / "whole", **settings).fit()
    trainer_of(model_of(dropout=0.3), epochs=2, out=tmp_path / "cut", **settings).fit()
    again = trainer_of(model_of(dropout=0.3), epochs=4, out=tmp_path / "cut", resume=True, **settings).fit()
    assert [e.loss for e in again.history] == [e.loss for e in whole.history]


def test_work_remembers_what_checkpoints_hold():
    work = trainer_of().work
    assert isinstance(work, HistoricalWork)
    work.refresh()
    other = trainer_of().work
    assert isinstance(other, HistoricalWork)
    other.load_state_dict(work.state_dict())
    for l, table in work.histories.tables.items():
        assert torch.equal(other.histories.tables[l], table)
