"""A script with a process group of its own, which hopline trains in: torchrun --nproc-per-node 2 THIS_FILE [DATA]."""

import sys

import torch
import torch.distributed as dist
from torch_geometric.nn import SAGEConv

import hopline as hl


def main(source: str = "demo", out: str | None = None) -> None:
    dist.init_process_group("gloo")  # "nccl", and device="cuda" below, on GPUs
    data = hl.open(source)
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    method = hl.Sampled(fanouts=(10, 10), batch_size=256)  # seeds of one rank
    run = hl.Trainer(model, data, method, epochs=3, out=out, show=False).fit()

    correct = torch.tensor([run.test])
    dist.all_reduce(correct)  # the process group is the script's own, before and after
    if dist.get_rank() == 0:
        print(f"test {data.metric} {correct.item() / dist.get_world_size():.4f} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
