"""Errors that end a run.

The module imports no torch, so that the command line can tell them apart at once.
"""

from __future__ import annotations


class PeerError(RuntimeError):
    """Another rank stopped answering, so this rank cannot continue."""


class StageError(RuntimeError):
    """A stage of the pipeline raised an exception, which is the `__cause__` of this one."""


class RankError(RuntimeError):
    """A rank that this process started has failed.

    message: names the rank and repeats its error. exit_code: of the rank's process, negative after a signal;
    None if it is not known.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
