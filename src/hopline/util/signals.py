"""Ctrl-C, SIGTERM and SIGUSR1: a moment to write a checkpoint before the end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Ctrl-C, the usual request to end, and Slurm's notice before preemption."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run, after its checkpoint was written."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = signal.Signals(number).name
        super().__init__(f"{self.name}: resume=True continues from the last checkpoint")


class Signals:
    """A context in which a first signal is noted, and a Ctrl-C after it raises at once.

    Launchers may send the same notice twice, which means no more than once. While `at_once` is set, the first raises
    too: where nothing would be lost. Only the main thread gets signals, so elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.at_once = True
        self._handlers_before: dict[int, Any] = {}
        self._hook_before: Callable[[sys.UnraisableHookArgs], Any] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # What the process was started to ignore (nohup), it goes on ignoring. A handler that Python did not
                # install (None) stays: it could not be installed again.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers_before[number] = signal.signal(number, self._note)
            self._hook_before = sys.unraisablehook
            sys.unraisablehook = self._report_unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        if self._hook_before is not None:
            sys.unraisablehook = self._hook_before

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        if is_first:
            self.received = number
        is_second_ctrl_c = not is_first and number == signal.SIGINT
        if self.at_once or is_second_ctrl_c:
            # Python drops what is raised while it deletes an object: then the run ends after its next step.
            raise Interrupted(number)

    def _report_unraisable(self, dropped: sys.UnraisableHookArgs) -> None:
        """Say what Python dropped, unless it is what was noted above."""
        if self._hook_before is not None and not isinstance(dropped.exc_value, Interrupted):
            self._hook_before(dropped)
