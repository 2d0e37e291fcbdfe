"""`Placement`: settings that say where a dataset lies while a GPU trains on it.

They are plain data, so reading them needs no torch. `placement` carries them out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hopline.util.config import check_fields, parse_size, settings


@settings
class Placement:
    """Says where graph and features lie while a GPU trains: `Trainer(placement=hl.Placement(...))`.

    Training on a CPU ignores it.

    Raises:
        ValueError: A field has a value that is not allowed, or `cache` is given where features are not
            pinned. From the Trainer: the method needs the graph on the host.

    Example:
        >>> placement = hl.Placement(features="pinned", cache="2G")
        >>> placement.graph
        'auto'
    """

    features: Literal["auto", "device", "pinned", "host"] = "auto"
    """Place of the rows: `device`, `pinned` (the GPU reads them by zero-copy) or `host` (the host reads
    them). `auto` takes `device` if they fit, else `pinned`, or `host` for sparse rows."""
    graph: Literal["auto", "device", "pinned", "host"] = "auto"
    """Place of the edges: `device`, `pinned`, or `host`, which then samples. `auto` takes `device` or `pinned`."""
    cache: str | int = "auto"
    """Device memory for copies of the pinned rows that a batch most probably reads, such as 2G. `auto`
    takes the memory that is left."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cache != "auto":
            parse_size(self.cache)
            if self.features in ("device", "host"):
                raise ValueError(f"cache={self.cache} needs pinned features: set features=pinned, or leave cache=auto")


def with_graph_on_host(requested: Placement, why: str) -> Placement:
    """The placement with the graph on the host, for a method that needs it there.

    why: the reason, for the error message if `requested` has the graph elsewhere.
    """
    if requested.graph in ("device", "pinned"):
        raise ValueError(f"placement.graph={requested.graph}, but {why}: set placement.graph=host, or leave it at auto")
    return replace(requested, graph="host")
