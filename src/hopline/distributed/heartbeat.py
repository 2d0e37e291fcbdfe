"""Which ranks are alive: each says so every second where all can see it, and the silent ones can be named."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

BEAT_S = 1.0
"""Every rank says this often that it is alive."""
STALE_S = 3.0
"""A rank that has said nothing for so long has stopped."""
WORDS = re.compile(r"[0-9]{1,18} [0-9]{1,18}|left|lost [0-9]{1,9}(,[0-9]{1,9})*|error .*", re.DOTALL)
"""All that ranks say."""


class _Message(NamedTuple):
    """The last words of a rank that this rank has read."""

    words: str
    """Text that `WORDS` matches."""
    seen_s: float
    """When the words were first read, by `time.monotonic` of this rank."""


class Heartbeat:
    """A thread that says in the store, every second, that this rank is alive, and notes which others say so.

    What is said is "beats exchanges" while the rank runs, and at the end "left", "lost 1,2" or "error ...". Clocks of
    hosts differ, so what counts is when a rank's words were last seen to change. All talk with the store is in this
    thread, so that a host that no longer answers holds up nobody else.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, exchanges: int = 0) -> None:
        self.exchanges = exchanges
        """How many exchanges this rank has begun: the one that is behind is the one the others wait for."""
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._messages: dict[int, _Message] = {}
        self._store_answered_s = time.monotonic()
        self._is_store_lost = False
        self._last_words = ""
        self._wake = threading.Event()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hopline-heart", daemon=True)
        self._thread.start()

    def stop(self, last_words: str) -> None:
        """Say the last words, unless others were said before, and end the thread."""
        self._last_words = self._last_words or last_words
        self._wake.set()
        self._is_stopped.set()
        self._thread.join(timeout=2.0)

    def wait_for_others(self, timeout_s: float) -> None:
        """Wait until every rank has said its last words; called after `stop`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._is_store_lost:
            with suppress(RuntimeError):
                self._read_messages()
            words = [self._words_of(rank) for rank in range(self._size) if rank != self._rank]
            is_any_running = any(text and text[0].isdigit() for text in words)
            if not is_any_running or self._find_stale():
                return
            time.sleep(0.05)

    def find_lost(self) -> str:
        """Say who stopped answering, after looking long enough to tell; the others are told at once."""
        deadline = time.monotonic() + STALE_S + 2 * BEAT_S
        while True:
            lost_ranks, sentence = self._find_suspects(final=time.monotonic() > deadline)
            if sentence:
                self._last_words = f"lost {','.join(map(str, lost_ranks))}"
                self._wake.set()
                return sentence
            time.sleep(0.1)

    def _run(self) -> None:
        num_beats = 0
        while True:
            last_words = self._last_words
            is_last = self._is_stopped.is_set()
            self._wake.clear()
            try:
                self._store.set(f"alive/{self._rank}", last_words or f"{num_beats} {self.exchanges}")
                self._read_messages()
            except RuntimeError:  # the store is gone, and its connection with it
                self._is_store_lost = True
                return
            if is_last:
                return
            num_beats += 1
            if not self._is_stopped.is_set():
                self._wake.wait(BEAT_S)

    def _read_messages(self) -> None:
        ranks = [r for r in range(self._size) if r in self._messages or self._store.check([f"alive/{r}"])]
        values = get_all(self._store, [f"alive/{r}" for r in ranks])
        self._store_answered_s = time.monotonic()
        for rank, value in zip(ranks, values, strict=True):
            words = bytes(value).decode(errors="replace")
            # Whoever reaches the store can write there: what no rank says is as if nothing had been said.
            if WORDS.fullmatch(words) and self._words_of(rank) != words:
                self._messages[rank] = _Message(words, self._store_answered_s)

    def _words_of(self, rank: int) -> str:
        return self._messages[rank].words if rank in self._messages else ""

    def _find_stale(self) -> list[int]:
        """Ranks that have fallen silent without last words."""
        now_s = time.monotonic()
        stale: list[int] = []
        for rank, message in list(self._messages.items()):
            is_running = message.words[0].isdigit()
            if rank != self._rank and is_running and now_s - message.seen_s > STALE_S:
                stale.append(rank)
        return stale

    def _find_suspects(self, *, final: bool) -> tuple[list[int], str]:
        """The ranks to blame and a sentence about them; "" while it is too early to tell."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        words = {rank: self._words_of(rank) for rank in others}

        for rank in others:
            if words[rank].startswith("error "):
                return [rank], f"rank {rank} stopped with {words[rank].removeprefix('error ').strip()}"
        for text in words.values():
            if text.startswith("lost "):
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
        num_exchanges = {rank: int(words[rank].split()[1]) for rank in others if words[rank][0].isdigit()}
        behind = [rank for rank, count in num_exchanges.items() if count < self.exchanges]
        if behind:
            return behind, f"{_name_ranks(behind)} is alive but did not answer within timeout_s"
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


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
