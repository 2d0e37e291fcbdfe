"""`Inputs`: what a model reads and predicts, as its training data had it. A run stores it in config.json.

Predictions on other data are right only if these data come in the form of the training data. `Inputs.fit`
brings a dataset into that form, or refuses it:

    feature columns   matched by name, in the order of the training data
    standardisation   mean and deviation of the training data
    edge arrays       those that the model reads
    classes           the classes of the training data, by name

A dataset knows its columns and classes by `meta["columns"]` and `meta["classes"]`, and how its features were
made by `meta["features"]` (`Dataset.standardized` and the like). Datasets made in Python, or from .npz files,
have no names. Then the widths are compared, and a line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hopline.data.dataset import Dataset, normalize, standardize
from hopline.tables import Table
from hopline.tasks.kinds import LabelKind
from hopline.tasks.labels import LABELS
from hopline.tasks.settings import restored, stored
from hopline.tasks.task import Task
from hopline.util.log import logger

MAX_SHOWN = 8
"""Most names of a list in a message."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The form of a dataset that a model was trained on, in plain JSON values."""

    num_features: int
    """Width of the table "x"; 0 if there is none."""
    columns: list[list[Any]] | None
    """[name, type, width] of each feature column, in order. The type is "number" or "bool". None: not known."""
    features: dict[str, Any] | None
    """How the features were made: {"kind": "standardized", "mean", "deviation"}, {"kind": "normalized"} or
    {"kind": "one_hot"}. None: as they were given."""
    edge: dict[str, list[int]]
    """By name: the shape of an entry of an edge array that the model reads, [] for a number."""
    symmetric: bool | None
    """Whether every edge had its reverse. None: not known."""
    task: LabelKind
    num_classes: int
    """Number of classes, of labels in the multi-label task, or of numbers per node in a regression."""
    classes: list[str] | None
    """Names of the classes by number. None: classes are numbers."""
    learnt: dict[str, Any]
    """Settings of the task, and what it took from the training labels (`tasks.stored`)."""

    @classmethod
    def of(cls, data: Dataset, edge_arrays: Sequence[str], task: Task) -> Inputs:
        """The form of a dataset. edge_arrays: names of those that the model reads. task: what the model learnt."""
        return cls(
            num_features=data.num_features,
            columns=data.meta.get("columns"),
            features=data.meta.get("features"),
            edge={name: list(data.edge_arrays[name].shape[1:]) for name in edge_arrays},
            symmetric=data.is_symmetric,
            task=data.task,
            num_classes=data.num_classes,
            classes=data.meta.get("classes"),
            learnt=stored(task),
        )

    def make_task(self) -> Task:
        """What the model learnt, for its predictions. For a task of the user's: the default one of the labels."""
        return restored(self.learnt, self.task, self.num_classes)

    @classmethod
    def from_dict(cls, stored: Any) -> Inputs:
        """What `to_dict` returned. Raises a ValueError if it is something else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(stored, Mapping) or set(stored) != names:
            raise ValueError("it does not say on which columns and classes the run was trained")
        return cls(**stored)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return asdict(self)

    def fit(self, data: Dataset, edge_arrays: Sequence[str], *, labels: bool = False) -> Dataset:
        """The dataset in the form of the training data.

        edge_arrays: names of those of the dataset that the model would read. The result has none that the training
        data had not.
        labels: whether the labels are needed, for a metric. Else the result has none.

        Raises:
            ValueError: The dataset lacks a column or an edge array, or has features of another width or type.
                With `labels`: it has none, or some of a class that the training data did not have.
        """
        meta = {key: value for key, value in data.meta.items() if key not in ("columns", "features", "classes")}
        known = {"columns": self.columns, "features": self.features, "classes": self.classes}
        meta |= {key: value for key, value in known.items() if value is not None}
        changes: dict[str, Any] = {"task": self.task, "num_classes": self.num_classes, "meta": meta}
        changes["y"] = self.labels(data) if labels else None
        change_features = self._change_of_features(data)
        edge = self._edge(data, edge_arrays)
        if edge is not None:
            changes["graph"] = data.graph.with_arrays(data.graph.indptr, data.graph.indices, edge)
        fitted = data.with_fields(**changes)
        return fitted if change_features is None else fitted.map_features(change_features)

    # ---- features

    def _change_of_features(self, data: Dataset) -> Callable[[Table], Table] | None:
        """A function that brings a dataset's features into the form of the training data. None: they are in it."""
        kind = None if self.features is None else self.features["kind"]
        own = data.meta.get("features")
        if kind == "one_hot":
            if data.num_nodes != self.num_features:
                raise ValueError(
                    f"the run learnt an embedding for each of its {self.num_features:,} nodes (features=one_hot), and "
                    f"{data.name!r} has {data.num_nodes:,}: train on features that other graphs have too"
                )
            same_order = data.one_hot()
            assert self.features is not None
            if same_order.meta["features"]["nodes"] != self.features["nodes"]:
                raise ValueError(
                    f"the run learnt an embedding for each of its nodes (features=one_hot), and {data.name!r} has "
                    "others, or in another order: give the nodes of the training data, in their order"
                )
            return lambda table: same_order.x
        if own is not None and own != self.features:
            raise ValueError(
                f"the features of {data.name!r} are {own['kind']} by numbers of their own, and the run has those of "
                f"its training data: give the dataset as it was before {own['kind']}()"
            )
        order = self._order(data)
        is_made = own is not None or kind is None  # by the same numbers already, or there is nothing to do
        if is_made and order is None:
            return None

        def change(table: Table) -> Table:
            ordered = table if order is None else _Changed(table, partial(_take_columns, order=order))
            if is_made:
                return ordered
            if kind == "normalized":
                return normalize(ordered)
            assert self.features is not None
            # float64 holds every number of float32, so no bit is lost on the way through JSON.
            mean, deviation = (torch.tensor(self.features[key], dtype=torch.float64) for key in ("mean", "deviation"))
            return _Changed(ordered, partial(standardize, mean=mean, deviation=deviation))

        return change

    def _order(self, data: Dataset) -> Tensor | None:
        """[num_features] int64: the column of the dataset for each of the training data. None: the same order.

        Raises a ValueError with both lists if columns are missing, or have another type or width.
        """
        columns = data.meta.get("columns")
        if self.columns is None or columns is None:
            if data.num_features != self.num_features:
                raise ValueError(
                    f"{data.name!r} has {data.num_features} features, and the run was trained on {self.num_features}: "
                    "give data with the columns of the training data, in their order"
                )
            if self.columns is not None:
                logger.warning(
                    f"{data.name!r} does not name its feature columns: they are read as {_listed(_names(self.columns))}"
                )
            return None
        if columns == self.columns:
            return None
        starts: dict[str, int] = {}
        start = 0
        for name, _, width in columns:
            starts[name] = start
            start += width
        entries = {name: (type_, width) for name, type_, width in columns}
        wrong = [name for name, type_, width in self.columns if entries.get(name) != (type_, width)]
        if wrong:
            raise ValueError(self._other_columns(data.name, columns, wrong))
        names = _names(self.columns)
        extra = [name for name in starts if name not in names]
        if extra:
            logger.warning(
                f"{data.name!r} has columns that the run does not know, and they are left out: {_listed(extra)}"
            )
        parts = [torch.arange(starts[name], starts[name] + width) for name, _, width in self.columns]
        return torch.cat(parts)

    def _other_columns(self, name: str, columns: Sequence[Sequence[Any]], wrong: Sequence[str]) -> str:
        """The refusal of columns that do not fit, with both lists side by side."""
        assert self.columns is not None
        ours = [_describe(column) for column in self.columns]
        theirs = [_describe(column) for column in columns]
        type_of = {name: type_ for name, type_, _ in columns}
        bools = [name for name, type_, _ in self.columns if type_ == "bool" and type_of.get(name) == "number"]
        mend = f"write true and false in {_listed(bools)}, in place of 1 and 0, or " if bools else ""
        return (
            f"the feature columns of {name!r} are not those of the run, for example {_listed(wrong)}: {mend}convert it "
            f"with columns of these names and types\n  the run:  {', '.join(ours)}\n  {name}:  {', '.join(theirs)}"
        )

    # ---- edges

    def _edge(self, data: Dataset, read: Sequence[str]) -> dict[str, Tensor] | None:
        """The edge arrays that the training data had. None: the model reads no others."""
        if self.symmetric and data.is_symmetric is False:
            raise ValueError(
                f"the edges of {data.name!r} go one way, and those of the training data both ways: convert it with "
                "symmetrize=true"
            )
        edge = data.edge_arrays
        for name, shape in self.edge.items():
            if name not in edge and data.num_edges == 0:
                edge = {**edge, name: torch.zeros(0, *shape)}  # files without edges have no columns of edges either
            if name not in edge:
                raise ValueError(
                    f"{data.name!r} has no edge array {name!r}, and the run was trained with it: convert it with "
                    f"columns.edge={name}"
                )
            if list(edge[name].shape[1:]) != shape:
                raise ValueError(
                    f"edge array {name!r} of {data.name!r} has entries of shape {list(edge[name].shape[1:])}, and the "
                    f"run was trained with {shape}"
                )
        extra = [name for name in edge if name not in self.edge]
        if extra:
            logger.warning(
                f"{data.name!r} has edge arrays that the run does not use, and they are left out: {_listed(extra)}"
            )
        # The edges of a dataset in shards cannot be changed, and need not be for arrays that nothing reads.
        is_new = set(read) != set(self.edge)
        return {name: edge[name] for name in self.edge} if is_new else None

    # ---- classes

    def labels(self, data: Dataset) -> Tensor:
        """The labels of a dataset, with the class numbers of the training data.

        Raises:
            ValueError: The dataset has none, or classes that the training data did not have.
        """
        y = data.labels
        if data.task != self.task:
            raise ValueError(
                f"the labels of {data.name!r} are of the {data.task} task, and the run's of the {self.task} task"
            )
        classes = data.meta.get("classes")
        if LABELS[self.task].has_columns:
            num_columns = LABELS[self.task].count(y)
            if num_columns != self.num_classes:
                raise ValueError(f"{data.name!r} has {num_columns} labels per node, and the run {self.num_classes}")
            return y
        if (classes is None) != (self.classes is None):
            named, numbered = ("the run", repr(data.name)) if classes is None else (repr(data.name), "the run")
            raise ValueError(
                f"the classes of {named} have names, {_listed(self.classes or classes or [])}, and those of {numbered} "
                "are numbers: write both as names, or both as numbers"
            )
        if classes is None or classes == self.classes:
            largest = int(y.max()) if y.numel() else -1
            if largest >= self.num_classes:
                raise ValueError(
                    f"{data.name!r} has a label {largest}, and the run knows the classes 0 to {self.num_classes - 1}"
                )
            return y
        assert self.classes is not None
        numbers = {name: number for number, name in enumerate(self.classes)}
        unknown = [name for name in classes if name not in numbers]
        if unknown:
            raise ValueError(
                f"{data.name!r} has classes that the run was not trained on, {_listed(unknown)}: it knows "
                f"{_listed(self.classes)}"
            )
        # The last entry is for -1, no label.
        number_of = torch.tensor([*(numbers[name] for name in classes), -1])
        return number_of[y]


def _names(columns: Sequence[Sequence[Any]]) -> list[str]:
    return [name for name, _, _ in columns]


def _describe(column: Sequence[Any]) -> str:
    name, type_, width = column
    shape = f" x {width}" if width > 1 else ""
    return f"{name} ({type_}{shape})"


def _listed(names: Sequence[str]) -> str:
    if len(names) > MAX_SHOWN:
        names = [*names[: MAX_SHOWN - 1], "...", names[-1]]
    return ", ".join(names)


class _Changed(Table):
    """The rows of a table, changed by a function when they are read."""

    def __init__(self, table: Table, change: Callable[[Tensor], Tensor]) -> None:
        self.table = table
        self.change = change
        self._no_rows = change(table.read(torch.zeros(0, dtype=torch.int64)))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.table), *self._no_rows.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self._no_rows.dtype

    @property
    def num_bytes(self) -> int:
        return 0

    def read(self, ids: Tensor) -> Tensor:
        return self.change(self.table.read(ids))


def _take_columns(rows: Tensor, order: Tensor) -> Tensor:
    return rows[:, order.to(rows.device)]
