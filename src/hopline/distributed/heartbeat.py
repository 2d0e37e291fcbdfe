"""Which ranks are alive: each says so every second where all can see it, and the silent ones can be named."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

BEAT_S = 1.0
"""Every rank says this often that it is alive."""
STALE_S = 3.0
"""A rank that has said nothing for so long has stopped."""
WORDS = re.compile(r"[0-9]{1,18} [0-9]{1,18}|left|lost [0-9]{1,9}(,[0-9]{1,9})*|error .*", re.DOTALL)
"""All that ranks say."""


class Heartbeat:
    """A thread that says in the store, every second, that this rank is alive, and notes which others say so.

    What is said is "beats exchanges" while the rank runs, and at the end "left", "lost 1,2" or "error ...". Clocks of
    hosts differ, so what counts is when a rank's words were last seen to change. All talk with the store is in this
    thread, so that a host that no longer answers holds up nobody else.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, place: str, exchanges: int = 0) -> None:
        self.exchanges = exchanges
        """How many exchanges this rank has begun: the one that is behind is the one the others wait for."""
        self._store, self._rank, self._size, self._place = store, rank, size, place
        self._seen: dict[int, tuple[str, float]] = {}
        self._answered = time.monotonic()
        self._broken = False
        self._last_words = ""
        self._wake, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hopline-heart", daemon=True)
        self._thread.start()

    def stop(self, last_words: str) -> None:
        """Say the last words, unless others were said before, and end the thread."""
        self._last_words = self._last_words or last_words
        self._wake.set()
        self._done.set()
        self._thread.join(timeout=2.0)

    def wait_for_others(self, timeout_s: float) -> None:
        """Wait until every rank has said its last words; called after `stop`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._broken:
            with suppress(RuntimeError):
                self._look()
            words = [self._words(rank) for rank in range(self._size) if rank != self._rank]
            if not any(w and w[0].isdigit() for w in words) or self._stale():
                return
            time.sleep(0.05)

    def find_lost(self) -> str:
        """Say who stopped answering, after looking long enough to tell; the others are told at once."""
        deadline = time.monotonic() + STALE_S + 2 * BEAT_S
        while True:
            lost, sentence = self._suspects(final=time.monotonic() > deadline)
            if sentence:
                self._last_words = f"lost {','.join(map(str, lost))}"
                self._wake.set()
                return sentence
            time.sleep(0.1)

    def _beat(self) -> None:
        beats = 0
        while True:
            words, ending = self._last_words, self._done.is_set()
            self._wake.clear()
            try:
                self._store.set(f"alive/{self._rank}", words or f"{beats} {self.exchanges}")
                self._look()
            except RuntimeError:  # the store is gone, and its connection with it
                self._broken = True
                return
            if ending:
                return
            beats += 1
            if not self._done.is_set():
                self._wake.wait(BEAT_S)

    def _look(self) -> None:
        others = [r for r in range(self._size) if r in self._seen or self._store.check([f"alive/{r}"])]
        values = get_all(self._store, [f"alive/{r}" for r in others])
        self._answered = time.monotonic()
        for rank, value in zip(others, values, strict=True):
            words = bytes(value).decode(errors="replace")
            # Whoever reaches the store can write there: what no rank says is as if nothing had been said.
            if WORDS.fullmatch(words) and self._words(rank) != words:
                self._seen[rank] = (words, self._answered)

    def _words(self, rank: int) -> str:
        return self._seen[rank][0] if rank in self._seen else ""

    def _stale(self) -> list[int]:
        """Ranks that have fallen silent without last words."""
        now = time.monotonic()
        seen = list(self._seen.items())
        return [rank for rank, (words, at) in seen if words[0].isdigit() and now - at > STALE_S and rank != self._rank]

    def _suspects(self, *, final: bool) -> tuple[list[int], str]:
        """The ranks to blame and a sentence about them; "" while it is too early to tell."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        words = {rank: self._words(rank) for rank in others}
        for rank in others:
            if words[rank].startswith("error "):
                return [rank], f"rank {rank} stopped with {words[rank].removeprefix('error ').strip()}"
        for text in words.values():
            blamed = [int(r) for r in text[5:].split(",") if r != str(self._rank)] if text.startswith("lost ") else []
            if blamed:
                return blamed, f"{_ranks(blamed)} stopped answering"
        if self._broken or time.monotonic() - self._answered > STALE_S:
            return [0], f"rank 0 or its host stopped answering (at {self._place}, where the ranks meet)"
        if stale := self._stale():
            return stale, f"{_ranks(stale)} stopped answering"
        if not final:
            return [], ""
        if missing := [rank for rank in others if not words[rank]]:
            return missing, f"{_ranks(missing)} did not start"
        if left := [rank for rank in others if words[rank] == "left"]:
            return left, f"{_ranks(left)} ended before the others"
        counts = {rank: int(words[rank].split()[1]) for rank in others if words[rank][0].isdigit()}
        if behind := [rank for rank, count in counts.items() if count < self.exchanges]:
            return behind, f"{_ranks(behind)} is alive but did not answer within timeout_s"
        return others, "the exchange between the ranks failed though all are alive"


class NoHeartbeat:
    """In place of a `Heartbeat` where the store of an existing process group cannot be used by a second thread.

    A rank that is lost still ends the exchange with an error; which rank it was cannot be told.
    """

    def __init__(self, exchanges: int = 0) -> None:
        self.exchanges = exchanges

    def stop(self, last_words: str) -> None:
        """Nothing is said: there is nowhere to say it."""

    def find_lost(self) -> str:
        return "a rank stopped answering, and the store of this process group cannot tell which"


def get_all(store: dist.Store, keys: Sequence[str]) -> list[bytes]:
    """The values of all keys, each waited for; a store of files is asked one by one."""
    if store.has_extended_api():
        return [bytes(value) for value in store.multi_get(list(keys))] if keys else []
    return [bytes(store.get(key)) for key in keys]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
