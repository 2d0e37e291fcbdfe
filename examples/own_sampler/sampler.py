"""A sampler of your own that knows nothing of ranks, with its training and test step. In a layer every node of the
graph has a random number, and each takes the in-neighbours with the smallest: fewer distinct nodes, as in LABOR."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import hopline as hl


@dataclass(frozen=True)
class SharedDraws(hl.extend.Method):
    fanouts: tuple[int, ...] = (10, 5)
    """In-neighbours that a node takes, one number per layer, the seeds' own first."""
    batch_size: int = 1024
    """Seeds of a step, over all ranks."""

    def numbers(self, graph: hl.Graph, generator: torch.Generator) -> Tensor:
        """[num_nodes]: the smaller, the sooner a node is drawn."""
        return torch.rand(graph.num_nodes, generator=generator)

    def sample(self, graph: hl.Graph, seeds: Tensor, key: int) -> tuple[hl.extend.Block, ...]:
        """One block per layer, in the order of computation: the last one leads to the seeds."""
        generator = torch.Generator().manual_seed(key)
        blocks: list[hl.extend.Block] = []
        for fanout in self.fanouts:
            dst = blocks[-1].src_ids if blocks else seeds
            degrees = graph.in_degrees(dst)
            row = torch.arange(dst.numel()).repeat_interleave(degrees)  # the destination of each in-edge
            nth = torch.arange(row.numel()) - (degrees.cumsum(0) - degrees)[row]  # and which of its in-edges it is
            src = graph.indices[graph.indptr[dst][row] + nth].long()
            order = self.numbers(graph, generator)[src].argsort(stable=True)
            order = order[row[order].argsort(stable=True)]  # by destination, then by number
            src = src[order[nth < fanout]]
            src_ids = torch.cat([dst, src[~torch.isin(src, dst)].unique()])
            place = src_ids.argsort()
            src_idx = place[torch.searchsorted(src_ids, src, sorter=place)].int()
            part = hl.extend.Part(torch.nn.functional.pad(degrees.clamp(max=fanout).cumsum(0), (1, 0)), src_idx)
            blocks.append(hl.extend.Block(src_ids, dst.numel(), (part,), graph, key, in_graph_order=False))
        return tuple(reversed(blocks))

    def train_step(self, model: torch.nn.Module, batch: hl.Batch, smoothing: float = 0.0) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch), batch.labels, label_smoothing=smoothing)

    def test_step(self, model: torch.nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {"accuracy": hl.metrics.accuracy(hl.infer.exact(model, data, ids), data.labels[ids])}

    def bind(self, job: hl.extend.Job) -> "SeedWork":
        return SeedWork(self, job)


@dataclass(frozen=True)
class HubsFirst(SharedDraws):
    power: float = 0.5
    """An option more: how much sooner nodes of high degree are drawn."""

    def numbers(self, graph: hl.Graph, generator: torch.Generator) -> Tensor:
        return super().numbers(graph, generator) / (1 + graph.in_degrees()) ** self.power


@dataclass
class SeedWork(hl.extend.Work):  # with any such sampler: the order of seeds, each rank's share, the batch around it
    sampler: SharedDraws
    job: hl.extend.Job

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        data = self.job.data
        ids = self.job.train_ids
        epoch_key = hl.extend.derive_key(self.job.seed, epoch)
        order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(epoch_key))
        for step, all_seeds in list(enumerate(ids[order].split(self.sampler.batch_size)))[done:]:
            key = hl.extend.derive_key(epoch_key, step)
            seeds = all_seeds.tensor_split(self.job.world.size)[self.job.world.rank]
            blocks = self.sampler.sample(data.graph, seeds, key)
            x = hl.extend.Rows(data.x, blocks[0].src_ids)
            batch = hl.Batch(seeds, blocks, x, data.labels[seeds], key=key, total_seeds=all_seeds.numel())
            yield hl.extend.BatchUnit(self.job, batch)
