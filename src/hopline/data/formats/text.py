"""Edge lists and node tables in CSV or Parquet files, read in chunks."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from hopline.util.spec import nearest

Chunk = dict[str, np.ndarray]
"""Columns of some rows: whole numbers, floating point (NaN where empty) or text ("" where empty)."""
CHUNK_ROWS = 1 << 20
BLOCK_BYTES = 1 << 24
"""Bytes of a CSV file that Arrow reads at a time."""
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "#NA", "#N/A N/A", "NULL", "null", "NaN", "nan", "-NaN", "-nan")
"""How files write that there is no value: Arrow's list, which is pandas'."""


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
    ids: Sequence[str] = (),
    whole: bool = False,
) -> Iterator[Chunk]:
    """Columns of a CSV file (plain or `.gz`) in chunks of rows; `header` names them where the file does not.

    An empty `header` numbers the columns: "0", "1", ... Reads through pyarrow where it is installed.
    ids: columns that are whole numbers only where every cell of a chunk is written as int64 is, and else text as it is
    written: "001" and numbers of 20 digits are texts. whole: all rows in one chunk, so that a column has one type.
    """
    _check_file(path)
    found, first_line = _header(path, header, delimiter)
    names = _choose(path, found, columns)
    has_arrow = importlib.util.find_spec("pyarrow") is not None
    read = _read_arrow if has_arrow else _read_plain
    return read(path, found, names, first_line, delimiter, ids, whole)


def read_parquet(path: Path, *, columns: Sequence[str] | None = None, whole: bool = False) -> Iterator[Chunk]:
    """Columns of a Parquet file in chunks of rows; a column of lists of equal length becomes a 2-D array."""
    widths: dict[str, int] = {}
    row = 0
    with _open_parquet(path) as file:
        names = _choose(path, file.schema_arrow.names, columns)
        for batch in file.iter_batches(max(1, file.metadata.num_rows) if whole else CHUNK_ROWS, columns=names):
            chunk = {name: _to_numpy(batch.column(name), path, name, row, widths) for name in names}
            yield chunk
            row += batch.num_rows


def columns_of(path: Path, *, header: Sequence[str] | None = None, delimiter: str = ",") -> list[str]:
    """The names of a file's columns; a name that is there twice is refused."""
    if is_parquet(path):
        with _open_parquet(path) as file:
            return _choose(path, file.schema_arrow.names, None)
    _check_file(path)
    return _choose(path, _header(path, header, delimiter)[0], None)


def index_columns(path: Path, names: Sequence[str]) -> list[str]:
    """Those of a file's columns that hold the index of a pandas frame (or the row names of R), and not its data."""
    if not is_parquet(path):
        return [name for name in names if name == "" or re.fullmatch(r"Unnamed: [0-9]+", name)]
    with _open_parquet(path) as file:
        metadata = (file.schema_arrow.metadata or {}).get(b"pandas", b"{}")
    try:
        listed = json.loads(metadata).get("index_columns", [])
    except (ValueError, AttributeError):  # what another program wrote there says nothing about indices
        listed = []
    return [name for name in names if name in listed or re.fullmatch(r"__index_level_[0-9]+__", name)]


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its name."""
    return path.suffix.lower() in (".parquet", ".pq")


def read_file(path: Path, *, columns: Sequence[str] | None = None, **settings: Any) -> Iterator[Chunk]:
    """Columns of a CSV or Parquet file in chunks of rows."""
    if not is_parquet(path):
        return read_csv(path, columns=columns, **settings)
    return read_parquet(path, columns=columns, whole=settings.get("whole", False))


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """An open Parquet file; what Arrow cannot read of it becomes one sentence."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("Reading Parquet needs pyarrow: run pip install 'hopline[parquet]'.") from error
    _check_file(path)
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({_first_line(error)}): write it again.") from error


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"There is no file {path}: check the path.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _choose(path: Path, found: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    if missing := [name for name in wanted or () if name not in found]:
        raise MissingColumns(path, missing, list(found))
    names = list(dict.fromkeys(found if wanted is None else wanted))
    for name in names:
        if (count := list(found).count(name)) > 1:
            raise ValueError(f"{path} has {count} columns {name!r}: rename one of them.")
    return names


