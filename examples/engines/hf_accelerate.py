"""HF Accelerate makes the process group; hopline trains in it: accelerate launch --num_processes 2 THIS_FILE [DATA]."""

import sys

import torch
from accelerate import Accelerator  # type: ignore
from torch_geometric.nn import SAGEConv

import hopline as hl


def main(source: str = "demo", out: str | None = None) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data = hl.open(source)
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    method = hl.Sampled(fanouts=(10, 10), batch_size=256)  # seeds of one rank
    options = {"epochs": 3, "out": out, "show": False, "device": accelerator.device.type}
    run = hl.Trainer(model, data, method, **options).fit()

    mean = accelerator.reduce(torch.tensor([run.test], device=accelerator.device), reduction="mean")
    accelerator.print(f"test {data.metric} {mean.item():.4f} on {accelerator.num_processes} ranks")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:3])
