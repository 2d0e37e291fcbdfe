"""Names of the kinds of labels. The module imports no torch, for settings and manifests."""

from __future__ import annotations

from typing import Literal, get_args

LabelKind = Literal["single", "multi", "binary", "regression"]
"""Kind of labels: one class per node, several labels per node, a yes or no, or numbers."""
TASKS: tuple[str, ...] = get_args(LabelKind)
"""The kinds, as `Dataset.task` has them."""
