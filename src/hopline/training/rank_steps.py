"""Steps of several ranks: how many examples they have together, and the same number on every rank.

Gradients are summed over the ranks. So each rank divides its summed loss by the number of examples of all
ranks:

    units that know this number (`Unit.total_size`)   no message; every rank must have the same number of units
    all other units                                   one message per step; ranks may have different numbers of units

hopline's own methods have units that know it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from hopline.contract import Unit
from hopline.distributed.world import World


@dataclass(frozen=True)
class NoUnit(Unit):
    """An empty unit, for a rank that has no unit left while other ranks have one."""

    device: torch.device
    size: int = 0

    def forward_backward(self, total: float) -> Tensor:
        return torch.zeros((), device=self.device)


def total_size(units: Sequence[Unit], world: World) -> float:
    """The number of examples of a step over all ranks.

    If some unit does not know it, all ranks must call together.
    """
    if not any(_is_unknown(unit) for unit in units):
        return sum(unit.total_size or 0 for unit in units)
    own_size = sum(unit.size for unit in units)
    return int(world.sum([own_size])[0])


def align_groups(groups: Generator[list[Unit], None, None], world: World) -> Generator[list[Unit], None, None]:
    """The groups of units of an epoch: on every rank the same number of groups, of the same lengths.

    Units that know the total come in equal numbers, so the ranks send no message after the first group.
    Otherwise a rank with fewer units than another gets empty ones, until no rank has any left. Closing the
    generator closes `groups`.
    """
    with closing(groups):
        group = next(groups, [])
        is_aligned = world.size == 1 or not world.any(any(map(_is_unknown, group)))
        if is_aligned:
            while group:
                yield group
                group = next(groups, [])
            return

        while num_units := _longest_group(group, world):
            padding = [NoUnit(world.device) for _ in range(num_units - len(group))]
            yield [*group, *padding]
            group = next(groups, [])


def _longest_group(group: Sequence[Unit], world: World) -> int:
    """The number of units in the longest group of any rank, for units that do not know their total.

    Raises a ValueError on all ranks if some unit of some rank does know it.
    """
    knows_total = any(not _is_unknown(unit) for unit in group)
    num_units, any_knows_total = world.max([len(group), knows_total])
    if any_knows_total:
        raise ValueError(
            "some units of a step say their total_size over all ranks and others do not: leave total_size (of a "
            "Batch, total_seeds) out of all units of the method, or give it in all of them on every rank"
        )
    return int(num_units)


def _is_unknown(unit: Unit) -> bool:
    return unit.total_size is None
