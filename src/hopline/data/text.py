"""Edge lists and node tables in CSV or Parquet files, read in chunks."""

from __future__ import annotations

import csv
import gzip
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hopline.spec import nearest

Chunk = dict[str, np.ndarray]
"""Columns of some rows: whole numbers, floating point (NaN where empty) or text ("" where empty)."""
CHUNK_ROWS = 1 << 20


class MissingColumns(ValueError):
    """A file does not have some columns that were asked for."""

    def __init__(self, path: Path, names: Sequence[str], found: Sequence[str]) -> None:
        self.names = names
        """Those that the file does not have."""
        self.found = found
        """Those that it has."""
        hint = nearest(names[0], found)
        super().__init__(f"{lacks(path, names, found)}: name the right one.{hint}")


def lacks(path: Path, names: Sequence[str], found: Sequence[str]) -> str:
    """Say which columns a file does not have, and which it has."""
    missing = " and ".join(map(repr, names))
    has = ", ".join([*found[:20], *["..."] * (len(found) > 20)]) if found else "none"
    return f"{path} has no column {missing}, only {has}"


def read_csv(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    header: Sequence[str] | None = None,
    delimiter: str = ",",
) -> Iterator[Chunk]:
    """Columns of a CSV file (plain or `.gz`) in chunks of rows; `header` names them where the file does not.

    An empty `header` numbers the columns: "0", "1", ... Reads through pyarrow where it is installed.
    """
    has_arrow = importlib.util.find_spec("pyarrow") is not None
    return (_read_arrow if has_arrow else _read_plain)(path, columns, header, delimiter)


def read_parquet(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
    """Columns of a Parquet file in chunks of rows; a column of lists becomes a 2-D array."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("Reading Parquet needs pyarrow: run pip install 'hopline[parquet]'.") from error
    _check_file(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = _choose(path, file.schema_arrow.names, columns)
            for batch in file.iter_batches(CHUNK_ROWS, columns=names):
                yield {name: _to_numpy(batch.column(name), path, name) for name in names}
    except arrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as Parquet ({_first_line(error)}): write it again.") from error


def columns_of(path: Path, **settings: Any) -> list[str]:
    """The names of a file's columns."""
    if is_parquet(path):
        import pyarrow.parquet as parquet

        _check_file(path)
        return list(parquet.read_schema(path).names)
    for chunk in read_csv(path, **settings):
        return list(chunk)
    return []


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its name."""
    return path.suffix in (".parquet", ".pq")


def read_file(path: Path, *, columns: Sequence[str] | None = None, **settings: Any) -> Iterator[Chunk]:
    """Columns of a CSV or Parquet file in chunks of rows."""
    return read_parquet(path, columns=columns) if is_parquet(path) else read_csv(path, columns=columns, **settings)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"There is no file {path}: check the path.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _choose(path: Path, found: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    if missing := [name for name in wanted or () if name not in found]:
        raise MissingColumns(path, missing, list(found))
    return list(found if wanted is None else dict.fromkeys(wanted))


def _read_arrow(
    path: Path, columns: Sequence[str] | None, header: Sequence[str] | None, delimiter: str
) -> Iterator[Chunk]:
    import pyarrow as arrow
    import pyarrow.csv as arrow_csv

    _check_file(path)
    read = arrow_csv.ReadOptions(
        column_names=list(header) if header else None,
        autogenerate_column_names=header is not None and not header,
        block_size=1 << 24,
    )
    parse = arrow_csv.ParseOptions(delimiter=delimiter)
    try:
        with arrow_csv.open_csv(path, read_options=read, parse_options=parse) as reader:
            found = [_plain_name(name, header) for name in reader.schema.names]
            names = _choose(path, found, columns)
            for batch in reader:
                yield {name: _to_numpy(batch.column(found.index(name)), path, name) for name in names}
    except arrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as CSV ({_first_line(error)}): correct the file.") from error


def _plain_name(name: str, header: Sequence[str] | None) -> str:
    # Arrow numbers the columns f0, f1, ...
    return name.removeprefix("f") if header is not None and not header else name


def _to_numpy(column: Any, path: Path, name: str) -> np.ndarray:
    """An Arrow array as whole numbers, floats or text; lists of equal length become rows."""
    import pyarrow as arrow

    kind = column.type
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind):
        values = column.flatten().to_numpy(zero_copy_only=False)
        if len(column) and values.size % len(column):
            raise ValueError(f"{path}: the lists in column {name!r} differ in length: make them equally long.")
        return values.reshape(len(column), -1)
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        return column.fill_null("").to_numpy(zero_copy_only=False).astype(str)
    if arrow.types.is_null(kind):
        return np.full(len(column), np.nan)
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
        raise ValueError(f"{path}: column {name!r} has type {kind}: store numbers or text.")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _read_plain(
    path: Path, columns: Sequence[str] | None, header: Sequence[str] | None, delimiter: str
) -> Iterator[Chunk]:
    _check_file(path)
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        rows = csv.reader(file, delimiter=delimiter)
        pending: list[list[str]] = []
        found = list(header) if header else next(rows, [])
        if header is not None and not header:
            pending, found = [found], [str(i) for i in range(len(found))]
        names = _choose(path, found, columns)
        at = [found.index(name) for name in names]
        line = 1 if header is not None else 2
        while pending or (pending := list(islice(rows, CHUNK_ROWS))):
            for i, row in enumerate(pending):
                if len(row) != len(found):
                    raise ValueError(
                        f"{path}, line {line + i}: {len(row)} columns instead of {len(found)}: correct it."
                    )
            yield {name: _parse([row[k] for row in pending]) for name, k in zip(names, at, strict=True)}
            line += len(pending)
            pending = []


def _parse(cells: list[str]) -> np.ndarray:
    """Whole numbers if all cells are, else floats with NaN for empty cells, else text."""
    array = np.array(cells)
    try:
        return array.astype(np.int64)
    except ValueError:
        pass
    try:
        return np.where(array == "", "nan", array).astype(np.float64)
    except ValueError:
        return array
