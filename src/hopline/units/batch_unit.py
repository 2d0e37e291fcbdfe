"""The unit of one batch, and the precision in which it runs.

A unit returns its loss summed over its examples. It scales its gradients by 1 / total, where total is the
number of examples of the step on all ranks, or the sum of their weights. The gradients of units and ranks then
add up to those of the mean over the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopline.contract import Job, Unit
from hopline.core.batch import Batch
from hopline.util import trace


@dataclass
class BatchUnit(Unit):
    """One batch through the job's training step, for methods that make batches. `Method` has an example."""

    job: Job
    batch: Batch

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.batch.num_examples

    @property
    def total_size(self) -> float | None:
        return self.batch.total_seeds

    @property
    def weight(self) -> float:
        return self.job.weight_of(self.batch)

    def forward_backward(self, total: float) -> Tensor:
        job = self.job
        weight = self.weight
        if not self.size:  # the last step of an epoch may have fewer examples than there are ranks
            return torch.zeros((), device=job.device)
        with autocast(job), trace.span("forward", job.device):
            loss = job.task.loss(job.model, self.batch)
        with trace.span("backward", job.device):
            (loss * (weight / total)).backward()
        return loss.detach() * weight


def autocast(job: Job) -> torch.autocast:
    """The autocast context of the forward pass: bfloat16 if the job asks for it.

    Autocast's cache of casts is off: a captured step is replayed with new weights, and cached casts would
    be of old ones.
    """
    return torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=job.bf16, cache_enabled=False)
