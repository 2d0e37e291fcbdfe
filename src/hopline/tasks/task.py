"""`Task`: what is learnt. The trainer, the methods and inference ask it, and never which task it is.

    examples(splits, name)     the terms of the loss, or of the metric: the nodes of a split, or nodes with labels
    loss(model, batch)         the mean loss of a batch, to differentiate
    weight(y)                  what a batch counts in the mean over a step
    measure(outputs, y)        metrics by name, the first of which chooses the best weights
    predict(outputs, write)    what is written for some nodes, in the user's units

A *mean* task has a loss that is a mean over examples: each row of the outputs adds a term of its own. Then a
batch may be computed in micro-batches, and an epoch in parts. The terms may have weights, of classes for
example. The mean then divides by the sum of the weights, as torch's cross entropy does: over all rows of a
step, on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor, nn

from hopline.metrics import Mode, mode_of

if TYPE_CHECKING:
    from hopline.core.batch import Batch
    from hopline.core.examples import Examples
    from hopline.tasks.settings import TaskSettings

Write = Literal["classes", "probabilities", "scores", "values", "embeddings"]
"""What predictions hold. "values" are numbers in the units of the labels."""
TrainStep: TypeAlias = "Callable[[nn.Module, Batch], Tensor]"
"""(model, batch) -> mean loss over the batch's seeds, as a scalar to differentiate."""
TestStep: TypeAlias = Callable[[nn.Module, Any, Tensor], dict[str, float]]
"""(model, data, node ids) -> metrics by name. Early stopping and the best weights go by the first."""
TotalOverRanks: TypeAlias = Callable[[Tensor], Tensor]
"""Numbers of the training nodes that this rank has -> their sum over all ranks."""


class Task(ABC):
    """What is learnt: the loss of a batch and the metric of outputs.

    Pass one to `hl.Trainer(task=)`. `hl.Classification` and `hl.Regression` make those of hopline.

    Example:
        >>> class Counts(hl.extend.Task):  # numbers of events, by the Poisson loss
        ...     metric = "mae"
        ...     def loss(self, model, batch):
        ...         return torch.nn.functional.poisson_nll_loss(model(batch).view(-1), batch.labels)
        ...     def measure(self, outputs, y):
        ...         return {"mae": (outputs.view(-1).exp() - y).abs().mean().item()}
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0.5, 1.0, 2.0, 0.0]),
        ...     splits={"train": [0, 1], "valid": [2]},
        ... )
        >>> hl.Trainer(hl.nn.GNN([SAGEConv(4, 1)]), data, task=Counts(), epochs=1, show=False).fit().metric
        'mae'
    """

    metric: str = ""
    """Name of the first metric that `measure` returns."""
    settings: TaskSettings | None = None
    """The settings that made the task. None: it is the user's own."""
    test_step: TestStep | None = None
    """An evaluation of the user's, in place of outputs and `measure`. None: there is none."""
    is_mean: bool = False
    """Whether `loss` is a mean over the rows of the outputs, so that it can be computed some rows at a time."""
    best_is: Mode | None = None
    """Whether the largest or the smallest value of the metric is best. None: its name tells (`metrics.mode_of`)."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch's examples: a scalar to differentiate. It calls model(batch)."""

    @abstractmethod
    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Metrics by name. outputs: [n, num_outputs] on the host. y: [n, ...], labels of the same rows."""

    def examples(self, splits: Mapping[str, Tensor], split: str) -> Tensor | Examples:
        """The nodes of a split that are examples: [n] int64. A node may be there several times.

        With labels of their own: `hl.extend.Examples(nodes, y)`. On several ranks, all must return the same.
        """
        return splits[split]

    def weight(self, y: Tensor | None) -> float | None:
        """What examples with labels `y` count in a mean. None: each counts 1."""
        return None

    @property
    def has_weights(self) -> bool:
        """Whether `weight` differs from the number of examples. Then ranks exchange it in every step."""
        return False

    writes: tuple[Write, ...] = ("values", "scores")
    """What predictions may hold besides embeddings, the default first. "scores" are the outputs as they are."""

    def predict(self, outputs: Tensor, write: Write) -> Tensor:
        """What is written for some nodes, one of `writes`: [n] or [n, width].

        outputs: [n, num_outputs] on the host.
        """
        return outputs

    def columns(self, outputs: Tensor, write: Write, classes: Sequence[str] | None) -> dict[str, Tensor]:
        """The same as columns by name, each [n]. classes: names of the classes, None if they are numbers."""
        values = self.predict(outputs, write)
        head = write.removesuffix("s")
        if values.dim() == 1 or values.size(1) == 1:
            return {head: values.reshape(-1)}
        return {f"{head} {i}": values[:, i] for i in range(values.size(1))}

    def state(self) -> dict[str, Any]:
        """What the task took from the training labels, in plain JSON values, for `hopline infer`."""
        return {}

    def mode(self, metric: str = "") -> Mode | None:
        """Whether the largest or the smallest value of a metric is the best. None: its name does not tell."""
        return self.best_is or mode_of(metric or self.metric)
