"""`SeedLoader`: a `torch.utils.data.DataLoader` whose items are seeds, and whose batches threads prepare.

Who decides the seeds of a batch, and who prepares it:

    iterated                                  `SeedOrder`, and the ranks of `world` share a step     threads
    iterated, with sampler=                   the sampler, as Lightning and Fabric give one          threads
    taken apart, as Accelerate does           a batch sampler of its own, by `collate_fn`            the caller

There are no worker processes, so `num_workers` is 0 for whoever asks. Lightning and Fabric divide a loader by
making it again: they read its arguments from the attributes of the same names, and add `sampler=`.

Draws have the key of (seed, epoch, step), and ranks that a sampler divides have the same one in a step. So all
ranks together draw as one process with a batch of all their seeds. With seed=None the key of an epoch is a number
that torch's default generator draws. Ranks of a `world` take that of rank 0. Others each draw one of their own, and
have the same one if they have called `torch.manual_seed` alike, as Lightning's `seed_everything` does.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from hopline import ops
from hopline.core.seed_order import SeedOrder, StepExamples, draw_key_of, share_of
from hopline.distributed.world import World
from hopline.pipeline.stages import resolve_threads
from hopline.util.log import logger

ONE_BY_ONE = 0
"""In the place of the epoch, in keys of batches that `collate_fn` makes: epochs are counted from 1."""


class RankExamples(NamedTuple):
    """One rank's examples of a step."""

    numbers: Tensor
    """[n] int64: which of the loader's examples."""
    key: int
    """Key of the step's random draws, the same on all ranks."""
    draw_key: int
    """Key by which neighbours are drawn, the same on all ranks."""
    first: int
    """Position of the first of them among the examples of all ranks."""
    total: int | None
    """Number of examples over all ranks. None if the loader does not know of other ranks."""


