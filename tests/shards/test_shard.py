"""One shard, opened by itself from its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from hopline.data import manifest as manifests
from hopline.ops.reference import row_entries
from hopline.shards.shard import is_shards, open_shard
from tests.shards.test_write import rich


def test_a_shard_is_opened_alone(folder: Path) -> None:
    data = rich()
    for other in ("shard-0", "shard-2", "manifest.json"):
        path = folder / other
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shard = open_shard(folder, 1)
    assert (shard.rank, shard.num_shards, shard.num_nodes, shard.num_edges) == (1, 3, 60, data.num_edges)
    assert torch.equal(shard.layout.degrees, data.graph.in_degrees(shard.nodes))
    assert torch.equal(shard.tables["x"].read(torch.arange(shard.num_own)), data.x.read(shard.nodes))
    assert torch.equal(shard.labels, data.labels[shard.nodes])
    train = shard.splits["train"]
    assert torch.equal(train, data.splits["train"][torch.isin(data.splits["train"], shard.nodes)])
    assert torch.equal(shard.nodes[shard.rows_of(train)], train)
    assert shard.num_features == 4
    assert shard.num_bytes > shard.tables["x"].num_bytes
    assert "Shard(1 of 3 of 'rich', 20 of 60" in repr(shard)
    assert open_shard(folder, 1, split=1).splits.keys() == {"train", "test"}


def test_in_edges_are_found_in_the_datasets_order(folder: Path) -> None:
    data = rich()
    order = torch.cat([open_shard(folder, rank).nodes for rank in range(3)])
    shard = open_shard(folder, 2)
    at = shard.edge_numbers.long()
    _, expected = row_entries(data.graph.indptr, shard.nodes)
    assert torch.equal(shard.edge_ids[at], expected)
    assert torch.equal(order[shard.sources(at)], data.graph.indices[expected].long())
    assert torch.equal(shard.edge["attr"][at], data.graph.edge["attr"][expected])


def test_what_cannot_be_opened_is_refused_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    assert is_shards(folder)
    assert is_shards(folder / "shard-0")
    assert not is_shards(tmp_path / "none")
    with pytest.raises(ValueError, match=r"0 to 2: .*one process per shard"):
        open_shard(folder, 3)
    with pytest.raises(ValueError, match=r"split 2: .*0 to 1"):
        open_shard(folder, 0, split=2)
    with pytest.raises(ValueError, match="not of shard 0"):
        open_shard(folder, 0).rows_of(open_shard(folder, 1).nodes[:1])
    shutil.move(folder / "shard-1", tmp_path / "kept")
    with pytest.raises(ValueError, match=r"no shard 1 in .*is missing"):
        open_shard(folder, 1)
    shutil.copytree(folder / "shard-0", folder / "shard-1")
    with pytest.raises(ValueError, match="rename its folder to shard-0"):
        open_shard(folder, 1)
    with pytest.raises(ValueError, match=r"no folder .*hopline partition"):
        open_shard(tmp_path / "none", 0)
    rich().save(tmp_path / "plain")
    with pytest.raises(ValueError, match="holds no shards"):
        open_shard(tmp_path / "plain", 0)
    (folder / "shard-2" / "halo_rows.npy").unlink()
    with pytest.raises(ValueError, match=r"halo_rows.npy is missing"):
        open_shard(folder, 2)
    change_manifest(folder / "shard-0", "num_shards", 2)
    with pytest.raises(ValueError, match=r"do not fit.*hopline partition"):
        open_shard(folder, 0)
    change_manifest(folder / "shard-0", "version", 7)
    with pytest.raises(ValueError, match=r"version 7, .*reads 1"):
        open_shard(folder, 0)


def change_manifest(folder: Path, key: str, value: int) -> None:
    """Change a number in a shard's manifest, with a checksum that fits."""
    manifest = manifests.read_manifest(folder)
    manifest.meta["shards"][key] = value
    (folder / "manifest.json").write_text(manifests.to_json(manifest))
    assert json.loads((folder / "manifest.json").read_text())["meta"]["shards"][key] == value
