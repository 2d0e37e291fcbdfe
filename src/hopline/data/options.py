"""Options of conversion: how edge lists and files become a graph.

They are plain data, so reading them needs no torch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from hopline.util.config import nearest, settings

_SEPARATORS = {"tab": "\t", "\\t": "\t", "space": " "}
"""Word -> separator that is hard to type in a shell. The word `\\t` is a backslash and a t."""


@settings
class EdgeOptions:
    """Says which edges of an edge list become edges of the graph, and which are added."""

    symmetrize: bool | None = None
    """Add the reverse of every edge that is not a self-loop, with the same edge arrays. Default: only if
    the file or object that the edges come from stores each undirected edge once."""
    self_loops: Literal["keep", "remove", "add"] = "keep"
    """Keep self-loops as they are, remove them, or add one to every node that has none (weight 1)."""
    duplicates: Literal["keep", "remove"] = "keep"
    """Keep repeated edges, or only the first of each."""
    chunk_edges: int = 1 << 22
    """Edges in memory at a time in a conversion with `folder=`, which writes the dataset to disk."""

    def __post_init__(self) -> None:
        if self.self_loops not in ("keep", "remove", "add"):
            raise ValueError(f"self_loops is {self.self_loops!r}: choose 'keep', 'remove' or 'add'.")
        if self.duplicates not in ("keep", "remove"):
            raise ValueError(f"duplicates is {self.duplicates!r}: choose 'keep' or 'remove'.")
        if self.chunk_edges < 1:
            raise ValueError(f"chunk_edges is {self.chunk_edges}: give a positive number of edges.")


def edge_options(options: Mapping[str, Any]) -> EdgeOptions:
    """Options from keywords. An unknown keyword is refused, and the nearest name suggested."""
    names = [field.name for field in fields(EdgeOptions)]
    for key in options:
        if key not in names:
            raise ValueError(f"There is no option {key!r}: choose from {', '.join(names)}.{nearest(key, names)}")
    return EdgeOptions(**options)


def merge(from_source: Mapping[str, Any], from_caller: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_edges`: those that a file or object tells, overridden by those of the caller.

    `tables` (rows per node) and `edge` (arrays per edge) are mappings by name. They are joined, and of two
    entries with the same name the caller's is taken.

    symmetrize=None of the caller leaves the decision to the file.
    """
    merged = dict(from_source)
    for key, value in from_caller.items():
        if key == "symmetrize" and value is None:
            continue
        if key in ("tables", "edge"):
            value = {**(from_source.get(key) or {}), **(value or {})}
        merged[key] = value
    return merged


@settings
class Columns:
    """Names the columns of edge and node files.

    Raises:
        ValueError: `delimiter` is not one character, and none of the words `tab`, `space` and `\\t`.

    Example:
        >>> columns = hl.Columns(src="citing", dst="cited", edge=("weight",), delimiter="tab")
        >>> columns.label
        'label'
    """

    src: str = "src"
    """Column of the edge file with the source of each edge."""
    dst: str = "dst"
    """Column of the edge file with the destination of each edge."""
    edge: tuple[str, ...] = ()
    """Further columns of the edge file that become edge arrays, such as "weight"."""
    id: str = "id"
    """Column of the node file with the node's id. Without such a column its rows are the nodes 0, 1, 2, ..."""
    features: tuple[str, ...] | None = None
    """Feature columns of the node file. Default: all columns that are not named otherwise here."""
    label: str = "label"
    """Column of the node file with the class of each node. An empty cell is no label."""
    split: str = "split"
    """Column of the node file with "train", "valid" or "test". An empty cell is no split."""
    header: tuple[str, ...] | None = None
    """Names of the columns of a CSV edge file that does not begin with a line of names."""
    delimiter: str | None = None
    """Separator of the columns of text files: a character, `tab` or `space`. Default: a tab in .tsv files,
    a comma in others."""

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
    """Check the shares of train, valid and test nodes.

    They must be three numbers from 0 on, at most 1 together, the first above 0.
    """
    example = "such as 0.6,0.2,0.2"
    is_list = isinstance(shares, tuple | list) and all(isinstance(share, numbers.Real) for share in shares)
    if not is_list or len(shares) != 3:
        raise ValueError(f"A split has three shares, {example} for train, valid and test, not {shares!r}.")
    text = ",".join(f"{share:g}" for share in shares)
    if not all(share >= 0 for share in shares):
        raise ValueError(f"The shares of a split are {text}, and none may be below 0: give shares {example}.")
    if math.fsum(shares) > 1 + 1e-9:  # 0.7 + 0.2 + 0.1 is not 1 in floating point
        raise ValueError(f"The shares of a split are {text}, more than 1 together: give shares {example}.")
    if shares[0] == 0:
        raise ValueError(f"The shares of a split are {text}, which leaves no training nodes: give shares {example}.")
