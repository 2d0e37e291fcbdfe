"""Ids of nodes in files: stored exactly, as whole numbers or as texts, or refused with their row.

The ids of a file are whole numbers (int64) if every one is written as one. If any is not, because of
letters, leading zeros or more digits than int64 holds, then all ids are texts, exactly as written: "001"
and "1" are two nodes.

In a file of numbers "2.0" is 2: pandas writes whole numbers in this way once their column has had an empty
cell. A fraction or an exponent is refused. So is a floating-point number that is so large that it may stand
for several ids: from 2**53 on in float64, and from 2**24 on in float32.

Readers call these functions in this order:

    checked_ids   a chunk of a column -> int64 or texts; refuses empty cells
    settle_ids    all ids of a file -> int64 if all texts are numbers, else texts
    IdMap         ids -> node numbers 0, 1, 2, ..., by binary search
"""

from __future__ import annotations

import re

import numpy as np
import torch

from hopline.tables import Table

_WHOLE = re.compile(r"\s*(-?(?:0|[1-9][0-9]*))(?:\.0*)?\s*")
"""A whole number without leading zeros, in group 1; "2." and "2.00" are allowed too."""
_DECIMAL = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")
"""Any number, with fraction and exponent, written with digits."""
_INT64 = np.iinfo(np.int64)


def checked_ids(ids: np.ndarray, where: str, first: int = 0, *, numbers: bool = False) -> np.ndarray:
    """A column of ids as int64 or as texts. An id that neither holds exactly is refused.

    ids: [n], of any dtype.
    where: What an error message writes before the number of a row.
    first: The number of the first row, for error messages.
    numbers: Whether ids are node numbers. Then unsigned ids beyond int64 are refused; else they become
        texts.
    """
    if ids.ndim != 1:
        raise ValueError(f"{where} {first}: the column holds lists, and ids are whole numbers or texts: name another.")

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

    if ids.dtype.kind == "U":  # texts
        empty = np.flatnonzero((ids == "") | np.char.isspace(ids))
        if empty.size:
            raise _missing_id_error(where, first + empty[0])
        return ids

    # Floating-point numbers: pandas makes them of whole numbers if a cell of the column is empty.
    # Below 2**(bits of the fraction + 1) a type holds every whole number. From there on, neighbours are 2 or
    # more apart. The limit of a long double would be beyond int64, so it has that of float64.
    num_bits = min(np.finfo(ids.dtype).nmant, np.finfo(np.float64).nmant)
    is_exact = np.abs(ids) < 2 ** (num_bits + 1)  # False for an empty cell, which is NaN
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
    """The position of the first text that is no whole number, or None.

    texts: [n], for which `are_numbers` is true.
    """
    return next((i for i, text in enumerate(texts) if not _WHOLE.fullmatch(text)), None)


def are_numbers(texts: np.ndarray) -> bool:
    """Whether all texts are numbers. Then the file is one of numbers, in which "2.0" is 2."""
    return all(_is_number(text) for text in texts)


def _is_number(text: str) -> bool:
    """Whether a text is a whole number that int64 holds, or a number with a fraction or an exponent.

    "001" is not: it has neither, so its zeros belong to it. A whole number beyond int64 is a text as well.
    """
    whole = _WHOLE.fullmatch(text)
    if whole is not None:
        return _INT64.min <= int(whole[1]) <= _INT64.max
    has_point_or_exponent = any(mark in text for mark in ".eE")
    return has_point_or_exponent and _DECIMAL.fullmatch(text) is not None


def to_numbers(texts: np.ndarray) -> np.ndarray:
    """[n] int64: the numbers that texts write, all of which must be whole."""
    # Every text matches. `if match` is for the type checker.
    matches = (_WHOLE.fullmatch(text) for text in texts)
    return np.array([int(match[1]) for match in matches if match], dtype=np.int64)


def settle_ids(ids: np.ndarray, where: str, first: int = 0) -> np.ndarray:
    """All ids of a file: texts as int64 if all of them are numbers, else as they are.

    A fraction or an exponent among numbers is refused.

    ids: [n] as `checked_ids` returns them.
    where, first: How an error message names a row, as in `checked_ids`.
    """
    if ids.dtype.kind != "U" or not are_numbers(ids):
        return ids
    refused = first_not_whole(ids)
    if refused is not None:
        raise _not_whole_error(where, first + refused, str(ids[refused]))
    return to_numbers(ids)


class IdMap:
    """Maps ids to node numbers: an id's node number is its position in `ids`.

    ids: [num_nodes], int64 or texts. An id that occurs twice is refused.
    missing: What an error says of an id that the map does not hold.
    """

    def __init__(self, ids: np.ndarray, missing: str = "is not in the node file: add a row for it") -> None:
        self.ids = ids
        self.missing = missing
        self.order = np.argsort(ids, kind="stable")
        self.sorted = ids[self.order]
        repeated = np.flatnonzero(self.sorted[1:] == self.sorted[:-1])
        if repeated.size:
            raise ValueError(f"The node file has id {self.sorted[repeated[0]]!s} twice: give each node one row.")

    def positions(self, ids: np.ndarray, where: str, first: int = 0) -> np.ndarray:
        """[n] int64: the node number of each of `ids` [n]. An id that is not in the map is refused.

        If the map holds numbers, texts are looked up by their value. If it holds texts, numbers are looked
        up by their digits.

        where, first: How an error message names a row, as in `checked_ids`.
        """
        if self.ids.dtype.kind == "U":
            keys = ids.astype(str)
        elif ids.dtype.kind != "U":
            keys = ids
        else:
            # The map holds numbers. A text that is none cannot be in it.
            is_int64 = np.array([_is_number(text) and _WHOLE.fullmatch(text) is not None for text in ids])
            if not is_int64.all():
                raise self._unknown_id_error(ids, int(np.argmin(is_int64)), where, first)
            keys = to_numbers(ids)

        # `searchsorted` returns the size for a key beyond the last id. Clipped, it finds the last id, which
        # differs.
        sorted_idx = np.searchsorted(self.sorted, keys).clip(max=max(0, self.sorted.size - 1))
        unknown = np.flatnonzero(self.sorted[sorted_idx] != keys) if self.sorted.size else np.arange(ids.size)
        if unknown.size:
            raise self._unknown_id_error(ids, int(unknown[0]), where, first)
        return self.order[sorted_idx]

    def _unknown_id_error(self, ids: np.ndarray, index: int, where: str, first: int) -> ValueError:
        shown = " ".join(str(ids[index]).split())[:60]
        return ValueError(f"{where} {first + index}: node {shown} {self.missing}.")

    def table(self) -> torch.Tensor:
        """The ids as rows of a table: [N] int64, or [N, width] uint8 of UTF-8 padded with zeros.

        `original_ids` reads them back. No text has a zero byte, which would be taken for padding: readers
        refuse it.
        """
        if self.ids.dtype.kind != "U":
            return torch.from_numpy(self.ids.astype(np.int64))
        encoded = np.char.encode(self.ids, "utf-8")
        return torch.from_numpy(encoded.view(np.uint8).reshape(len(encoded), -1).copy())


def original_ids(table: Table) -> np.ndarray:
    """[num_nodes] int64 or texts: the ids that nodes had in their file.

    table: the table "node_ids" of a dataset that was converted with ids=map.
    """
    rows = table.read(torch.arange(len(table))).numpy()
    if rows.ndim == 1:
        return rows
    return np.char.decode(np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").reshape(-1), "utf-8")
