"""The manifest of a dataset folder: read as written, and every wrong field refused by name."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from hopline.data.arrays import checksum_text
from hopline.data.dataset import Dataset
from hopline.data.manifest import is_array_name, is_name, read_manifest, to_json


@pytest.fixture
def folder(tiny: Dataset, tmp_path: Path) -> Path:
    tiny.save(tmp_path / "tiny")
    return tmp_path / "tiny"


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of the manifest and make its checksum right again."""
    fields = json.loads((folder / "manifest.json").read_text())
    del fields["manifest_checksum"]
    fields |= changes
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["manifest_checksum"] = checksum_text(zlib.crc32(text.encode()))
    (folder / "manifest.json").write_text(json.dumps(fields))


def test_a_manifest_survives_writing_and_reading(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.num_nodes, manifest.num_edges) == ("tiny", 40, 200)
    assert manifest.tables == {"x": -1, "words": 5, "half": -1}
    assert manifest.arrays["table.half"].dtype == "bfloat16"
    (folder / "manifest.json").write_text(to_json(manifest))
    assert read_manifest(folder) == manifest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "its format is not"),
        ({"version": 99}, "format version 99"),
        ({"task": "several"}, "task=several"),
        ({"num_nodes": -1}, "out of range"),
        ({"num_nodes": "40"}, "num_nodes=40 is not valid: expected an integer"),
        ({"num_edges": True}, "num_edges=True"),
        ({"arrays": []}, r"arrays=\[\]"),
        ({"tables": {"../x": -1}}, "table"),
        ({"arrays": {"y": {"file": "../y.npy"}}}, "arrays.dtype"),
        ({"meta": None}, "meta=None"),
    ],
)
def test_wrong_fields_are_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(folder)
    assert "manifest.json is damaged" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file", "../secret.npy"),
        ("dtype", "object"),
        ("shape", [40, 10**30]),
        ("shape", [-1]),
        ("shape", []),
        ("shape", [True]),
        ("num_bytes", 7),
        ("checksum", "md5:1"),
    ],
)
def test_wrong_array_entries_are_refused(folder: Path, key: str, value: Any) -> None:
    arrays = json.loads((folder / "manifest.json").read_text())["arrays"]
    arrays["y"][key] = value
    rewrite(folder, arrays=arrays)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged \((its array 'y'|arrays\.shape=)"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"nonsense", b"[" * 100_000, b"1" * 5000, b'{"a": NaN}', b"\xff\xfe\x00"]
)
def test_what_is_no_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        read_manifest(folder)


def test_a_changed_digit_is_noticed(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"num_classes": 3', '"num_classes": 4'))
    with pytest.raises(ValueError, match="checksum does not match"):
        read_manifest(folder)


def test_names_can_be_file_names() -> None:
    assert is_name("split.0.train")
    assert is_array_name("node_ids")
    assert not is_array_name("a.b")
    assert not any(is_name(bad) for bad in ("", ".hidden", "a/b", "a b", "é"))
