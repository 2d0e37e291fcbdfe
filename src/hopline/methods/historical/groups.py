"""The batches of an epoch: groups of parts, in an order drawn by the epoch.

A batch is a *group* of `parts_per_batch` parts. With groups="redrawn" each epoch draws which parts meet; with "fixed"
it only draws the order of the groups, so their blocks can be cached. A *turn* is one group per rank, all trained in
the same optimizer step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hopline import ops
from hopline.methods.partitioned.parts import Group
from hopline.methods.partitioned.rank_histories import PartAssignment

if TYPE_CHECKING:
    from hopline.methods.historical.settings import Historical


class Groups:
    """Draws the groups of each epoch, and the rank that trains each."""

    def __init__(self, method: Historical, assignment: PartAssignment, seed: int) -> None:
        self.method = method
        self.assignment = assignment
        self.seed = seed
        num_parts_by_host = [len(assignment.parts_of_host(host)) for host in self._hosts]
        self.num_groups = sum(math.ceil(num_parts / method.parts_per_batch) for num_parts in num_parts_by_host)
        """The number of batches that cover all parts once, over all ranks."""

    @property
    def _hosts(self) -> range:
        """The numbers of all hosts. `assignment.hosts` has the host of each rank."""
        return range(max(self.assignment.hosts) + 1)

    def turns_of(self, epoch: int) -> list[tuple[Group, ...]]:
        """The groups of an epoch, by turn and rank. A rank trains parts that its host keeps; () if none are left.

        On one host the ranks take the groups of the epoch in order: at turn s, rank r of R takes group s * R + r.
        """
        groups_by_host = [iter(self._draw_groups(epoch, host)) for host in self._hosts]
        max_batches = self.method.max_batches
        turns: list[tuple[Group, ...]] = []
        while True:
            turn = tuple(next(groups_by_host[host], ()) for host in self.assignment.hosts)
            # `max_batches` counts batches over all ranks, so the last turn may have fewer batches than ranks.
            if max_batches is not None:
                num_remaining = max_batches - len(turns) * len(turn)
                turn = tuple(group if rank < num_remaining else () for rank, group in enumerate(turn))
            if not any(turn):
                return turns
            turns.append(turn)

    def _draw_groups(self, epoch: int, host: int) -> list[Group]:
        """The groups that one host trains in an epoch, in order. All ranks draw the same."""
        key = ops.derive_key(self.seed, epoch)
        # Host 0 has the key of the epoch itself, as a single host has.
        if host:
            key = ops.derive_key(key, host)
        parts = torch.tensor(self.assignment.parts_of_host(host))
        if self.method.groups == "redrawn":
            parts = parts[ops.permutation(key, parts.numel())]
        groups = [tuple(sorted(group.tolist())) for group in parts.split(self.method.parts_per_batch)]
        if self.method.groups == "fixed":
            groups = [groups[i] for i in ops.permutation(key, len(groups)).tolist()]
        return groups

    def groups_of(self, epoch: int) -> list[Group]:
        """The non-empty groups of an epoch, over all ranks, in order."""
        return [group for turn in self.turns_of(epoch) for group in turn if group]
