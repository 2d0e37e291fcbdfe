"""Settings of where a dataset lies while a GPU trains on it: plain data, so that reading them needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from hopline.util.config import RemovedSetting, check_fields, parse_size, settings


@settings
class Placement:
    """Where graph and features lie while a GPU trains: `Trainer(placement=hl.Placement(...))`. A CPU ignores it.

    Raises:
        ValueError: A field has a value that is not allowed, or `cache` is given where features are not pinned. From the
            Trainer: the method needs the graph on the host.

    Example:
        >>> placement = hl.Placement(features="pinned", cache="2G")
        >>> placement.graph
        'auto'
    """

    REMOVED: ClassVar = {
        "order": RemovedSetting(
            "access", "the rows that a batch most probably reads are cached; hl.table(order=) chooses others"
        )
    }
    features: Literal["auto", "device", "pinned", "host"] = "auto"
    """Where the rows are: `device`, `pinned` (the GPU reads them on the host), `host` (the host does), or what fits."""
    graph: Literal["auto", "device", "pinned", "host"] = "auto"
    """Where the edges are: `device`, `pinned`, `host` (sampled by the host), or what fits."""
    cache: str | int = "auto"
    """Device memory for the rows of pinned features that a batch most probably reads, such as 2G; `auto` is what is
    left."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cache != "auto":
            parse_size(self.cache)
            if self.features in ("device", "host"):
                raise ValueError(f"cache={self.cache} needs pinned features: set features=pinned, or leave cache=auto")


def with_graph_on_host(requested: Placement, why: str) -> Placement:
    """For methods that work on the edges there."""
    if requested.graph in ("device", "pinned"):
        raise ValueError(f"placement.graph={requested.graph}, but {why}: set placement.graph=host, or leave it at auto")
    return replace(requested, graph="host")
