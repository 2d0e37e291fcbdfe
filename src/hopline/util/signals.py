"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its current step or evaluation, with a checkpoint.

While a trainer trains, the handler only notes the first signal. The trainer looks at `Signals.received`,
writes the checkpoint and raises `Interrupted`. After the first signal, of whichever kind, a Ctrl-C raises
`Interrupted` at once, so that a person need not wait for a long step. A run that does not train yet, or no
longer, has nothing to lose. Then every signal raises at once (`Signals.at_once`).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""The signals that end a run: Ctrl-C, the usual request to end, a closed terminal, and Slurm's notice before
preemption."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run.

    number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = signal.Signals(number).name
        super().__init__(f"{self.name}: resume=True continues from the last checkpoint")


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """A context in which a function handles `SIGNALS`. At its end the handlers of before are installed again.

    Python delivers signals to the main thread alone. In another thread the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers_before: dict[int, Any] = {}
    hook_before = sys.unraisablehook

    def report_unraisable(dropped: sys.UnraisableHookArgs) -> None:
        # `Interrupted` needs no report: its signal was noted.
        if not isinstance(dropped.exc_value, Interrupted):
            hook_before(dropped)

    try:
        for number in SIGNALS:
            # A signal that the process was started to ignore (nohup) stays ignored. A handler that Python did not
            # install (None) stays too, because Python could not install it again afterwards.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                handlers_before[number] = signal.signal(number, handler)
        sys.unraisablehook = report_unraisable
        yield
    finally:
        for number, handler_before in handlers_before.items():
            signal.signal(number, handler_before)
        sys.unraisablehook = hook_before


class Signals:
    """A context that handles the signals of `SIGNALS`, in one of two modes:

        at_once=True     every signal raises `Interrupted`. The mode at the beginning.
        at_once=False    the first signal is only noted. After it, Ctrl-C raises `Interrupted`. The others
                         change nothing, since launchers may send the same notice twice.

    `Checkpoints.hold_signals` sets the mode. In a thread other than the main one the context does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the first signal; None before it."""
        self.at_once = True
        """Whether every signal raises `Interrupted`. False while a trainer trains, where the work of a step
        would be lost."""
        self._handlers = handle_signals(self._note)

    def __enter__(self) -> Self:
        self._handlers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.__exit__(kind, error, trace)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: note the first signal, and raise `Interrupted` if the mode asks for it."""
        is_first = self.received is None
        if is_first:
            self.received = number
        is_later_ctrl_c = not is_first and number == signal.SIGINT
        if self.at_once or is_later_ctrl_c:
            # Python drops an exception that is raised while it deletes an object (`__del__`). Then
            # `received` is set, and the run ends after its next step.
            raise Interrupted(number)
