"""Cases for the comparison with `reference_loops.py`: a graph, methods, models, and scenarios of training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Data

import hopline as hl
from hopline.core.seed_order import seed_batches
from hopline.ops import derive_key
from tests.equivalence import reference_loops as plain
from tests.support.helpers import randint, randn, random_graph
from tests.support.own_modules import opaque

NUM_NODES = 40
NUM_FEATURES = 6
NUM_CLASSES = 3
FULL = 40
"""A fan-out above every in-degree: trees have no "all"."""


def _make_data() -> plain.Data:
    """A directed graph with loops, double edges, a hub, nodes without in-edges, and one without any edge."""
    graph = random_graph(NUM_NODES, 130, loops=True)
    y = randint(0, NUM_CLASSES, NUM_NODES, seed=9)
    data = Data(x=randn(NUM_NODES, NUM_FEATURES), y=y, edge_index=graph.edge_index())
    ids = torch.arange(NUM_NODES)
    data.train_mask = (ids % 2 == 1) | (ids < 5)  # the hub is 0, the node without edges 39
    data.val_mask = ~data.train_mask & (ids < 25)
    data.test_mask = ~data.train_mask & ~data.val_mask
    return data


DATA: plain.Data = _make_data()


def data_with(**attributes: Tensor) -> plain.Data:
    """The graph with other attributes of its nodes or edges."""
    data = copy.copy(DATA)
    for name, value in attributes.items():
        data[name] = value
    return data


WEIGHTED = data_with(edge_weight=randn(DATA.num_edges, seed=4).abs() + 0.1)
ATTRIBUTED = data_with(edge_attr=randn(DATA.num_edges, 2, seed=5))
MULTI_LABEL = data_with(y=torch.stack([randint(0, 2, NUM_NODES, seed=s) for s in (6, 7, 8)], dim=1))
BINARY = data_with(y=randint(0, 2, NUM_NODES, seed=6))


# ---- methods


@dataclass(frozen=True)
class CallingConvention:
    """A method as it is compared, and which reference loop is its own."""

    method: Callable[[int], hl.extend.Method]
    """Number of layers -> the method."""
    epochs: int
    """Enough epochs for ten steps or more."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_history: bool = False
    """Whether the reference is `History`, and not the whole graph."""


def _full_batch(aggregation: Any) -> CallingConvention:
    """Full-batch training over three shards, one step an epoch."""
    return CallingConvention(
        lambda layers: hl.FullBatch(num_shards=3, partition="random", aggregation=aggregation), epochs=10
    )


def _sampled(layout: Any, fanout: int) -> CallingConvention:
    """Sampled training with all edges; batch_size 7."""
    return CallingConvention(
        lambda layers: hl.Sampled(fanouts=(fanout,) * layers, batch_size=7, layout=layout, workers=1), epochs=3
    )


def _historical(num_parts: int, parts_per_batch: int, **settings: Any) -> hl.Historical:
    """Historical training on random parts."""
    return hl.Historical(num_parts=num_parts, parts_per_batch=parts_per_batch, partition="random", **settings)


WAYS: dict[str, CallingConvention] = {
    "sampled-block": _sampled("block", -1),
    "sampled-tree": _sampled("tree", FULL),
    "historical": CallingConvention(lambda layers: _historical(8, 2), epochs=3, has_history=True),
    "historical-one-batch": CallingConvention(lambda layers: _historical(3, 3), epochs=10),
    # All batches of an epoch are one step, with exact tables before it.
    "historical-compensated": CallingConvention(
        lambda layers: _historical(4, 2, compensate=True, refresh_every=1), epochs=10, settings={"accumulate": 2}
    ),
    "sweep": _full_batch("sweep"),
    "sequential": _full_batch("sequential"),
    "stored": _full_batch("stored"),
    "one-shot": _full_batch("one_shot"),
}


# ---- models


def sage_gcn(num_outputs: int = NUM_CLASSES) -> nn.Module:
    """A SAGE and a GCN layer."""
    return hl.nn.GNN([pyg.SAGEConv(NUM_FEATURES, 8), pyg.GCNConv(8, num_outputs)])


def two_sage() -> nn.Module:
    """Two SAGE layers, the second with a maximum."""
    return hl.nn.GNN([pyg.SAGEConv(NUM_FEATURES, 8), pyg.SAGEConv(8, NUM_CLASSES, aggr="max")])


