"""Datasets from CSV and Parquet: an edge file, and a node file with features, labels and a split, read in chunks."""

from __future__ import annotations

import csv
import difflib
import gzip
import importlib
import json
import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as arrow
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet

from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.ids import IdMap, are_numbers, checked_ids, first_not_whole, settle_ids, to_numbers
from hopline.data.nodes import split_name, usual_split
from hopline.data.options import Columns, merge
from hopline.data.paths import default_name
from hopline.util.config import nearest
from hopline.util.files import check_file
from hopline.util.log import logger

compute: Any = importlib.import_module("pyarrow.compute")
"""Arrow's functions over arrays. They are made at import, so type checkers do not know them."""
Ids = Literal["number", "map"]
EDGE_FIELDS = ("src", "dst", "edge")
"""Fields of `Columns` that name columns of the edge file."""
NODE_FIELDS = ("id", "label", "split", "features")
"""Fields of `Columns` that name columns of the node file."""
SEVERAL = ("edge", "features")
"""Fields of `Columns` that name more than one."""


class _EdgeFile:
    """Edge chunks of a file; can be read more than once."""

    def __init__(self, path: Path, columns: Columns, *, any_ids: bool, mapping: IdMap | None = None) -> None:
        self.path = path
        self.columns = columns
        self.any_ids = any_ids
        """Whether ids may be anything, kept as they are written; else they are node numbers."""
        self.mapping = mapping
        self.where = f"{path}, edge"
        """How a refusal names an edge."""

    def raw(self, *extra: str) -> Iterator[Chunk]:
        """Columns of the file in chunks, the ids as whole numbers or as text."""
        c = self.columns
        settings: dict[str, Any] = {} if c.header is None else {"header": c.header}
        settings["delimiter"] = c.separator(self.path)
        settings["ids"] = (c.src, c.dst) if self.any_ids else ()
        row = 0
        try:
            for chunk in read_file(self.path, columns=[c.src, c.dst, *extra], **settings):
                ids = {n: checked_ids(chunk[n], self.where, row, numbers=not self.any_ids) for n in (c.src, c.dst)}
                yield chunk | ids
                row += len(chunk[c.src])
        except MissingColumns as missing:
            lacking = lacks(self.path, missing.names, missing.found)
            raise ValueError(f"{lacking}: {_what_to_type(missing, c, EDGE_FIELDS)}.") from None

    def __iter__(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        row = 0
        for chunk in self.raw(*self.columns.edge):
            ends = [chunk[self.columns.src], chunk[self.columns.dst]]
            index = np.stack([self._numbers(end, row) for end in ends])
            yield index, {name: _edge_array(chunk[name], name, self.path) for name in self.columns.edge}
            row += index.shape[1]

    def _numbers(self, ids: np.ndarray, row: int) -> np.ndarray:
        if self.mapping is not None:
            return self.mapping.positions(ids, self.where, row)
        if ids.dtype.kind == "U":
            # One text makes a column one of texts, so the first of them need not be the one.
            at = next((i for i, text in enumerate(ids) if not re.fullmatch("-?[0-9]+", text)), 0)
            raise ValueError(
                f"{self.where} {row + at}: node id {str(ids[at])!r} is not a number: number the nodes from 0, or "
                "let ids=map do it."
            )
        return ids


def _what_to_type(missing: MissingColumns, columns: Columns, fields: Sequence[str]) -> str:
    """How to name the columns that a file has, instead of those that it does not have.

    fields: those of `Columns` that are about this file.
    """
    found = missing.found
    separator = next((c for c in ";\t| " if len(found) == 1 and c in found[0]), None)
    if separator is not None:
        typed = {"\t": "tab", " ": "space"}.get(separator, repr(separator))  # as a shell reads it
        return f"if {separator!r} separates its columns, type columns.delimiter={typed}"
    header = ""
    if fields == EDGE_FIELDS and not {columns.src, columns.dst} & set(found):
        wanted = [columns.src, columns.dst, *columns.edge]
        header = "columns.header=" + ",".join([*wanted, *(f"column{i}" for i in range(len(wanted), len(found)))])
        if all(re.fullmatch("-?[0-9.]+", name) for name in found):
            return f"its first line holds no names, so type {header}"

    named = {field: _as_tuple(getattr(columns, field)) for field in fields}
    free = [column for column in found if not any(column in names for names in named.values())]
    guesses: dict[str, str] = {}
    for name in missing.names:
        first = free[:1] if name in (columns.src, columns.dst, columns.id) else []
        close = [] if name == "id" else _close(name, free)  # two letters are like those of too many words
        guesses[name] = [*close, *first, "NAME"][0]
        free = [column for column in free if column != guesses[name]]
    mended = {
        field: tuple(guesses.get(name, name) for name in names)
        for field, names in named.items()
        if any(name in guesses for name in names)
    }
    words = [shlex.quote(f"columns.{field}={','.join(names)}") for field, names in mended.items()]
    in_python = [f"{field}={names if field in SEVERAL else names[0]!r}" for field, names in mended.items()]
    otherwise = f", or {header} if its first line holds no names" if header else ""
    return f"type {' '.join(words)} (in Python Columns({', '.join(in_python)})){otherwise}"


def _close(name: str, columns: Sequence[str]) -> list[str]:
    """The column that is spelt most like a name, if one is at all."""
    by_lower = {column.lower(): column for column in columns}
    return [by_lower[close] for close in difflib.get_close_matches(name.lower(), by_lower, n=1)]


def _as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value or ()


def _truth(values: np.ndarray) -> np.ndarray:
    """A column of true and false in any case as 1 and 0, with NaN for empty cells; any other as it is."""
    if values.dtype.kind != "U":
        return values
    words = np.char.lower(values)
    is_missing = np.isin(values, MISSING)
    if not (is_missing | np.isin(words, ("true", "false", "1", "0"))).all() or is_missing.all():
        return values
    truth = np.isin(words, ("true", "1"))
    return np.where(is_missing, np.nan, truth) if is_missing.any() else truth


def _edge_array(values: np.ndarray, name: str, path: Path) -> np.ndarray:
    values = _truth(values)
    if values.dtype.kind not in "iufb":
        raise ValueError(f"{path}: edge column {name!r} holds text: only numbers can be edge arrays.")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused by its row
        return values.astype(np.float32) if values.dtype.kind == "f" else values


def from_csv(
    edges: str | os.PathLike[str],
    nodes: str | os.PathLike[str] | None = None,
    *,
    columns: Columns | Mapping[str, Any] | None = None,
    ids: Ids = "number",
    **arguments: Any,
) -> Dataset:
    """Make a dataset from an edge file and, optionally, a node file.

    Each file may be CSV, `.csv.gz`, `.tsv` or Parquet. The edges may be an `.npy` file of node numbers [2, num_edges],
    too. A node file with labels and without a split column gets 20 training and 30 validation nodes per class, as an
    `.npz` file does; `split_shares=` draws others.

    Args:
        edges: The edge file: a source, a destination and perhaps edge arrays per line.
        nodes: The node file: features, a label and a split per line.
        columns: Which columns mean what.
        ids: "number": ids are 0 .. num_nodes - 1. "map": any whole numbers or texts, which are kept as they are written
            in the table "node_ids" (see `hopline.data.original_ids`).
        arguments: Those of `from_edges`, among them `folder` for edge files larger than memory. Its `tables` are added
            to those of the files.

    Returns:
        The dataset; features are [num_nodes, num_features] float32.

    Raises:
        ValueError: A file or a column is missing, or a value cannot be read. The line is named.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("edges.csv").write_text("src,dst\\n0,1\\n1,2\\n")
        >>> _ = Path("nodes.csv").write_text("id,age,label\\n0,30,0\\n1,40,1\\n2,50,0\\n")
        >>> data = hl.from_csv("edges.csv", "nodes.csv", split_shares=(0.6, 0.2, 0.2))
        >>> data.num_nodes, data.num_features, data.num_classes
        (3, 1, 2)
    """
    if ids not in ("number", "map"):
        raise ValueError(f"ids is {ids!r}: choose 'number' or 'map'.")
    is_npy = Path(edges).suffix.lower() == ".npy"
    if is_npy and ids == "map":
        raise ValueError(f"ids=map reads the ids of text and Parquet files: leave it out for {edges}.")
    columns = Columns(**columns) if isinstance(columns, Mapping) else columns or Columns()
    source = _EdgeFile(Path(edges).expanduser(), columns, any_ids=ids == "map")
    given: dict[str, Any] = {
        "name": default_name(arguments.get("folder"), source.path.name.split(".")[0]),
        "meta": {"origin": source.path.name},
    }
    if not is_npy:
        _tell_edge_columns(source.path, source.columns)
    known = None
    if nodes is not None:
        node_part, known = _read_nodes(Path(nodes).expanduser(), source.columns, ids)
        meta = {"origin": f"{source.path.name} and {Path(nodes).name}", **node_part.pop("meta")}
        if "splits" not in node_part and (drawn := usual_split(node_part.get("y"), None)):
            node_part["splits"], meta["split"] = drawn
        given |= {**node_part, "meta": meta}
    if ids == "map":
        mapping = IdMap(known if known is not None else _distinct(source))
        source = _EdgeFile(source.path, source.columns, any_ids=True, mapping=mapping)
        given |= {"num_nodes": mapping.ids.size, "tables": {"node_ids": mapping.table()}}
        if "node_ids" in (arguments.get("tables") or {}):
            raise ValueError("ids=map keeps the ids in the table 'node_ids': give the table of tables= another name.")
    return from_edges(source.path if is_npy else source, **merge(given, arguments))


def _distinct(source: _EdgeFile) -> np.ndarray:
    """All ids of an edge file, sorted."""
    numbers, texts = np.empty(0, dtype=np.int64), np.empty(0, dtype=str)
    for chunk in source.raw():
        for ids in (chunk[source.columns.src], chunk[source.columns.dst]):
            if ids.dtype.kind == "U":
                texts = np.union1d(texts, ids)
            else:
                numbers = np.union1d(numbers, ids)
    if not texts.size and not numbers.size:
        raise ValueError(f"{source.path} holds no edges, so there are no ids to number: add some, or give nodes=FILE.")
    if not texts.size:
        return numbers
    if not are_numbers(texts):
        return np.union1d(numbers.astype(str), texts)
    row = 0
    if first_not_whole(texts) is not None:
        for chunk in source.raw():  # again, for the row
            for ids in (chunk[source.columns.src], chunk[source.columns.dst]):
                settle_ids(ids, source.where, row)
            row += len(chunk[source.columns.src])
    return np.union1d(numbers, to_numbers(texts))


def _read_nodes(path: Path, columns: Columns, ids: Ids) -> tuple[dict[str, Any], np.ndarray | None]:
    """(arguments for `from_edges`, ids) of a node file."""
    separator = columns.separator(path)
    names = columns_of(path, delimiter=separator)
    _check_node_columns(path, names, columns, ids)
    if numbers := [name for name in names if _is_number(name)]:
        raise ValueError(
            f"the first line of {path} must name its columns, and it holds {numbers[0]!r}: add a line such as "
            "id,age,score,label."
        )
    special = [columns.id, columns.label, columns.split]
    index = [name for name in index_columns(path, names) if name not in special]
    free = [name for name in names if name not in special]
    features = columns.features if columns.features is not None else [name for name in free if name not in index]
    # The index, too, of rows that have no ids: it may hold them.
    looked_at = index if columns.id not in names and columns.features is None else []
    wanted = [*features, *looked_at, *(name for name in special if name in names)]
    exact = [columns.id] if ids == "map" else []
    whole = _whole_file(path, wanted, delimiter=separator, ids=exact)
    given: dict[str, Any] = {"num_nodes": len(whole[wanted[0]])}
    whole |= {name: _truth(whole[name]) for name in features}
    if texts := [name for name in features if whole[name].dtype.kind == "U"]:
        numbers = ",".join(name for name in features if name not in texts)
        raise ValueError(
            f"{path}: column {' and '.join(map(repr, texts))} holds text, and features are numbers: say what it is "
            f"with columns.id=, columns.label= or columns.split=, or name the features with columns.features={numbers}."
        )
    if columns.id not in whole:
        in_order = [name for name in looked_at if np.array_equal(whole[name], np.arange(given["num_nodes"]))]
        may_be_ids = [name for name in [*features, *looked_at] if name not in in_order]
        _check_rows_are_nodes(path, {name: whole[name] for name in may_be_ids}, columns)
    _tell_features(path, features, [name for name in free if name not in features], index)
    if features:
        parts = [_feature(whole[name], name, path) for name in features]
        given["x"] = np.concatenate([p if p.ndim == 2 else p[:, None] for p in parts], axis=1)
    meta: dict[str, Any] = {}
    if features:
        types = ["bool" if whole[name].dtype.kind == "b" else "number" for name in features]
        widths = [1 if part.ndim == 1 else part.shape[1] for part in parts]
        meta["columns"] = [list(column) for column in zip(features, types, widths, strict=True)]
    labels, classes = _labels(whole[columns.label], path) if columns.label in whole else (None, [])
    if labels is None:
        logger.warning(
            f"{path} has no column {columns.label!r}, so nodes get no labels: that is right for nodes to predict; if "
            "another column holds their labels, name it with columns.label="
        )
    elif not (labels >= 0).any():  # empty cells are -1 or NaN
        logger.warning(f"{path}: column {columns.label!r} is empty, so nodes get no labels")
    else:
        _tell_unused_classes(labels, path)
        given["y"] = labels
        if classes:
            meta["classes"] = classes
    if columns.split in whole:
        given["splits"] = _split_masks(whole[columns.split], path)
    given["meta"] = meta
    if columns.id not in whole:
        return given, None
    where = f"{path}, row"
    known = checked_ids(whole[columns.id], where, numbers=ids == "number")
    if ids == "number":
        _reorder(given, known, path)
        return given, known
    return given, settle_ids(known, where)


def _whole_file(path: Path, wanted: list[str], **settings: Any) -> dict[str, np.ndarray]:
    chunks = list(read_file(path, columns=wanted, whole=True, **settings)) if wanted else []
    whole = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in wanted} if chunks else {}
    if not whole or not len(whole[wanted[0]]):
        raise ValueError(f"{path} holds no nodes: add a row for each, with columns such as id,age,score,label.")
    return whole


