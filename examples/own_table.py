"""A table of your own: features stored in a quarter of their size, as 8-bit numbers with a scale per node."""

import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

import hopline as hl


class Quantised(hl.extend.Table):
    def __init__(self, rows: Tensor) -> None:
        self.scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        self.stored = (rows / self.scale).round().to(torch.int8)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def read(self, ids: Tensor) -> Tensor:
        return self.stored[ids] * self.scale[ids]


def main(name: str = "demo", epochs: int = 3) -> hl.Run:
    data = hl.open(name)
    data.tables["x"] = Quantised(data.x[torch.arange(data.num_nodes)])
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)])
    return hl.Trainer(model, data, hl.Sampled(fanouts=(10, 5)), epochs=epochs).fit()


if __name__ == "__main__":
    main()
