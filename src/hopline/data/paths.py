"""Paths of datasets: what kind of dataset a path holds, by the names of its files.

Nothing but DGL's small .json files is read, so these questions need no torch.

A dataset folder is replaced by two renames: the old folder becomes a hidden *backup*, then the new one
takes its name (`writer`). A writer that is killed between the two leaves only the backup, which `existing`
finds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

MANIFEST = "manifest.json"
"""The file that makes a folder a dataset, or a folder of shards."""


def backup_of(folder: Path) -> Path:
    """The path to which a writer renames the old folder before it puts the new one in place."""
    return folder.parent / f".{folder.name}.old"


def existing(folder: Path) -> Path:
    """The folder, or its backup if a writer was killed between the two renames."""
    backup = backup_of(folder)
    was_interrupted = not folder.exists() and (backup / MANIFEST).is_file()
    return backup if was_interrupted else folder


def default_name(folder: str | os.PathLike[str] | None, source: str) -> str:
    """The name of a dataset that was given none: that of its folder, or `source` if it stays in memory.

    A byte of the folder's name that is no UTF-8 becomes "?".
    """
    name = source if folder is None else Path(os.path.abspath(Path(folder).expanduser())).name
    return name.encode(errors="replace").decode()


def is_dataset(folder: Path) -> bool:
    """Whether a folder, or the backup that a killed writer left, holds a dataset."""
    return (existing(folder) / MANIFEST).is_file()


def is_ogb_folder(path: Path) -> bool:
    """Whether a folder has OGB's layout: `split/`, and edges under `raw/` as CSV or binary."""
    has_edges = any((path / "raw" / file).is_file() for file in ("edge.csv.gz", "data.npz"))
    return has_edges and (path / "split").is_dir()


def dgl_config(path: Path) -> Path | None:
    """The .json file of a graph partitioned by DGL: `path` itself, or the first one in the folder. None: no such."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    for file in files:
        if file.suffix != ".json" or not file.is_file():
            continue
        try:
            fields = json.loads(file.read_bytes())
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and {"num_parts", "part-0"} <= fields.keys():
            return file
    return None
