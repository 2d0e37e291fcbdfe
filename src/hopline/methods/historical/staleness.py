"""Drift: the distance that embeddings move while they wait in the tables of historical training.

A batch reads embeddings of its halo that were computed some steps ago, with the weights of that step. Their age says
little by itself: with a small learning rate, an embedding may hardly change in eight steps. So the drift is measured:

    when an epoch begins       rows of some nodes after the first layer     -> before
    `age` steps later          rows of these nodes after the first layer    -> now
    counter history.drift      |now - before| / max(|now|, |before|)

`age` is the mean age at which batches read embeddings in the epoch before. Both sets of rows are exact and without
dropout, whose noise would hide the difference.

It costs at most two passes over few nodes per epoch, and changes no result. Deeper layers are left out, since their
exact rows would need more hops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.sampler import full_block
from hopline.device.snapshots import evaluating
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph
from hopline.util import trace

MAX_NODES = 256
MAX_INPUTS = 1 << 20
"""Most input features that the compared rows are computed from: 4 MiB of float32."""


class RowDrift:
    """Measures the drift of embeddings, at most once per epoch, as the counter `history.drift`.

    Belongs to one work, and to the thread that takes its units. Checkpoints hold nothing of it: a resumed run begins
    its measurement anew.
    """

    def __init__(self, partitioned: PartitionedGraph) -> None:
        self.partitioned = partitioned
        self.age_sum = 0
        """The sum of the ages, in steps, of the rows that batches have read in this epoch."""
        self.num_rows = 0
        """The number of rows that batches have read in this epoch."""
        self._age = 1
        """The mean age of rows that batches read in the epoch before, in steps, and at least 1."""
        self._start_rows: Tensor | None = None
        """[n, ...] float32: rows to compare with. None if no comparison is due."""
        self._start_step = 0
        """The number of steps that were committed when `_start_rows` was computed."""
        self._block: Block | None = None
        """The compared nodes with all their in-edges. Found on first use."""

    def observe_ages(self, ages: Tensor) -> None:
        """Note that a batch reads rows of these ages, in steps. -1 means never written, and does not count."""
        written_ages = ages[ages >= 0]
        self.age_sum += int(written_ages.sum())
        self.num_rows += written_ages.numel()

    def begin_epoch(self) -> None:
        """Compute the rows to compare with, unless those of an earlier epoch still wait to be compared."""
        if self._start_rows is None and self.partitioned.model.num_layers > 1:
            self._start_rows = self._compute_rows()
            self._start_step = self.partitioned.histories.step

    def end_step(self) -> None:
        """Compare after a step, once the rows of `begin_epoch` are as old as those that batches read."""
        if self._start_rows is None or not self.num_rows:
            return
        if self.partitioned.histories.step - self._start_step >= self._age:
            start_rows = self._start_rows
            self._start_rows = None
            trace.count("history.drift", relative_distance(start_rows, self._compute_rows()))

    def end_epoch(self) -> None:
        """Update the mean age by what batches read in this epoch."""
        if self.num_rows:
            self._age = max(1, round(self.age_sum / self.num_rows))
        self.age_sum = 0
        self.num_rows = 0

    def _compute_rows(self) -> Tensor:
        """[n, ...] float32: current rows of the compared nodes after the first layer, in evaluation mode."""
        if self._block is None:
            self._block = self._find_block()
        with evaluating(self.partitioned.model):
            return self.partitioned.layer_at(0, self._block).float()

    def _find_block(self) -> Block:
        """Nodes spread over the graph, with all their in-edges: as many as `MAX_NODES` and `MAX_INPUTS` allow."""
        job = self.partitioned.job
        graph = job.data.graph
        candidates = torch.linspace(0, graph.num_nodes - 1, MAX_NODES).long().unique()
        num_features = max(1, job.data.num_features)
        num_inputs = num_features * (1 + graph.in_degrees(candidates))
        # Nodes of low degree first: a hub would take the place of all others.
        order = num_inputs.argsort(stable=True)
        fits = num_inputs[order].cumsum(0) <= MAX_INPUTS
        fits[0] = True  # at least one node, however many inputs it has
        nodes = candidates[order[fits]].sort().values
        return full_block(self.partitioned.parts.sampler, nodes).to(job.device)


def relative_distance(before: Tensor, now: Tensor) -> float:
    """|now - before| / max(|now|, |before|), by Frobenius norms. It is 1 if all rows became zero."""
    # The last term keeps two tensors of zeros from dividing by zero.
    largest = max(float(before.norm()), float(now.norm()), 1e-30)
    return float((now - before).norm()) / largest