# ---- CSV


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """An open text file; what is not text becomes one sentence."""
    try:
        # The mark that Excel puts before UTF-8 is not part of the first name.
        is_gzip = path.suffix == ".gz"
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if is_gzip
            else path.open(encoding="utf-8-sig", newline="") as file
        ):
            yield file
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except (OSError, EOFError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV ({_first_line(error)}): correct the file.") from error


def _not_utf8(path: Path) -> ValueError:
    return ValueError(f"{path} is not in UTF-8: save it as UTF-8 (in Excel: CSV UTF-8).")


def _header(path: Path, header: Sequence[str] | None, delimiter: str) -> tuple[list[str], int]:
    """(names of all columns of a CSV file, lines before its first row)."""
    if header:
        return list(header), 0
    with _open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter)
        first = next((row for row in reader if row), [])
        num_lines = reader.line_num
    if not first and header is None:
        raise ValueError(f"{path} is empty: its first line must name its columns.")
    if header is not None:
        return [str(i) for i in range(len(first))], 0
    return [name.strip() for name in first], num_lines


def _read_arrow(
    path: Path,
    found: list[str],
    names: list[str],
    first_line: int,
    delimiter: str,
    ids: Sequence[str],
    whole: bool,
) -> Iterator[Chunk]:
    import pyarrow as arrow
    import pyarrow.csv as arrow_csv

    if not found:
        return
    # By number, since a file may have two columns of one name, of which none is asked for.
    at = {name: str(found.index(name)) for name in names}
    # Arrow goes by the first block for the type of a column, so in several blocks we find out about each by itself.
    as_text = [at[name] for name in names if name in ids or not whole]
    settings = {
        "read_options": arrow_csv.ReadOptions(
            column_names=[str(i) for i in range(len(found))],
            skip_rows=first_line,
            block_size=BLOCK_BYTES,
        ),
        "parse_options": arrow_csv.ParseOptions(delimiter=delimiter),
        "convert_options": arrow_csv.ConvertOptions(
            include_columns=list(at.values()), column_types=dict.fromkeys(as_text, arrow.string())
        ),
    }
    row = 0
    try:
        if whole:
            batches = arrow_csv.read_csv(path, **settings).combine_chunks().to_batches()
        else:
            batches = arrow_csv.open_csv(path, **settings)
        for batch in batches:
            chunk: Chunk = {}
            for name, number in at.items():
                column = batch.column(batch.schema.get_field_index(number))
                if name in ids:
                    column = _as_ids(column)
                elif not whole:
                    column = _as_numbers(column)
                if arrow.types.is_binary(column.type):
                    raise _not_utf8(path)
                chunk[name] = _to_numpy(column, path, name, row)
            yield chunk
            row += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        if "UTF8" in str(error):
            raise _not_utf8(path) from error
        raise ValueError(f"{path} cannot be read as CSV ({_first_line(error)}): correct the file.") from error


def _compute() -> Any:
    """Arrow's functions over arrays, which are made at import and which type checkers do not know."""
    return importlib.import_module("pyarrow.compute")


def _as_ids(column: Any) -> Any:
    """Texts of an Arrow array as whole numbers, if all of them are written as whole numbers are; else as they are."""
    import pyarrow as arrow

    numbers = _cast(column, arrow.int64())
    if numbers is None:
        return column
    return numbers if _compute().all(_compute().equal(numbers.cast(arrow.string()), column)).as_py() else column


def _cast(cells: Any, kind: Any) -> Any:
    """Texts as numbers, or None if one of them is none."""
    import pyarrow as arrow

    try:
        cells.slice(0, 1000).cast(kind)  # Arrow goes on after the first that is no number, at a high price
        return cells.cast(kind)
    except arrow.ArrowInvalid:
        return None


def _as_numbers(column: Any) -> Any:
    """Texts of an Arrow array as whole numbers, else as floating point, else as they are."""
    import pyarrow as arrow

    def cast(cells: Any) -> Any:
        numbers = _cast(cells, arrow.int64())
        return _cast(cells, arrow.float64()) if numbers is None else numbers

    if (numbers := cast(column)) is not None:  # most columns are clean, and cleaning takes three times as long
        return numbers
    cells = _compute().utf8_trim_whitespace(column)
    is_missing = _compute().is_in(cells, value_set=arrow.array(MISSING))
    numbers = cast(_compute().if_else(is_missing, arrow.scalar(None, arrow.string()), cells))
    return column if numbers is None else numbers


