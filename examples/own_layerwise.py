"""A computation of your own over all nodes, layer by layer: personalised PageRank of every label, in bounded memory."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.nn import SimpleConv

import hopline as hl


class Ranges(hl.extend.LayerPlan[Tensor]):
    """Every layer at all nodes, so many at a time."""

    def __init__(self, data: hl.Dataset, rows: Tensor, size: int) -> None:
        self.sampler, self.rows = hl.extend.NeighborSampler(data.graph, [-1]), rows
        self.ranges = torch.arange(data.num_nodes).split(size)

    def chunks_of(self, l: int) -> Sequence[Tensor]:
        return self.ranges

    def piece(self, l: int, chunk: Tensor) -> hl.extend.Piece:
        (block,) = self.sampler.sample(chunk, key=0)
        return hl.extend.Piece(block, src=block.src_ids, dst=chunk, number=int(chunk[0]))

    def inputs_of(self, ids: Tensor) -> Tensor:
        return self.rows[ids]


def main(name: str = "demo", steps: int = 10, teleport: float = 0.1, size: int = 10_000) -> Tensor:
    data = hl.open(name)
    rows = torch.zeros(data.num_nodes, data.num_classes)
    train = data.splits["train"]
    rows[train, data.labels[train]] = 1
    model = hl.nn.GNN([SimpleConv("mean") for _ in range(steps)], act=None, initial_residual=teleport).eval()
    tables = hl.extend.LayerTables(data.num_nodes)
    between = hl.extend.Boundaries(tables, device=torch.device("cpu"), dtype=rows.dtype)
    with torch.no_grad():
        hl.extend.Layers(model, Ranges(data, rows, size), between).forward(range(steps))
    return tables.tables[steps - 1]


if __name__ == "__main__":
    print(main()[:5])
