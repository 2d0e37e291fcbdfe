"""Datasets from DGL's partitions: `dgl_2_1_0.zip` holds what DGL 2.1.0 wrote (`write_dgl.py`)."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.formats.dgl import from_dgl
from hopline.data.formats.dgl_stream import ARRAY, read_graph, read_tensors
from hopline.data.paths import dgl_config
from hopline.data.store import verify
from tests.support.runs import assert_refused, command

HOMOGENEOUS = ("metis", "random", "csr", "all_formats", "one_part")
NUM_NODES = 30


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dgl")
    with zipfile.ZipFile(Path(__file__).parent / "dgl_2_1_0.zip") as files:
        files.extractall(folder)
    return folder


@pytest.fixture
def metis(archive: Path, tmp_path: Path) -> Path:
    """A copy of one partition, to be damaged."""
    return Path(shutil.copytree(archive / "metis", tmp_path / "metis"))


def make_expected(archive: Path, order: np.ndarray | None = None) -> Dataset:
    """The graph that DGL partitioned. order: its nodes are numbered anew, order[i] becoming i."""
    with np.load(archive / "original.npz") as arrays:
        original = dict(arrays)
    order = np.arange(NUM_NODES) if order is None else order
    new = np.argsort(order)
    nodes = {key.removeprefix("node_"): rows[order] for key, rows in original.items() if key.startswith("node_")}
    return from_edges(
        new[original["edge_index"]],
        edge={"weight": original["edge_w"], "attr": original["edge_feat"]},
        x=nodes["feat"],
        y=nodes["label"],
        splits={name: nodes[f"{name}_mask"] for name in ("train", "val", "test")},
        tables={name: nodes[name].reshape(NUM_NODES, -1) for name in ("year", "half", "brain")},
        num_nodes=NUM_NODES,
    )


def edges_of(data: Dataset) -> list[Any]:
    """Every edge with its arrays, sorted: edges into one node may come in any order."""
    ends = data.graph.edge_index().T.tolist()
    arrays = [data.graph.edge[name].reshape(len(ends), -1).tolist() for name in ("weight", "attr")]
    return sorted(zip(ends, *arrays, strict=True))


def assert_same(ours: Dataset, expected: Dataset) -> None:
    everyone = torch.arange(NUM_NODES)
    assert edges_of(ours) == edges_of(expected)
    assert torch.equal(ours.labels, expected.labels)
    assert ours.splits.keys() == expected.splits.keys() == {"train", "valid", "test"}
    assert all(torch.equal(ours.splits[name], ids) for name, ids in expected.splits.items())
    assert ours.tables.keys() - {"part"} == expected.tables.keys() == {"x", "year", "half", "brain"}
    for name, table in expected.tables.items():
        assert ours.tables[name].dtype == table.dtype
        assert torch.equal(ours.tables[name].read(everyone), table.read(everyone)), name


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_joining_the_parts_gives_the_graph_that_was_partitioned(archive: Path, name: str) -> None:
    nodes = np.load(archive / name / "nodes.npy")
    assert dgl_config(archive / name) == dgl_config(archive / name / "graph.json") == archive / name / "graph.json"
    ours = from_dgl(archive / name, ids=archive / name / "nodes.npy")
    assert_same(ours, make_expected(archive))
    ranges = json.loads((archive / name / "graph.json").read_text())["node_map"]["_N"]
    parts = ours.tables["part"].read(torch.from_numpy(nodes)).view(-1).tolist()
    assert parts == [part for part, (first, last) in enumerate(ranges) for _ in range(first, last)]
    assert ours.num_classes == 5


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_without_original_ids_nodes_keep_dgls_ids_and_a_warning_says_what_to_save(
    archive: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = from_dgl(archive / name / "graph.json")
    assert "ids=FILE" in caplog.text
    assert_same(ours, make_expected(archive, np.load(archive / name / "nodes.npy")))


def test_original_ids_in_the_files_are_taken(archive: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = make_expected(archive)
    ours = from_dgl(archive / "original_ids", folder=tmp_path / "out")
    assert_same(ours, expected)
    assert torch.equal(ours.graph.indices, expected.graph.indices)  # each node's in-edges in the order they had
    assert "ids=FILE" not in caplog.text
    assert not list(tmp_path.glob(".dgl-*"))
    verify(tmp_path / "out")
    with pytest.raises(ValueError, match="leave out ids="):
        from_dgl(archive / "original_ids", ids=archive / "original_ids" / "nodes.npy")


def test_the_command_converts_with_ids_and_cuts_the_same_parts(archive: Path, tmp_path: Path) -> None:
    nodes = torch.from_numpy(np.load(archive / "random" / "nodes.npy"))
    torch.save(nodes, tmp_path / "nodes.pt")
    outcome = command("convert", archive / "random", tmp_path / "out", f"ids={tmp_path / 'nodes.pt'}")
    assert outcome.status == 0, outcome.err
    settings = ("shards=3", "how=labels", "labels=part")
    assert command("partition", tmp_path / "out", tmp_path / "shards", *settings).status == 0
    ranges = json.loads((archive / "random" / "graph.json").read_text())["node_map"]["_N"]
    for rank, (first, last) in enumerate(ranges):
        own = np.load(tmp_path / "shards" / f"shard-{rank}" / "nodes.npy")
        assert sorted(own.tolist()) == sorted(nodes[first:last].tolist())
    assert_refused(
        command("partition", tmp_path / "out", tmp_path / "more", "shards=3", "how=labels", "labels=parts"),
        "labels=parts must name one whole number per node",
        "part",
    )
    assert_refused(command("convert", archive / "random", tmp_path / "none", "ids=map"), "There is no file map")
    assert_refused(
        command("convert", archive / "original.npz", tmp_path / "none", "ids=x.npy"), "ids= is for edge lists"
    )


def test_ids_that_are_no_numbering_of_the_nodes_are_refused(archive: Path, tmp_path: Path) -> None:
    for ids, reason in (
        (np.arange(NUM_NODES - 1), r"holds \[29\] int64, and ids= is for whole numbers \[30\]"),
        (np.zeros(NUM_NODES), "holds .* float64"),
        (np.zeros(NUM_NODES, np.int64), "does not hold every node once"),
        (np.arange(NUM_NODES) + 1, "does not hold every node once"),
        (np.array([{}] * NUM_NODES), "cannot be read as an .npy or .pt file"),
    ):
        np.save(tmp_path / "ids.npy", ids)
        with pytest.raises(ValueError, match=reason):
            from_dgl(archive / "metis", ids=tmp_path / "ids.npy")
    (tmp_path / "ids.pt").write_bytes(b"no tensor")
    with pytest.raises(ValueError, match="cannot be read as an"):
        from_dgl(archive / "metis", ids=tmp_path / "ids.pt")
    with pytest.raises(ValueError, match="is a folder"):
        from_dgl(archive / "metis", ids=tmp_path)


def test_what_cannot_be_read_is_refused_with_a_sentence(archive: Path, metis: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "torn.json").write_text("{")
    assert dgl_config(tmp_path) is None
    with pytest.raises(ValueError, match="partitioned by DGL"):
        from_dgl(tmp_path)
    with pytest.raises(ValueError, match=r"2 types .*to_homogeneous"):
        from_dgl(archive / "typed")
    config = metis / "graph.json"
    fields = json.loads(config.read_text())
    for change, reason in (
        ({"num_parts": 1}, "ranges of node_map do not hold every id once"),
        ({"num_parts": 3}, "graph.json is damaged"),
        ({"num_parts": "2"}, "graph.json is damaged"),
        (
            {"num_nodes": 10**15, "node_map": {"_N": [[0, 15], [15, 10**15]]}},
            r"does not fit the other files \(num_nodes",
        ),
        ({"edge_map": {"_N:_E:_N": [60, 120]}}, "graph.json is damaged"),
        ({"edge_map": {"_N:_E:_N": [[0, 59], [59, 120]]}}, r"graph.dgl does not fit .*ids of another range"),
        ({"part-0": {"part_graph_graphbolt": "g.pt"}}, "use_graphbolt=False"),
        ({"part-1": fields["part-0"]}, "ids of another range"),
        ({"part-0": fields["part-0"] | {"node_feats": "part0"}}, "part0 is a folder: give a file"),
        ({"part-0": fields["part-0"] | {"node_feats": "part1/edge_feat.dgl"}}, "edge_feat.dgl does not fit"),
        ({"part-1": fields["part-1"] | {"node_feats": "part0/graph.dgl"}}, "not a file of tensors by DGL"),
        ({"part-1": fields["part-1"] | {"part_graph": "part0/node_feat.dgl"}}, "not a graph file by DGL"),
    ):
        config.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=reason):
            from_dgl(config)


def test_another_version_of_the_format_is_refused_by_name(metis: Path) -> None:
    path = metis / "part0" / "graph.dgl"
    content = bytearray(path.read_bytes())
    content[8] = 3
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"version 3 .*kind 2 in version 2"):
        from_dgl(metis)


def damaged_copies(content: bytes, count: int) -> list[bytes]:
    """A third is cut off, a third has wrong heads of arrays, a third has wrong bytes anywhere."""
    draw = random.Random(0)
    heads = [at for at in range(len(content)) if content.startswith(ARRAY.to_bytes(8, "little"), at)]
    copies = []
    for number in range(count):
        copy = bytearray(content)
        if number % 3 == 0:
            del copy[draw.randrange(len(copy)) :]
        elif number % 3 == 1 and heads:
            at = draw.choice(heads) + draw.randrange(40)  # magic number, device, dtype, shape
            copy[at] ^= draw.randrange(1, 256)
        else:
            start = draw.randrange(len(copy))
            for at in range(start, min(len(copy), start + draw.choice((1, 8, 64)))):
                copy[at] = draw.randrange(256)
        copies.append(bytes(copy))
    return copies


@pytest.mark.parametrize("kind", ["graph", "node_feat", "edge_feat"])
def test_damaged_files_are_refused_and_never_allocate_more_than_they_hold(
    archive: Path, metis: Path, kind: str
) -> None:
    # DGL's files have no checksums: a wrong number among features cannot be seen, a wrong structure can.
    path = metis / "part0" / f"{kind}.dgl"
    read = read_graph if kind == "graph" else read_tensors
    content = path.read_bytes()
    tracemalloc.start()
    try:
        for number, copy in enumerate(damaged_copies(content, 102)):
            path.write_bytes(copy)
            try:
                read(path)
                ours = from_dgl(metis, ids=archive / "metis" / "nodes.npy")
            except ValueError:
                continue
            assert number % 3, "a file that was cut off was read"
            assert (ours.num_nodes, ours.num_edges) == (NUM_NODES, 120)
            if number % 3 == 1:
                assert_same(ours, make_expected(archive))
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_a_column_that_one_part_lacks_is_refused(metis: Path) -> None:
    path = metis / "part1" / "node_feat.dgl"
    path.write_bytes(path.read_bytes().replace(b"_N/year", b"_N/tear"))
    with pytest.raises(ValueError, match=r"node_feat\.dgl .*other columns"):
        from_dgl(metis)
