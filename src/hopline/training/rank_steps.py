"""Steps that several ranks take together: over the examples of all of them, and as many steps on every rank.

Gradients are summed over the ranks, so each rank divides its summed loss by the examples of all ranks. Units that know
that number, as those of our own methods do, are taken at their word. For all others the ranks tell each other how many
examples they have, once a step; then they may also have different numbers of units in an epoch.
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
    """What a rank trains at a turn for which it has no unit left and others have one."""

    device: torch.device
    size: int = 0

    def forward_backward(self, total: float) -> Tensor:
        return torch.zeros((), device=self.device)


def total_size(units: Sequence[Unit], world: World) -> float:
    """Examples of a step over all ranks. Where units do not know it, every rank must ask at the same time."""
    if not any(_is_unknown(unit) for unit in units):
        return sum(unit.total_size or 0 for unit in units)
    own_size = sum(unit.size for unit in units)
    return int(world.sum([own_size])[0])


def align_groups(groups: Generator[list[Unit], None, None], world: World) -> Generator[list[Unit], None, None]:
    """The groups of units of an epoch, as many of the same length on every rank; closing it closes `groups`.

    Units that know the total of all ranks come in equal numbers, so after the first group nothing is asked. Else a rank
    that has fewer units than another takes part with empty ones, until no rank has any.
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
    """Units in the longest group of a rank."""
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
