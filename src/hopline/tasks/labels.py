"""The kinds of labels of a dataset, and what each must satisfy.

    kind         y                                             no label
    single       [N] int64: the class of each node             -1
    binary       [N] int64: 0 or 1                             -1
    multi        [N, C] of zeros and ones: several labels      every node has C of them
    regression   [N] or [N, k] float: numbers                  NaN

The kind follows from the numbers, unless the user names it. Whole numbers [N] are classes, and zeros and
ones [N, C] are labels, also as floats. All other floats are a regression.

`LABELS` has an object per kind. All that a dataset asks about its labels is a method of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from hopline.tasks.kinds import TASKS, LabelKind

MAX_CLASSES = 10_000_000
"""Largest number of classes."""


class Labels(ABC):
    """One kind of labels."""

    kind: LabelKind
    """Name of the kind, as `Dataset.task` and `task=` have it."""
    noun: str
    """What the labels are, for messages."""
    are_numbers: bool = False
    """Whether the values are to be predicted as they are, rather than classes or labels by their number."""
    has_columns: bool = False
    """Whether a node may have several values, each for a column of its own."""
    other_task: str = ""
    """End of a refusal of values: the kind that they may be meant for."""

    @abstractmethod
    def normalize(self, y: Tensor) -> Tensor:
        """Labels as a `Dataset` has them. Raises a ValueError if they are of another kind."""

    @abstractmethod
    def count(self, y: Tensor) -> int:
        """The number of classes, of labels per node, or of numbers per node."""

    @abstractmethod
    def check_shape(self, y: Tensor, num_nodes: int, num_classes: int) -> None:
        """Refuse labels whose shape or dtype does not fit. No value is read."""

    @abstractmethod
    def allowed(self, num_classes: int) -> str:
        """The values that a label may have, for messages."""

    @abstractmethod
    def is_wrong(self, y: Tensor, num_classes: int) -> Tensor:
        """[n, ...] bool: values that no label of this kind may have. y: labels of some nodes."""

    def num_outputs(self, num_classes: int) -> int:
        """The width of a model's output."""
        return num_classes

    def describe(self, num_classes: int) -> str:
        return f"{num_classes} classes"


class ClassLabels(Labels):
    """One class per node."""

    kind = "single"
    noun = "classes"

    def normalize(self, y: Tensor) -> Tensor:
        if y.dim() != 1:
            raise ValueError(f"y has shape {list(y.shape)}, which only fits task='multi' or task='regression'.")
        if y.dtype.is_floating_point:
            y = torch.where(y.isnan(), -1.0, y)
            if not bool((y == y.float().round()).all()):
                raise ValueError(
                    f"Labels of task={self.kind!r} must be whole numbers: give class numbers, and -1 for unlabelled "
                    "nodes, or task='regression'."
                )
        largest = y.max().item() if y.numel() else 0
        if largest > MAX_CLASSES:
            raise ValueError(
                f"A label is {largest:.0f}: labels number the classes 0, 1, 2, ... and -1 stands for none. For "
                "numbers to predict set task='regression'."
            )
        return y.long()

    def count(self, y: Tensor) -> int:
        largest = int(y.max()) if y.numel() else 0
        return max(largest + 1, 1)

    def check_shape(self, y: Tensor, num_nodes: int, num_classes: int) -> None:
        if y.dim() != 1 or y.dtype != torch.int64:
            hint = " For numbers to predict set task='regression'." if y.is_floating_point() else ""
            raise ValueError(
                f"y must be a 1-D int64 tensor in the {self.kind} task, not {list(y.shape)} {_dtype(y)}.{hint}"
            )

    def allowed(self, num_classes: int) -> str:
        return f"a class from 0 to {num_classes - 1}, or -1 for none"

    def is_wrong(self, y: Tensor, num_classes: int) -> Tensor:
        return (y < -1) | (y >= num_classes)


class BinaryLabels(ClassLabels):
    """A yes or no per node, for which a model has one score."""

    kind = "binary"

    def count(self, y: Tensor) -> int:
        return 2

    def num_outputs(self, num_classes: int) -> int:
        return 1


