"""Options of how files become a graph: plain data, so that reading them needs no torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from hopline.util.config import nearest, settings

_SEPARATORS = {"tab": "\t", "\\t": "\t", "space": " "}
"""Separators that are hard to type in a shell."""


@settings
class EdgeOptions:
    """What happens to an edge list on its way into a graph."""

    symmetrize: bool | None = None
    """Add the reverse of every edge that is not a self-loop, with the same edge arrays. Default: only where the source
    says that it stores each undirected edge once."""
    self_loops: Literal["keep", "remove", "add"] = "keep"
    """Keep self-loops as they are, remove them, or add one to every node that has none (weight 1)."""
    duplicates: Literal["keep", "remove"] = "keep"
    """Keep repeated edges, or only the first of each."""
    chunk_edges: int = 1 << 22
    """Edges held in memory at a time when a graph is converted into a folder."""

    def __post_init__(self) -> None:
        if self.self_loops not in ("keep", "remove", "add"):
            raise ValueError(f"self_loops is {self.self_loops!r}: choose 'keep', 'remove' or 'add'.")
        if self.duplicates not in ("keep", "remove"):
            raise ValueError(f"duplicates is {self.duplicates!r}: choose 'keep' or 'remove'.")
        if self.chunk_edges < 1:
            raise ValueError(f"chunk_edges is {self.chunk_edges}: give a positive number of edges.")


def edge_options(options: Mapping[str, Any]) -> EdgeOptions:
    """Options from keywords; an unknown one gets the nearest name suggested."""
    names = [field.name for field in fields(EdgeOptions)]
    for key in options:
        if key not in names:
            raise ValueError(f"There is no option {key!r}: choose from {', '.join(names)}.{nearest(key, names)}")
    return EdgeOptions(**options)


def merge(from_source: Mapping[str, Any], from_caller: Mapping[str, Any]) -> dict[str, Any]:
    """What a source holds and what a caller gives, which takes precedence; tables and edge arrays are joined."""
    merged = dict(from_source)
    for key, value in from_caller.items():
        if key == "symmetrize" and value is None:
            continue
        is_joined = key in ("tables", "edge") and from_source.get(key) and value
        merged[key] = {**from_source[key], **value} if is_joined else value
    return merged


@settings
class Columns:
    """Which columns of the files mean what.

    Raises:
        ValueError: `delimiter` is more than one character, and neither `tab` nor `space`.

    Example:
        >>> columns = hl.Columns(src="citing", dst="cited", edge=("weight",), delimiter="tab")
        >>> columns.label
        'label'
    """

    src: str = "src"
    """Source of each edge, in the edge file."""
    dst: str = "dst"
    """Destination of each edge, in the edge file."""
    edge: tuple[str, ...] = ()
    """Further columns of the edge file to keep as edge arrays, such as "weight"."""
    id: str = "id"
    """The node's id, in the node file; without such a column its rows are nodes 0, 1, 2, ..."""
    features: tuple[str, ...] | None = None
    """Feature columns of the node file; None takes all that have no other meaning."""
    label: str = "label"
    """Class of each node, in the node file; empty where there is none."""
    split: str = "split"
    """"train", "valid" or "test", in the node file; empty for no split."""
    header: tuple[str, ...] | None = None
    """Names of the columns of an edge file in CSV that has no first line of names."""
    delimiter: str | None = None
    """What separates the columns of text files: a character, `tab` or `space`. Default: a tab in a file called .tsv, a
    comma in others."""

    def separator(self, path: Path) -> str:
        """The character that separates the columns of a file."""
        if self.delimiter is None:
            return "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","
        return _SEPARATORS.get(self.delimiter, self.delimiter)

    def __post_init__(self) -> None:
        delimiter = self.delimiter
        if delimiter is not None and len(_SEPARATORS.get(delimiter, delimiter)) != 1:
            raise ValueError(f"columns.delimiter must be one character, tab or space, not {delimiter!r}")


def check_shares(shares: Any) -> None:
    """Refuse what cannot be the shares of train, valid and test nodes in a split."""
    example = "such as 0.6,0.2,0.2"
    if not isinstance(shares, tuple | list) or not all(isinstance(share, numbers.Real) for share in shares):
        raise ValueError(
            f"The shares of a split are three numbers, {example} for train, valid and test, not {shares!r}."
        )
    text = ",".join(f"{share:g}" for share in shares)
    if len(shares) != 3:
        raise ValueError(f"A split has three shares, {example} for train, valid and test, not {text or 'none'}.")
    if not all(share >= 0 for share in shares):
        raise ValueError(f"The shares of a split are {text}, and none may be below 0: give shares {example}.")
    if math.fsum(shares) > 1 + 1e-9:  # 0.7 + 0.2 + 0.1 is not 1 in floating point
        raise ValueError(f"The shares of a split are {text}, more than 1 together: give shares {example}.")
    if shares[0] == 0:
        raise ValueError(f"The shares of a split are {text}, which leaves no training nodes: give shares {example}.")
