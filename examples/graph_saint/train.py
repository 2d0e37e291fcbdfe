"""Train GraphConv by GraphSAINT's subgraphs: `python train.py` or `python train.py DATASET`."""

import sys
from dataclasses import replace

import torch
from saint import SaintWalks
from torch_geometric.nn import GraphConv

import hopline as hl


def with_mean_weights(data: hl.Dataset) -> hl.Dataset:
    """The dataset with the weight 1 / in-degree at every edge, so that a sum is the mean."""
    degree = data.graph.in_degrees()
    weight = (1 / degree.clamp(min=1)).repeat_interleave(degree)
    return replace(data, graph=data.graph.with_arrays(data.graph.indptr, data.graph.indices, {"weight": weight}))


def main(name: str = "demo", epochs: int = 5, batch_size: int = 512) -> hl.Run:
    data = with_mean_weights(hl.open(name))
    torch.manual_seed(0)
    model = hl.nn.GNN([GraphConv(data.num_features, 64), GraphConv(64, data.num_classes)], dropout=0.5)
    saint = SaintWalks(data, batch_size, length=2)
    method = hl.Sampled(sampler=saint, batch_size=batch_size, drop_last=True)  # the norms are those of full batches
    return hl.Trainer(model, data, method, train_step=saint.train_step(data.labels), epochs=epochs, lr=0.01).fit()


if __name__ == "__main__":
    main(dict(enumerate(sys.argv)).get(1, "demo"))