def _tell_edge_columns(path: Path, columns: Columns) -> None:
    """Name the columns of an edge file that are left out. A file that cannot be read is refused later, by its line."""
    found = columns.header or columns_of(path, delimiter=columns.separator(path))
    left = [name for name in found if name not in (columns.src, columns.dst, *columns.edge)]
    is_readable = columns.src in found and columns.dst in found
    if left and is_readable:
        level = logging.INFO if columns.edge else logging.WARNING
        settings = f"columns.edge={','.join(left)}"
        logger.log(
            level,
            f"{path}: not taken: {_listed(left)}; to make edge arrays of them, {settings} (convs read weight and attr)",
        )


def _tell_features(path: Path, features: Sequence[str], others: Sequence[str], index: Sequence[str]) -> None:
    """Say which columns become features, so that one that is none is seen."""
    taken = f"features ({len(features)}): {_listed(features)}" if features else "no column is a feature"
    left = [(name or "''") + " (the index of a table)" * (name in index) for name in others]
    logger.info(f"{path}: {taken}" + (f"; not taken: {_listed(left)}" if left else ""))


def _listed(names: Sequence[str], most: int = 12) -> str:
    """Names in a line, without the middle of a long list."""
    if len(names) > most:
        names = [*names[: most - 2], "...", names[-1]]
    return ", ".join(names)