def gcn_graph() -> nn.Module:
    """Convs that take edge weights."""
    return hl.nn.GNN([pyg.GCNConv(NUM_FEATURES, 8), pyg.GraphConv(8, NUM_CLASSES)])


def gat() -> nn.Module:
    """Convs that take edge attributes."""
    return hl.nn.GNN([pyg.GATConv(NUM_FEATURES, 4, heads=2, edge_dim=2), pyg.GATv2Conv(8, NUM_CLASSES, edge_dim=2)])


def tied_layers() -> nn.Module:
    """One conv in two places."""
    shared = pyg.SAGEConv(NUM_FEATURES, NUM_FEATURES)
    return hl.nn.GNN([shared, shared, pyg.GCNConv(NUM_FEATURES, NUM_CLASSES)])


def tied_weights() -> nn.Module:
    """One parameter in two convs."""
    first = pyg.SAGEConv(NUM_FEATURES, NUM_FEATURES)
    second = pyg.SAGEConv(NUM_FEATURES, NUM_FEATURES)
    assert isinstance(first.lin_l, nn.Module)
    assert isinstance(second.lin_r, nn.Module)
    second.lin_r.weight = first.lin_l.weight
    return hl.nn.GNN([first, second, pyg.GCNConv(NUM_FEATURES, NUM_CLASSES)])


class OwnModule(nn.Module):
    """A module with no layers that hopline could see."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.SAGEConv(NUM_FEATURES, 8)
        self.second = pyg.GCNConv(8, 8)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = opaque(x)
        first = self.first(x, edge_index).tanh()
        return self.head(torch.cat([first, self.second(first, edge_index).sigmoid()], dim=1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pyg.GraphSAGE": lambda: pyg.GraphSAGE(NUM_FEATURES, 8, 2, NUM_CLASSES),
    "pyg.GCN": lambda: pyg.GCN(NUM_FEATURES, 8, 3, NUM_CLASSES),
    "own module": OwnModule,
}


def make(model: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model in float64 with first weights of a seed."""
    torch.manual_seed(seed)
    return model().double()


def plain_twin(model: nn.Module) -> nn.Module:
    """The same model in plain torch, with weights of its own."""
    model = copy.deepcopy(model)
    return plain.Layers(model.convs) if isinstance(model, hl.nn.GNN) else model


# ---- scenarios


@dataclass(frozen=True)
class Scenario:
    """What is trained, and how."""

    model: Callable[[], nn.Module] = sage_gcn
    data: plain.Data = field(default_factory=lambda: DATA)
    dataset: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `hl.from_pyg`."""
    loss: plain.Loss = plain.cross_entropy
    task: hl.extend.Task | hl.Regression | hl.Classification | None = None
    """What hopline learns. None: the default of the labels."""
    examples: tuple[Tensor, Tensor] | None = None
    """(nodes, labels) of the terms of the loss, a node perhaps several times. None: the training nodes."""
    own_loss: bool = False
    """Whether hopline gets the loss as `train_step`; else it is what the task means without one."""
    optimizer: str = "sgd"
    lr: float = 0.5
    weight_decay: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the Trainer that are arguments of the reference loop too."""
    batch_size: int | None = None
    """Of `Sampled`, where it matters."""
    prepare: Callable[[nn.Module], None] | None = None
    """What is done to the model before training."""
    after_step: plain.AfterStep | None = None
    without: tuple[str, ...] = ()
    """Ways in which it means something else; docs/same_as_pyg.md says what."""


def freeze_first(model: Any) -> None:
    """Freeze the first conv."""
    model.convs[0].requires_grad_(False)


def unfreeze(step: int, model: Any, optimizer: Optimizer) -> None:
    """The first conv learns from the fifth step on, and the last no more from the ninth on."""
    if step == 4:
        model.convs[0].requires_grad_(True)
    if step == 8:
        model.convs[-1].requires_grad_(False)


