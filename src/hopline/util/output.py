"""Standard output and standard error that may go away: `| head`, a dead `tee`, a closed terminal, a full disk.

A run is worth more than its output. Inside `outlive_output` a write that fails stops nothing: what is written
from then on is dropped.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO


class _Output:
    """A standard stream whose writes never raise. Other attributes are those of the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    def write(self, text: str) -> int:
        if self._is_lost:
            return len(text)
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:  # a path that is not UTF-8, or a terminal that is not
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError) as error:  # a ValueError: the stream was closed
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: OSError | ValueError) -> None:
        """Send all further output nowhere, with what the stream holds back and would write at exit."""
        if self._is_lost:
            return
        self._is_lost = True
        # A stream of a program that embeds Python may have no descriptor.
        with open(os.devnull, "w") as nowhere, suppress(OSError, ValueError):
            os.dup2(nowhere.fileno(), self._stream.fileno())
        # A reader that has gone needs no word. A file that is not whole does.
        if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EIO):
            print(f"the output is lost from here on ({error.strerror}), and the command continues", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def outlive_output() -> Generator[None]:
    """A context in which writing to standard output and standard error never raises."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _Output):
                continue
            # None: the process was started without the stream (`>&-`). This file takes its descriptor, which
            # else would be that of a file of the run, and libraries in C would write their messages into it.
            output = _Output(stack.enter_context(open(os.devnull, "w")) if stream is None else stream)
            setattr(sys, name, output)
            stack.callback(_restore, name, stream, output)
        yield


def _restore(name: str, stream: TextIO | None, output: _Output) -> None:
    """Put a stream of `sys` back in the place of an output, unless it was replaced meanwhile."""
    output.flush()
    if getattr(sys, name) is output:
        setattr(sys, name, stream)