def _feature(values: np.ndarray, name: str, path: Path) -> np.ndarray:
    """A feature column as float32; what it cannot hold is named."""
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(numbers))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        place = ", entry ".join(map(str, at))
        is_large = np.isfinite(values[at])
        advice = "which float32 cannot hold: scale the column" if is_large else "fill it in, as with the column's mean"
        raise ValueError(
            f"{path}: column {name!r} holds {values[at]} in row {place}{', ' if is_large else ': '}{advice}, or name "
            "the other features with columns.features=."
        )
    return numbers


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_rows_are_nodes(path: Path, features: dict[str, np.ndarray], columns: Columns) -> None:
    """Refuse a column of ids by another name: its rows would become nodes 0, 1, 2, ... in the order of the file."""
    for name, values in features.items():
        is_numbered = values.dtype.kind in "iu" and values.ndim == 1 and values.size > 1 and columns.features is None
        if is_numbered and np.array_equal(np.sort(values), np.arange(values.size)):
            typed = f"type columns.id={name}" if name else "give it a name in the first line, such as id"
            raise ValueError(
                f"{path} has no column {columns.id!r}, and {name!r} holds each node number once: if it holds the ids, "
                f"{typed}; else name the features with columns.features=."
            )
    logger.warning(f"{path} has no column {columns.id!r}, so its rows are nodes 0, 1, 2, ... (else columns.id=NAME)")


