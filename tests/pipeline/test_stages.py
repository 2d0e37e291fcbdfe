"""The pipeline of stages: results in order, bounded look-ahead, errors by stage, and no thread left."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hopline.pipeline.stages import EXTRA_NICENESS, Pipeline, Stage
from hopline.util import trace
from hopline.util.errors import StageError


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hopline-pipeline")]


def jitter(value: int) -> int:
    time.sleep(random.Random(value).random() * 0.003)
    return value


WORKERS = pytest.mark.parametrize("workers", [0, 1, 2, 5])


@WORKERS
@pytest.mark.parametrize("look_ahead", [1, 2, 9])
def test_results_come_in_the_order_of_the_requests(workers: int, look_ahead: int) -> None:
    stages = [Stage("jitter", jitter), Stage("square", lambda v: v * v)]
    ours = list(Pipeline(stages, workers=workers, look_ahead=look_ahead).run(range(40)))
    assert ours == [v * v for v in range(40)]
    assert not our_threads()


@WORKERS
def test_pipelines_without_requests_or_stages_run(workers: int) -> None:
    assert list(Pipeline([Stage("same", jitter)], workers=workers).run([])) == []
    assert list(Pipeline([], workers=workers).run("ab")) == ["a", "b"]


@WORKERS
def test_none_is_a_request_and_a_result_like_any_other(workers: int) -> None:
    assert list(Pipeline([Stage("same", lambda v: v)], workers=workers).run([None, 1, None])) == [None, 1, None]


@pytest.mark.parametrize(("workers", "look_ahead"), [(1, 1), (1, 3), (4, 2), (2, 5)])
def test_never_more_than_look_ahead_results_wait(workers: int, look_ahead: int) -> None:
    lock = threading.Lock()
    num_consumed = 0
    ahead = []

    def started(value: int) -> int:
        with lock:
            ahead.append(value + 1 - num_consumed)
        return value

    for value in Pipeline([Stage("start", started)], workers=workers, look_ahead=look_ahead).run(range(60)):
        with lock:
            num_consumed = value + 1
        if value % 10 == 0:
            time.sleep(0.01)  # time to run too far ahead
    # One more than look_ahead: the result that is being handed over was asked for already.
    assert max(ahead) <= look_ahead + 1
    assert len(ahead) == 60


def test_an_endless_source_is_read_only_as_far_as_needed() -> None:
    values_read = []

    def source() -> Iterator[int]:
        for value in itertools.count():
            values_read.append(value)
            yield value

    with closing(Pipeline([Stage("same", jitter)], workers=2, look_ahead=3).run(source())) as results:  # type: ignore[type-var]
        assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(values_read) <= 5 + 3


def test_without_workers_everything_runs_in_the_caller_when_asked() -> None:
    ran = []
    pipeline = Pipeline([Stage("note", lambda v: ran.append((v, threading.get_ident())))], workers=0)
    results = pipeline.run(range(3))
    next(results)
    assert ran == [(0, threading.get_ident())]


def test_one_thread_takes_a_request_through_all_stages() -> None:
    def note(threads_so_far: tuple[int, ...]) -> tuple[int, ...]:
        return (*threads_so_far, threading.get_ident())

    for threads in Pipeline([Stage("a", note), Stage("b", note)], workers=3).run([()] * 20):
        assert len(set(threads)) == 1
        assert threads[0] != threading.get_ident()


@WORKERS
@pytest.mark.parametrize("stage", ["sample", "gather", "move"])
def test_an_error_names_its_stage_and_keeps_its_cause(workers: int, stage: str) -> None:
    def fail(value: int) -> int:
        if value == 3:
            raise KeyError("gone")
        return value

    stages = [Stage(name, fail if name == stage else jitter) for name in ("sample", "gather", "move")]
    delivered: list[int] = []
    results = Pipeline(stages, workers=workers, look_ahead=4).run(range(10))
    with pytest.raises(StageError, match=f"stage '{stage}' failed.*gone") as caught:
        delivered.extend(results)
    assert isinstance(caught.value.__cause__, KeyError)
    assert delivered == [0, 1, 2]
    assert not our_threads()


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_an_error_that_callers_look_for_is_still_one_of_that_kind(kind: type[Exception]) -> None:
    def fail(value: int) -> int:
        raise kind("too much")

    with pytest.raises(kind, match="'move' failed: too much") as caught:
        list(Pipeline([Stage("move", fail)]).run([1]))
    assert isinstance(caught.value, StageError)


@WORKERS
def test_an_error_in_the_source_reaches_the_caller(workers: int) -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(Pipeline([Stage("same", jitter)], workers=workers).run(source()))
    assert not our_threads()


@pytest.mark.parametrize("how", ["close", "forget"])
def test_abandoning_the_iterator_stops_the_threads(how: str) -> None:
    results = Pipeline([Stage("same", jitter)], workers=3, look_ahead=6).run(itertools.count())
    next(results)
    assert our_threads()
    if how == "close":
        results.close()  # type: ignore[attr-defined]
    else:
        del results
        gc.collect()
    assert not our_threads()


def test_nothing_starts_before_the_first_result_is_asked_for() -> None:
    ran = []
    results = Pipeline([Stage("note", ran.append)], workers=2).run(range(9))
    assert not our_threads()
    assert not ran
    del results


def test_a_consumer_that_raises_leaves_no_threads() -> None:
    def consume() -> None:
        for value in Pipeline([Stage("same", jitter)], workers=2).run(itertools.count()):
            if value == 2:
                raise ValueError("enough")

    try:
        consume()
    except ValueError as error:
        assert str(error) == "enough"  # noqa: PT017 - the traceback must be gone before threads are counted
    gc.collect()
    assert not our_threads()


def test_waiting_for_a_result_takes_no_processor_time() -> None:
    def slow(value: int) -> int:
        time.sleep(0.5)
        return value

    before = time.thread_time()
    assert list(Pipeline([Stage("slow", slow)], workers=1).run([1])) == [1]
    assert time.thread_time() - before < 0.2


def test_two_runs_of_one_pipeline_do_not_mix() -> None:
    pipeline = Pipeline([Stage("same", jitter)], workers=2)
    assert list(zip(pipeline.run(range(8)), pipeline.run(range(100, 108)), strict=True)) == [
        (v, v + 100) for v in range(8)
    ]


def test_stages_and_waiting_are_spans() -> None:
    timers = trace.Timers()
    with trace.listen(timers):
        list(Pipeline([Stage("sample", jitter), Stage("gather", jitter)], workers=1).run(range(4)))
    assert {r.name: r.calls for r in timers.statistics()} == {"sample": 4, "gather": 4, "wait": 4}


def test_a_run_says_what_its_stages_took_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(
        "hopline.pipeline.stages._alone_s", lambda: next(ticks)
    )  # a second passes between two looks at it
    pipeline = Pipeline([Stage("sample", jitter), Stage("gather", jitter)], workers=1)
    assert list(pipeline.run(range(5))) == [*range(5)]
    assert pipeline.stage_s == {"sample": 5, "gather": 5}


def test_a_run_that_did_not_end_or_had_no_threads_says_nothing_of_its_stages() -> None:
    for workers, requests in ((0, range(3)), (1, range(0))):
        pipeline = Pipeline([Stage("same", jitter)], workers=workers)
        assert list(pipeline.run(requests)) == [*requests]
        assert pipeline.stage_s == {}
    pipeline = Pipeline([Stage("same", jitter)], workers=1)
    with closing(pipeline.run(range(3))) as results:
        next(results)
    assert pipeline.stage_s == {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities of threads are Linux's")
def test_preparing_threads_give_way_to_training() -> None:
    def priority(_: int) -> tuple[int, int]:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), torch.get_num_threads()

    own_priority = os.getpriority(os.PRIO_PROCESS, 0)
    (ours,) = Pipeline([Stage("look", priority)], workers=1).run([0])
    assert ours == (min(19, own_priority + EXTRA_NICENESS), 1)
    (ours,) = Pipeline([Stage("look", priority)], workers=1, all_cores=True).run([0])
    assert ours == (min(19, own_priority + EXTRA_NICENESS), torch.get_num_threads())
    assert os.getpriority(os.PRIO_PROCESS, 0) == own_priority


def test_in_step_every_request_that_was_begun_is_finished() -> None:
    finished: list[int] = []
    threads: set[str] = set()

    def work(request: int) -> int:
        time.sleep(0.01)
        threads.add(threading.current_thread().name)
        finished.append(request)
        if request == 7:
            raise ValueError("seven")
        return request

    pipeline = Pipeline([Stage("work", work)], workers=4, look_ahead=3, in_step=True)
    with closing(pipeline.run(itertools.count())) as results:
        assert next(results) == 0
    assert finished == [0, 1, 2, 3]  # however far the thread was, so that all ranks end at the same one
    assert len(threads) == 1
    finished.clear()
    with pytest.raises(ValueError, match="seven"):
        list(pipeline.run(itertools.count()))
    assert finished[-1] < 10
