"""Messages of hopline, through `logging` under the name "hopline". Progress bars are in `progress.py`.

A program that uses the library sets up `logging` as it likes. The command line, and a Trainer with show=True,
print messages on standard output, through `print_messages`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("hopline")


@contextmanager
def print_messages(enabled: bool = True) -> Iterator[None]:
    """Print messages of level INFO and above on standard output while the context lasts.

    enabled: False changes nothing, for runs with show=false. Nor does a context inside another one, or in a
    program whose own `logging` shows these messages: each is printed once.
    """
    is_shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    if not enabled or is_shown:
        yield
        return
    handler = logging.StreamHandler(sys.stdout)
    level_before = logger.level
    propagate_before = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else handlers of the root logger would print each message again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before
