"""`verify` of a folder of shards finds flipped bits, wrong numbers and mixed cuts."""

from __future__ import annotations

import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hopline.core.partition import make_partition
from hopline.data import manifest as manifests
from hopline.data.arrays import HEADER_BYTES, checksum_text
from hopline.shards.verify import open_shards, verify_shards
from hopline.shards.write import cut
from tests.shards.test_write import rich


def test_a_flipped_bit_is_found(folder: Path) -> None:
    path = folder / "shard-1" / "src_idx.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"src_idx.npy is damaged"):
        verify_shards(folder)


def alter_array(folder: Path, array: str, position: int, value: float) -> None:
    """Change one number of an array, with a checksum that fits, as a wrong cut would write it."""
    manifest = manifests.read_manifest(folder)
    entry = manifest.arrays[array]
    rows = np.load(folder / entry.file)
    rows.reshape(-1)[position] = value
    with (folder / entry.file).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(rows.tobytes())
    manifest.arrays[array] = replace(entry, checksum=checksum_text(zlib.crc32(rows.tobytes())))
    (folder / "manifest.json").write_text(manifests.to_json(manifest))


@pytest.mark.parametrize(
    ("array", "position", "value", "message"),
    [
        ("nodes", 0, 59, "a node is there twice"),
        ("edge_ids", 5, 0, "an edge is missing or there twice"),
        ("at", 0, 10_000, "an edge is out of range"),
        ("src_idx", 3, 1000, "a source is out of range"),
        ("halo_rows", 0, 19, "it wants other rows than shard"),
        ("halo_nodes", 0, 59, "by other ids"),
        ("send_rows", 0, 18, "it wants other rows than shard"),
        ("edge.attr", 2, float("nan"), "edge.attr.npy holds nan"),
        ("table.x", 2, float("inf"), "table.x.npy holds inf"),
        ("y", 2, 9, "y.npy holds label 9"),
    ],
)
def test_a_wrong_number_is_found(folder: Path, array: str, position: int, value: float, message: str) -> None:
    alter_array(folder / "shard-1", array, position, value)
    with pytest.raises(ValueError, match=message):
        verify_shards(folder)


def test_edges_under_another_destination_are_found(folder: Path) -> None:
    shard = open_shards(folder)[1]
    indptr = shard.layout.parts[0].indptr
    row = int(indptr.diff().argmax())
    alter_array(folder / "shard-1", "part_indptr", (shard.num_own + 1) * 1 + row + 1, int(indptr[row]))
    with pytest.raises(ValueError, match="under another destination"):
        verify_shards(folder)


def test_shards_of_different_cuts_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    data = rich()
    cut(data, make_partition(data.graph, 3, "range"), tmp_path / "other")
    shutil.rmtree(folder / "shard-2")
    shutil.copytree(tmp_path / "other" / "shard-2", folder / "shard-2")
    with pytest.raises(ValueError, match="is of another cut"):
        verify_shards(folder)
    with pytest.raises(ValueError, match="folder above it"):
        verify_shards(tmp_path / "other" / "shard-2")
