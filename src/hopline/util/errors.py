"""Errors that end a run, in a module that needs no torch, so that the command line can tell them apart at once."""

from __future__ import annotations


class PeerError(RuntimeError):
    """Another rank stopped answering, so this one cannot go on."""


class StageError(RuntimeError):
    """An exception inside a stage; the original is its cause."""


class RankError(RuntimeError):
    """A spawned rank failed; the message names it and says what it said."""

    def __init__(self, message: str, rank: int, exit_code: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
