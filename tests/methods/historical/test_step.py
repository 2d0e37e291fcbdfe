"""One step of historical training: when history is pushed, and what the reported loss leaves out."""

from __future__ import annotations

from typing import Any

from tests.methods.historical.test_work import trainer_of


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


def test_a_rank_without_a_batch_has_loss_zero_and_counts_the_step():
    work: Any = trainer_of().work
    unit = work.unit(None, 7)
    assert (unit.size, unit.total_size) == (0, 7)
    assert float(unit.forward_backward(7)) == 0
    unit.commit()
    assert work.partitioned.histories.step == 1
    assert not work.partitioned.histories.tables
