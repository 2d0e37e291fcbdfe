"""Lightning Fabric starts the processes and logs; hopline trains: python THIS_FILE [DATA]."""

import sys

import torch
from lightning.fabric import Fabric  # type: ignore
from torch_geometric.nn import SAGEConv

import hopline as hl


class LogByFabric(hl.Callback):
    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        self.fabric.log_dict({"loss": epoch.loss, "seeds_per_s": epoch.seeds_per_s}, step=epoch.epoch)


def main(source: str = "demo", out: str | None = None) -> None:
    fabric = Fabric(accelerator="auto", devices=2, strategy="ddp")
    fabric.launch()  # from here on there are two processes and a process group
    data = hl.open(source)
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    method = hl.Sampled(fanouts=(10, 10), batch_size=256)  # seeds of one rank
    options = {"epochs": 3, "out": out, "show": False, "device": fabric.device.type}
    run = hl.Trainer(model, data, method, callbacks=[LogByFabric(fabric)], **options).fit()

    total = fabric.all_reduce(torch.tensor([run.test]), reduce_op="mean")
    fabric.print(f"test {data.metric} {total.item():.4f} on {fabric.world_size} ranks")


if __name__ == "__main__":
    main(*sys.argv[1:3])
