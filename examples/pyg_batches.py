"""PyG's own batches as a method: anything that yields `Data` with `x`, `edge_index`, `y` and `batch_size`, as
`torch_geometric.loader.NeighborLoader` does, the seeds first. (That loader, used by `main`, needs pyg-lib.)"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

import hopline as hl


@dataclass
class DataUnit(hl.extend.Unit):
    model: torch.nn.Module
    data: Data
    size: int

    def forward_backward(self, total: int) -> torch.Tensor:
        scores = self.model(self.data.x, self.data.edge_index)[: self.size]
        loss = torch.nn.functional.cross_entropy(scores, torch.as_tensor(self.data.y)[: self.size], reduction="sum")
        (loss / total).backward()
        return loss.detach()


@dataclass
class PyGBatches(hl.extend.Method):
    make_loader: Callable[[int], Iterable[Data]]  # epoch -> batches

    def bind(self, job: hl.extend.Job) -> hl.extend.Work:
        return PyGWork(job.module, self.make_loader)


@dataclass
class PyGWork(hl.extend.Work):
    model: torch.nn.Module
    make_loader: Callable[[int], Iterable[Data]]

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        for data in islice(self.make_loader(epoch), done, None):
            yield DataUnit(self.model, data, data.batch_size)


def main(name: str = "demo", epochs: int = 3) -> hl.Run:
    data = hl.open(name)
    loader = NeighborLoader(data.to_pyg(), [10, 5], input_nodes=data.train_ids, batch_size=1024)
    method, model = PyGBatches(lambda epoch: loader), GraphSAGE(data.num_features, 64, 2, data.num_classes)
    return hl.Trainer(model, data, method, epochs=epochs).fit()


if __name__ == "__main__":
    main()
