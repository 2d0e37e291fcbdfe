"""Output that goes away: a run continues without it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

import hopline as hl
from hopline import cli
from hopline.util.output import outlive_output
from hopline.util.progress import progress
from tests.support.runs import method, sage, small


@pytest.fixture
def nobody_reads() -> Iterator[TextIO]:
    """A pipe whose reader has gone, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


def test_a_reader_that_goes_away_stops_nothing(nobody_reads: TextIO, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", nobody_reads)
    with pytest.raises(BrokenPipeError):
        print("without the context", flush=True)
    with outlive_output():
        for _ in range(3):
            print("x" * 100_000, flush=True)
        print("not flushed")
    assert sys.stdout is nobody_reads
    print("nor afterwards", flush=True)  # Python flushes at exit


def test_a_file_that_is_not_whole_is_told(monkeypatch: pytest.MonkeyPatch):
    errors = io.StringIO()
    monkeypatch.setattr("sys.stderr", errors)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with outlive_output():
            print("a line", flush=True)
            print("another", flush=True)
    line = "the output is lost from here on (No space left on device), and the command continues\n"
    assert errors.getvalue() == line


def test_a_missing_or_closed_stream_takes_output(monkeypatch: pytest.MonkeyPatch):
    with open(os.devnull, "w") as closed:
        pass
    for stream in (None, closed):
        monkeypatch.setattr("sys.stdout", stream)
        with outlive_output():
            print("a line", flush=True)
            assert stream is not None or not sys.stdout.isatty()
        assert sys.stdout is stream


def test_text_that_the_stream_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    with outlive_output():
        print(os.fsdecode(b"runs/\xff"), "naïve", flush=True)
    assert written.getvalue() == rb"runs/\udcff na\xefve" + b"\n"


def test_contexts_may_be_nested_and_streams_replaced_inside(monkeypatch: pytest.MonkeyPatch):
    before = sys.stdout
    inside = io.StringIO()
    with outlive_output():
        outer = sys.stdout
        with outlive_output():
            assert sys.stdout is outer
        sys.stdout = inside
    assert sys.stdout is inside  # whoever replaced it puts it back
    sys.stdout = before


def test_training_and_bars_go_on_without_output(nobody_reads: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hopline.util.progress.PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr("sys.stdout", nobody_reads)
    monkeypatch.setattr("sys.stderr", nobody_reads)
    data = small()
    run = hl.Trainer(sage(data), data, method(), epochs=3, out=tmp_path / "run").fit()
    assert run.epochs == 3
    assert (tmp_path / "run" / "report.html").exists()
    with outlive_output(), progress("work", total=2) as shown:
        shown.advance()


def test_a_command_whose_reader_has_gone_ends_well(nobody_reads: TextIO, monkeypatch: pytest.MonkeyPatch):
    for arguments in (["datasets"], ["train", "--keys"], ["--help"]):
        monkeypatch.setattr("sys.stdout", nobody_reads)
        monkeypatch.setattr("sys.argv", ["hopline", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
