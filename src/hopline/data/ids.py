"""Ids of nodes as files write them: kept exactly, as whole numbers or as texts, or refused by their row.

Ids are whole numbers (int64) if every one of them is written as one. If any is not, because of letters, leading zeros
or more digits than int64 has, all of them are texts, as they are written: "001" and "1" are two nodes. In a file of
numbers "2.0" is 2, since pandas writes columns so that had empty cells; a fraction or an exponent is refused.
"""

from __future__ import annotations

import re

import numpy as np
import torch

from hopline.tables import Table

_WHOLE = re.compile(r"\s*(-?(?:0|[1-9][0-9]*))(?:\.0*)?\s*")
_DECIMAL = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")
_INT64 = np.iinfo(np.int64)
MAX_EXACT_FLOAT = 2**53
"""From here on floating-point numbers are further than 1 apart."""


def checked_ids(ids: np.ndarray, where: str, first: int = 0, *, numbers: bool = False) -> np.ndarray:
    """A column of ids as int64 or as text; what cannot be kept exactly is refused.

    where, first: how a refusal names a row, and the number of the first one. numbers: ids are node numbers, so that
    those beyond int64 are refused.
    """
    if ids.ndim != 1 or ids.dtype.kind == "b":
        what = "lists" if ids.ndim != 1 else "true and false"
        raise ValueError(f"{where} {first}: the column holds {what}, and ids are whole numbers or texts: name another.")
    if ids.dtype.kind == "i":
        return ids.astype(np.int64)
    if ids.dtype.kind == "u":
        too_large = np.flatnonzero(ids > _INT64.max)
        if too_large.size and numbers:
            raise ValueError(
                f"{where} {first + too_large[0]}: node id {ids[too_large[0]]} is too large for a node number: let "
                "ids=map number the nodes."
            )
        return ids.astype(str) if too_large.size else ids.astype(np.int64)
    if ids.dtype.kind == "U":
        empty = np.flatnonzero((ids == "") | np.char.isspace(ids))
        if empty.size:
            raise _no_id(where, first + empty[0])
        return ids
    wrong = np.flatnonzero(~(np.abs(ids) < MAX_EXACT_FLOAT) | (ids != np.round(ids)))  # an empty cell is NaN
    if wrong.size:
        bad, row = ids[wrong[0]], first + wrong[0]
        if np.isnan(bad):
            raise _no_id(where, row)
        if bad != np.round(bad):
            raise _not_whole(where, row, str(bad))
        raise ValueError(
            f"{where} {row}: node id {bad} is a floating-point number, and such large ones cannot be told apart: store "
            "ids as whole numbers, or as texts with ids=map."
        )
    return ids.astype(np.int64)


def _no_id(where: str, row: int) -> ValueError:
    return ValueError(f"{where} {row}: there is no node id: correct the file.")


def _not_whole(where: str, row: int, written: str) -> ValueError:
    return ValueError(f"{where} {row}: node id {written} is not a whole number: correct the file.")


def first_not_whole(texts: np.ndarray) -> int | None:
    """Of texts that are all numbers, the position of the first that is no whole one (a fraction, or an exponent)."""
    return next((i for i, text in enumerate(texts) if not _WHOLE.fullmatch(text)), None)


def are_numbers(texts: np.ndarray) -> bool:
    """Whether texts are all numbers that a table of numbers may hold: then "2.0" is 2."""
    return all(_is_number(text) for text in texts)


def _is_number(text: str) -> bool:
    whole = _WHOLE.fullmatch(text)
    if whole is not None:
        return _INT64.min <= int(whole[1]) <= _INT64.max
    return _DECIMAL.fullmatch(text) is not None and any(mark in text for mark in ".eE")


def to_numbers(texts: np.ndarray) -> np.ndarray:
    """Texts that are whole numbers, as int64."""
    return np.array([int(whole[1]) for text in texts if (whole := _WHOLE.fullmatch(text))], dtype=np.int64)


def settled(ids: np.ndarray, where: str, first: int = 0) -> np.ndarray:
    """All ids of a file, from `checked_ids`: as numbers if that is what they are, else as texts."""
    if ids.dtype.kind != "U" or not are_numbers(ids):
        return ids
    if (wrong := first_not_whole(ids)) is not None:
        raise _not_whole(where, first + wrong, str(ids[wrong]))
    return to_numbers(ids)


class IdMap:
    """Ids of any kind -> node numbers: the position in a list of ids."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.order = np.argsort(ids, kind="stable")
        self.sorted = ids[self.order]
        repeated = np.flatnonzero(self.sorted[1:] == self.sorted[:-1])
        if repeated.size:
            raise ValueError(f"The node file has id {self.sorted[repeated[0]]!s} twice: give each node one row.")

    def positions(self, ids: np.ndarray, where: str, first: int = 0) -> np.ndarray:
        """The node number of each id; `where` and the number of a row, counted from `first`, say which is wrong."""
        if self.ids.dtype.kind == "U":
            wanted = ids.astype(str)
        elif ids.dtype.kind != "U":
            wanted = ids
        else:
            known = np.array([_is_number(text) and _WHOLE.fullmatch(text) is not None for text in ids])
            if not known.all():
                raise self._unknown(ids, int(np.argmin(known)), where, first)
            wanted = to_numbers(ids)
        at = np.searchsorted(self.sorted, wanted).clip(max=max(0, self.sorted.size - 1))
        wrong = np.flatnonzero(self.sorted[at] != wanted) if self.sorted.size else np.arange(ids.size)
        if wrong.size:
            raise self._unknown(ids, int(wrong[0]), where, first)
        return self.order[at]

    @staticmethod
    def _unknown(ids: np.ndarray, at: int, where: str, first: int) -> ValueError:
        shown = " ".join(str(ids[at]).split())[:60]
        return ValueError(f"{where} {first + at}: node {shown} is not in the node file: add a row for it.")

    def table(self) -> torch.Tensor:
        """What is kept of the ids: int64 [N], or UTF-8 bytes [N, width] padded with zeros."""
        if self.ids.dtype.kind != "U":
            return torch.from_numpy(self.ids.astype(np.int64))
        encoded = np.char.encode(self.ids, "utf-8")
        return torch.from_numpy(encoded.view(np.uint8).reshape(len(encoded), -1).copy())


def original_ids(table: Table) -> np.ndarray:
    """The ids that a "node_ids" table keeps, as numbers or as text."""
    rows = table.read(torch.arange(len(table))).numpy()
    if rows.ndim == 1:
        return rows
    return np.char.decode(np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").reshape(-1), "utf-8")
