"""A training script as PyG's examples have them. For hopline only the line is changed that imports the loader."""

import time

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import hopline as hl
from hopline import NeighborLoader  # PyG: from torch_geometric.loader import NeighborLoader


def main(name: str = "demo", epochs: int = 3, num_workers: int = 2) -> float:
    dataset = hl.open(name)
    data = dataset.to_pyg()
    kwargs = {"num_neighbors": [15, 10], "batch_size": 1024, "num_workers": num_workers}
    train_loader = NeighborLoader(data, input_nodes=data.train_mask, shuffle=True, **kwargs)
    test_loader = NeighborLoader(data, input_nodes=data.test_mask, **kwargs)
    model = GraphSAGE(dataset.num_features, 64, num_layers=2, out_channels=dataset.num_classes, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def run(loader: NeighborLoader) -> tuple[float, float]:
        loss_sum = num_correct = 0
        for batch in loader:
            out, y = model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
            loss = F.cross_entropy(out, y)
            if model.training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            loss_sum += loss.item() * batch.batch_size
            num_correct += int((out.argmax(dim=-1) == y).sum())
        return loss_sum / len(loader.dataset), num_correct / len(loader.dataset)

    for epoch in range(1, epochs + 1):
        began_s = time.perf_counter()
        loss, accuracy = run(train_loader)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}, {time.perf_counter() - began_s:.2f} s")
    model.eval()
    return run(test_loader)[1]


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
