"""How far hidden rows move while they wait in the tables of historical training.

A batch reads rows of its neighbours that were computed some steps ago, with the weights of then. How old they are says
little by itself: with a small learning rate, rows of eight steps ago may be those of now. So the rows themselves are
compared: those of some nodes after the first layer, when an epoch begins, with the same rows as many steps later as
stored rows are old when they are read. Both are exact and without dropout, whose noise would hide the difference.

It takes at most two passes over few nodes per epoch, and changes no result. Deeper layers are left out, since their
exact rows would need more hops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.sampler import full_block
from hopline.inference import evaluating
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork

MAX_NODES = 256
"""Nodes whose rows are compared, at most."""
MAX_INPUTS = 1 << 20
"""Numbers that these nodes' rows are made of, at most: 4 MiB of float32 input features. A rule of thumb."""


class RowDrift:
    """The movement of rows over as many steps as stored rows are old: the counter `history.drift`.

    It is counted at most once per epoch.

    Belongs to one work, and to the thread that takes its units. Nothing of it is in checkpoints: after an interruption
    it begins anew.
    """

    def __init__(self, work: HistoricalWork) -> None:
        self.work = work
        self.age_sum, self.num_rows = 0, 0
        """Of the rows that batches read in this epoch: the steps since they were written, and how many there were."""
        self._age = 1
        """Steps that rows were old in the epoch before, the mean."""
        self._before: Tensor | None = None
        self._since = 0
        """The steps committed when `_before` was computed."""
        self._block: Block | None = None

    def observe_ages(self, ages: Tensor) -> None:
        """Rows of these ages are read; -1 is for those never written."""
        known = ages[ages >= 0]
        self.age_sum += int(known.sum())
        self.num_rows += known.numel()

    def begin_epoch(self) -> None:
        """Remember the rows of now, unless those remembered are still to be compared."""
        if self._before is None and self.work.model.num_layers > 1:
            self._before, self._since = self._rows(), self.work.histories.step

    def end_step(self) -> None:
        """After a step: compare, if rows of the remembered age would be as old as those that batches read."""
        if self._before is not None and self.num_rows and self.work.histories.step - self._since >= self._age:
            before, self._before = self._before, None
            trace.count("history.drift", relative_distance(before, self._rows()))

    def end_epoch(self) -> None:
        """Learn how long rows wait."""
        if self.num_rows:
            self._age = max(1, round(self.age_sum / self.num_rows))
        self.age_sum, self.num_rows = 0, 0

    def _rows(self) -> Tensor:
        """The rows of now after the first layer, as in evaluation."""
        if self._block is None:
            self._block = self._find_block()
        with evaluating(self.work.model):
            return self.work.layer_at(0, self._block).float()

    def _find_block(self) -> Block:
        """Some nodes spread over the whole graph with all their in-edges: no more of them than `MAX_INPUTS` allows."""
        work, graph = self.work, self.work.parts.graph
        spread = torch.linspace(0, graph.num_nodes - 1, MAX_NODES).long().unique()
        width = max(1, work.job.data.num_features)
        num_inputs = width * (1 + graph.in_degrees(spread))
        # Nodes of low degree first: a hub would take the place of all others.
        order = num_inputs.argsort(stable=True)
        fits = num_inputs[order].cumsum(0) <= MAX_INPUTS
        fits[0] = True
        nodes = spread[order[fits]].sort().values
        return full_block(work.parts.sampler, nodes).to(work.job.device)


def relative_distance(before: Tensor, now: Tensor) -> float:
    """The norm of the difference over the larger of both norms: 1 also where all rows became zero."""
    largest = max(float(before.norm()), float(now.norm()), 1e-30)
    return float((now - before).norm()) / largest
