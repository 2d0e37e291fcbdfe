"""The numbering of slots in the tree layout, in which every possible draw of a batch has a slot of its own.

Hop 0 holds the seeds. Hop h + 1 has `fanouts[h]` slots for every slot of hop h. Hops follow one another,
and so do the children of one slot. Two seeds with the fan-outs (3, 2), for example:

    hop        0        1                  2
    slots      0 1      2 3 4  5 6 7       8 9  10 11  12 13  14 15  16 17  18 19
    parents   -1 -1     0 0 0  1 1 1       2 2   3  3   4  4   5  5   6  6   7  7
    offsets    0        2                  8                                         20

The parent and the first child of a slot follow from its number alone, so no list of edges is needed. Shapes
are the same in every step, so a step can be captured as a CUDA graph. The price is memory for slots that
stay empty, and repeated work for nodes that are drawn more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

HOP_BITS = 40
"""Bits of a slot's number within its hop. The id of a slot is (hop << HOP_BITS) + that number."""


@dataclass(frozen=True)
class Slots:
    """The slots of the trees of `num_seeds` seeds. Immutable and hashable: tensors are cached by it."""

    num_seeds: int
    """Seeds of this batch: all of a step, or a contiguous share of them, such as one rank's."""
    fanouts: tuple[int, ...]
    """Child slots per slot, for each hop from the seeds outwards."""
    first_seed: int = 0
    """The position of the first of these seeds among the step's seeds. It enters the ids of the slots."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """[num_hops + 2]: the number of the first slot of each hop, then the number of all slots."""
        offsets = [0]
        size = self.num_seeds
        for fanout in self.fanouts:
            offsets.append(offsets[-1] + size)
            size *= fanout
        offsets.append(offsets[-1] + size)
        return tuple(offsets)

    @property
    def num_hops(self) -> int:
        """The number of hops beyond the seeds."""
        return len(self.fanouts)

    def up_to(self, hop: int) -> int:
        """The number of slots of the hops 0 .. hop together."""
        return self.offsets[hop + 1]

    def ids(self, device: torch.device) -> Tensor:
        """[num_slots] int64: the ids by which the draws of slots are keyed.

        An id counts from the first seed of the whole step. So the draws of a seed's tree do not depend on
        how the seeds of a step are divided into shares.
        """
        return _ids(self, device)

    def first_children(self, device: torch.device) -> Tensor:
        """[slots up to the last hop but one] int32: the number of each slot's first child."""
        return _first_children(self, device)

    def parents(self, device: torch.device) -> Tensor:
        """[num_slots] int32: the number of each slot's parent, -1 for seeds."""
        return _parents(self, device)


def _numbers_in_hop(slots: Slots, hop: int, device: torch.device) -> Tensor:
    """[slots of the hop] int64: the number of each slot within its hop: 0, 1, 2, ..."""
    return torch.arange(slots.offsets[hop + 1] - slots.offsets[hop], device=device)


# The three tensors below are cached, since every step of a run has the same few shapes.
@lru_cache(maxsize=8)
def _ids(slots: Slots, device: torch.device) -> Tensor:
    hops = []
    first = slots.first_seed  # the number of the hop's first slot, in the hop of the whole step
    for hop in range(slots.num_hops + 1):
        if hop > 0:
            first *= slots.fanouts[hop - 1]
        hops.append((hop << HOP_BITS) + first + _numbers_in_hop(slots, hop, device))
    return torch.cat(hops)


@lru_cache(maxsize=8)
def _first_children(slots: Slots, device: torch.device) -> Tensor:
    hops = []
    for hop, fanout in enumerate(slots.fanouts):
        hops.append(slots.offsets[hop + 1] + fanout * _numbers_in_hop(slots, hop, device))
    return torch.cat(hops).int()


@lru_cache(maxsize=8)
def _parents(slots: Slots, device: torch.device) -> Tensor:
    hops = [torch.full((slots.num_seeds,), -1, device=device)]
    for hop, fanout in enumerate(slots.fanouts):
        hops.append(slots.offsets[hop] + _numbers_in_hop(slots, hop + 1, device) // fanout)
    return torch.cat(hops).int()
