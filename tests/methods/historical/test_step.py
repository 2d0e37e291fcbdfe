"""One step of historical training: when history is pushed, and what the reported loss leaves out."""

from __future__ import annotations

from typing import Any

import torch

import hopline as hl
from hopline.methods.historical.settings import Historical
from tests.methods.historical.test_work import GRAPH, model_of, trainer_of
from tests.support.helpers import dataset_of, randn


def test_history_is_pushed_by_commit_and_not_before():
    trainer = trainer_of(warm_up=False)
    work: Any = trainer.work
    unit = next(iter(work.units(1)))
    unit.forward_backward(unit.total_size)
    assert not work.partitioned.histories.tables[0].any()

    unit.commit()
    for row_range in unit.hist_batch.halo.row_ranges:
        assert work.partitioned.histories.tables[0][row_range].any()
        assert (work.partitioned.histories.written[row_range] == 1).all()
    assert int((work.partitioned.histories.written < 0).sum()) == 60 - unit.hist_batch.nodes.numel()


def test_lipschitz_penalty_changes_the_gradient_but_not_the_reported_loss():
    losses = {}
    gradients = {}
    for weight in (0.0, 1.0, 2.0):
        trainer = trainer_of(lipschitz=weight)
        unit = next(iter(trainer.work.units(1)))
        assert unit.total_size is not None
        losses[weight] = unit.forward_backward(unit.total_size)
        gradients[weight] = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]

    assert losses[0.0] == losses[2.0]
    # gradient(w) = gradient(0) + w * gradient of the penalty: linear in w, and not constant.
    for at_0, at_1, at_2 in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(at_2 - at_0, 2 * (at_1 - at_0))
    pairs = zip(gradients[0.0], gradients[1.0], strict=True)
    assert any(not torch.equal(at_0, at_1) for at_0, at_1 in pairs)


def test_a_batch_without_training_nodes_still_pushes():
    data = dataset_of(GRAPH, randn(60, 6))
    data.splits["train"] = torch.tensor([3])
    method = Historical(num_parts=6, parts_per_batch=1, partition="random", warm_up=False)
    trainer = hl.Trainer(model_of(), data, method, epochs=1, show=False)
    trainer.fit()
    work: Any = trainer.work
    assert (work.partitioned.histories.written >= 0).all()


def test_a_rank_without_a_batch_has_loss_zero_and_counts_the_step():
    work: Any = trainer_of().work
    unit = work.unit(None, 7)
    assert (unit.size, unit.total_size) == (0, 7)
    assert float(unit.forward_backward(7)) == 0
    unit.commit()
    assert work.partitioned.histories.step == 1
    assert not work.partitioned.histories.tables
