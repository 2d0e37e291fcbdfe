"""Steps of several ranks: the number of examples of a step, and equally many steps on every rank.

A step runs a group of units. A unit is work that ends in gradients, such as a batch.

Gradients are summed over the ranks. So each rank divides its summed loss by the number of examples that a
step has on all ranks. A unit may know its part of that number: `Unit.total_size`, the examples of this unit
and of the other ranks' units at the same place of the step. The function `total_size` adds up the units of
a step.

With several ranks, an epoch begins with one collective call. It tells whether the units of the first groups
know their total:

    all units know their total     no further call; every rank must have the same number of units
    no unit knows its total        two calls per step, a maximum and a sum, and at the end one more maximum;
                                   ranks may have different numbers of units

Summing gradients is collective too: a rank with fewer steps than the others would leave them waiting for
it. `align_groups` adds empty units to prevent that, but only where units do not know their total.

The units of hopline's own methods know it.
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
    """The number of examples of a whole step: over its units, and over all ranks.

    If some unit does not know its total, this is a collective call.
    """
    if not any(_is_unknown(unit) for unit in units):
        # No total is None in this branch. `or 0` says so to the type checker.
        return sum(unit.total_size or 0 for unit in units)
    own_size = sum(unit.size for unit in units)
    return int(world.sum([own_size])[0])


def total_weight(units: Sequence[Unit], world: World) -> float:
    """What the examples of a whole step weigh together. A collective call."""
    return world.sum([sum(unit.weight for unit in units)])[0]


def align_groups(groups: Generator[list[Unit], None, None], world: World) -> Generator[list[Unit], None, None]:
    """The groups of units of an epoch: on every rank the same number of groups, of the same lengths.

    Units that know their total come in equal numbers, so no collective call follows the one at the first
    group. Otherwise a rank with fewer units than another gets empty ones, until no rank has any left.
    Closing the generator closes `groups`.
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
