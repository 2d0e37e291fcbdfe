"""Measuring metrics within a limit of bytes."""

from __future__ import annotations

import hopline as hl
from hopline.training.evaluation import Measure
from hopline.util import trace
from tests.support.runs import method, sage, small


def test_sampled_evaluation_keeps_to_its_bytes():
    data = small()
    trainer = hl.Trainer(sage(data), data, method(), show=False)
    measures = [Measure(trainer.method, exact=False, chunk_bytes=size) for size in (None, 120_000)]
    counters = trace.Counters()
    with trace.listen(counters):
        metrics = [measure(trainer.job) for measure in measures]
    counters.next_epoch()
    assert metrics[0] == metrics[1]
    assert counters.last_epoch()["budget.batches_split"] > 0
    assert "budget.steps_over" not in counters.last_epoch()
