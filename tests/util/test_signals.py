"""Signals: a run writes its checkpoint and ends, with a status that says why; the same command goes on."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import psutil
import pytest

import hopline as hl
from hopline.training import checkpoint
from hopline.util.signals import SIGNALS, Interrupted, Signals
from tests.support.runs import method, read_checkpoint, sage, small
from tests.support.warm import Process, python

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ["train", "demo", "epochs=200", "evaluate_every=200", "model.hidden=8", "out=run", "resume=true"]


def test_the_first_signal_is_noted_and_the_second_raises() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Signals() as signals:
        signals.at_once = False
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher's second notice
        assert signals.received == signal.SIGTERM
        with pytest.raises(Interrupted, match="SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_handler_that_python_did_not_install_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python gives None for one of C code, and cannot put it back."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS} | {signal.SIGTERM: None}
    set_numbers: list[int] = []

    def set_handler(number: int, handler: object) -> object:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        set_numbers.append(number)
        return handlers[signal.Signals(number)]

    monkeypatch.setattr(signal, "getsignal", handlers.get)
    monkeypatch.setattr(signal, "signal", set_handler)
    with Signals():
        pass
    assert signal.SIGTERM not in set_numbers
    assert signal.SIGUSR1 in set_numbers


def test_the_first_signal_raises_where_nothing_would_be_lost() -> None:
    with Signals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGUSR1)


class Deleted:
    """An object during whose deletion a signal comes."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


class Broken:
    """An object whose deletion fails."""

    def __del__(self) -> None:
        raise ValueError("broken")


def test_a_signal_that_python_drops_is_remembered_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: reported.append(str(what.exc_value)))
    with Signals() as signals:
        gone: object = Deleted()
        del gone
        assert signals.received == signal.SIGINT
        gone = Broken()
        del gone
    gone = Broken()
    del gone
    assert reported == ["broken", "broken"]


def test_a_run_whose_interruption_python_drops_ends_after_the_next_step(tmp_path: Path) -> None:
    class DeletesBetweenEpochs(hl.Callback):
        def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
            if epoch.epoch == 2:
                Deleted()

    data = small()
    trainer = hl.Trainer(
        sage(data), data, method(), epochs=50, show=False, out=tmp_path / "run", callbacks=[DeletesBetweenEpochs()]
    )
    with pytest.raises(Interrupted, match="SIGINT"):
        trainer.fit()
    assert trainer.position.epoch == 3


@pytest.mark.parametrize("evaluate", ["blocking", "async"])
def test_a_signal_during_an_evaluation_waits_for_it_and_loses_nothing(evaluate: str, tmp_path: Path) -> None:
    """Long before a checkpoint is due by time."""

    class Noticed(hl.Trainer):
        def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
            if self.position.epoch == 3 and evaluate == "blocking":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(split, exact=exact)

    class Notices(hl.Callback):
        def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
            if epoch.epoch == 3 and evaluate == "async":
                os.kill(os.getpid(), signal.SIGTERM)

    data = small()
    settings = {"epochs": 5, "show": False, "evaluate": evaluate}
    uninterrupted = hl.Trainer(sage(data), data, method(), **settings).fit()
    kind = Noticed if evaluate == "blocking" else hl.Trainer
    with pytest.raises(Interrupted, match="SIGTERM"):
        kind(sage(data), data, method(), out=tmp_path, callbacks=[Notices()], **settings).fit()
    stored = read_checkpoint(tmp_path / checkpoint.FILE)
    assert [epoch["epoch"] for epoch in stored["history"]] == [1, 2, 3]
    assert (stored["position"]["epoch"], stored["position"]["units"]) == (4, 0)
    trainer = kind(sage(data), data, method(), out=tmp_path, resume=True, **settings)
    assert [epoch.loss for epoch in trainer.fit().history] == [epoch.loss for epoch in uninterrupted.history]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])  # SIGHUP: nohup
def test_a_signal_that_was_ignored_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), number)
        assert signals.received is None
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_no_handler_is_installed() -> None:
    handlers = []

    def work() -> None:
        with Signals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


def start(folder: Path, *settings: str) -> Process:
    return python("-m", "hopline", *TRAIN, *settings, cwd=folder)


def wait_for_epochs(folder: Path, count: int, process: Process) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        metrics = folder / "run" / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count('"event": "epoch"') >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no epoch in time: {process.communicate(timeout=10)}")