class SeedLoader(DataLoader):
    """Batches around seeds. A loader belongs to one thread.

    A subclass sets its own attributes first, and calls `__init__` of this class last.

    Args:
        num_examples: The number of seeds, of which one may come several times.
        batch_size: Seeds per batch and rank.
        shuffle: Whether they have a new order in each epoch.
        drop_last: Whether to leave out the last batch of an epoch if it is not full.
        seed: Seed of every random draw, together with the epoch. None: torch's default generator decides.
        num_workers: Threads that prepare batches. 0: the thread that iterates does.
        look_ahead: Batches prepared before they are needed.
        law_every: Steps that draw neighbours by one key.
        on_gpu: Whether a GPU samples. Then there are no threads.
        world: The ranks that share the seeds of each step. None: all seeds are this rank's.
        sampler: Their numbers, in an order, as of `torch.utils.data.DistributedSampler`.
        batch_sampler: Lists of such numbers, in place of `sampler` and `batch_size`.

    Raises:
        ValueError: Both a world and a sampler are given, or arguments that torch refuses together.
    """

    dataset: Any
    """Positions in the seeds, whose length scripts read. Typed as Any, since torch's class has no length."""

    def __init__(
        self,
        num_examples: int,
        *,
        batch_size: int,
        shuffle: bool | None,
        drop_last: bool,
        seed: int | None,
        num_workers: int | Literal["auto"],
        look_ahead: int | Literal["auto"],
        on_gpu: bool,
        world: World | None,
        sampler: Iterable[int] | None,
        batch_sampler: Iterable[list[int]] | None,
        law_every: int = 1,
    ) -> None:
        self._follows_sampler = sampler is not None or batch_sampler is not None
        if world is not None and not isinstance(world, World):
            raise ValueError(f"world must be a World such as hl.World.current(), not {type(world).__name__} {world!r}")
        if world is not None and self._follows_sampler:
            raise ValueError(
                "a sampler and world= both divide the seeds: leave out world= under Lightning, Fabric and Accelerate, "
                "and sampler= in a loop of your own"
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
            raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, or None, not {seed!r}")
        self.seed = seed
        self.world = world
        ranks = World.alone() if world is None else world
        self.rank = ranks.rank
        self.size = ranks.size
        self.num_cores = ranks.num_cores
        self.threads = (0, 1) if on_gpu else resolve_threads(num_workers, look_ahead, self.num_cores)
        """(threads that prepare batches, batches that they may be ahead). A GPU works in order, without threads."""
        self._order = SeedOrder(
            num_examples=num_examples,
            per_step=batch_size * self.size,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            law_every=law_every,
        )
        self._num_epochs = 0
        self._num_collated = 0
        self._collate_key: int | None = None

        super().__init__(
            range(num_examples),  # type: ignore[arg-type]
            batch_size=batch_size,
            # Torch's random sampler refuses an empty dataset.
            shuffle=shuffle and num_examples > 0,
            sampler=sampler,  # type: ignore[arg-type]
            batch_sampler=batch_sampler,  # type: ignore[arg-type]
            drop_last=drop_last,
            collate_fn=self._collate,
        )
        self.shuffle = shuffle
        self.num_workers = num_workers  # type: ignore[assignment]
        # While a hook of Lightning runs, constructors of DataLoaders are wrapped: the outermost saves its arguments in
        # the loader, to make it again. If our class was imported in the hook, its own constructor is not wrapped, and
        # a base class has saved others. Without them Lightning reads the attributes.
        if not hasattr(type(self).__init__, "__wrapped__"):
            for name in [name for name in vars(self) if name.startswith("__pl_")]:
                del vars(self)[name]

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        """Worker processes, of which there are none. The argument `num_workers` counts threads."""
        return 0

    @num_workers.setter
    def num_workers(self, argument: int | Literal["auto"]) -> None:
        # Where Lightning finds the argument.
        vars(self)["num_workers"] = argument

    def __len__(self) -> int:
        return super().__len__() if self._follows_sampler else len(self._order)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch."""
        if self.world is None and not self._follows_sampler and _num_ranks() > 1:
            _say_that_ranks_repeat_seeds()
        self._num_epochs += 1
        key = self.epoch_key(self._num_epochs)
        if self._follows_sampler:
            return self._batches(self._sampled_steps(key))
        return self._batches(self._shared_steps(self._order.steps(key)))

    def epoch_key(self, epoch: int) -> int:
        """The key of an epoch. Without a seed it is drawn anew in each call, which is collective in a `world`."""
        if self.seed is not None:
            return ops.derive_key(self.seed, epoch)
        # As torch's DataLoader draws the base seed of its workers, and nothing else of torch's state changes.
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        if self.world is not None:
            self.world.broadcast_tensors([drawn])
        return int(drawn)

    @abstractmethod
    def _batches(self, steps: Iterator[RankExamples]) -> Iterator[Any]:
        """The batches of some steps, prefetched by threads."""

    @abstractmethod
    def _batch(self, step: RankExamples) -> Any:
        """The batch of one step, made in the caller's thread."""

    def _shared_steps(self, steps: Iterable[StepExamples]) -> Iterator[RankExamples]:
        """This rank's share of each step."""
        for numbers, key, draw_key in steps:
            first = numbers.numel() * self.rank // self.size
            total = None if self.world is None else numbers.numel()
            yield RankExamples(share_of(numbers, self.rank, self.size), key, draw_key, first, total)

    def _sampled_steps(self, epoch_key: int) -> Iterator[RankExamples]:
        """The steps that the sampler gives."""
        for step, positions in enumerate(self.batch_sampler):  # type: ignore[arg-type]
            yield self._sampled_step(positions, epoch_key, step)

    def _sampled_step(self, positions: list[int], epoch_key: int, step: int) -> RankExamples:
        """The step of positions in the seeds."""
        numbers = torch.as_tensor(positions)
        # Trees draw by slot, so the slots of ranks must differ.
        first = dist.get_rank() * numbers.numel() if _num_ranks() > 1 else 0
        draw_key = draw_key_of(epoch_key, step, self._order.law_every)
        return RankExamples(numbers, ops.derive_key(epoch_key, step), draw_key, first, total=None)

    def _collate(self, positions: list[int]) -> Any:
        """The batch of items of the dataset, which are positions in the seeds. Every call draws anew."""
        if self._collate_key is None:
            self._collate_key = self.epoch_key(ONE_BY_ONE)
        step = self._num_collated
        self._num_collated += 1
        return self._batch(self._sampled_step(positions, self._collate_key, step))

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.collate_fn = self._collate  # a shallow copy would have that of the original


def check_names(arguments: Iterable[str]) -> None:
    """Refuse arguments that `DataLoader` does not have.

    Raises:
        TypeError: There is no such argument.
    """
    for name in arguments:
        if name not in inspect.signature(DataLoader).parameters:
            raise TypeError(f"a loader has no argument {name!r}")


def _num_ranks() -> int:
    """Ranks of torch.distributed, 1 if it is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@cache  # once in a process
def _say_that_ranks_repeat_seeds() -> None:
    if dist.get_rank() == 0:
        logger.warning(
            f"each of {dist.get_world_size()} ranks takes all seeds of its loader: give world=hl.World.current() to "
            "divide them, or world=hl.World.alone() if the seeds of each rank are its own (docs/engines.md)"
        )