def change_rate(step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Change the learning rate after every step."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5 if step % 2 else 1.5


@torch.no_grad()
def change_weights(step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Weights that are kept small, and one that is set."""
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)
    if step == 5:
        next(iter(model.parameters())).zero_()


def halve_output(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """A forward hook."""
    return out / 2


def shift_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook."""
    return (inputs[0] + 0.5, *inputs[1:])


def hook_convs(model: Any) -> None:
    """Forward hooks on convs."""
    model.convs[0].register_forward_hook(halve_output)
    model.convs[1].register_forward_hook(halve_output)


def hook_inside(model: Any) -> None:
    """Forward hooks on modules inside convs, which a fused conv would not call."""
    model.convs[0].lin_l.register_forward_hook(halve_output)
    model.convs[1].lin.register_forward_pre_hook(shift_input)


def hook_gradients(model: Any) -> None:
    """A mask on a gradient: half of a weight is never changed."""
    for conv in (model.convs[0].lin_l, model.convs[1].lin):
        mask = (torch.arange(conv.weight.size(0)) % 2).double()[:, None]
        conv.weight.register_hook(lambda gradient, mask=mask: gradient * mask)


# ---- examples that are not seeds


EXAMPLE_NODES = torch.cat([torch.arange(5).repeat(4), torch.arange(7, NUM_NODES, 3), torch.tensor([39, 12, 39])])
"""The hub 0 four times, the node without edges 39 three times."""
EXAMPLE_LABELS = randint(0, NUM_CLASSES, EXAMPLE_NODES.numel(), seed=3)
"""Labels of the examples: those of one node differ."""


class Votes(hl.extend.Task):
    """Several labels for a node, each a term of cross entropy."""

    metric = "accuracy"
    is_mean = True

    def examples(self, splits: Mapping[str, Tensor], split: str) -> hl.extend.Examples:
        return hl.extend.Examples(EXAMPLE_NODES, EXAMPLE_LABELS)

    def loss(self, model: nn.Module, batch: hl.Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch), batch.labels)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        return {"accuracy": float((outputs.argmax(1) == y).double().mean())}


class JointVotes(Votes):
    """The same with a loss that must see all examples at once, each with its own label."""

    is_mean = False

    def loss(self, model: nn.Module, batch: hl.Batch) -> Tensor:
        return joint_votes(model, model(batch), batch.labels)


def joint_votes(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, and a term that is no mean over rows: scores of one label against those of the others."""
    is_first = y == 0
    spread = (out[is_first].sum(0) - out[~is_first].sum(0)).square().mean() / out.size(0)
    return nn.functional.cross_entropy(out, y) + 0.05 * spread


# ---- regression


def _numbers() -> plain.Data:
    """The graph with three numbers per node, of which about a third is not known; each node has the first."""
    y = randn(NUM_NODES, 3, seed=11).double() * 5 + 20
    y[:, 1:][randn(NUM_NODES, 2, seed=12) < -0.3] = torch.nan
    return data_with(y=y)


ONE_NUMBER = data_with(y=randn(NUM_NODES, seed=13).double())
NUMBERS = _numbers()


def standardised_huber(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Huber loss of the known entries, in units of mean 0 and deviation 1 over the training nodes."""
    train = NUMBERS.y[DATA.train_mask]
    mean = train.nanmean(0)
    target = (y - mean) / (train - mean).square().nanmean(0).sqrt()
    is_known = ~y.isnan()
    return nn.functional.huber_loss(out[is_known], target[is_known])


def mean_squares(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(out.view(-1), y)


def known_squares(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(out[~y.isnan()], y[~y.isnan()])


def smooth_class_weights(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=out.dtype)
    return nn.functional.cross_entropy(out, y, weight=weight, label_smoothing=0.1)


def without_first_class(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([0.0, 1.0, 3.0], dtype=out.dtype)
    if not (y > 0).any():
        return out.sum() * 0
    return nn.functional.cross_entropy(out, y, weight=weight)


OWN = Scenario(own_loss=True)
SCENARIOS: dict[str, Scenario] = {
    "usual loss": Scenario(),
    "parameters in the loss": replace(OWN, loss=plain.with_parameters),
    "label smoothing": replace(OWN, loss=plain.label_smoothing),
    # Each batch divides by the weights of its own seeds, and tables of gradients by those of all.
    "class weights": replace(OWN, loss=plain.class_weights, without=("historical-compensated",)),
    "multi-label": Scenario(data=MULTI_LABEL, dataset={"task": "multi"}, loss=plain.multi_label),
    "binary": Scenario(model=lambda: sage_gcn(1), data=BINARY, dataset={"task": "binary"}, loss=plain.binary),
    "two classes, one column": Scenario(model=lambda: sage_gcn(1), data=BINARY, loss=plain.binary),
    "accumulation, uneven last batch": Scenario(
        settings={"accumulate": 3}, batch_size=4, without=("historical-compensated",)
    ),
    "clipping": Scenario(settings={"clip_norm": 0.05}),
    "adam, weight decay": Scenario(optimizer="adam", lr=0.05, weight_decay=0.1),
    "adamw, weight decay": Scenario(optimizer="adamw", lr=0.05, weight_decay=0.1),
    "frozen": Scenario(prepare=freeze_first),
    "unfrozen": Scenario(prepare=freeze_first, after_step=unfreeze),
    "unfrozen, clipping": Scenario(prepare=freeze_first, after_step=unfreeze, settings={"clip_norm": 0.05}),
    "tied layers": Scenario(model=tied_layers),
    "tied weights": Scenario(model=tied_weights),
    "callback changes the rate": Scenario(after_step=change_rate),
    "callback changes weights": Scenario(after_step=change_weights),
    "hooks on convs": Scenario(model=two_sage, prepare=hook_convs),
    "hooks within convs": Scenario(prepare=hook_inside),
    "hooks on gradients": Scenario(prepare=hook_gradients),
    "repeated training ids": Scenario(examples=(EXAMPLE_NODES.sort().values, DATA.y[EXAMPLE_NODES.sort().values])),
    "examples with labels of their own": Scenario(task=Votes(), examples=(EXAMPLE_NODES, EXAMPLE_LABELS)),
    "a joint loss of examples": Scenario(
        task=JointVotes(),
        examples=(EXAMPLE_NODES, EXAMPLE_LABELS),
        loss=joint_votes,
        without=("historical-compensated",),
    ),
    "regression": Scenario(model=lambda: sage_gcn(1), data=ONE_NUMBER, loss=mean_squares, lr=0.1),
    "regression, standardised, some not known": Scenario(
        data=NUMBERS,
        task=hl.Regression(loss="huber", standardize=True),
        loss=standardised_huber,
    ),
    "regression, some not known": Scenario(data=NUMBERS, task=hl.Regression(), loss=known_squares, lr=0.01),
    "class weights and smoothing of the task": Scenario(
        task=hl.Classification(class_weights=(0.2, 1.0, 3.0), label_smoothing=0.1),
        loss=smooth_class_weights,
    ),
    # With one or two seeds, whole batches have no weight.
    "a class that does not count": Scenario(
        task=hl.Classification(class_weights=(0.0, 1.0, 3.0)),
        loss=without_first_class,
        batch_size=2,
    ),
    "edge weights": Scenario(model=gcn_graph, data=WEIGHTED),
    "edge attributes": Scenario(model=gat, data=ATTRIBUTED),
}


# ---- training by both


class Steps(hl.Callback):
    """Records losses by step and rates by epoch; calls the after_step of the reference after each step."""

    def __init__(self, after_step: plain.AfterStep | None = None) -> None:
        self.after_step = after_step
        self.losses: dict[int, float] = {}
        self.rates: dict[int, float] = {}

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        self.losses[step.step] = float(step.loss)
        if self.after_step is not None:
            self.after_step(step.step, trainer.model, trainer.optimizer)

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        self.rates[epoch.epoch] = epoch.lr

    @property
    def trained(self) -> plain.Trained:
        return plain.Trained(list(self.losses.values()), list(self.rates.values()))


def train_step_of(loss: plain.Loss) -> Callable[[nn.Module, hl.Batch], Tensor]:
    """A loss of the reference loops as the `train_step` of a Trainer."""

    def train_step(model: nn.Module, batch: hl.Batch) -> Tensor:
        return loss(model, model(batch), batch.labels)

    return train_step


def dataset_of(scenario: Scenario, *, evaluated: bool = False) -> hl.Dataset:
    """The dataset of a scenario. evaluated: with its validation and test nodes, so that the best epoch is kept."""
    data = hl.from_pyg(scenario.data, **scenario.dataset)
    if scenario.examples is not None and scenario.task is None:
        data = replace(data, splits={**data.splits, "train": scenario.examples[0]})
    return data if evaluated else replace(data, splits={"train": data.splits["train"]})


def trainer_of(scenario: Scenario, way: CallingConvention, model: nn.Module, **options: Any) -> hl.Trainer:
    """The Trainer of a scenario by a method. options: further settings, and data=."""
    method = way.method(len(getattr(model, "convs", (None, None))))
    if isinstance(method, hl.Sampled) and scenario.batch_size is not None:
        method = replace(method, batch_size=scenario.batch_size)
    settings: dict[str, Any] = {
        "epochs": way.epochs,
        "optimizer": scenario.optimizer,
        "lr": scenario.lr,
        "weight_decay": scenario.weight_decay,
        "train_step": train_step_of(scenario.loss) if scenario.own_loss else None,
        "task": scenario.task,
        "show": False,
    }
    settings |= {**way.settings, **scenario.settings, **options}
    data = settings.pop("data", None) or dataset_of(scenario)
    return hl.Trainer(model, data, method, **settings)


def epochs_of(
    trainer: hl.Trainer, way: CallingConvention, num_epochs: int, scenario: Scenario | None = None
) -> list[list[Tensor]]:
    """The nodes of every batch of every epoch, in hopline's order. For sampled examples: their numbers."""
    if isinstance(trainer.method, hl.Sampled) and scenario is not None and scenario.examples is not None:
        numbers = torch.arange(len(scenario.examples[0]))
        keys = [derive_key(trainer.settings.seed, epoch) for epoch in range(1, num_epochs + 1)]
        return [list(seed_batches(numbers, trainer.method.batch_size, key)) for key in keys]
    if isinstance(trainer.method, hl.Sampled):
        loader = trainer.method.loader(trainer.data, seed=trainer.settings.seed, model=trainer.model)
        return [[batch.seeds for batch in loader.epoch(epoch)] for epoch in range(1, num_epochs + 1)]
    if way.has_history:
        work: Any = trainer.work
        parts = work.partitioned.parts
        return [[parts.nodes_of(g) for g in work.groups.groups_of(epoch)] for epoch in range(1, num_epochs + 1)]
    return [[torch.arange(trainer.data.num_nodes)]] * num_epochs


def optimizer_of(scenario: Scenario, model: nn.Module) -> Optimizer:
    """The optimizer of a scenario in plain torch."""
    kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[scenario.optimizer]
    return kind(model.parameters(), lr=scenario.lr, weight_decay=scenario.weight_decay)


def reference_of(
    scenario: Scenario, way: CallingConvention, model: nn.Module, epochs: list[list[Tensor]], **options: Any
) -> plain.Trained:
    """Train a plain model by the reference loop."""
    arguments: dict[str, Any] = {"optimizer": optimizer_of(scenario, model), "after_step": scenario.after_step}
    arguments |= {**scenario.settings, "loss": scenario.loss}
    if way.has_history:
        history = plain.History(model, scenario.data)
        arguments |= {"outputs": history.outputs, "commit": history.commit}
    if scenario.examples is not None:
        nodes, labels = scenario.examples
        is_sampled = isinstance(way.method(2), hl.Sampled)

        def examples(batch: Tensor) -> tuple[Tensor, Tensor]:
            chosen = batch if is_sampled else torch.isin(nodes, batch)
            return nodes[chosen], labels[chosen]

        arguments["examples"] = examples
    return plain.train(model, scenario.data, epochs, **(arguments | options))


def assert_same(ours: plain.Trained, expected: plain.Trained, tolerance: float = 1e-9) -> None:
    """Losses of all steps and rates of all epochs are equal."""
    assert len(ours.losses) == len(expected.losses)
    for name in ("losses", "rates"):
        our_values = torch.tensor(getattr(ours, name), dtype=torch.float64)
        expected_values = torch.tensor(getattr(expected, name), dtype=torch.float64)
        torch.testing.assert_close(
            our_values, expected_values, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_same_weights(ours: nn.Module, expected: nn.Module, tolerance: float = 1e-9) -> None:
    """Parameters have the same names and values."""
    our_weights = dict(ours.named_parameters())
    expected_weights = dict(expected.named_parameters())
    assert list(our_weights) == list(expected_weights)
    for name in our_weights:
        torch.testing.assert_close(
            our_weights[name], expected_weights[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
