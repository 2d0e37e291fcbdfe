from __future__ import annotations

import hopline as hl
from hopline.training.evaluation import Measure
from hopline.util import trace
from tests.runs import method, sage, small


def test_sampled_evaluation_keeps_to_its_bytes():
    data = small()
    trainer = hl.Trainer(sage(data), data, method(), show=False)
    measures = [Measure(trainer.method, exact=False, chunk_bytes=size) for size in (None, 120_000)]
    trace_of = trace.Counters()
    with trace.listen(trace_of):
        found = [measure(trainer.job) for measure in measures]
    trace_of.next_epoch()
    assert found[0] == found[1]
    assert trace_of.last_epoch()["budget.batches_split"] > 0
    assert "budget.steps_over" not in trace_of.last_epoch()
