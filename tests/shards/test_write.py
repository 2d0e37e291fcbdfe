"""Writing shards: their union is the dataset, and memory does not grow with edges and features."""

from __future__ import annotations

import errno
import gc
import threading
from pathlib import Path

import pytest
import torch

import hopline.shards.write as cutting
from hopline.core.graph import Graph
from hopline.core.partition import Partition, make_partition
from hopline.data import store
from hopline.data.dataset import Dataset
from hopline.shards.all_shards import join_shards
from hopline.shards.layout import shard_layouts
from hopline.shards.shard import open_shard
from hopline.shards.verify import verify_shards
from hopline.shards.write import cut
from hopline.tables import SparseTable, Table, TensorTable
from tests.data.test_store import assert_same
from tests.support import warm
from tests.support.helpers import randint, randn, random_graph


def rich(num_nodes: int = 60, num_edges: int = 400) -> Dataset:
    """A dataset of everything that shards hold.

    Edge arrays, three kinds of tables, two splits, double edges, loops, and nodes without in-edges.
    """
    graph = random_graph(num_nodes, num_edges, weight=True, attr=2, loops=True, dtype=torch.int32)
    words = randn(num_nodes, 7, seed=5)
    ids = torch.arange(num_nodes)
    splits = ({"train": ids[::3], "valid": ids[1::3], "test": ids[2::3]}, {"train": ids[5:10], "test": ids[40:]})
    return Dataset(
        name="rich",
        graph=graph,
        tables={
            "x": TensorTable(randn(num_nodes, 4, seed=4)),
            "words": SparseTable.from_dense(torch.where(words > 0.5, words, 0)),
            "half": TensorTable(randn(num_nodes, 3, seed=6).bfloat16()),
        },
        y=randint(0, 5, num_nodes, 7),
        splits=splits[0],
        alternatives=splits,
        num_classes=5,
        meta={"source": "a test"},
    )


@pytest.fixture(params=["metis", "streaming", "random", "range", "labels"])
def how(request: pytest.FixtureRequest) -> str:
    return request.param


def partition_of(data: Dataset, num_shards: int, how: str) -> Partition:
    if how == "labels":
        return make_partition(data.graph, num_shards, labels=data.y)
    return make_partition(data.graph, num_shards, how)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_union_of_the_shards_is_the_dataset(
    how: str, num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "CHUNK", 17)  # many chunks, and a hub that is larger than one
    monkeypatch.setattr(cutting, "BYTES_AT_ONCE", 300)
    data = rich()
    cut(data, partition_of(data, num_shards, how), tmp_path / "shards")
    assert_same(join_shards(tmp_path / "shards"), data)
    assert len(verify_shards(tmp_path / "shards")) == 5
    assert not list(tmp_path.glob(".*"))
    assert not list((tmp_path / "shards").glob("scratch"))


def test_shards_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    data = rich()
    partition = partition_of(data, 4, "metis")
    cut(data, partition, tmp_path / "shards")
    for rank, expected in enumerate(shard_layouts(data.graph, partition)):
        layout = open_shard(tmp_path / "shards", rank).layout
        for name in ("ptr", "own_ids", "degrees"):
            assert torch.equal(getattr(layout, name), getattr(expected, name)), name
        for ours, theirs in zip(layout.parts, expected.parts, strict=True):
            assert ours.edge_ids is not None
            assert theirs.edge_ids is not None
            assert ours.src_idx.dtype == torch.int32
            assert ours.indptr.dtype == torch.int64
            assert torch.equal(ours.indptr, theirs.indptr)
            assert torch.equal(ours.src_idx, theirs.src_idx)
            assert torch.equal(ours.edge_ids, theirs.edge_ids)
            assert all(torch.equal(ours.edge[name], theirs.edge[name]) for name in ("weight", "attr"))
        for ours, theirs in zip(layout.halos + layout.sends, expected.halos + expected.sends, strict=True):
            assert torch.equal(ours, theirs)


def test_shards_of_one_node_and_graphs_without_edges_are_written(tmp_path: Path) -> None:
    data = rich(12, 30)
    cut(data, make_partition(data.graph, 12, "range"), tmp_path / "shards")
    assert_same(join_shards(tmp_path / "shards"), data)
    verify_shards(tmp_path / "shards")
    bare = Dataset(name="bare", graph=random_graph(9, 0))
    cut(bare, make_partition(bare.graph, 2, "range"), tmp_path / "bare")
    assert_same(join_shards(tmp_path / "bare"), Dataset(name="bare", graph=random_graph(9, 0, dtype=torch.int32)))
    verify_shards(tmp_path / "bare")


def test_a_cut_that_fails_leaves_the_old_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rich()
    cut(data, make_partition(data.graph, 2, "range"), tmp_path / "shards")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cutting._ShardWriter, "write_halo", full)
    with pytest.raises(ValueError, match="The disk is full"):
        cut(data, make_partition(data.graph, 3, "range"), tmp_path / "shards")
    monkeypatch.undo()
    assert len(list((tmp_path / "shards").glob("shard-*"))) == 2
    verify_shards(tmp_path / "shards")
    cut(data, make_partition(data.graph, 3, "range"), tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("shard-*"))) == 3
    assert not list(tmp_path.glob(".*"))


def test_mistakes_are_refused_with_a_sentence(tmp_path: Path) -> None:
    data = rich()
    with pytest.raises(ValueError, match="of 12 nodes"):
        cut(data, make_partition(rich(12, 30).graph, 2, "range"), tmp_path / "shards")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not a dataset"):
        cut(data, make_partition(data.graph, 2, "range"), tmp_path / "full")
    cut(data, make_partition(data.graph, 2, "range"), tmp_path / "shards")
    with pytest.raises(ValueError, match="open_shard"):
        store.open_folder(tmp_path / "shards")


def private_bytes() -> int:
    """Bytes of private memory of this process. Pages of mapped files, which the system may drop, do not count."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def measure_growth(folder: Path) -> tuple[int, int]:
    """Write a large dataset as shards. Returns the bytes that this process grew by, and those of the dataset."""
    cutting.CHUNK = 1 << 14
    cutting.BYTES_AT_ONCE = 1 << 20

    def opened(num_nodes: int, num_edges: int) -> Dataset:
        graph = random_graph(num_nodes, num_edges, dtype=torch.int32)
        edge = {"attr": torch.zeros(graph.num_edges, 32)}
        tables: dict[str, Table] = {"x": TensorTable(torch.zeros(num_nodes, 500))}
        Dataset(name="large", graph=Graph(graph.indptr, graph.indices, edge), tables=tables).save(folder / "data")
        return store.open_folder(folder / "data")

    few = opened(20, 100)
    cut(few, make_partition(few.graph, 3, "range"), folder / "shards")  # what is compiled once
    data = opened(20_000, 600_000)
    gc.collect()
    before = private_bytes()
    highest = [0]
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(0.001):
            highest[0] = max(highest[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        cut(data, make_partition(data.graph, 4, "random"), folder / "shards")
    finally:
        is_done.set()
        watcher.join()
    return highest[0] - before, data.num_bytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts the pages of a process as Linux does")
def test_memory_does_not_grow_with_edges_and_features(tmp_path: Path) -> None:
    # In a process of its own: that of the tests grows by what earlier tests left to their threads.
    grown_bytes, data_bytes = warm.call(measure_growth, tmp_path)
    assert grown_bytes < data_bytes // 4
