"""Spans, counters and timers, with and without listeners, over threads and epochs."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from hopline.util import trace
from hopline.util.trace import Counters, Span, Timers, count, listen, span


class Recorder:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counts: list[tuple[str, float]] = []

    def on_span(self, span: Span) -> None:
        self.spans.append(span)

    def on_count(self, name: str, amount: float) -> None:
        self.counts.append((name, amount))


def add_times(timers: Timers, **seconds: float) -> None:
    for name, duration_s in seconds.items():
        timers.on_span(Span(name, 0.0, duration_s, "main"))


def test_spans_and_counts_reach_listeners_only_while_they_listen():
    recorder = Recorder()
    with span("before"):
        count("n", 1)
    with listen(recorder):
        start_s = time.perf_counter()
        with span("during"):
            time.sleep(0.002)
        count("n", 2.5)
    with span("after"):
        count("n", 4)
    assert [s.name for s in recorder.spans] == ["during"]
    assert recorder.counts == [("n", 2.5)]
    ended = recorder.spans[0]
    assert ended.start_s >= start_s
    assert 0.002 <= ended.duration_s <= time.perf_counter() - start_s
    assert ended.thread == threading.current_thread().name


def test_a_span_that_raises_is_reported_and_the_error_is_raised():
    recorder = Recorder()
    with listen(recorder), pytest.raises(KeyError), span("fails"):
        raise KeyError
    assert [s.name for s in recorder.spans] == ["fails"]


@pytest.mark.parametrize("leaves_first", [0, 1])
def test_listeners_leave_in_any_order(leaves_first: int):
    recorders = [Recorder(), Recorder()]
    contexts = [listen(recorder) for recorder in recorders]
    for context in contexts:
        context.__enter__()
    contexts[leaves_first].__exit__(None, None, None)
    count("n", 1)
    contexts[1 - leaves_first].__exit__(None, None, None)
    count("n", 1)
    assert len(recorders[leaves_first].counts) == 0
    assert len(recorders[1 - leaves_first].counts) == 1


def test_threads_see_listeners_and_name_themselves():
    recorder = Recorder()

    def work() -> None:
        with span("work"):
            count("n", 1)

    with listen(recorder):
        worker = threading.Thread(target=work, name="gather-0")
        worker.start()
        worker.join()
    assert [s.thread for s in recorder.spans] == ["gather-0"]
    assert recorder.counts == [("n", 1)]


def test_without_listeners_every_span_is_one_shared_object():
    assert span("a") is span("b")


def test_statistics_set_the_first_epoch_apart():
    timers = Timers()
    later = [1.0, 2.0, 4.0]
    for seconds in [9.0, *later]:
        add_times(timers, sample=seconds / 2, gather=0.5)
        add_times(timers, sample=seconds / 2)
        timers.next_epoch()
    sample, gather = timers.statistics()
    assert (sample.name, sample.calls, sample.first_epoch_s) == ("sample", 8, 9.0)
    assert sample.mean_s == pytest.approx(statistics.fmean(later))
    assert sample.std_s == pytest.approx(statistics.stdev(later))
    assert (gather.calls, gather.mean_s, gather.std_s) == (4, 0.5, 0.0)


def test_one_epoch_has_no_mean_and_two_have_no_spread():
    timers = Timers()
    add_times(timers, step=3.0)
    assert timers.statistics()[0].first_epoch_s == 3.0, "an epoch never closed is the first"
    timers.next_epoch()
    only = timers.statistics()[0]
    assert only.first_epoch_s == 3.0
    assert math.isnan(only.mean_s)
    add_times(timers, step=1.0)
    timers.next_epoch()
    both = timers.statistics()[0]
    assert both.mean_s == 1.0
    assert math.isnan(both.std_s)


def test_an_epoch_without_a_region_counts_as_zero_seconds():
    timers = Timers()
    for seconds in ({"step": 1.0}, {"step": 1.0, "evaluate": 4.0}, {"step": 1.0}):
        add_times(timers, **seconds)
        timers.next_epoch()
    evaluate = timers.statistics()[1]
    assert (evaluate.first_epoch_s, evaluate.mean_s, evaluate.calls) == (0.0, 2.0, 1)


def test_last_epoch_and_slowest_are_of_the_last_completed_epoch():
    timers = Timers()
    assert timers.last_epoch() == {}
    assert timers.slowest() is None
    add_times(timers, sample=1.0, gather=3.0, step=2.0)
    timers.next_epoch()
    add_times(timers, sample=100.0)
    assert timers.last_epoch() == {"sample": 1.0, "gather": 3.0, "step": 2.0}
    assert timers.slowest() == "gather"
    assert timers.slowest(among=["sample", "step"]) == "step"
    assert timers.slowest(among=["absent"]) is None


def test_region_and_listening_fill_the_same_table():
    timers = Timers()
    for _ in range(3):
        with timers.region("mine"):
            time.sleep(0.001)
        with listen(timers), span("theirs"):
            pass
        timers.next_epoch()
    lines = timers.table().splitlines()
    assert lines[0].split() == ["region", "calls", "first", "epoch", "later", "epochs"]
    assert lines[1].startswith("mine")
    assert " ± " in lines[1]
    assert lines[2].split()[:2] == ["theirs", "3"]
    assert timers.last_epoch()["mine"] >= 0.001


def test_counters_add_up_per_epoch_and_overall():
    counters = Counters()
    with listen(counters):
        count("rows", 2)
        count("rows", 3)
        counters.next_epoch()
        count("rows", 10)
        count("bytes", 1.5)
    assert counters.last_epoch() == {"rows": 5}
    assert counters.totals() == {"rows": 15, "bytes": 1.5}


def test_many_threads_lose_nothing():
    timers = Timers()
    counters = Counters()

    def work(_: int) -> None:
        for _ in range(200):
            with span("work"):
                count("n", 1)

    with listen(timers), listen(counters), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert timers.statistics()[0].calls == 1600
    assert counters.totals() == {"n": 1600}
    assert trace._trace.listeners == ()


class FakeEvent:
    """A CUDA event, which has happened once somebody has waited for it."""

    def __init__(self, at_ms: float, over: bool) -> None:
        self.at_ms = at_ms
        self.over = over

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_spans_of_a_gpu_are_reported_when_they_have_ended(monkeypatch: pytest.MonkeyPatch):
    pending = deque[Any]()
    monkeypatch.setattr(trace._trace, "pending", pending)
    this_thread = threading.current_thread().name
    timers = trace.Timers()

    def begun(name: str, thread: str, over: bool) -> None:
        start, end = (cast(torch.cuda.Event, event) for event in (FakeEvent(1, True), FakeEvent(3, over)))
        pending.append(trace._DeviceSpan(name=name, start_s=0.0, thread=thread, start=start, end=end))

    with trace.listen(timers):
        begun("done", this_thread, over=True)
        begun("under way", this_thread, over=False)
        begun("another's", "another", over=False)
        for _ in range(4):
            trace._report_oldest()
        assert timers.this_epoch() == {"done": pytest.approx(0.002)}, "nobody waits for what is under way"
        assert [device_span.name for device_span in pending] == ["under way", "another's"]
        trace.end_device_spans()
        assert timers.this_epoch() == {name: pytest.approx(0.002) for name in ("done", "under way")}
        assert [device_span.name for device_span in pending] == ["another's"]
        pending[0].end.synchronize()
        trace._report_oldest()
        trace._report_oldest()
        assert set(timers.this_epoch()) == {"done", "under way", "another's"}


def test_spans_that_nobody_waited_for_are_not_reported_to_the_next_listener(monkeypatch: pytest.MonkeyPatch):
    """As after an error, which ends an epoch before its spans are asked for."""
    monkeypatch.setattr(trace._trace, "pending", deque[Any]())
    with trace.listen(trace.Timers()):
        start, end = (cast(torch.cuda.Event, event) for event in (FakeEvent(1, True), FakeEvent(3, True)))
        trace._trace.pending.append(
            trace._DeviceSpan(name="left", start_s=0.0, thread="MainThread", start=start, end=end)
        )
    timers = trace.Timers()
    with trace.listen(timers):
        trace.end_device_spans()
    assert timers.this_epoch() == {}
