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
            raise _missing_id_error(where, first + empty[0])
        return ids

    is_exact = np.abs(ids) < MAX_EXACT_FLOAT  # False for an empty cell, which is NaN
    is_whole = ids == np.round(ids)
    refused = np.flatnonzero(~(is_exact & is_whole))
    if refused.size:
        value = ids[refused[0]]
        row = first + refused[0]
        if np.isnan(value):
            raise _missing_id_error(where, row)
        if value != np.round(value):
            raise _not_whole_error(where, row, str(value))
        raise ValueError(
            f"{where} {row}: node id {value} is a floating-point number, and such large ones cannot be told apart: "
            "store ids as whole numbers, or as texts with ids=map."
        )
    return ids.astype(np.int64)


def _missing_id_error(where: str, row: int) -> ValueError:
    return ValueError(f"{where} {row}: there is no node id: correct the file.")


def _not_whole_error(where: str, row: int, text: str) -> ValueError:
    return ValueError(f"{where} {row}: node id {text} is not a whole number: correct the file.")


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
    has_point_or_exponent = any(mark in text for mark in ".eE")
    return has_point_or_exponent and _DECIMAL.fullmatch(text) is not None


def to_numbers(texts: np.ndarray) -> np.ndarray:
    """Texts that are whole numbers, as int64."""
    matches = (_WHOLE.fullmatch(text) for text in texts)
    return np.array([int(match[1]) for match in matches if match], dtype=np.int64)


def settled(ids: np.ndarray, where: str, first: int = 0) -> np.ndarray:
    """All ids of a file, from `checked_ids`: as numbers if that is what they are, else as texts."""
    if ids.dtype.kind != "U" or not are_numbers(ids):
        return ids
    refused = first_not_whole(ids)
    if refused is not None:
        raise _not_whole_error(where, first + refused, str(ids[refused]))
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
            keys = ids.astype(str)
        elif ids.dtype.kind != "U":
            keys = ids
        else:
            is_int64 = np.array([_is_number(text) and _WHOLE.fullmatch(text) is not None for text in ids])
            if not is_int64.all():
                raise self._unknown_id_error(ids, int(np.argmin(is_int64)), where, first)
            keys = to_numbers(ids)

        sorted_idx = np.searchsorted(self.sorted, keys).clip(max=max(0, self.sorted.size - 1))
        unknown = np.flatnonzero(self.sorted[sorted_idx] != keys) if self.sorted.size else np.arange(ids.size)
        if unknown.size:
            raise self._unknown_id_error(ids, int(unknown[0]), where, first)
        return self.order[sorted_idx]

    @staticmethod
    def _unknown_id_error(ids: np.ndarray, index: int, where: str, first: int) -> ValueError:
        shown = " ".join(str(ids[index]).split())[:60]
        return ValueError(f"{where} {first + index}: node {shown} is not in the node file: add a row for it.")

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
