"""How far the gradient of historical training is from that of the full batch: on cora, by parts, tables and method.

    PYTHONPATH=src python benchmarks/history_bias.py --data cora.npz

Three GCN layers, hidden 16, no dropout, the loss at all nodes, 8 parts, one a batch; three seeds. The gradient is the
sum over all batches, and its error relative to the exact one. "8 steps old": tables made exact, then 8 steps of Adam
on the full gradient (lr 0.01) without writing them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import GCNConv

import hopline as hl
from hopline.contract import Job
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.methods.historical.work import HistoricalWork
from hopline.methods.partitioned.sweep import Sweep
from hopline.nn import GNN
from tests.support.helpers import own_task

METHODS: dict[str, dict[str, Any]] = {
    "Cluster-GCN": {"halo": "drop"},
    "plain": {},
    "compensated": {"compensate": True},
}


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch), batch.labels)


def work_of(data: hl.Dataset, seed: int, partition: Any, settings: dict[str, Any]) -> HistoricalWork:
    torch.manual_seed(seed)
    model = GNN([GCNConv(data.num_features, 16), GCNConv(16, 16), GCNConv(16, data.num_classes)])
    method = hl.Historical(num_parts=8, parts_per_batch=1, partition=partition, groups="fixed", **settings)
    everything = torch.arange(data.num_nodes)
    job = Job(data=data, model=model, module=model, examples=Examples(everything), task=own_task(mean_loss), seed=seed)
    return method.bind(job)


def exact_twin(work: HistoricalWork) -> HistoricalWork:
    """The same parts with all their edges and tables of its own: what a work is compared with."""
    method = replace(work.method, halo="history", compensate=False)
    return HistoricalWork(work.job, work.model, method, work.partitioned.partition)


def gradient_of(model: nn.Module, compute: Callable[[], object]) -> torch.Tensor:
    """The gradient that `compute` adds to the parameters, as one vector."""
    model.zero_grad(set_to_none=True)
    compute()
    vector = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return vector


def measure_bias(work: HistoricalWork) -> float:
    """Error of the gradient of an epoch's batches at the current weights, relative to the exact gradient."""

    def by_batches() -> None:
        for group in work.partitioned.parts.own_groups:
            work.unit(work.batch(group, None)).forward_backward(1)

    exact = Sweep(exact_twin(work).partitioned)
    exact.forward()
    ours, theirs = (gradient_of(work.model, compute) for compute in (by_batches, exact.backward))
    return float((ours - theirs).norm() / theirs.norm())


def age(work: HistoricalWork, steps: int) -> None:
    """Move the weights by exact full-batch steps; the tables stay as they are."""
    optimizer = torch.optim.Adam(work.model.parameters(), lr=0.01)
    shadow = Sweep(exact_twin(work).partitioned)
    for _ in range(steps):
        optimizer.zero_grad()
        shadow.forward()
        shadow.backward()
        for p in work.model.parameters():
            assert p.grad is not None
            p.grad /= work.job.train_ids.numel()
        optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an .npz file of a graph")
    data = hl.from_npz(parser.parse_args().data).normalized()
    data = replace(data, y=torch.as_tensor(data.labels).clamp(min=0))
    print("| parts | tables | " + " | ".join(METHODS) + " |\n|---|---|" + "---|" * len(METHODS))
    for partition in ("metis", "random"):
        for old in (0, 8):
            cells = []
            for settings in METHODS.values():
                errors = []
                for seed in range(3):
                    work = work_of(data, seed, partition, settings)
                    work.refresh()
                    age(work, old)
                    errors.append(measure_bias(work))
                cells.append(f"{statistics.fmean(errors):.1e}")
            tables = f"{old} steps old" if old else "exact"
            print(f"| {partition} | {tables} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
