"""GammaGL's GraphSAGE layers on TensorLayerX, fed by hopline's sampler and feature store."""

import os

os.environ.setdefault("TL_BACKEND", "tensorflow")  # the backend that runs with a current release

import hopline.interop as interop  # before TensorFlow: it loads Triton, which must come first

# isort: split
import tensorlayerx as tlx  # type: ignore
import torch
from gammagl.layers.conv import SAGEConv  # type: ignore

import hopline as hl

BACKEND = os.environ["TL_BACKEND"]


class Net(tlx.nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        self.convs = tlx.nn.ModuleList([SAGEConv(width, 64, activation=tlx.nn.ReLU()), SAGEConv(64, classes)])

    def forward(self, batch):
        x, adjs = batch
        for conv, adj in zip(self.convs, adjs, strict=True):
            x = conv((x, x[: adj.size[1]]), adj.edge_index)
        return x


def main(name: str = "demo", epochs: int = 3) -> float:
    data = hl.open(name)
    sampler = interop.Sampler(data, (10, 5), to=BACKEND)
    features, labels = (interop.table(rows, to=BACKEND) for rows in (data.x, data.labels))
    net = Net(data.num_features, data.num_classes)
    loss = tlx.model.WithLoss(net, tlx.losses.softmax_cross_entropy_with_logits)
    step = tlx.model.TrainOneStep(loss, tlx.optimizers.Adam(0.01), net.trainable_weights)
    train, test = data.splits["train"], data.splits["test"][:2000]
    for seeds in (s for _ in range(epochs) for s in train[torch.randperm(len(train))].split(512)):
        n_id, _, adjs = sampler.sample(seeds)
        step((features[n_id], adjs), labels[seeds])
    n_id, _, adjs = sampler.sample(test)
    found = tlx.argmax(net((features[n_id], adjs)), 1)
    return float((interop.from_any(found) == data.labels[test]).float().mean())


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
