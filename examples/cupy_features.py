"""Softmax regression on a node's features and its neighbours' mean: in CuPy on a GPU, in NumPy without one."""

import torch

import hopline as hl

if torch.cuda.is_available():
    import cupy as xp  # type: ignore
else:
    import numpy as xp


def main(name: str = "demo", epochs: int = 3) -> float:
    data, device = hl.open(name), "cuda" if torch.cuda.is_available() else "cpu"
    sampler = hl.interop.Sampler(data, (20,), to=xp.__name__, device=device)
    features = hl.interop.table(data.x.read(torch.arange(data.num_nodes)).to(device), to=xp.__name__)
    labels = hl.interop.table(data.labels.to(device), to=xp.__name__)
    weight = xp.zeros((2 * data.num_features, data.num_classes), dtype="float32")

    def inputs(seeds):
        n_id, size, (adj,) = sampler.sample(seeds)
        rows, (source, target) = features[n_id], adj.edge_index
        mean = xp.zeros((size, rows.shape[1]), dtype=rows.dtype)
        xp.add.at(mean, target, rows[source])
        mean /= xp.maximum(xp.bincount(target, minlength=size), 1)[:, None].astype(rows.dtype)
        return xp.concatenate([rows[:size], mean], 1)

    train, test = (data.splits[name].to(device) for name in ("train", "test"))
    for seeds in (s for _ in range(epochs) for s in train[torch.randperm(len(train))].split(512)):
        x, y = inputs(seeds), labels[seeds]
        chance = xp.exp(x @ weight - (x @ weight).max(1, keepdims=True))
        chance /= chance.sum(1, keepdims=True)
        chance[xp.arange(len(y)), y] -= 1
        weight -= 0.5 / len(y) * (x.T @ chance)
    return float(((inputs(test[:2000]) @ weight).argmax(1) == labels[test[:2000]]).mean())


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
