"""CUDA-graph capture: when it is due, the order of streams, and the state after a failed one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from hopline.device import streams
from hopline.device.cuda_graph import CapturedCall, CaptureDeclined
from tests.support.fake_cuda import FakeCuda, Stream, capture_lock_elsewhere

GPU = torch.device("cuda", 0)


def captured_of(lines: list[str] | None = None, **options: Any) -> CapturedCall[Any]:
    say = print if lines is None else lines.append
    return CapturedCall(GPU, purpose="this", subject="steps are", say=say, **options)


def is_lock_free() -> bool:
    """Whether another thread could take the capture lock."""
    acquired: list[bool] = []

    def ask() -> None:
        acquired.append(streams.capture_lock.acquire(blocking=False))
        if acquired[0]:
            streams.capture_lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return acquired[0]


def test_capture_is_due_after_the_warm_up_at_most_max_captures_times(fake_cuda: FakeCuda):
    captured = captured_of(warm_up=2, max_captures=2)
    history = []
    for _ in range(2):
        for _ in range(2):
            history.append(captured.is_due)
            captured.runs += 1
        history.append(captured.is_due)
        assert not captured.is_settled
        assert captured.capture(nullcontext(lambda: "result"))
        assert not captured.is_due
        assert captured.is_settled
        assert captured.replay() == captured.result == "result"
        captured.reset()
        assert captured.graph is None
    assert history == [False, False, True] * 2
    captured.runs += 5
    assert not captured.is_due, "what it reads keeps moving"
    assert captured.is_settled


def test_streams_wait_for_each_other_and_the_rest_happens_between(fake_cuda: FakeCuda):
    captured = captured_of()

    @contextmanager
    def prepared() -> Iterator[Callable[[], str]]:
        fake_cuda.log.append(f"warm up on {fake_cuda.current[-1].name}")
        assert not is_lock_free()
        yield lambda: fake_cuda.log.append("the call") or "result"
        assert captured.graph is None, "until all is put back"
        fake_cuda.log.append(f"put back on {fake_cuda.current[-1].name}")

    assert captured.capture(prepared())
    assert fake_cuda.log == [
        "side 1 waits for main",
        "warm up on side 1",
        "capture 0 on side 1 in pool of 0",
        "the call",
        "end of capture 0",
        "put back on side 1",
        "main waits for side 1",
    ]
    assert is_lock_free()
    captured.replay()
    assert fake_cuda.log[-1] == "replay of 0 on main"


@pytest.mark.parametrize("where", ["before", "within", "after"])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("no\n  more"), CaptureDeclined()], ids=lambda error: type(error).__name__
)
def test_after_a_failure_nothing_is_left_and_nobody_tries_again(where: str, error: Exception, fake_cuda: FakeCuda):
    lines: list[str] = []
    captured = captured_of(lines, max_captures=3)

    def fails(moment: str) -> None:
        if moment == where:
            raise error

    @contextmanager
    def prepared() -> Iterator[Callable[[], None]]:
        fails("before")
        try:
            yield lambda: fails("within")
            fails("after")
        finally:
            fake_cuda.log.append("put back")

    assert not captured.capture(prepared())
    assert captured.graph is None
    assert not captured.is_due
    assert captured.is_settled
    assert len(fake_cuda.current) == 1
    assert is_lock_free()
    assert fake_cuda.log[-1] == "main waits for side 1"
    assert ("put back" in fake_cuda.log) == (where != "before")
    if isinstance(error, CaptureDeclined):
        assert lines == []
    else:
        assert lines == ["steps are not captured in a CUDA graph, so kernels are launched one by one: no more"]


def test_an_interruption_is_no_failure_of_the_capture(fake_cuda: FakeCuda):
    def interrupted() -> None:
        raise KeyboardInterrupt

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        captured_of(lines).capture(nullcontext(interrupted))
    assert lines == []
    assert len(fake_cuda.current) == 1
    assert is_lock_free()


def test_an_optional_capture_does_not_wait_for_the_lock(fake_cuda: FakeCuda):
    captured = captured_of()
    with capture_lock_elsewhere():
        assert not captured.capture(nullcontext(lambda: None), wait=False)
    assert fake_cuda.log == []
    assert captured.is_due, "nothing was tried"
    assert captured.capture(nullcontext(lambda: None), wait=False)


def test_a_required_capture_waits_for_the_lock(fake_cuda: FakeCuda):
    captured = captured_of()
    log = fake_cuda.log
    with capture_lock_elsewhere() as ended:
        timer = threading.Timer(0.05, lambda: (log.append("evaluated"), ended.set()))
        timer.start()
        assert captured.capture(nullcontext(lambda: None))
        timer.join()
    assert log[0] == "evaluated"


def test_a_call_computes_in_the_memory_of_one_that_never_runs_at_the_same_time(fake_cuda: FakeCuda):
    full = captured_of()
    last = captured_of()
    other = captured_of()
    full.capture(nullcontext(lambda: None))
    last.capture(nullcontext(lambda: None), pool_of=full)
    other.capture(nullcontext(lambda: None))
    assert [graph.memory for graph in fake_cuda.graphs] == ["pool of 0", "pool of 0", "pool of 2"]


def test_kernels_have_the_priority_of_the_current_stream_or_of_the_one_that_is_given(fake_cuda: FakeCuda):
    streams_used: list[tuple[str, int]] = []

    def note() -> None:
        streams_used.append((fake_cuda.current[-1].name, fake_cuda.current[-1].priority))

    captured_of().capture(nullcontext(note))
    first = Stream(fake_cuda.log, "first", -1)
    with torch.cuda.stream(first):  # type: ignore[arg-type]
        captured_of().capture(nullcontext(note))
        captured_of().capture(nullcontext(note))
        captured_of().capture(nullcontext(note), stream=Stream(fake_cuda.log, "given"))  # type: ignore[arg-type]
    assert streams_used == [("side 1", 0), ("side 2", -1), ("side 2", -1), ("given", 0)]


def test_the_owner_of_a_graph_is_freed_without_the_garbage_collector(fake_cuda: FakeCuda):
    class Owner:
        def __init__(self) -> None:
            self.captured = captured_of()
            self.captured.capture(self.prepared())

        @contextmanager
        def prepared(self) -> Iterator[Callable[[], None]]:
            yield self.run

        def run(self) -> None: ...

    gc.disable()
    try:
        owner = Owner()
        reference = weakref.ref(owner)
        del owner
        assert reference() is None
    finally:
        gc.enable()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_is_captured_while_another_thread_waits_for_its_copies():
    ended = threading.Event()
    lines = []
    x = torch.ones(1000, device="cuda")
    failures = []

    def wait_again_and_again() -> None:
        copies = torch.cuda.Stream()
        source = torch.ones(1 << 20).pin_memory()
        try:
            while not ended.is_set():
                with torch.cuda.stream(copies):
                    source.to("cuda", non_blocking=True)
                    copies.record_event().synchronize()
        except RuntimeError as error:
            failures.append(error)

    def count() -> None:
        for _ in range(2000):
            x.add_(1)

    captured = captured_of(lines)
    thread = threading.Thread(target=wait_again_and_again)
    thread.start()
    try:
        captured.capture(nullcontext(count))
    finally:
        ended.set()
        thread.join()
    assert not lines
    captured.replay()
    assert not failures
    assert float(x[0]) == 2001


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("waits", [False, True], ids=["raises", "waits for the device"])
def test_a_graph_that_cannot_be_captured_leaves_nothing_open(waits: bool):
    lines = []
    other = torch.cuda.Stream()
    x = torch.ones(10, device="cuda")
    outer = torch.cuda.current_stream()

    def fails() -> None:
        x.mul(2)
        if waits:
            torch.cuda.synchronize()
        raise ZeroDivisionError

    assert not captured_of(lines).capture(nullcontext(fails))
    assert len(lines) == 1
    assert torch.cuda.current_stream() == outer
    assert torch.rand(5, device="cuda").shape == (5,)
    read = torch.empty(1 << 22, device="cuda")
    address = read.data_ptr()
    read.record_stream(other)
    del read
    torch.cuda.synchronize()
    again = torch.empty(1 << 22, device="cuda")
    assert again.data_ptr() == address, "memory that another stream has read comes back"
    captured = captured_of(lines)
    assert captured.capture(nullcontext(lambda: x.add_(1)))
    captured.replay()
    assert float(x[0]) == 2
