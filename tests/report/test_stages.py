"""The stages of an epoch: no time is counted in two of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

import hopline as hl
from hopline.report.bottleneck import PREPARING_STAGES, TRAINING_STAGES
from hopline.util import trace
from tests.support.runs import sage, small


class SpanRecorder:
    """A listener that records the spans of stages."""

    def __init__(self) -> None:
        self.spans: list[trace.Span] = []

    def on_span(self, span: trace.Span) -> None:
        if span.name in (*PREPARING_STAGES, *TRAINING_STAGES):
            self.spans.append(span)

    def on_count(self, name: str, amount: float) -> None: ...


METHODS: list[hl.extend.Method] = [
    hl.FullBatch(num_shards=3, partition="random", aggregation="sweep"),
    hl.FullBatch(num_shards=3, partition="random", aggregation="sweep", trim=True),
    hl.FullBatch(num_shards=3, partition="random", aggregation="sequential"),
    hl.Historical(num_parts=4, parts_per_batch=2, partition="random", refresh_every=1),
    hl.Historical(num_parts=4, parts_per_batch=2, partition="random", compensate=True),
    hl.Sampled(fanouts=(3, 2), batch_size=50, workers=0),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_no_stage_lies_within_another(method: hl.extend.Method):
    data = small()
    recorder = SpanRecorder()
    with trace.listen(recorder):
        run = hl.Trainer(sage(data), data, method, epochs=2, show=False).fit()
    for thread in {span.thread for span in recorder.spans}:
        stretches = sorted((s.start_s, s.start_s + s.duration_s, s.name) for s in recorder.spans if s.thread == thread)
        for (_, stop, name), (start, _, other) in pairwise(stretches):
            assert stop <= start, f"{other} begins before {name} ends"
    epoch = run.history[-1]
    assert 0 < sum(epoch.stages.get(name, 0.0) for name in (*PREPARING_STAGES, *TRAINING_STAGES)) <= epoch.seconds
