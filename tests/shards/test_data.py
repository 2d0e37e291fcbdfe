"""`ShardedData` on one rank. `shards/ranks.py` checks several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.core.partition import make_partition
from hopline.shards.write import cut
from tests.shards.test_write import rich


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = rich()
    for shards in (1, 2):
        cut(data, make_partition(data.graph, shards, "range"), tmp_path / f"shards-{shards}")
    return tmp_path


def test_sharded_data_has_the_sizes_and_splits_of_the_whole_dataset(folder: Path) -> None:
    data = hl.shards.open(folder / "shards-1")
    whole = rich()
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_outputs) == (60, whole.num_edges, 4, 5)
    assert data.splits.keys() == whole.splits.keys()
    assert all(torch.equal(data.splits[name], ids) for name, ids in whole.splits.items())
    assert data.metric == "accuracy"
    assert data.num_bytes == data.shard.num_bytes
    assert "ShardedData(Shard(0 of 1" in repr(data)
    assert hl.shards.open(folder / "shards-1", split=1).splits["train"].tolist() == [5, 6, 7, 8, 9]


def test_what_needs_the_whole_graph_is_refused(folder: Path) -> None:
    data = hl.shards.open(folder / "shards-1")
    model = hl.nn.GNN([SAGEConv(4, 5)])
    with pytest.raises(ValueError, match=r"in shards.*method=sampled"):
        hl.Trainer(model, data, hl.Historical(num_parts=2, parts_per_batch=1), show=False)
    with pytest.raises(ValueError, match=r"data\.shard\.labels"):
        _ = data.labels
    with pytest.raises(ValueError, match="2 shards and 1 processes"):
        hl.shards.open(folder / "shards-2")
