"""Damaged weights and checkpoints are refused by name: they neither predict, nor are exported, nor resumed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from hopline.run import commands
from hopline.run import train as run
from hopline.run.infer import predict
from hopline.run.settings import ExportConfig, InferConfig, RunConfig
from tests.support.runs import quick

NUM_DAMAGED = 12
"""Damaged copies of each file. 100 of each were refused when this was written."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run, of which more epochs are asked for."""
    config = quick(tmp_path_factory.mktemp("run"))
    run.train(config)
    return dataclasses.replace(config, epochs=config.epochs + 1, resume=True)


def damaged_copies(content: bytes, number: int) -> Iterator[bytes]:
    """Copies with a flipped bit, zeroed or exchanged bytes, an end that is missing, or bytes that were appended."""
    draw = random.Random(3)
    for i in range(number):
        copy = bytearray(content)
        start = draw.randrange(len(copy))
        stop = min(len(copy), start + draw.randrange(1, 200))
        if i % 5 == 0:
            copy[start] ^= 1 << draw.randrange(8)
        elif i % 5 == 1:
            copy[start:stop] = bytes(stop - start)
        elif i % 5 == 2:
            copy[start:stop] = draw.randbytes(stop - start)
        elif i % 5 == 3:
            del copy[start:]
        else:
            copy += draw.randbytes(stop - start)
        if copy != content:  # zeroes may have been there before
            yield bytes(copy)


@pytest.mark.parametrize("name", ["best", "last"])
def test_damaged_weights_neither_predict_nor_are_exported(config: RunConfig, name: Any, tmp_path: Path):
    assert config.out is not None
    path = config.out / f"{name}.pt"
    content = path.read_bytes()
    for copy in damaged_copies(content, NUM_DAMAGED):
        path.write_bytes(copy)
        with pytest.raises(ValueError, match=rf"{name}\.pt is damaged"):
            predict(config.out, InferConfig(weights=name))
        with pytest.raises(ValueError, match=rf"{name}\.pt is damaged"):
            commands.export(config.out, tmp_path / "weights.pt", ExportConfig(weights=name))
        # A run that begins with these weights, and a prediction by the file's path, compare the checksum too.
        with pytest.raises(ValueError, match=rf"{name}.pt is damaged"):
            predict(config.out, InferConfig(weights=path))
    path.write_bytes(content)
    predict(config.out, InferConfig(weights=name, out=tmp_path / "predictions.npy"))
    assert not (tmp_path / "weights.pt").exists()


def test_damaged_checkpoints_are_not_resumed(config: RunConfig):
    assert config.out is not None
    path = config.out / "checkpoint.pt"
    content = path.read_bytes()
    for copy in damaged_copies(content, NUM_DAMAGED):
        path.write_bytes(copy)
        with pytest.raises(ValueError, match=r"checkpoint.pt is (damaged|not a hopline checkpoint)"):
            run.train(config)
        assert path.read_bytes() == copy
    path.write_bytes(content)
    assert run.train(config).epochs == config.epochs


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_an_export_onto_a_full_disk_leaves_the_old_file_or_none(
    config: RunConfig, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(weights: Any, file: IO[bytes]) -> None:
        file.write(b"half")
        raise error

    assert config.out is not None
    kept, _ = commands.export(config.out, tmp_path / "kept.pt", ExportConfig())
    before = kept.read_bytes()
    monkeypatch.setattr(torch, "save", full)
    for file in (kept, tmp_path / "new.pt"):
        with pytest.raises(ValueError, match=f"cannot write .*{file.name}"):
            commands.export(config.out, file, ExportConfig())
    assert kept.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "kept.pt"]
