"""What a method and the trainer say to each other: a job, and the units of work it is done in."""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # settings of methods derive from `Method`, and reading settings needs no torch
    import torch
    from torch import Tensor, nn

    from hopline.core.batch import Batch
    from hopline.data.dataset import Dataset
    from hopline.data.placement_settings import Placement
    from hopline.distributed.world import World
    from hopline.nn.gnn import GNN
    from hopline.nn.whole_module import Whole

TrainStep: TypeAlias = "Callable[[nn.Module, Batch], Tensor]"
"""(model, batch) -> mean loss over the batch's seeds, as a scalar to differentiate."""
KeepRows: TypeAlias = "Callable[[int, Tensor, Tensor], None]"
"""(layer, node ids, their rows after that layer) -> None: called with each part of the nodes once."""


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


def _alone() -> World:
    from hopline.distributed.world import World

    return World.alone()


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What a method needs to know about the run it works for. The Trainer makes it; `Method` has an example."""

    data: Dataset
    model: GNN | Whole
    """The model as the library runs it, called with a batch; shares its parameters with the user's."""
    module: nn.Module
    """The user's own model, as it was given."""
    train_ids: Tensor
    """[n] int64: nodes to train on."""
    train_step: TrainStep
    usual_loss: bool = False
    """Whether `train_step` is the usual loss of the task: a mean over the seeds, which may be computed in parts."""
    seed: int = 0
    device: torch.device = field(default_factory=_cpu)
    bf16: bool = False
    """Whether forward runs under bfloat16 autocast."""
    world: World = field(default_factory=_alone)
    """The processes that train together."""
    say: Callable[[str], None] = print
    """Where a line for the person watching goes."""


class Unit(ABC):
    """A piece of work that ends in gradients: a batch, a sweep over parts, a captured graph.

    `Method` has an example.
    """

    size: int
    """How many training examples it covers, on this rank."""

    @property
    def total_size(self) -> float | None:
        """How many the units of all ranks in this place cover together; None: the Trainer sums their sizes.

        A method that knows it saves an exchange a step, and then gives every rank the same number of units.
        """
        return None

    @abstractmethod
    def forward_backward(self, total: float) -> Tensor:
        """Add this unit's share of the gradient of the mean loss over `total` examples; return its summed loss.

        total: examples of the whole step, over all its units and all ranks. Gradients are summed over the ranks.
        """

    def commit(self) -> None:  # noqa: B027 - most units have nothing to write
        """Called after the optimizer step: the one place where a unit may write state."""


@dataclass(frozen=True, kw_only=True)
class WorkDescription:
    """How a work prepares its units, for the report and its advice. The defaults are those of a work without threads.

    Example:
        >>> hl.extend.WorkDescription(workers=4, look_ahead=8, is_sampled=True).most_workers
        0
    """

    workers: int = 0
    """Threads that prepare batches; 0 where the thread that trains does."""
    look_ahead: int = 1
    """Batches that may be prepared ahead."""
    most_workers: int = 0
    """How many threads there can be at most; 0 where a user cannot change their number."""
    on_gpu: bool = False
    """Whether a GPU prepares the batches itself."""
    is_sampled: bool = False
    """Whether batches are samples, which smaller fan-outs make smaller."""
    refreshes: bool = False
    """Whether stored embeddings are computed exactly in every epoch."""
    prepare_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the threads' own work in the last epoch, by stage."""


class Work(ABC):
    """A method bound to a job. Only `units` must be written; the rest has defaults. `Method` has an example.

    Raises:
        TypeError: A subclass has a `units` with other arguments.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        given = list(inspect.signature(cls.units).parameters)
        if given[1:] != ["epoch", "done", "examples"]:
            raise TypeError(
                f"{cls.__name__}.units takes ({', '.join(given)}): write units(self, epoch, done=0, examples=0), and "
                "leave out the first `done` units of the epoch"
            )

    @abstractmethod
    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        """The units of an epoch (counted from 1), in order; the same epoch gives the same units again.

        Over several ranks each yields its own; the gradient is that of the mean over the examples of all of them.
        done, examples: units at the beginning of the epoch that are left out, since a run that was interrupted has
        trained them, and how many examples these had over all ranks.
        """

    def describe(self) -> WorkDescription:
        """How units are prepared, as it is after the last epoch."""
        return WorkDescription()

    @property
    def keep_rows(self) -> KeepRows | None:
        """Where exact evaluation leaves the hidden rows that it computes; None where they are of no use."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What the work remembers from step to step. It is in the checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most works remember nothing
        """Go on from what `state_dict` returned."""


def units_from(work: Work, epoch: int, done: int = 0, examples: int = 0) -> Generator[Unit, None, None]:
    """The units of an epoch that are not done yet; closing it closes the work's own iterator."""
    units = work.units(epoch, done, examples)
    try:
        yield from units
    finally:
        if isinstance(units, Generator):
            units.close()


def in_groups(units: Generator[Unit, None, None], size: int) -> Generator[list[Unit], None, None]:
    """Units in lists of `size`; closing it closes the units, so that no thread goes on preparing them."""
    with closing(units):
        while group := list(itertools.islice(units, size)):
            yield group


class Method(ABC):
    """A way to train. Subclasses are settings; `bind` gives the work that yields the units of each epoch.

    For every step the Trainer calls `Unit.forward_backward` of some units, then the optimizer, then `Unit.commit`.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class OneByOne(hl.extend.Method):  # a step per training node, over all edges that lead to it
        ...     def bind(self, job):
        ...         return OneByOneWork(job)
        >>> class OneByOneWork(hl.extend.Work):
        ...     def __init__(self, job):
        ...         self.job = job
        ...         self.sampler = hl.extend.NeighborSampler(job.data.graph, [-1] * job.model.num_layers)
        ...
        ...     def units(self, epoch, done=0, examples=0):
        ...         for step, seeds in enumerate(self.job.train_ids.split(1)[done:], start=done):
        ...             key = 1000 * epoch + step  # of dropout
        ...             blocks = self.sampler.sample(seeds, key)
        ...             x = hl.extend.Rows(self.job.data.x, blocks[0].src_ids)
        ...             batch = hl.Batch(seeds, blocks, x, self.job.data.labels[seeds], key=key)
        ...             yield hl.extend.BatchUnit(self.job, batch)
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> trainer = hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, OneByOne(), epochs=1, show=False)
        >>> trainer.fit().finished, trainer.num_steps
        (True, 3)
    """

    @abstractmethod
    def bind(self, job: Job) -> Work: ...

    def for_model(self, model: nn.Module) -> Method:
        """The same method, with settings that depend on the model's depth filled in."""
        return self

    def for_graph(self, num_nodes: int) -> Method:
        """The same method, with defaults that a graph of so few nodes cannot follow made smaller."""
        return self

    def placement(self, wanted: Placement) -> Placement:
        """Where a GPU should find the data, given what was asked for."""
        return wanted

    def place(self, data: Dataset, wanted: Placement, device: torch.device) -> Dataset:
        """The dataset where a GPU finds it fastest, given what was asked for."""
        from hopline.data.placement import place

        return place(data, self.placement(wanted), device)

    def inference_batches(self, job: Job, ids: Tensor) -> Iterable[Batch] | None:
        """Batches for approximate inference at `ids`, in their order; None where only exact inference exists."""
        return None
