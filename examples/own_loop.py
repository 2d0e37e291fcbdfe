"""The loader alone, in a loop of your own, without the Trainer."""

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl


def main(name: str = "demo", epochs: int = 2) -> float:
    data = hl.open(name)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    loader = hl.Sampled(fanouts=(10, 5), batch_size=1024).loader(data, "train", model=model)
    with hl.extend.own_threads(model):
        for epoch in range(1, epochs + 1):
            for batch in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(batch), batch.labels)
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    ids = data.splits["test"]
    return hl.metrics.accuracy(hl.infer.exact(model, data, ids), data.labels[ids])


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