def _check_node_columns(path: Path, names: list[str], columns: Columns, ids: Ids) -> None:
    """Refuse a node file without a column that was named, or that ids=map needs."""
    usual = Columns()
    asked = [name for f in ("id", "label", "split") if (name := getattr(columns, f)) != getattr(usual, f)]
    asked += columns.features or ()
    why = ""
    if ids == "map" and columns.id not in names:
        asked = [columns.id, *(name for name in asked if name != columns.id)]
        why = "ids=map needs the ids of the nodes, and "
    missing = [name for name in asked if name not in names]
    if missing:
        advice = _what_to_type(MissingColumns(path, missing, names), columns, NODE_FIELDS)
        raise ValueError(f"{why}{lacks(path, missing, names)}: {advice}.")


def _labels(values: np.ndarray, path: Path) -> tuple[np.ndarray, list[str]]:
    """Class numbers with -1 for empty cells; classes given as text are numbered in alphabetical order."""
    if values.dtype.kind != "U":
        return values, []
    for word in (word for word in MISSING if word and (values == word).any()):
        rows = np.flatnonzero(values == word)
        logger.warning(
            f"{path}: label {word!r} in row {rows[0]} is taken for no label, as in {rows.size} of {values.size} rows: "
            "if it is a class, give it another name"
        )
    values = np.where(np.isin(values, MISSING), "", values)
    classes = [str(c) for c in np.unique(values) if c != ""]
    return np.where(values == "", -1, np.searchsorted(classes, values) if classes else -1), classes


