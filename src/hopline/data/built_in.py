"""Settings of the built-in graphs. `synthetic` generates them. They are plain data, so listing them needs no torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

from hopline.util.config import nearest, settings


@settings
class PlantedPartition:
    """A random graph whose classes are communities.

    The neighbours of a node say much about its class, its own features say little.
    """

    num_nodes: int = 60_000
    """Number of nodes."""
    num_edges: int = 1_200_000
    """Number of directed edges. The graph has exactly this number."""
    num_classes: int = 16
    """Number of communities, of equal size."""
    num_features: int = 64
    """Width of the features."""
    num_train: int | None = None
    """Training nodes. Default: a third of the nodes."""
    num_valid: int | None = None
    """Validation nodes. Default: a twelfth of the nodes."""
    num_test: int | None = None
    """Test nodes, at most all that are left. Default: all that are left."""
    homophily: float = 0.5
    """Share of in-edges whose source is drawn from the own community. Other sources may lie in it by chance."""
    signal: float = 1.0
    """Length of a class's mean feature vector. The noise has standard deviation 1 in every column."""
    symmetric: bool = False
    """Store every edge in both directions. num_edges counts both, and must be even."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Element type of the features."""
    seed: int = 0
    """Seed of all draws."""

    def __post_init__(self) -> None:
        if self.num_classes < 1 or self.num_nodes < 2 * self.num_classes:
            raise ValueError(f"A planted graph needs two nodes per class: give num_nodes >= {2 * self.num_classes}.")
        if not 0 <= self.homophily <= 1:
            raise ValueError(f"homophily is {self.homophily}: give a share from 0 to 1.")
        if self.num_edges < 0 or self.num_features < 1 or (self.symmetric and self.num_edges % 2):
            raise ValueError(
                "A planted graph needs num_features >= 1 and num_edges >= 0, even if symmetric, not "
                f"num_features={self.num_features} and num_edges={self.num_edges}."
            )
        if min(self.split_sizes) < 0 or sum(self.split_sizes) > self.num_nodes:
            num_train, num_valid, _ = self.split_sizes
            raise ValueError(
                f"The splits do not fit into {self.num_nodes} nodes with num_train={num_train} and "
                f"num_valid={num_valid}: give smaller ones."
            )
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}: choose float32, float16 or bfloat16.")

    @property
    def split_sizes(self) -> tuple[int, int, int]:
        """Numbers of training, validation and test nodes."""
        num_train = self.num_nodes // 3 if self.num_train is None else self.num_train
        num_valid = self.num_nodes // 12 if self.num_valid is None else self.num_valid
        num_left = self.num_nodes - num_train - num_valid
        num_test = num_left if self.num_test is None else min(self.num_test, num_left)
        return num_train, num_valid, num_test

    def scaled(self, scale: float) -> PlantedPartition:
        """Settings with all numbers of nodes and edges multiplied by `scale` and rounded."""
        if not scale > 0:
            raise ValueError(f"scale is {scale}: give a positive factor.")
        counts: dict[str, Any] = {}
        for name in ("num_nodes", "num_edges", "num_train", "num_valid", "num_test"):
            count = getattr(self, name)
            counts[name] = None if count is None else round(count * scale)
        if self.symmetric:
            counts["num_edges"] += counts["num_edges"] % 2  # must be even
        return replace(self, **counts)


BUILT_IN: dict[str, tuple[PlantedPartition, str]] = {
    "demo": (PlantedPartition(symmetric=True, signal=1.25), "60k nodes in 16 communities, made in a moment"),
    "planted": (PlantedPartition(), "planted communities of any size: num_nodes=, num_edges=, num_classes=, ..."),
    "products-shaped": (
        PlantedPartition(
            num_nodes=2_449_029,
            num_edges=123_718_280,
            num_classes=47,
            num_features=100,
            num_train=196_615,
            num_valid=39_323,
            num_test=2_213_091,
        ),
        "the sizes of ogbn-products",
    ),
    "papers100m-shaped": (
        PlantedPartition(
            num_nodes=111_059_956,
            num_edges=3_231_371_744,
            num_classes=172,
            num_features=128,
            num_train=1_207_179,
            num_valid=125_265,
            num_test=214_338,
            dtype="float16",
        ),
        "the sizes of ogbn-papers100M with both directions",
    ),
}
"""Settings and a description of each built-in graph, by name."""


def built_in(name: str, options: dict[str, Any]) -> PlantedPartition:
    """The settings of a built-in graph, scaled by `scale` and then changed by fields of `PlantedPartition`."""
    names = ["scale", *(field.name for field in fields(PlantedPartition))]
    for key in options:
        if key not in names:
            raise ValueError(f"{name!r} has no option {key!r}: choose from {', '.join(names)}.{nearest(key, names)}")
    changes = dict(options)
    settings = BUILT_IN[name][0].scaled(float(changes.pop("scale", 1)))
    return replace(settings, **changes) if changes else settings
