"""PyG's own batches as a method: anything that yields `Data` with `x`, `edge_index`, `y` and `batch_size`, as
`torch_geometric.loader.NeighborLoader` does, the seeds first. (That loader, used by `main`, needs pyg-lib.)"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

import hopline as hl


@dataclass
class DataUnit(hl.extend.Unit):
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
class PyGBatches(hl.extend.Method):
    make_loader: Callable[[int], Iterable[Data]]  # epoch -> batches

    def bind(self, job: hl.extend.Job) -> "PyGBatches":
        self.model = job.module
        return self

    def units(self, epoch: int) -> Iterator[hl.extend.Unit]:
        for data in self.make_loader(epoch):
            yield DataUnit(self.model, data)


def main(name: str = "demo", epochs: int = 3) -> hl.Run:
    data = hl.open(name)
    pyg = data.to_pyg()
    loader = NeighborLoader(pyg, [10, 5], input_nodes=pyg.train_mask, batch_size=1024)
    model = GraphSAGE(data.num_features, 64, 2, data.num_classes)
    return hl.Trainer(model, data, PyGBatches(lambda epoch: loader), epochs=epochs).fit()


if __name__ == "__main__":
    main()