def _tell_unused_classes(labels: np.ndarray, path: Path) -> None:
    """Numbers are class numbers as they stand: 100 and 200 make 201 classes, which is seldom meant."""
    used = np.unique(labels[np.isfinite(labels) & (labels >= 0)]) if labels.dtype.kind in "iuf" else np.empty(0)
    if used.size and used[-1] + 1 > used.size:
        logger.warning(
            f"{path}: labels are class numbers from 0, so {used[-1]:.0f} makes {used[-1] + 1:.0f} classes, of which "
            f"{used.size} occur: write labels as words, or number them from 0"
        )


def _split_masks(values: np.ndarray, path: Path) -> dict[str, np.ndarray]:
    if values.dtype.kind != "U":
        raise ValueError(f"{path}: the split column must hold train, valid, test or nothing.")
    names = [str(name) for name in np.unique(values) if name != ""]
    masks: dict[str, np.ndarray] = {}
    for name in names:
        ours = split_name(name.lower())
        if ours not in ("train", "valid", "test"):
            raise ValueError(f"{path}: split {name!r} is not known: write train, valid, test or nothing.")
        masks[ours] = masks.get(ours, False) | (values == name)
    return masks


def _reorder(given: dict[str, Any], ids: np.ndarray, path: Path) -> None:
    """Put the rows of a node file in the order of its ids, which must be 0 .. N - 1."""
    order = np.argsort(ids, kind="stable")
    if ids.dtype.kind not in "iu" or not np.array_equal(ids[order], np.arange(ids.size)):
        _ = IdMap(ids)  # which refuses an id that is there twice, by name
        raise ValueError(f"{path}: the ids are not the numbers 0 to {ids.size - 1}, each once: use ids=map.")
    for key in ("x", "y"):
        if key in given:
            given[key] = given[key][order]
    if "splits" in given:
        given["splits"] = {name: mask[order] for name, mask in given["splits"].items()}


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

    An empty `header` numbers the columns: "0", "1", ...
    ids: columns that are whole numbers only where every cell of a chunk is written as int64 is, and else text as it is
    written: "001" and numbers of 20 digits are texts. whole: all rows in one chunk, so that a column has one type.
    """
    _check_file(path)
    found, first_line = _header(path, header, delimiter)
    names = _choose(path, found, columns)
    if not found:
        return
    # By number, since a file may have two columns of one name, of which none is asked for.
    at = {name: str(found.index(name)) for name in names}
    # All columns as texts: of itself Arrow would read true and dates as types of its own.
    settings: dict[str, Any] = {
        "read_options": arrow_csv.ReadOptions(
            column_names=[str(i) for i in range(len(found))],
            skip_rows=first_line,
            block_size=BLOCK_BYTES,
        ),
        "parse_options": arrow_csv.ParseOptions(delimiter=delimiter),
        "convert_options": arrow_csv.ConvertOptions(
            include_columns=list(at.values()), column_types=dict.fromkeys(at.values(), arrow.string())
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
                column = _as_ids(column) if name in ids else _as_numbers(column)
                chunk[name] = _to_numpy(column, path, name, row)
            yield chunk
            row += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        if "UTF8" in str(error):
            raise _not_utf8(path) from error
        reason = _reason(error, path, settings)
        raise ValueError(f"{path} cannot be read as CSV ({reason}): correct the file.") from error


def _reason(error: Exception, path: Path, settings: dict[str, Any]) -> str:
    """Why a CSV file cannot be read, with the row. It is read once more, since Arrow counts rows in one thread only."""
    settings["read_options"].use_threads = False
    try:
        for _ in arrow_csv.open_csv(path, **settings):
            pass
    except (arrow.ArrowException, OSError) as with_row:
        return _first_line(with_row)
    return _first_line(error)


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
    _check_file(path)
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({_first_line(error)}): write it again.") from error


def _check_file(path: Path) -> None:
    check_file(path)
    if str(path) != str(path).encode(errors="replace").decode():
        raise ValueError(
            f"The path {path} is not in UTF-8, and pyarrow cannot open it: rename it, or give a link to it."
        )


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


def _not_utf8(path: Path) -> ValueError:
    return ValueError(f"{path} is not in UTF-8: save it as UTF-8 (in Excel: CSV UTF-8).")


def _header(path: Path, header: Sequence[str] | None, delimiter: str) -> tuple[list[str], int]:
    """(names of all columns of a CSV file, lines before its first row)."""
    if header:
        return list(header), 0
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        # The mark that Excel puts before UTF-8 is not part of the first name.
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter)
            first = next((row for row in reader if row), [])
            num_lines = reader.line_num
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except (OSError, EOFError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV ({_first_line(error)}): correct the file.") from error
    if not first and header is None:
        raise ValueError(f"{path} is empty: its first line must name its columns.")
    if header is not None:
        return [str(i) for i in range(len(first))], 0
    return [name.strip() for name in first], num_lines


def _as_ids(column: Any) -> Any:
    """Texts of an Arrow array as whole numbers, if all of them are written as whole numbers are; else as they are."""
    numbers = _cast(column, arrow.int64())
    if numbers is None:
        return column
    return numbers if compute.all(compute.equal(numbers.cast(arrow.string()), column)).as_py() else column


def _as_numbers(column: Any) -> Any:
    """Texts of an Arrow array as whole numbers, else as floating point with nulls for empty cells, else as they are."""
    if _holds(column, "x") or _holds(column, "X"):
        return column  # 0x1F, which is a number to Arrow alone
    kinds = (arrow.int64(), arrow.float64())
    # Most columns are clean, and their cast is quicker than what comes then. But +5 is a fraction to Arrow.
    numbers = None if _holds(column, "+") else _cast(column, *kinds)
    if numbers is None:
        cells = compute.replace_substring_regex(compute.ascii_trim_whitespace(column), r"^\+([0-9.])", r"\1")
        is_missing = compute.is_in(cells, value_set=arrow.array(MISSING))
        numbers = _cast(compute.if_else(is_missing, None, cells), *kinds)
    return column if numbers is None else numbers


def _holds(column: Any, text: str) -> bool:
    return compute.any(compute.match_substring(column, text)).as_py()


def _cast(cells: Any, *kinds: Any) -> Any:
    """Texts as the first of these kinds of numbers that all of them are; None if there is none."""
    for kind in kinds:
        try:
            cells.slice(0, 1000).cast(kind)  # Arrow goes on after the first that is no number, at a high price
            return cells.cast(kind)
        except arrow.ArrowInvalid:
            continue
    return None


def _to_numpy(column: Any, path: Path, name: str, first: int, widths: dict[str, int] | None = None) -> np.ndarray:
    """An Arrow array as whole numbers, floats or text; lists of equal length become rows.

    first: the number of its first row. widths: the length of the lists of each column so far.
    """
    if arrow.types.is_dictionary(column.type):  # a categorical of pandas
        column = column.dictionary_decode()
    if arrow.types.is_boolean(column.type) or arrow.types.is_temporal(column.type):
        column = column.cast(arrow.string())  # as CSV writes them
    kind = column.type
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind):
        return _lists(column, path, name, first, {} if widths is None else widths)
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        # A NumPy array of texts drops zero bytes at the end, and two texts would be one.
        has_zero = compute.fill_null(compute.match_substring(column, "\0"), False)
        if compute.any(has_zero).as_py():
            row = first + has_zero.to_numpy(zero_copy_only=False).argmax()
            raise ValueError(f"{path}: column {name!r} holds a zero byte in row {row}: remove it from the text.")
        return column.fill_null("").to_numpy(zero_copy_only=False).astype(str)
    if arrow.types.is_null(kind):
        return np.full(len(column), np.nan)
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind)):
        raise ValueError(f"{path}: column {name!r} has type {kind}: store numbers or text.")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _lists(column: Any, path: Path, name: str, first: int, widths: dict[str, int]) -> np.ndarray:
    """An Arrow array of lists of numbers as rows [n, width]."""
    kind = column.type.value_type
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
        raise ValueError(f"{path}: column {name!r} holds lists of {kind}: store lists of numbers.")
    if column.null_count:
        row = first + column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise ValueError(f"{path}: column {name!r} has no list in row {row}: give each row one, all equally long.")
    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
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
