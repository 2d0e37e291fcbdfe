"""GraphSAGE in Paddle, fed by hopline's sampler and feature store."""

import paddle  # type: ignore
import torch

import hopline as hl


def forward(layers, x, adjs):
    for layer, (edge_index, _, (_, size)) in zip(layers, adjs, strict=True):
        mean = paddle.geometric.send_u_recv(x, edge_index[0], edge_index[1], "mean", out_size=size)
        x = layer(paddle.concat([x[:size], mean], 1))
        x = paddle.nn.functional.relu(x) if layer is not layers[-1] else x
    return x


def main(name: str = "demo", epochs: int = 3) -> float:
    data = hl.open(name)
    sampler = hl.interop.Sampler(data, (10, 5), to="paddle")
    features = hl.interop.table(data.x, to="paddle")
    labels = hl.interop.table(data.labels, to="paddle")
    layers = [paddle.nn.Linear(2 * data.num_features, 64), paddle.nn.Linear(2 * 64, data.num_classes)]
    optimizer = paddle.optimizer.Adam(0.01, parameters=[w for layer in layers for w in layer.parameters()])
    train, test = data.splits["train"], data.splits["test"][:2000]
    for seeds in (s for _ in range(epochs) for s in train[torch.randperm(len(train))].split(512)):
        n_id, _, adjs = sampler.sample(seeds)
        loss = paddle.nn.functional.cross_entropy(forward(layers, features[n_id], adjs), labels[seeds])
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    n_id, _, adjs = sampler.sample(test)
    found = forward(layers, features[n_id], adjs).argmax(1)
    return float((found == labels[test]).astype("float32").mean())


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
