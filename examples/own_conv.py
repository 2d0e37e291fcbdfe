"""A conv of your own that reads a block: the sum of LightGCN, normed by the degrees of the whole graph."""

import torch
from torch import Tensor, nn

import hopline as hl


class DegreeSum(nn.Module):
    """x' = D^-1/2 A D^-1/2 x. As PyG calls it, and on a block, which has only some of the edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        degrees = torch.bincount(edge_index[1], minlength=x.size(0))
        return self._sum(x, edge_index, degrees, x.size(0))

    def on_block(self, x: Tensor, block: hl.extend.Block) -> Tensor:
        """x: rows of the block's sources. Returns those of its destinations."""
        assert block.graph is not None
        return self._sum(x, block.edge_index, block.graph.in_degrees(block.src_ids), block.num_dst)

    def _sum(self, x: Tensor, edge_index: Tensor, degrees: Tensor, num_dst: int) -> Tensor:
        (src, dst), scale = edge_index, degrees.clamp(min=1).to(x.dtype).rsqrt()[:, None]
        return torch.zeros(num_dst, x.size(1), dtype=x.dtype, device=x.device).index_add(
            0, dst, x[src] * scale[src] * scale[dst]
        )


def main(name: str = "demo", epochs: int = 3) -> hl.Run:
    data = hl.open(name)
    model = hl.nn.GNN(
        [DegreeSum(), DegreeSum()],
        encoder=nn.Linear(data.num_features, 64),
        head=nn.Linear(64, data.num_classes),
    )
    return hl.Trainer(model, data, hl.Sampled(fanouts=(10, 5)), epochs=epochs).fit()


if __name__ == "__main__":
    main()
