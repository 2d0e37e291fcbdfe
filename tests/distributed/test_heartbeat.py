"""Heartbeats tell a silent rank from one that left, failed or is slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hopline.distributed.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopline.distributed.heartbeat.BEAT_S", 0.05)
    monkeypatch.setattr("hopline.distributed.heartbeat.STALE_S", 0.4)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def heartbeat(store: dist.Store) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(store, 0, 3, "here:1")
    yield heartbeat
    heartbeat.stop("left")


def test_a_silent_rank_is_named_and_the_others_are_told(heartbeat: Heartbeat, store: dist.Store):
    third = Heartbeat(store, 2, 3, "here:1")
    store.set("alive/1", "7 1")
    assert heartbeat.find_lost() == "rank 1 stopped answering"
    time.sleep(0.2)
    assert store.get("alive/0") == b"lost 1"
    third.stop("left")
    heartbeat.stop("left")
    assert store.get("alive/0") == b"lost 1"  # the first last words count


def test_last_words_are_written_if_stop_comes_at_the_start_of_a_round(store: dist.Store):
    heartbeat = Heartbeat(store, 0, 1, "here:1")
    heartbeat._is_stopped.set()
    heartbeat._wake.set()
    heartbeat._thread.join()

    class StoppedWhenAsked(threading.Event):
        """`stop` comes while the thread asks whether it has come."""

        def is_set(self) -> bool:
            heartbeat._last_words = "left"
            return True

    heartbeat._is_stopped = StoppedWhenAsked()
    heartbeat._run()
    assert store.get("alive/0") == b"left"


def test_who_left_because_of_another_is_not_blamed(heartbeat: Heartbeat, store: dist.Store):
    store.set("alive/1", "7 1")
    store.set("alive/2", "lost 1")
    assert heartbeat.find_lost() == "rank 1 stopped answering"


@pytest.mark.parametrize("words", [b"\xff\xfe\x00", b"", b"7", b"x y", b"lost a,b", b"lost ", b"9" * 5000 + b" 1"])
def test_words_that_no_rank_says_are_not_heard(words: bytes, heartbeat: Heartbeat, store: dist.Store):
    store.set("alive/1", "7 1")
    store.set("alive/2", "5 5")
    time.sleep(0.2)
    store.set("alive/1", words)  # type: ignore[arg-type]
    time.sleep(0.2)
    before = store.get("alive/0")
    until = time.monotonic() + 10
    while store.get("alive/0") == before and time.monotonic() < until:  # its own beats go on
        time.sleep(0.01)
    assert heartbeat._words_of(1) == "7 1"
    store.set("alive/1", "error KeyError: 'x'")
    while heartbeat._words_of(1) == "7 1" and time.monotonic() < until:
        time.sleep(0.01)
    assert heartbeat.find_lost() == "rank 1 stopped with KeyError: 'x'"


def test_a_rank_whose_words_stay_unreadable_is_named(heartbeat: Heartbeat, store: dist.Store):
    third = Heartbeat(store, 2, 3, "here:1")
    store.set("alive/1", "7 1")
    time.sleep(0.2)
    store.set("alive/1", b"\xff")  # type: ignore[arg-type]
    assert heartbeat.find_lost() == "rank 1 stopped answering"
    third.stop("left")


def test_a_rank_that_failed_has_said_why(heartbeat: Heartbeat, store: dist.Store):
    store.set("alive/1", "lost 2")
    store.set("alive/2", "error KeyError: 'x'")
    assert heartbeat.find_lost() == "rank 2 stopped with KeyError: 'x'"


def test_a_rank_that_is_behind_is_named(heartbeat: Heartbeat, store: dist.Store):
    peers = [Heartbeat(store, rank, 3, "here:1") for rank in (1, 2)]
    heartbeat.exchanges = 5
    peers[0].exchanges = 5
    peers[1].exchanges = 4
    assert heartbeat.find_lost() == "rank 2 is alive but did not answer within timeout_s"
    for peer in peers:
        peer.stop("left")


def test_ranks_that_ended_or_never_came_are_named(heartbeat: Heartbeat, store: dist.Store):
    store.set("alive/1", "left")
    assert heartbeat.find_lost() == "rank 2 did not start"
    store.set("alive/2", "left")
    time.sleep(0.2)
    assert heartbeat.find_lost() == "ranks 1, 2 ended before the others"


def test_a_store_that_is_gone_was_with_rank_0(monkeypatch: pytest.MonkeyPatch):
    class Gone(dist.HashStore):
        def set(self, *args: object) -> None:
            raise dist.DistNetworkError("gone")

    heartbeat = Heartbeat(Gone(), 1, 2, "node1:29500")
    assert heartbeat.find_lost() == "rank 0 or its host stopped answering (at node1:29500, where the ranks meet)"
    heartbeat.stop("left")


def test_waiting_for_the_others_ends(heartbeat: Heartbeat, store: dist.Store):
    store.set("alive/1", "3 3")
    store.set("alive/2", "left")
    heartbeat.stop("left")
    assert not [t for t in threading.enumerate() if t.name == "hopline-heart"]
    start = time.monotonic()
    heartbeat.wait_for_others(5)  # rank 1 is silent, so nothing more will come from it
    assert 0.2 < time.monotonic() - start < 4.9
    store.set("alive/1", "left")
    again = time.monotonic()
    heartbeat.wait_for_others(5)
    assert time.monotonic() - again < 4.9
