"""PyG's own batches as a method: anything that yields `Data` with `x`, `edge_index`, `y` and `batch_size`, as
`torch_geometric.loader.NeighborLoader` does (the first `batch_size` nodes are the seeds)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch_geometric.data import Data

import hopline as hl


@dataclass
class DataUnit(hl.Unit):
    model: torch.nn.Module
    data: Data

    @property
    def size(self) -> int:
        return self.data.batch_size

    def forward_backward(self, total: int) -> torch.Tensor:
        scores = self.model(self.data.x, self.data.edge_index)
        labels = torch.as_tensor(self.data.y)
        loss = torch.nn.functional.cross_entropy(scores[: self.size], labels[: self.size], reduction="sum")
        (loss / total).backward()
        return loss.detach()


@dataclass
class PyGBatches(hl.Method):
    make_loader: Callable[[int], Iterable[Data]]
    """epoch -> batches, for example `lambda epoch: NeighborLoader(data, [10, 5], batch_size=1024)`."""

    def bind(self, job: hl.Job) -> "PyGBatches":
        self.model = job.module
        return self

    def units(self, epoch: int) -> Iterator[hl.Unit]:
        for data in self.make_loader(epoch):
            yield DataUnit(self.model, data)
