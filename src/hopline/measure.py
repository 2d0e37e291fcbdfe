"""What evaluation computes: metrics of a split, over every edge, over sampled ones, or by the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from hopline import infer, ops, shard_infer
from hopline.budget import Budget
from hopline.data.dataset import Dataset
from hopline.guard import Guard
from hopline.infer import KeepRows
from hopline.loader import Loader
from hopline.nn.gnn import GNN
from hopline.replayed import Replayed, replayed_of
from hopline.shard_data import ShardedData
from hopline.work import Job, Method

TestStep = Callable[[nn.Module, Dataset, Tensor], dict[str, float]]
"""(model, data, node ids) -> metrics; the first one is the one that early stopping and keep-best go by."""
MOST_THREADS = 8
"""Our threads that train: more of them gain nothing, as the parts between products and reductions stay in one."""


def own_threads(job: Job) -> AbstractContextManager[None]:
    """Our threads where all the long work is ours, else torch's: both at once would fight for the cores."""
    if job.device.type == "cpu" and isinstance(job.model, GNN) and job.model.is_fused:
        return ops.own_threads(min(torch.get_num_threads(), job.world.num_cores, MOST_THREADS))
    return nullcontext()


@dataclass(frozen=True)
class Measure:
    """How a split is measured: over every edge, over sampled ones, or by the user's own function."""

    method: Method
    test_step: TestStep | None = None
    split: str = "valid"
    exact: bool = True
    show: bool = False
    chunk_bytes: int | None = None
    """What a chunk of exact evaluation or a sampled batch may take, where there is a budget,"""
    rows_on_disk: bool = False
    """and whether hidden rows are kept in files, which are removed afterwards."""

    def __call__(self, job: Job, keep: KeepRows | None = None) -> dict[str, float]:
        data, ids = job.data, job.data.splits[self.split]
        if self.test_step is not None:
            # What it draws is its own: training goes on as if it had not been asked, whoever runs it.
            gpus = [job.device] if job.device.type == "cuda" else []
            with infer.evaluating(job.model), torch.random.fork_rng(gpus):
                return self.test_step(job.model, data, ids)
        batches = None if self.exact else self.method.inference_batches(job, ids)
        with own_threads(job):
            if isinstance(data, ShardedData):
                return shard_infer.evaluate(job.model, data, self.split, batches, job.device)
            if batches is None and keep is None and (replayed := self.replayed(job)) is not None:
                scores = replayed()
            elif batches is None:
                with TemporaryDirectory() if self.rows_on_disk and keep is None else nullcontext() as folder:
                    options: dict[str, Any] = {"chunk_bytes": self.chunk_bytes, "keep": keep, "folder": folder}
                    scores = infer.exact(job.model, data, ids, device=job.device, show=self.show, **options)
            else:
                guard = None if self.chunk_bytes is None else Guard(job, Budget(), self.chunk_bytes)
                if guard is not None and isinstance(batches, Loader):
                    batches.waits_on_host = True  # no more of them than the guard has room for goes to a GPU
                scores = infer.sampled(job.model, batches, num_nodes=ids.numel(), show=self.show, guard=guard)
        return infer.measure(data, scores, self.labels(job))

    def labels(self, job: Job) -> Tensor:
        """Of the split's nodes, on the host."""
        y, ids = job.data.y, job.data.splits[self.split]
        assert y is not None
        return y[ids.to(y.device)].cpu()

    def replayed(self, job: Job) -> Replayed | None:
        """What becomes a CUDA graph of it, if something does."""
        bound = self.chunk_bytes is not None or self.rows_on_disk
        if bound or not self.exact or self.test_step is not None or isinstance(job.data, ShardedData):
            return None
        return replayed_of(job, job.data.splits[self.split])
