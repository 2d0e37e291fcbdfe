"""`Classification` and `Regression` as users type them: `Trainer(task=hl.Regression(loss="huber"))`, `task=regression`.

`bind` makes the `Task` of a dataset, as `Method.bind` makes the work of a job. The module imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from hopline.tasks.kinds import LabelKind
from hopline.util.config import check_fields, from_dict, kind_of, settings, to_dict

if TYPE_CHECKING:
    from torch import Tensor

    from hopline.tasks.task import Task, TotalOverRanks

METRICS_OF: dict[str, tuple[str, ...]] = {
    "single": ("accuracy", "balanced_accuracy", "macro_f1", "log_loss", "roc_auc", "average_precision"),
    "binary": ("roc_auc", "average_precision", "accuracy", "balanced_accuracy", "macro_f1", "log_loss"),
    "multi": ("micro_f1", "macro_f1", "roc_auc", "average_precision", "log_loss"),
    "regression": ("rmse", "mae", "mse", "r2"),
}
"""By kind of labels: the metrics that go with it, the default first."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelFacts:
    """What a task is told about the labels of a dataset."""

    kind: LabelKind
    """Kind of labels, as `Dataset.task`."""
    num_classes: int
    """Number of classes, of labels per node, or of numbers per node."""
    train: Tensor | None = None
    """[n, ...]: labels of the training nodes that this rank has. None: not known, as for predictions."""
    total: TotalOverRanks = lambda numbers: numbers
    """Adds numbers over ranks that have different training nodes."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What `Task.state` returned in training, in place of what `train` tells. Empty: nothing."""


class TaskSettings(ABC):
    """Settings of a task."""

    kinds: ClassVar[tuple[LabelKind, ...]]
    """The kinds of labels that the task learns."""

    @abstractmethod
    def bind(self, labels: LabelFacts) -> Task:
        """The task of a dataset with these labels."""


@settings
class Classification(TaskSettings):
    """Classes: one per node, a yes or no, or several labels. The loss is cross entropy.

    Example:
        >>> hl.Classification(class_weights="balanced", label_smoothing=0.1).metric
    """

    kinds: ClassVar[tuple[LabelKind, ...]] = ("single", "binary", "multi")

    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    """Weight of each class in the loss, as `weight=` of torch's CrossEntropyLoss. `balanced` weights a class by the
    inverse of its share of the training nodes. With several labels per node: `pos_weight=` of BCEWithLogitsLoss."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    metric: str | Callable[..., Any] | None = None
    """Metric that chooses the best weights: accuracy, balanced_accuracy, macro_f1, micro_f1, roc_auc,
    average_precision or log_loss. Default: accuracy, micro_f1 for several labels, roc_auc for a yes or no. In Python
    also a function of (scores, labels), such as a metric of torchmetrics."""

    def __post_init__(self) -> None:
        given: Any = self.class_weights
        if given is not None and not isinstance(given, str | tuple):  # a list, a tensor or an array, as torch takes
            numbers = given.tolist() if hasattr(given, "tolist") else given
            object.__setattr__(self, "class_weights", tuple(numbers))
        check_fields(self)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be from 0 up to 1, not {self.label_smoothing}")
        weights = self.class_weights
        if isinstance(weights, tuple) and not (all(math.isfinite(w) and w >= 0 for w in weights) and any(weights)):
            raise ValueError(
                f"class_weights must be finite, not negative and not all 0: {', '.join(map(str, weights))}"
            )
        # A batch of such nodes would have a loss and no weight, so batches would not add up.
        if isinstance(weights, tuple) and self.label_smoothing and not all(weights):
            raise ValueError(
                "label_smoothing gives nodes of a class with weight 0 a loss: set label_smoothing=0, or take these "
                "nodes out of the training split"
            )

    def bind(self, labels: LabelFacts) -> Task:
        from hopline.tasks.classification import bind

        check_kind(self, labels.kind)
        check_metric(self.metric, labels.kind)
        return bind(self, labels)


@settings
class Regression(TaskSettings):
    """Numbers: one or several per node. NaN entries are left out of the loss and of the metric.

    Example:
        >>> hl.Regression(loss="huber", standardize=True).loss
        'huber'
    """

    kinds: ClassVar[tuple[LabelKind, ...]] = ("regression",)

    loss: Literal["mse", "mae", "huber"] = "mse"
    """Loss: squared error, absolute error, or torch's HuberLoss, which is squared up to 1 and linear beyond."""
    standardize: bool = False
    """Targets of mean 0 and standard deviation 1 over the training nodes, column by column. Predictions and metrics
    are in the units of the labels."""
    metric: str | Callable[..., Any] | None = None
    """Metric that chooses the best weights: rmse, mae, mse or r2. Default: rmse. In Python also a function of
    (predictions, labels), such as a metric of torchmetrics."""

    def __post_init__(self) -> None:
        check_fields(self)

    def bind(self, labels: LabelFacts) -> Task:
        from hopline.tasks.regression import bind

        check_kind(self, labels.kind)
        check_metric(self.metric, labels.kind)
        return bind(self, labels)


ListedTask: TypeAlias = Classification | Regression
TASK_SETTINGS: dict[str, type[ListedTask]] = {kind_of(task_class): task_class for task_class in get_args(ListedTask)}
"""The tasks of the library by name, as `task=` takes them. A further task is added here."""


def check_metric(metric: str | Callable[..., Any] | None, kind: LabelKind) -> None:
    """Refuse the name of a metric that is not defined for the labels."""
    if isinstance(metric, str) and metric not in METRICS_OF[kind]:
        raise ValueError(
            f"metric={metric} does not go with labels of the {kind} task: choose one of {', '.join(METRICS_OF[kind])}, "
            "or in Python give a function of (scores, labels)"
        )


def check_kind(task: TaskSettings, kind: LabelKind) -> None:
    """Refuse labels of a kind that a task does not learn."""
    if kind in task.kinds:
        return
    if kind == "regression":
        raise ValueError(
            "the labels are numbers, and task=classification needs classes: set task=regression, or convert the "
            "dataset with whole numbers as labels and task=single"
        )
    raise ValueError(
        "the labels are classes, and task=regression needs numbers: leave out task=, or make the dataset with "
        "task='regression' (hl.from_pyg(data, task='regression'), hopline convert ... task=regression)"
    )


def stored(task: Task) -> dict[str, Any]:
    """A task as plain JSON values, for `restored`. A metric of the user's is left out."""
    if task.settings is None:
        return {"settings": None, "state": {}}
    fields = {"kind": kind_of(type(task.settings))} | to_dict(task.settings)
    if callable(fields["metric"]):
        fields["metric"] = None
    return {"settings": fields, "state": task.state()}


def restored(learnt: Mapping[str, Any], kind: LabelKind, num_classes: int) -> Task:
    """The task of a run, for predictions. Of a task of the user's: the default one of the labels."""
    fields = learnt["settings"]
    if fields is None:
        return DEFAULT_TASKS[kind].bind(LabelFacts(kind=kind, num_classes=num_classes))
    values = {name: value for name, value in fields.items() if name != "kind"}
    task = from_dict(TASK_SETTINGS[fields["kind"]], values)
    return task.bind(LabelFacts(kind=kind, num_classes=num_classes, state=learnt["state"]))


DEFAULT_TASKS: dict[str, TaskSettings] = {
    "single": Classification(),
    "multi": Classification(),
    "binary": Classification(),
    "regression": Regression(),
}
"""By kind of labels: the task that is learnt unless the user names one."""
