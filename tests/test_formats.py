"""Files that hopline stores: today's form is read as it was written, and another format's number is refused by name."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hopline as hl
from hopline.run.settings import load_config
from tests.data.test_store import assert_same
from tests.shards.test_write import rich
from tests.support.runs import assert_refused, command

SETTINGS = ("model=gcn", "model.layers=2", "model.hidden=6", "method.fanouts=4,3", "method.workers=0", "show=false")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, its shards and a run."""
    folder = tmp_path_factory.mktemp("written")
    rich().save(folder / "dataset")
    for arguments in (
        ("partition", folder / "dataset", folder / "shards", "shards=2", "how=random"),
        ("train", folder / "dataset", *SETTINGS, "epochs=1", f"out={folder / 'run'}"),
    ):
        outcome = command(*arguments)
        assert outcome.status == 0, outcome.err
    return folder


@pytest.fixture
def files(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "written"))


def test_what_is_written_is_read(files: Path):
    assert_same(hl.open(files / "dataset"), rich())
    for folder in ("dataset", "shards"):
        assert "is intact" in command("verify", files / folder).out
    assert load_config(files / "run").model.hidden == 6
    assert hl.load(files / "run").predict(hl.open(files / "dataset"))["id"].tolist() == list(range(60))
    resumed = command("train", files / "dataset", *SETTINGS, "epochs=2", f"out={files / 'run'}", "resume=true")
    assert resumed.status == 0, resumed.err


def change_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and its checksum with it."""
    fields = json.loads(path.read_text())
    fields.pop("manifest_checksum")
    change(fields)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps(fields | {"manifest_checksum": f"crc32:{zlib.crc32(text):08x}"}))


def test_a_dataset_of_another_version_is_refused(files: Path):
    path = files / "dataset" / "manifest.json"
    change_manifest(path, lambda fields: None)
    hl.open(files / "dataset")
    change_manifest(path, lambda fields: fields.update(version=99))
    with pytest.raises(ValueError, match=r"manifest\.json .* format version 99"):
        hl.open(files / "dataset")
    change_manifest(path, lambda fields: fields.update(version=1, format="another-dataset"))
    with pytest.raises(ValueError, match="'hopline-dataset'"):
        hl.open(files / "dataset")


def test_shards_of_another_version_are_refused(files: Path):
    for folder in ("shards", "shards/shard-0"):
        change_manifest(files / folder / "manifest.json", lambda fields: fields["meta"]["shards"].update(version=99))
    with pytest.raises(ValueError, match="has version 99"):
        hl.shards.open_shard(files / "shards", 0)
    assert_refused(command("verify", files / "shards"), "version 99")


def test_a_checkpoint_of_another_format_is_refused_and_stays(files: Path):
    path = files / "run" / "checkpoint.pt"
    state = torch.load(io.BytesIO(path.read_bytes().partition(b"\n")[2]), weights_only=True)
    buffer = io.BytesIO()
    torch.save(state | {"format": 99}, buffer)
    payload = buffer.getvalue()
    header = f"hopline-checkpoint {hashlib.sha256(payload).hexdigest()} {len(payload)}\n".encode()
    path.write_bytes(header + payload)
    outcome = command("train", files / "dataset", *SETTINGS, "epochs=4", f"out={files / 'run'}", "resume=true")
    assert_refused(outcome, "checkpoint.pt has format 99")
    assert path.read_bytes() == header + payload


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda stored: stored.update(format=99), "format 99"),
        (lambda stored: stored.pop("format"), "is damaged"),
        (lambda stored: stored["config"].update(warp=9), "warp"),
    ],
    ids=["later", "none", "unknown setting"],
)
def test_settings_of_another_format_are_refused_by_every_command(files: Path, change: Callable[..., Any], word: str):
    path = files / "run" / "config.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    commands = [("infer", files / "run"), ("test", files / "run"), ("export", files / "run", files / "w.pt")]
    commands += [] if word == "warp" else [("report", files / "run")]
    for arguments in commands:
        assert_refused(command(*arguments), "config.json", word)
