"""One historical batch: what it learns from, and what it writes when."""

from __future__ import annotations

from typing import Any

import torch

import hopline as hl
from hopline.methods.historical.settings import Historical
from tests.helpers import dataset_of, randn
from tests.methods.historical.test_work import GRAPH, model_of, trainer_of


def test_nothing_is_written_before_the_optimizers_step():
    trainer = trainer_of(warm_up=False)
    work: Any = trainer.work
    unit = next(iter(work.units(1)))
    unit.forward_backward(unit.total_size)
    assert not work.histories.tables[0].any()
    unit.commit()
    for slab in unit.hist_batch.halo.row_ranges:
        assert work.histories.tables[0][slab].any()
        assert (work.histories.written[slab] == 1).all()
    assert int((work.histories.written < 0).sum()) == 60 - unit.hist_batch.nodes.numel()


def test_the_penalty_is_added_to_what_is_minimised():
    gradients = []
    for weight in (0.0, 1.0, 2.0):
        trainer = trainer_of(lipschitz=weight)
        unit = next(iter(trainer.work.units(1)))
        assert unit.total_size is not None
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


def test_a_rank_without_a_batch_gives_nothing_and_ends_its_turn():
    work: Any = trainer_of().work
    unit = work.unit(None, 7)
    assert (unit.size, unit.total_size) == (0, 7)
    assert float(unit.forward_backward(7)) == 0
    unit.commit()
    assert work.histories.step == 1
    assert not work.histories.tables
