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
    if not enabled or any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
        yield
        return
    handler, level, propagate = _StdoutHandler(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
