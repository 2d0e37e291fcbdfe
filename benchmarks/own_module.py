"""GraphSAGE as a module of one's own: a step of `Sampled` beside `hl.nn.GNN` of the same convs, and as a whole.

    PYTHONPATH=src python benchmarks/own_module.py [ROUNDS]

Three layers of width 256, fan-outs (15, 10, 5), 1024 seeds, forward and backward on batches that are there. The three
take turns, batch by batch; a row is the median of CPU seconds, which other processes disturb less than the clock.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.core.batch import Batch
from hopline.data.synthetic import planted_partition

WIDTH = 256
FANOUTS = (15, 10, 5)


class Sage(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        widths = [in_channels, WIDTH, WIDTH, out_channels]
        self.convs = nn.ModuleList([SAGEConv(widths[l], widths[l + 1]) for l in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), 0.5, self.training)
        return self.convs[-1](x, edge_index)


def step_s(model: nn.Module, batch: Batch) -> float:
    """CPU seconds of a forward and a backward pass."""
    start_s = time.process_time()
    with hl.extend.own_threads(model):
        F.cross_entropy(model(batch), batch.labels).backward()
    return time.process_time() - start_s


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    torch.manual_seed(0)
    data = planted_partition()  # 60k nodes, 1.2 million edges, 64 features
    module = Sage(data.num_features, data.num_classes)
    gnn = hl.nn.GNN(module.convs, dropout=0.5)
    models = {"own module": hl.nn.as_batch_model(module), "hl.nn.GNN": gnn, "as a whole": hl.nn.Whole(module)}
    times: dict[str, list[float]] = {name: [] for name in models}
    loader = hl.Sampled(fanouts=FANOUTS, batch_size=1024).loader(data, "train", model=gnn)
    for number, batch in enumerate(loader):
        if number > rounds:
            break
        for name, model in models.items():
            seconds = step_s(model, batch)
            if number:  # the first batch tries the convs out
                times[name].append(seconds)
    base_s = statistics.median(times["hl.nn.GNN"])
    for name, seconds in times.items():
        median_s = statistics.median(seconds)
        print(f"{name:<12} {median_s:.4f} s a step, {median_s / base_s:.3f} of hl.nn.GNN's")


if __name__ == "__main__":
    main()
