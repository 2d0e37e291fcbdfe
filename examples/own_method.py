"""A method of your own: seeds drawn in proportion to their degree, instead of each once per epoch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl


@dataclass(frozen=True)
class ByDegree(hl.extend.Method):
    fanouts: tuple[int, ...] = (10, 5)
    batch_size: int = 1024
    steps: int = 20

    def bind(self, job: hl.extend.Job) -> "ByDegreeWork":
        return ByDegreeWork(self, job, hl.extend.NeighborSampler(job.data.graph, self.fanouts))


@dataclass
class ByDegreeWork(hl.extend.Work):
    spec: ByDegree
    job: hl.extend.Job
    sampler: hl.extend.NeighborSampler

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        data, world = self.job.data, self.job.world
        rank_key = hl.extend.derive_key(self.job.seed, epoch, world.rank)  # each rank draws seeds of its own
        generator = torch.Generator().manual_seed(rank_key)
        weights = data.graph.in_degrees(self.job.train_ids).double() + 1
        for step in range(self.spec.steps):
            seeds = self.job.train_ids[weights.multinomial(self.spec.batch_size, generator=generator)]
            if step < done:  # trained before the run was interrupted: only its draw is repeated
                continue
            key = hl.extend.derive_key(self.job.seed, epoch, step)
            blocks = self.sampler.sample(seeds, key)
            yield hl.extend.BatchUnit(
                self.job,
                hl.Batch(seeds, blocks, hl.extend.Rows(data.x, blocks[0].src_ids), data.labels[seeds], key=key),
            )


def main(name: str = "demo", epochs: int = 3) -> hl.Run:
    data = hl.open(name)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)])
    return hl.Trainer(model, data, ByDegree(), epochs=epochs).fit()


if __name__ == "__main__":
    main()
