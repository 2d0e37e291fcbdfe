"""How the slots of a tree are numbered: a batch in which every drawn neighbour has a place of its own.

Hop 0 holds the seeds, hop h + 1 has `fanouts[h]` slots for every slot of hop h, and all hops stand one after the
other. A slot's parent and its first child follow from its number alone, so shapes never change from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

HOP_BITS = 40
"""A slot's id is its hop, and below that many bits its number in the hop."""


@dataclass(frozen=True)
class Slots:
    """The slots of the trees of some seeds; the seeds may be a part, from `first_seed` on, of a step's."""

    num_seeds: int
    fanouts: tuple[int, ...]
    first_seed: int = 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each hop begins, and the number of all slots."""
        found, size = [0], self.num_seeds
        for fanout in (*self.fanouts, 0):
            found.append(found[-1] + size)
            size *= fanout
        return tuple(found)

    @property
    def num_hops(self) -> int:
        """Hops beyond the seeds."""
        return len(self.fanouts)

    def up_to(self, hop: int) -> int:
        """How many slots the hops 0 .. hop have."""
        return self.offsets[hop + 1]

    def ids(self, device: torch.device) -> Tensor:
        """[num_slots] int64: what a slot's draws are keyed by; the same for any division of a step's seeds."""
        return _ids(self, device)

    def first_children(self, device: torch.device) -> Tensor:
        """[slots with children] int32: the number of each slot's first child."""
        return _first_children(self, device)

    def parents(self, device: torch.device) -> Tensor:
        """[num_slots] int32: the number of each slot's parent; -1 at the seeds."""
        return _parents(self, device)


def _per_hop(slots: Slots, hop: int, device: torch.device) -> Tensor:
    return torch.arange(slots.offsets[hop + 1] - slots.offsets[hop], device=device)


# Kept, since every step of a run has the same few shapes.
@lru_cache(maxsize=8)
def _ids(slots: Slots, device: torch.device) -> Tensor:
    found, first = [], slots.first_seed
    for hop in range(slots.num_hops + 1):
        found.append((hop << HOP_BITS) + first + _per_hop(slots, hop, device))
        first *= slots.fanouts[hop] if hop < slots.num_hops else 1
    return torch.cat(found)


@lru_cache(maxsize=8)
def _first_children(slots: Slots, device: torch.device) -> Tensor:
    return torch.cat(
        [slots.offsets[hop + 1] + fanout * _per_hop(slots, hop, device) for hop, fanout in enumerate(slots.fanouts)]
    ).int()


@lru_cache(maxsize=8)
def _parents(slots: Slots, device: torch.device) -> Tensor:
    found = [torch.full((slots.num_seeds,), -1, device=device)]
    for hop, fanout in enumerate(slots.fanouts):
        found.append(slots.offsets[hop] + _per_hop(slots, hop + 1, device) // fanout)
    return torch.cat(found).int()
