"""A callback: stop once the loss is low enough, and watch the gradient's norm on the way."""

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl


class StopAtLoss(hl.Callback):
    def __init__(self, target: float) -> None:
        self.target = target
        self.norms: list[float] = []

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        squares = [p.grad.square().sum() for p in trainer.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        if epoch.loss < self.target:
            trainer.stop(f"the loss is below {self.target}")


def main(name: str = "demo", epochs: int = 10, target: float = 0.9) -> hl.Run:
    data = hl.open(name)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    watch = StopAtLoss(target)
    method = hl.Sampled(fanouts=(10, 5))
    run = hl.Trainer(model, data, method, callbacks=[watch], epochs=epochs).fit()
    print(f"stopped: {run.reason}; largest gradient norm {max(watch.norms):.2f}")
    return run


if __name__ == "__main__":
    main()
