"""`check_same`: refuses ranks that were given different things, before they train together.

Ranks that differ would train on some of the nodes, end with different weights, or send messages of sizes
that nobody expects, at which gloo ends the process. So every rank describes what it was given by *facts*, and
the ranks compare them:

    1. each rank gathers a hash of all facts     16 bytes per rank: all that is sent if the ranks agree
    2. only if they differ: the facts as JSON    and every rank raises the same error

Step 2 may find that the ranks agree after all. An array of a dataset folder has a stored checksum, and the same
array in memory has none: such arrays are compared by some of their rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

MAX_SHOWN = 60
"""Most characters of a value that an error shows."""


class Fact(NamedTuple):
    """A thing that every rank must have been given alike."""

    text: str
    """The value, or the size and type of an array. An error shows it."""
    checksum: str = ""
    """A checksum of the whole array. "" if there is none."""
    sample: Callable[[], str] | None = None
    """Computes a checksum of some rows. Called if an array has no checksum on some rank."""
    advice: str = "give every rank the same"

    def plain(self, *, sampled: bool) -> list[str]:
        """The fact for a message: text, checksum, and a checksum of some rows if it is needed or asked for."""
        is_needed = sampled or not self.checksum
        return [self.text, self.checksum, self.sample() if self.sample is not None and is_needed else ""]


class Peers(Protocol):
    """Ranks that gather bytes: a `World` or a `Channel`."""

    @property
    def size(self) -> int: ...
    def gather_bytes(self, content: bytes) -> list[bytes]: ...


def check_same(ranks: Peers, facts: Mapping[str, Fact]) -> None:
    """Raise a ValueError on every rank if one was given something else than rank 0. Collective.

    facts: By name, which stands in the error: "lr", "table 'x'". In the order in which they are compared.
    """
    if ranks.size == 1:
        return
    digest = hashlib.blake2b(_to_json(facts, sampled=False), digest_size=16).digest()
    if len(set(ranks.gather_bytes(digest))) == 1:
        return
    first, *others = [json.loads(content) for content in ranks.gather_bytes(_to_json(facts, sampled=True))]
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if not _is_same(first.get(name), other.get(name)):
                values = _describe(other.get(name), first.get(name))
                advice = facts.get(name, Fact("")).advice
                raise ValueError(f"rank {rank} and rank 0 differ in {name}{values}: {advice}")


def _to_json(facts: Mapping[str, Fact], *, sampled: bool) -> bytes:
    return json.dumps({name: fact.plain(sampled=sampled) for name, fact in facts.items()}).encode()


def _is_same(ours: Sequence[str] | None, theirs: Sequence[str] | None) -> bool:
    """Whether two facts agree, as `Fact.plain` wrote them. Checksums of all rows count where both have one."""
    if ours is None or theirs is None:
        return False
    text, checksum, sample = ours
    other_text, other_checksum, other_sample = theirs
    if checksum and other_checksum:
        return (text, checksum) == (other_text, other_checksum)
    return (text, sample) == (other_text, other_sample)


def _describe(other: Sequence[str] | None, first: Sequence[str] | None) -> str:
    """The two values in brackets, if they are short."""
    ours, theirs = ("none" if fact is None else fact[0] for fact in (first, other))
    if max(len(ours), len(theirs)) > MAX_SHOWN or not (ours or theirs):
        return ""
    return f" ({theirs} against {ours})" if ours != theirs else f" (both {ours}, with other values)"
