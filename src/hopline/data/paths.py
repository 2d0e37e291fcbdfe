"""Which kind of dataset a path holds, told by the names of files alone."""

from __future__ import annotations

import os
from pathlib import Path

MANIFEST = "manifest.json"
"""The file that makes a folder a dataset, or a folder of shards."""


def backup_of(folder: Path) -> Path:
    """Where the old folder waits while the new one takes its place."""
    return folder.parent / f".{folder.name}.old"


def existing(folder: Path) -> Path:
    """The folder, or its backup if a writer was killed between the two renames that swap them."""
    backup = backup_of(folder)
    was_interrupted = not folder.exists() and (backup / MANIFEST).is_file()
    return backup if was_interrupted else folder


def default_name(folder: str | os.PathLike[str] | None, source: str) -> str:
    """What a dataset is called if nobody says: as the folder it is written to, or in memory as its source."""
    if folder is None:
        return source
    return Path(os.path.abspath(Path(folder).expanduser())).name


def is_dataset(folder: Path) -> bool:
    """Whether a folder (or the backup of a killed writer) holds a dataset."""
    return (existing(folder) / MANIFEST).is_file()


def is_ogb_folder(path: Path) -> bool:
    """Whether a folder has OGB's layout."""
    has_edges = any((path / "raw" / file).is_file() for file in ("edge.csv.gz", "data.npz"))
    return has_edges and (path / "split").is_dir()
