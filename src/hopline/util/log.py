"""What hopline says beside its progress: through `logging`, under the name "hopline"."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("hopline")


class _StdoutHandler(logging.Handler):
    """Messages as plain lines on standard output, in order with the progress that is printed there."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


@contextmanager
def print_messages(enabled: bool = True) -> Iterator[None]:
    """Print messages while the context lasts, as the command line does; a program sets up `logging` as it likes."""
    is_printing = any(isinstance(handler, _StdoutHandler) for handler in logger.handlers)
    if not enabled or is_printing:
        yield
        return
    handler = _StdoutHandler()
    level_before = logger.level
    propagate_before = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before