class SeveralLabels(Labels):
    """Several labels per node, each of them 0 or 1."""

    kind = "multi"
    has_columns = True
    noun = "zeros and ones"
    other_task = ", or for numbers to predict set task='regression'"

    def normalize(self, y: Tensor) -> Tensor:
        if y.dim() != 2:
            raise ValueError("Multi-label y must be [num_nodes, num_labels]: give a 2-D array of zeros and ones.")
        return y if y.dtype == torch.uint8 else y.float()

    def count(self, y: Tensor) -> int:
        return y.size(1)

    def check_shape(self, y: Tensor, num_nodes: int, num_classes: int) -> None:
        if y.dim() != 2 or y.size(1) != num_classes:
            raise ValueError(f"Multi-label y must be [{num_nodes}, {num_classes}], not {list(y.shape)}.")

    def allowed(self, num_classes: int) -> str:
        return "0 or 1"

    def is_wrong(self, y: Tensor, num_classes: int) -> Tensor:
        return (y != 0) & (y != 1)


class Numbers(Labels):
    """One or several numbers per node. NaN stands for a number that is not known."""

    kind = "regression"
    are_numbers = True
    has_columns = True
    noun = "numbers"

    def normalize(self, y: Tensor) -> Tensor:
        if y.dim() > 2:
            raise ValueError(f"y has shape {list(y.shape)}: give [num_nodes] or [num_nodes, k] numbers.")
        return y if y.dtype == torch.float64 else y.float()

    def count(self, y: Tensor) -> int:
        return y.size(1) if y.dim() == 2 else 1

    def check_shape(self, y: Tensor, num_nodes: int, num_classes: int) -> None:
        if not y.is_floating_point():
            raise ValueError(
                f"y has whole numbers ({_dtype(y)}) in the regression task: give y.float(), or set task='single'."
            )
        width = y.size(1) if y.dim() == 2 else 1
        if y.dim() > 2 or width != num_classes:
            raise ValueError(f"y of a regression must be [{num_nodes}] or [{num_nodes}, k], not {list(y.shape)}.")

    def describe(self, num_classes: int) -> str:
        return "a number per node" if num_classes == 1 else f"{num_classes} numbers per node"

    def allowed(self, num_classes: int) -> str:
        return "a finite number, or NaN for none"

    def is_wrong(self, y: Tensor, num_classes: int) -> Tensor:
        return y.isinf()


LABELS: dict[str, Labels] = {
    labels.kind: labels for labels in (ClassLabels(), SeveralLabels(), BinaryLabels(), Numbers())
}
"""By kind: what its labels must satisfy."""
assert set(LABELS) == set(TASKS)


def normalize_labels(y: Tensor, kind: LabelKind | None) -> tuple[Tensor, LabelKind]:
    """Labels as a `Dataset` has them, and their kind: the one that is given, or what the numbers say.

    A column [N, 1] becomes [N].
    """
    if not y.dim():
        raise ValueError("y is a single number: give one label per node, -1 for none.")
    if y.dim() == 2 and y.size(1) == 1:
        y = y[:, 0]
    if kind is None:
        kind = kind_of(y)
    return LABELS[kind].normalize(y), kind


def kind_of(y: Tensor) -> LabelKind:
    """The kind of labels by their values. y: [N] or [N, k]."""
    if y.dtype.is_floating_point:
        is_whole = (y == 0) | (y == 1) if y.dim() == 2 else y == y.round()
        # NaN stands for no label in either kind, so it does not decide.
        if not bool((is_whole | y.isnan()).all()):
            return "regression"
    return "multi" if y.dim() == 2 else "single"


def is_labelled(y: Tensor) -> Tensor:
    """[n] bool: the nodes that have a label, of any kind. y: labels of some nodes, as a `Dataset` has them."""
    if not y.is_floating_point():
        return y >= 0 if y.dim() == 1 else torch.ones(y.size(0), dtype=torch.bool, device=y.device)
    is_known = ~y.isnan()
    return is_known.any(-1) if y.dim() == 2 else is_known


def _dtype(y: Any) -> str:
    return str(y.dtype).removeprefix("torch.")