def test_each_signal_leaves_a_checkpoint_and_the_same_command_goes_on(tmp_path: Path) -> None:
    epochs = reached = 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process = start(tmp_path)
        try:
            wait_for_epochs(tmp_path, epochs + 2, process)
            process.send_signal(number)
            _, errors = process.communicate(timeout=90)
        finally:
            process.kill()
        assert process.returncode == 128 + number, errors
        assert f"interrupted by {number.name}" in errors
        assert "resume=true" in errors
        assert "Traceback" not in errors
        position = read_checkpoint(tmp_path / "run" / checkpoint.FILE)["position"]
        assert position["epoch"] > reached  # the signal may come before the epoch that was seen has been evaluated
        reached = position["epoch"]
        assert not list((tmp_path / "run").glob("*.unfinished"))
        epochs = (tmp_path / "run" / "metrics.jsonl").read_text().count('"event": "epoch"')
    assert (tmp_path / "run" / "run.log").read_text().count("resuming from") == 3


@pytest.mark.parametrize(
    "everyone", [pytest.param(False, id="one rank", marks=pytest.mark.extended), pytest.param(True, id="everyone")]
)
@pytest.mark.process
@pytest.mark.spawn  # finds the ranks among the children of the process
def test_a_notice_sent_to_ranks_themselves_leaves_a_checkpoint_too(everyone: bool, tmp_path: Path) -> None:
    process = start(tmp_path, "devices=2", "timeout_s=20")
    try:
        wait_for_epochs(tmp_path, 2, process)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        for each in [process, *ranks] if everyone else ranks[1:]:
            each.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=90)  # some four seconds where the cores have no other work
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGUSR1, errors
    assert "interrupted by SIGUSR1" in errors
    assert not psutil.wait_procs(family, timeout=20)[1]
    position = read_checkpoint(tmp_path / "run" / checkpoint.FILE)["position"]
    assert position["epoch"] >= 2
    assert position["loss_sum"].numel() == 2  # all ranks took part
    assert not list((tmp_path / "run").glob("*.unfinished"))


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
@pytest.mark.process
@pytest.mark.spawn  # a process with a terminal of its own
def test_a_closed_terminal_leaves_a_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hopline", *TRAIN, f"devices={num_ranks}", "timeout_s=20"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdin=end,
        stdout=end,
        stderr=end,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # the kernel hangs up those who have the terminal
    )
    os.close(end)
    is_shown = threading.Event()

    def show() -> None:
        while not is_shown.wait(0.05):
            if select.select([terminal], [], [], 0)[0]:
                os.read(terminal, 1 << 16)

    screen = threading.Thread(target=show)
    screen.start()
    try:
        wait_for_epochs(tmp_path, 2, process)
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        is_shown.set()
        screen.join()
        os.close(terminal)
        try:
            process.wait(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGHUP
    assert not psutil.wait_procs(family, timeout=20)[1]
    position = read_checkpoint(tmp_path / "run" / checkpoint.FILE)["position"]
    assert position["epoch"] >= 2
    assert position["loss_sum"].numel() == num_ranks
    assert "SIGHUP" in (tmp_path / "run" / "run.log").read_text()


SLOW = """
import os, time
from pathlib import Path
from torch import nn

class Slow(nn.Module):
    steps = 0

    def __init__(self, data):
        super().__init__()
        self.linear = nn.Linear(data.num_features, data.num_classes)

    def forward(self, x, edge_index):
        self.steps += self.training  # copies of it are tried before the first step
        if self.steps == 3 and self.training:
            Path(f"slow-{os.getpid()}").touch()
            time.sleep(60)
        return self.linear(x)

def make(spec, data):
    return Slow(data)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_ctrl_c_ends_a_step_that_takes_long(devices: int, tmp_path: Path) -> None:
    (tmp_path / "slow_model.py").write_text(SLOW)
    process = start(tmp_path, "model=slow_model:make", f"devices={devices}")
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("slow-*"))) < devices and time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        family = [psutil.Process(int(path.name.removeprefix("slow-"))) for path in tmp_path.glob("slow-*")]
        assert len(family) == devices
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the end of the step
            process.wait(timeout=1)
        process.send_signal(signal.SIGINT)
        # Far less than the step takes; on busy cores the end of a process takes seconds.
        _, errors = process.communicate(timeout=90)
        assert not psutil.wait_procs(family, timeout=20)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "interrupted by SIGINT" in errors
    assert "Traceback" not in errors
