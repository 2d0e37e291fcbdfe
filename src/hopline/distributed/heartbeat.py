"""Heartbeats: which ranks are alive, and which one to blame if a collective call fails.

A failed collective call does not say which rank caused it. So a thread of every rank writes a message into
the store of the process group every `BEAT_S` seconds, and reads those of the others:

    alive/RANK = "BEATS EXCHANGES"   running: beats so far, and collective calls begun so far
                 "left"              ended in good order
                 "error TEXT"        ended by this error
                 "lost 1,2"          gave up, because ranks 1 and 2 stopped answering

After a failure `find_lost` blames, in this order: a rank that ended by an error, ranks that others call
lost, the host of the store if it does not answer, ranks whose message no longer changes. If none is found
within some seconds: ranks that never started, that left, or that have begun fewer calls than this one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

BEAT_S = 1.0
"""Seconds between two beats of a rank."""
STALE_S = 3.0
"""Seconds. A running rank whose message has not changed for longer has stopped."""
WORDS = re.compile(r"[0-9]{1,18} [0-9]{1,18}|left|lost [0-9]{1,9}(,[0-9]{1,9})*|error .*", re.DOTALL)
"""All messages that a rank writes: a beat, "left", "lost ..." or "error ..."."""


class _Message(NamedTuple):
    """The latest message of a rank, as this rank has read it."""

    words: str
    seen_s: float
    """When this rank first read these words, in seconds of its own `time.monotonic`."""


class Heartbeat:
    """A thread that writes the heartbeat of this rank into a store, and reads those of the other ranks.

    The thread starts with the object and ends with `stop`. Clocks of hosts differ, so a rank is judged by
    how long its message has not changed, by the clock of this rank. Until `stop`, only the thread calls the
    store: if the host of the store no longer answers, the thread waits for it, and no other.

    Args:
        store: A connection of its own: a call of another thread may block a connection for long.
        rank: Number of this rank.
        size: Number of ranks.
        address: Where the store is served. Errors name it.
        exchanges: Collective calls that this rank has begun already, under heartbeats before this one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, exchanges: int = 0) -> None:
        self.exchanges = exchanges
        """Collective calls that this rank has begun. The others wait for a rank that has begun fewer."""
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._messages: dict[int, _Message] = {}
        """Latest message of each rank that has written one, this rank included."""
        self._store_answered_s = time.monotonic()
        """When the store last answered, by `time.monotonic`."""
        self._is_store_lost = False
        self._last_words = ""
        """Message that is written in place of beats: "lost ...", "left" or "error ...". "" while running."""
        self._wake = threading.Event()
        """Set to make the thread write at once, before its next beat."""
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hopline-heart", daemon=True)
        self._thread.start()

    def stop(self, last_words: str) -> None:
        """Write "left" or "error ...", unless `find_lost` has written a last message, and end the thread."""
        self._last_words = self._last_words or last_words
        self._wake.set()
        self._is_stopped.set()
        self._thread.join(timeout=2.0)

    def wait_for_others(self, timeout_s: float) -> None:
        """After `stop`: wait until every other rank has written its last message, or until one is silent."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._is_store_lost:
            with suppress(RuntimeError):
                self._read_messages()
            words = [self._words_of(rank) for rank in range(self._size) if rank != self._rank]
            is_any_running = any(_is_beat(text) for text in words)
            if not is_any_running or self._find_stale():
                return
            time.sleep(0.05)

    def find_lost(self) -> str:
        """Who stopped answering, as a sentence. Also writes "lost ..." for the other ranks to read.

        May take some seconds: a rank counts as silent after `STALE_S`, and its last beat may have come just
        now.
        """
        deadline = time.monotonic() + STALE_S + 2 * BEAT_S
        while True:
            lost_ranks, sentence = self._find_suspects(final=time.monotonic() > deadline)
            if sentence:
                self._last_words = f"lost {','.join(map(str, lost_ranks))}"
                self._wake.set()
                return sentence
            time.sleep(0.1)

    def _run(self) -> None:
        """The thread: write a message, read all others, wait for the next beat or for `_wake`."""
        num_beats = 0
        while True:
            # In this order, because `stop` sets the words first and the flag last: a round that sees the flag
            # also sees the words. A `stop` that comes later gets another round.
            self._wake.clear()
            is_last = self._is_stopped.is_set()
            last_words = self._last_words
            try:
                self._store.set(f"alive/{self._rank}", last_words or f"{num_beats} {self.exchanges}")
                self._read_messages()
            except RuntimeError:  # the process that serves the store has ended
                self._is_store_lost = True
                return
            if is_last:
                return
            num_beats += 1
            if not self._is_stopped.is_set():
                self._wake.wait(BEAT_S)

    def _read_messages(self) -> None:
        """Read the messages of all ranks that have written one, and note when each was first seen."""
        # Reading a key that does not exist would block, so a rank's first message is checked for.
        ranks = [r for r in range(self._size) if r in self._messages or self._store.check([f"alive/{r}"])]
        values = get_all(self._store, [f"alive/{r}" for r in ranks])
        self._store_answered_s = time.monotonic()
        for rank, value in zip(ranks, values, strict=True):
            words = bytes(value).decode(errors="replace")
            # Any process that reaches the store can write to it. Text that no rank would write is ignored.
            if WORDS.fullmatch(words) and self._words_of(rank) != words:
                self._messages[rank] = _Message(words, self._store_answered_s)

    def _words_of(self, rank: int) -> str:
        return self._messages[rank].words if rank in self._messages else ""

    def _find_stale(self) -> list[int]:
        """Other ranks that wrote no last message, and whose beats have stopped."""
        now_s = time.monotonic()
        stale: list[int] = []
        # A copy: the thread may add to the dict meanwhile.
        for rank, message in list(self._messages.items()):
            if rank != self._rank and _is_beat(message.words) and now_s - message.seen_s > STALE_S:
                stale.append(rank)
        return stale

    def _find_suspects(self, *, final: bool) -> tuple[list[int], str]:
        """(ranks to blame, a sentence about them). The sentence is "" while it is too early to tell.

        final: Whether a silent rank would have been noticed by now. Then ranks that never started, that
            left or that are behind are blamed.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        words = {rank: self._words_of(rank) for rank in others}

        # Errors first: others may call such a rank lost, but its error says why.
        for rank in others:
            if words[rank].startswith("error "):
                return [rank], f"rank {rank} stopped with {words[rank].removeprefix('error ').strip()}"
        for text in words.values():
            if text.startswith("lost "):
                # A rank that blames this one is not followed: this one is running.
                blamed = [int(r) for r in text.removeprefix("lost ").split(",") if r != str(self._rank)]
                if blamed:
                    return blamed, f"{_name_ranks(blamed)} stopped answering"
        if self._is_store_lost or time.monotonic() - self._store_answered_s > STALE_S:
            return [0], f"rank 0 or its host stopped answering (at {self._address}, where the ranks meet)"
        stale = self._find_stale()
        if stale:
            return stale, f"{_name_ranks(stale)} stopped answering"
        if not final:
            return [], ""

        missing = [rank for rank in others if not words[rank]]
        if missing:
            return missing, f"{_name_ranks(missing)} did not start"
        left = [rank for rank in others if words[rank] == "left"]
        if left:
            return left, f"{_name_ranks(left)} ended before the others"
        behind: list[int] = []
        for rank in others:
            if _is_beat(words[rank]):
                _, num_exchanges = words[rank].split()
                if int(num_exchanges) < self.exchanges:
                    behind.append(rank)
        if behind:
            return behind, f"{_name_ranks(behind)} is alive but did not answer within timeout_s"
        return others, "the exchange between the ranks failed though all are alive"


class NoHeartbeat:
    """Stands in for a `Heartbeat` if the store of an existing process group allows no second connection.

    A collective call with a lost rank still fails, but the error does not name the rank.
    """

    def __init__(self, exchanges: int = 0) -> None:
        self.exchanges = exchanges

    def stop(self, last_words: str) -> None:
        """Does nothing: there is no store to write to."""

    def find_lost(self) -> str:
        """A sentence that names no rank."""
        return "a rank stopped answering, and the store of this process group cannot tell which"


def get_all(store: dist.Store, keys: Sequence[str]) -> list[bytes]:
    """The values of all keys. Waits until each exists."""
    if store.has_extended_api():
        return [bytes(value) for value in store.multi_get(list(keys))] if keys else []
    return [bytes(store.get(key)) for key in keys]  # such as a store of files


def _is_beat(words: str) -> bool:
    return words[:1].isdigit()


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
