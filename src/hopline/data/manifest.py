"""`manifest.json`: the arrays of a dataset folder with sizes and checksums, and all that is not an array.

A manifest may come from anywhere, so reading it trusts nothing: every field is checked for its type and
range, file names cannot leave the folder, and sizes must fit shapes. The file carries a checksum of itself.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hopline.data.arrays import DTYPES, checksum_text, file_bytes, npy_header
from hopline.data.paths import MANIFEST
from hopline.tasks.kinds import LabelKind
from hopline.util.config import from_dict

FORMAT = "hopline-dataset"
VERSION = 1
"""Value of the field "version". Other versions are refused."""
MAX_BYTES = 1 << 26
"""Largest size of a manifest that is read, in bytes. A manifest takes some kilobytes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}")
_MAX_COUNT = 2**48
"""Counts and sizes in a manifest are smaller."""


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """One array file of the folder, `<name>.npy`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    """Size of the file, header included."""
    checksum: str
    """CRC-32 of the data after the header (the header is compared byte by byte)."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of a dataset but the numbers of its arrays."""

    name: str
    num_nodes: int
    num_edges: int
    """Number of stored (directed) edges."""
    task: LabelKind
    num_classes: int
    num_splits: int
    """Number of alternative splits in the folder, each of train, valid and test nodes."""
    tables: dict[str, int]
    """Table name -> number of columns of a sparse (CSR) table, or -1 for a dense one."""
    arrays: dict[str, ArrayEntry]
    meta: dict[str, Any]


def is_name(text: str) -> bool:
    """Whether a word may name an array: letters, digits, `_`, `-` and `.`, up to 100 of them.

    The first must be a letter or a digit. Such a name is a safe file name, without folders.
    """
    return _NAME.fullmatch(text) is not None


def is_array_name(text: str) -> bool:
    """Whether a word may name a table, an edge array or a split.

    It has no dot: dots join such words into array names, such as "edge.weight".
    """
    return is_name(text) and "." not in text


def _canonical_json(fields: dict[str, Any]) -> bytes:
    """The bytes whose checksum a manifest carries. Spaces and the order of keys do not change them."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def to_json(manifest: Manifest) -> str:
    """The text of the file, with a checksum of all other fields."""
    fields = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    # To JSON and back first: tuples become lists and keys become strings, as the reader of the checksum
    # will see them.
    fields = json.loads(json.dumps(fields))
    fields["manifest_checksum"] = checksum_text(zlib.crc32(_canonical_json(fields)))
    return json.dumps(fields, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder. Any damage raises a `ValueError` that names the file."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a dataset folder: it has no {MANIFEST}; give a folder made by save().")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is too large")
        fields = json.loads(path.read_bytes().decode())
        return _parse_manifest(fields)
    except (ValueError, RecursionError, OSError) as error:  # json and unicode errors are ValueErrors
        raise ValueError(f"{path} is damaged ({error}): convert or copy the dataset again.") from error


def _parse_manifest(fields: Any) -> Manifest:
    """The manifest of parsed JSON. Errors say what is wrong with "it", the file."""
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    if fields.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if fields.get("version") != VERSION:
        raise ValueError(f"it has format version {fields.get('version')!r}, this hopline reads {VERSION}")
    checksum = fields.pop("manifest_checksum", None)
    if checksum != checksum_text(zlib.crc32(_canonical_json(fields))):
        raise ValueError("its checksum does not match its text")
    del fields["format"], fields["version"]
    manifest = from_dict(Manifest, fields)
    for key in ("num_nodes", "num_edges", "num_classes", "num_splits"):
        count = getattr(manifest, key)
        if not 0 <= count < _MAX_COUNT:
            raise ValueError(f"its field {key!r} is {count}, which is out of range")
    for name, num_columns in manifest.tables.items():
        if not is_array_name(name) or num_columns < -1:
            raise ValueError(f"its table {name!r} is not described by a number of columns")
    for name, entry in manifest.arrays.items():
        _check_entry(name, entry)
    return manifest


def _check_entry(name: str, entry: ArrayEntry) -> None:
    """Check the entry of one array. Its file name must be that of the array, so it cannot name a file elsewhere."""
    has_valid_sizes = all(0 <= size < _MAX_COUNT for size in entry.shape)
    if not 1 <= len(entry.shape) <= 4 or not has_valid_sizes:
        raise ValueError(f"its array {name!r} has the shape {list(entry.shape)}")
    if entry.dtype not in DTYPES:
        raise ValueError(f"its array {name!r} has the unknown type {entry.dtype!r}")
    if entry.num_bytes != file_bytes(DTYPES[entry.dtype], entry.shape):
        raise ValueError(f"its array {name!r} has a size that does not fit its shape")
    if not is_name(name) or entry.file != f"{name}.npy" or not _CHECKSUM.fullmatch(entry.checksum):
        raise ValueError(f"its array {name!r} has no valid file name or checksum")
    npy_header(DTYPES[entry.dtype], entry.shape)  # refuses a shape whose header does not fit