def _to_numpy(column: Any, path: Path, name: str, first: int, widths: dict[str, int] | None = None) -> np.ndarray:
    """An Arrow array as whole numbers, floats or text; lists of equal length become rows.

    first: the number of its first row. widths: the length of the lists of each column so far.
    """
    import pyarrow as arrow

    if arrow.types.is_dictionary(column.type):  # a categorical of pandas
        column = column.dictionary_decode()
    kind = column.type
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind):
        return _lists(column, path, name, first, {} if widths is None else widths)
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        # A NumPy array of texts drops zero bytes at the end, and two texts would be one.
        has_zero = _compute().fill_null(_compute().match_substring(column, "\0"), False)
        if _compute().any(has_zero).as_py():
            raise _zero_byte(path, name, first + has_zero.to_numpy(zero_copy_only=False).argmax())
        return column.fill_null("").to_numpy(zero_copy_only=False).astype(str)
    if arrow.types.is_null(kind):
        return np.full(len(column), np.nan)
    if arrow.types.is_boolean(kind) and column.null_count:
        column = column.cast(arrow.uint8())
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
        raise ValueError(f"{path}: column {name!r} has type {kind}: store numbers or text.")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _zero_byte(path: Path, name: str, row: int) -> ValueError:
    return ValueError(f"{path}: column {name!r} holds a zero byte in row {row}: remove it from the text.")


def _lists(column: Any, path: Path, name: str, first: int, widths: dict[str, int]) -> np.ndarray:
    """An Arrow array of lists of numbers as rows [n, width]."""
    import pyarrow as arrow

    kind = column.type.value_type
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
        raise ValueError(f"{path}: column {name!r} holds lists of {kind}: store lists of numbers.")
    if column.null_count:
        row = first + column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise ValueError(f"{path}: column {name!r} has no list in row {row}: give each row one, all equally long.")
    lengths = _compute().list_value_length(column).to_numpy(zero_copy_only=False)
    width = widths.setdefault(name, int(lengths[0])) if len(lengths) else 0
    other = np.flatnonzero(lengths != width)
    if other.size:
        raise ValueError(
            f"{path}: column {name!r} has a list of {lengths[other[0]]} numbers in row {first + other[0]} and of "
            f"{width} before: make them equally long."
        )
    values = column.flatten()
    values = values.cast(arrow.uint8()) if arrow.types.is_boolean(kind) else values
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), width)


def _read_plain(
    path: Path,
    found: list[str],
    names: list[str],
    first_line: int,
    delimiter: str,
    ids: Sequence[str],
    whole: bool,
) -> Iterator[Chunk]:
    at = [found.index(name) for name in names]
    row = 0
    with _open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter)
        rows = ((reader.line_num, cells) for cells in reader if cells and reader.line_num > first_line)
        while pending := list(islice(rows, None if whole else CHUNK_ROWS)):
            for line, cells in pending:
                if len(cells) != len(found):
                    raise ValueError(f"{path}, line {line}: {len(cells)} columns instead of {len(found)}: correct it.")
            chunk: Chunk = {}
            for name, k in zip(names, at, strict=True):
                cells = [cells[k] for _, cells in pending]
                if (zero := next((i for i, cell in enumerate(cells) if "\0" in cell), None)) is not None:
                    raise _zero_byte(path, name, row + zero)
                chunk[name] = _parse_ids(cells) if name in ids else _parse(cells)
            yield chunk
            row += len(pending)


def _parse_ids(cells: list[str]) -> np.ndarray:
    """Whole numbers if all cells are written as whole numbers are, else text."""
    texts = np.array(cells)
    try:
        numbers = texts.astype(np.int64)
    except (ValueError, OverflowError):
        return texts
    return numbers if np.array_equal(numbers.astype(str), texts) else texts


def _parse(cells: list[str]) -> np.ndarray:
    """Whole numbers if all cells are, else floats with NaN for empty cells, else text."""
    array = np.array(cells)
    if not all(cell.isascii() and "_" not in cell for cell in cells):  # numbers to Python, but to nobody else
        return array
    try:
        return array.astype(np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.where(np.isin(np.char.strip(array), MISSING), "nan", array).astype(np.float64)
    except ValueError:
        return array
