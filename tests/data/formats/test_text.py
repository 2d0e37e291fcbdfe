"""Reading CSV and Parquet files in chunks: types of columns, chosen columns, and damaged files by name."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from hopline.data.formats import csv_parquet
from hopline.data.formats.csv_parquet import Chunk, columns_of, read_csv, read_file, read_parquet

TABLE = "id,size,name\n7,1.5,ann\n8,,bob\n9,2.5,\n"


def join_chunks(chunks: list[Chunk]) -> Chunk:
    """Each column over all chunks."""
    return {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}


def test_columns_are_numbers_or_text(tmp_path: Path) -> None:
    for name, data in (("a.csv", TABLE.encode()), ("a.csv.gz", gzip.compress(TABLE.encode()))):
        (tmp_path / name).write_bytes(data)
        columns = join_chunks(list(read_csv(tmp_path / name)))
        assert columns["id"].tolist() == [7, 8, 9]
        assert columns["id"].dtype == np.int64
        assert np.array_equal(columns["size"], [1.5, np.nan, 2.5], equal_nan=True)
        assert columns["name"].tolist() == ["ann", "bob", ""]
        assert columns_of(tmp_path / name) == ["id", "size", "name"]


def test_columns_can_be_chosen_named_and_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    assert list(join_chunks(list(read_csv(tmp_path / "a.csv", columns=["name", "id"])))) == ["name", "id"]
    (tmp_path / "b.csv").write_text("1;2\n3;4\n")
    named = join_chunks(list(read_csv(tmp_path / "b.csv", header=("s", "d"), delimiter=";")))
    assert named["d"].tolist() == [2, 4]
    with_index = join_chunks(list(read_csv(tmp_path / "b.csv", header=(), delimiter=";")))
    assert {k: v.tolist() for k, v in with_index.items()} == {"0": [1, 3], "1": [2, 4]}
    with pytest.raises(ValueError, match=r"'nam', only id, size, name.*'name'"):
        list(read_csv(tmp_path / "a.csv", columns=["nam"]))


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.csv: check the path"):
        list(read_csv(tmp_path / "none.csv"))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ValueError, match=r"a\.csv.*2") as caught:
        list(read_csv(tmp_path / "a.csv"))
    assert "\n" not in str(caught.value)


def test_a_file_is_read_in_chunks_and_an_error_names_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_parquet, "BLOCK_BYTES", 16)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n5,6\n7,8\n9\n")
    chunks = read_csv(tmp_path / "a.csv")
    assert next(chunks)["a"].tolist() == [1, 3, 5]
    with pytest.raises(ValueError, match=r"a\.csv .*Row #6"):
        list(chunks)


def test_parquet_columns_and_lists_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_parquet, "CHUNK_ROWS", 2)
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.table({"id": [1, 2, 3], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "s": ["a", None, "c"]}), path
    )
    chunks = list(read_file(path))
    assert len(chunks) == 2
    columns = join_chunks(chunks)
    assert columns["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert columns["s"].tolist() == ["a", "", "c"]
    assert columns_of(path) == ["id", "x", "s"]
    with pytest.raises(ValueError, match="has no column 'y'"):
        list(read_parquet(path, columns=["y"]))
    parquet.write_table(arrow.table({"x": [[1.0], [2.0, 3.0]]}), path)
    with pytest.raises(ValueError, match=r"'x' .*2 numbers in row 1 .*1"):
        list(read_parquet(path))
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match="as Parquet"):
        list(read_parquet(path))
