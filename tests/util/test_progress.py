"""Progress as a bar on a terminal and as lines elsewhere."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import pytest
import torch
from rich.console import Console

from hopline.util import progress as module
from hopline.util.progress import progress


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before
    assert not module._displays


def terminal() -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(force_terminal=True, file=file, width=150, color_system=None), file


def plain() -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, width=150, force_terminal=False), file


def stop_at_three(console: Console, error: type[BaseException]) -> None:
    with progress("load", 10, console=console) as shown:
        shown.advance(3)
        raise error


def text_on_screen(file: StringIO) -> list[str]:
    """The text that a terminal shows at the end, after all movements of the cursor."""
    lines = [""]
    row = 0
    for code, text in re.findall(r"(\x1b\[\??[0-9]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", file.getvalue()):
        if code == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif code.endswith("A"):
            row -= int(code[2:-1])
        elif code.endswith("K"):
            lines[row] = ""
        lines[row] += text
    return [line for line in lines if line]


def test_lines_end_with_total_rate_and_seconds():
    console, file = plain()
    with progress("epoch 1", 2000, "batches", console=console) as shown:
        for step in range(2000):
            shown.advance(loss=0.5 + step)
        shown.info(note="[done]")
    lines = file.getvalue().splitlines()
    assert len(lines) == 1, "short work says one thing"
    pattern = r"epoch 1: 2,000 batches in \d+\.\d s, [\d,.e+]+ batches/s, loss 2000, note \[done\]"
    assert re.fullmatch(pattern, lines[0]), lines[0]


def test_lines_come_at_intervals(monkeypatch: pytest.MonkeyPatch):
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    console, file = plain()
    with progress("load", 100, "rows", console=console) as shown:
        for _ in range(25):
            now_s += 1.0
            shown.advance(2)
    assert file.getvalue().splitlines() == [
        "load: 20/100 rows, 2 rows/s, 0:40 left",
        "load: 40/100 rows, 2 rows/s, 0:30 left",
        "load: 50 rows in 25.0 s, 2 rows/s",
    ]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_lines_say_where_work_stopped(error: type[BaseException]):
    console, file = plain()
    with pytest.raises(error):
        stop_at_three(console, error)
    assert file.getvalue().startswith("load: stopped at 3/10 in ")


def test_bar_shows_amount_time_and_values():
    console, file = terminal()
    with progress("epoch [1]", 4, "batches", console=console) as shown:
        for _ in range(4):
            shown.advance(loss=torch.tensor(0.123456))
    (line,) = text_on_screen(file)
    assert line.startswith("epoch [1]")
    assert "4/4 batches" in line
    assert "batches/s" in line
    assert re.search(r"\d:\d\d", line)
    assert line.rstrip().endswith("loss 0.1235")


def test_bar_without_a_total_ends_full():
    console, file = terminal()
    with progress("scan", None, console=console) as shown:
        shown.advance(7)
    assert "7/7" in text_on_screen(file)[0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_bar_restores_the_terminal_after_an_error(error: type[BaseException]):
    console, file = terminal()
    with pytest.raises(error):
        stop_at_three(console, error)
    assert "3/10" in text_on_screen(file)[0]
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l"), "cursor is shown again"


def test_nested_bars_share_one_display_and_a_second_run_starts_afresh():
    console, file = terminal()
    with progress("fit", 2, "epochs", console=console) as outer:
        for epoch in range(2):
            with progress(f"epoch {epoch}", 3, console=console) as inner:
                inner.advance(3)
                assert len(module._displays) == 1
            outer.advance()
    assert [line.split("━")[0].strip() for line in text_on_screen(file)] == ["epoch 0", "epoch 1", "fit"]
    with progress("again", 1, console=console) as shown:
        shown.advance()
    assert [line.split("━")[0].strip() for line in text_on_screen(file)][3:] == ["again"]


def test_overlapping_bars_may_close_in_any_order():
    console, file = terminal()
    first = progress("first", 1, console=console)
    second = progress("second", 1, console=console)
    late = first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    late.advance()
    second.__exit__(None, None, None)
    assert len(text_on_screen(file)) == 2


@pytest.mark.parametrize("make", [terminal, plain])
def test_threads_may_advance_together(make):
    console, file = make()
    with progress("load", 800, "rows", console=console) as shown, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [shown.advance() for _ in range(100)], range(8)))
    assert re.search(r"800(/800)? rows", text_on_screen(file)[-1])


@pytest.mark.parametrize("make", [terminal, plain])
def test_disabled_shows_nothing(make):
    console, file = make()
    with progress("load", 1, enabled=False, console=console) as shown:
        shown.advance(loss=1.0)
        shown.info(loss=1.0)
    assert file.getvalue() == ""


def test_progress_is_written_to_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with progress("load", 1) as shown:
        shown.advance()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("load: 1 in ")
