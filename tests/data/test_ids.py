"""Ids of nodes as files write them: matched between files, given back unchanged, or refused by row."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from hopline.data.formats import csv_parquet
from hopline.data.formats.csv_parquet import from_csv
from hopline.data.ids import IdMap, checked_ids, original_ids, settle_ids
from hopline.data.options import Columns
from hopline.tables import TensorTable

POOLS = {
    "numbers": ["1", "2", "30", "-4", str(2**60), str(2**60 + 1), str(2**63 - 1), str(-(2**63))],
    "numbers of pandas": ["1.0", "2.0", "7", " 8 ", "2"],
    "padded": ["001", "01", "1", "0"],
    "hashes": ["14695981039346656037", "14695981039346656038", "5", "12e5"],
    "texts": ["a", "b", "zoë", "a b", "NA", "null", "1.0", "1", "1e5", "true", "2020-01-01", "1_0", " a"],
}


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("kind", POOLS)
def test_edges_join_the_nodes_that_the_file_names(
    kind: str, in_chunks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a few rows, some with numbers alone, some with texts, give the graph that Python reads off the file."""
    if in_chunks:
        monkeypatch.setattr(csv_parquet, "BLOCK_BYTES", 64)
    draw = random.Random(kind)
    # All of the pool, at the end, so that the first chunks do not tell what kind of ids these are.
    ends = draw.choices(POOLS[kind][:2], k=30) + POOLS[kind]
    weights = draw.choices(["1", "2", "0.5"], k=len(ends))
    rows = list(zip(ends, draw.sample(ends, len(ends)), weights, strict=True))
    path = tmp_path / "e.csv"
    path.write_text("\n".join(["src,dst,w", *(",".join(row) for row in rows)]))
    expected = sorted((_node(kind, src), _node(kind, dst), float(w)) for src, dst, w in rows)

    for folder in (None, tmp_path / "out"):
        data = from_csv(path, ids="map", columns=Columns(edge=("w",)), folder=folder)
        names = original_ids(data.tables["node_ids"]).tolist()
        src, dst = data.graph.edge_index().tolist()
        weights = data.graph.edge["w"].tolist()
        assert sorted((names[s], names[d], w) for s, d, w in zip(src, dst, weights, strict=True)) == expected
        assert len(set(names)) == data.num_nodes == len({name for row in expected for name in row[:2]})


def _node(kind: str, written: str) -> int | str:
    return int(float(written) if "." in written else written) if kind.startswith("numbers") else written


@pytest.mark.parametrize("values", [[3, 1, 2], [2**62, -5, 0], ["a", "zoë", ""], ["001", "1", "01"]])
def test_ids_come_back_as_they_were(values: list[int] | list[str]) -> None:
    assert original_ids(TensorTable(IdMap(np.array(values)).table())).tolist() == values


def test_an_id_is_found_in_whatever_form_the_other_file_has_it() -> None:
    numbers = IdMap(np.array([10, 20]))
    texts = IdMap(np.array(["10", "020"]))
    assert numbers.positions(np.array(["20.0", " 10"]), "edge").tolist() == [1, 0]
    assert texts.positions(np.array([10]), "edge").tolist() == [0]
    for mapping, ids, message in (
        (numbers, ["10", "020"], "edge 6: node 020 is not in the node file"),
        (numbers, ["10", "1e1"], "edge 6: node 1e1 is not in the node file"),
        (numbers, ["10", str(2**70)], f"edge 6: node {2**70} is not in the node file"),
        (texts, [10, 20], "edge 6: node 20 is not in the node file"),
    ):
        with pytest.raises(ValueError, match=message):
            mapping.positions(np.array(ids), "edge", 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1.0, np.nan]), "row 8: there is no node id"),
        (np.array(["a", ""]), "row 8: there is no node id"),
        (np.array([1.0, 0.5]), "row 8: node id 0.5 is not a whole number"),
        (np.array([1.0, -(2.0**53)]), "row 8: node id -9007199254740992.0 is a floating-point number"),
        (np.array([2**24 - 1, 2**24], np.float32), "row 8: node id 16777216.0 is a floating-point number"),
        (np.array([1.0, np.inf]), "row 8: node id inf is a floating-point number"),
        (np.array([1, 2**63], np.uint64), "row 8: node id 9223372036854775808 is too large for a node number"),
        (np.array([[1], [2]]), "row 7: the column holds lists"),
    ],
)
def test_what_cannot_be_an_id_is_refused_with_its_row(values: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_ids(values, "row", 7, numbers=True)


def test_a_fraction_among_number_ids_is_refused_and_among_text_ids_is_a_text() -> None:
    assert settle_ids(np.array(["1.0", "2"]), "row").tolist() == [1, 2]
    assert settle_ids(np.array(["1.5", "a"]), "row").tolist() == ["1.5", "a"]
    for written in ("1.5", "1e5", ".5", "-2.25"):
        with pytest.raises(ValueError, match=f"row 1: node id {written} "):
            settle_ids(np.array(["2.0", written]), "row")
