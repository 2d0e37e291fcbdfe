"""A subclass: another learning rate for the last layer, and a second metric."""

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl


class TwoRates(hl.Trainer):
    def make_optimizer(self) -> torch.optim.Optimizer:
        last = list(self.model.get_submodule("convs.1").parameters())
        rest = [p for p in self.model.parameters() if not any(p is q for q in last)]
        groups = [{"params": rest}, {"params": last, "lr": self.settings.lr / 2}]
        return torch.optim.AdamW(groups, lr=self.settings.lr)

    def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
        found = super().evaluate(split, exact=exact)
        return found | {"error": 1 - found["accuracy"]}


def main(name: str = "demo", epochs: int = 3) -> hl.Run:
    data = hl.open(name)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    return TwoRates(model, data, hl.Sampled(fanouts=(10, 5)), epochs=epochs).fit()


if __name__ == "__main__":
    main()
