"""Errors that end a run, and `NotCopied`, whose objects refuse to be copied.

The module imports no torch, so that the command line can tell them apart at once.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


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


class NotCopied:
    """A base of classes whose objects belong to their process: copying and pickling raise a TypeError."""

    instead: ClassVar[str]
    """Why, and what to do instead."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # `copy.copy`, `copy.deepcopy` and `pickle` all come here.
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: {self.instead}")
