"""Ranks of a user's process group that were given different things: by every method, and in loops of the user's own."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.data.synthetic import planted_partition


@dataclasses.dataclass(frozen=True)
class OwnMethod(hl.extend.Method):
    """A method of the user's own."""

    batch_size: int = 5

    def bind(self, job: hl.extend.Job) -> hl.extend.Work:
        return hl.Sampled(fanouts=(3, 2), batch_size=self.batch_size, workers=1).bind(job)


METHODS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sampled": (hl.Sampled, {"fanouts": (3, 2), "batch_size": 5, "workers": 1}),
    "historical": (hl.Historical, {"num_parts": 6, "parts_per_batch": 2, "partition": "random"}),
    "full_batch": (hl.FullBatch, {"partition": "random"}),
    "own": (OwnMethod, {}),
}
"""By name: the class of a method, and its settings."""
METHOD_SETTING: dict[str, tuple[str, tuple[Any, Any]]] = {
    "sampled": ("batch_size", (5, 6)),
    "historical": ("parts_per_batch", (2, 3)),
    "full_batch": ("trim", (False, True)),
    "own": ("batch_size", (5, 6)),
}
"""By method: a setting that must not differ, and its values on the two ranks."""


def dataset(num_train: int = 29, seed: int = 0) -> hl.Dataset:
    return planted_partition(
        num_nodes=60, num_edges=300, num_classes=3, num_features=4, num_train=num_train, num_valid=10, seed=seed
    )


def model(hidden: int = 6, aggr: str = "mean") -> hl.nn.GNN:
    """Two layers, whose weights are drawn from torch's generator."""
    return hl.nn.GNN([SAGEConv(4, hidden, aggr=aggr), SAGEConv(hidden, 3)])


def with_train(data: hl.Dataset, ids: torch.Tensor) -> hl.Dataset:
    return dataclasses.replace(data, splits=data.splits | {"train": ids})


def with_rows(data: hl.Dataset, rows: torch.Tensor) -> hl.Dataset:
    return dataclasses.replace(data, tables={"x": hl.extend.TensorTable(rows)})


ALL_NODES = "give every rank all nodes, of which hopline gives each rank its share"
REFUSED = {
    "own halves": f"the split 'train' (14 nodes against 15 nodes): {ALL_NODES}",
    "equal halves": f"the split 'train' (both 14 nodes, with other values): {ALL_NODES}",
    "seed": "seed (1 against 0): give every rank one seed, by which they divide the nodes",
    "features": "table 'x' (both float32 [60, 4], with other values): give every rank the same",
    "one feature": "table 'x' (both float32 [60, 4], with other values): give every rank the same",
    "edges": "the edges (both 60 nodes, 300 edges, with other values): give every rank the same",
    "aggr": "the settings or the code of the model: give every rank the same",
    "width": "'convs.0.lin_l.weight' of the model ([7, 4] float32 against [6, 4] float32): give every rank the same",
    "setting of the method": "method.",
}
"""What the error says of a rank that was given something else than rank 0, by a Trainer and by a loader."""
REFUSED_BY_TRAINER = {
    "lr": "lr (0.02 against 0.01): give every rank the same",
    "epochs": "epochs (2 against 1): give every rank the same",
    "train_step": "train_step ('cross_entropy' against None): give every rank the same",
    "budget": "budget.device ('2GiB' against '1GiB'): give every rank the same",
    "optimizer": "optimizer ('RMSprop(alpha=0.6)' against 'RMSprop(alpha=0.5)'): give every rank the same",
}
ALLOWED = ("nothing", "workers", "one in memory, one mapped")
"""Differences that change no result."""
ALLOWED_FOR_TRAINER = ("weights", "optimizer of torch", "out, show and checkpoints on rank 0", "out on rank 1")


def arguments(case: str, method: str, rank: int, folder: Path) -> dict[str, Any]:
    """What a rank gives to its Trainer or loader: "model", "data", "method", "seed", and options of the Trainer."""
    data = dataset()
    kind, settings = METHODS[method]
    given: dict[str, Any] = {"model": model(), "data": data, "method": kind(**settings), "seed": 0, "options": {}}
    train_ids = data.splits["train"]
    rows = data.x.read(torch.arange(60))
    if case == "own halves":
        given["data"] = with_train(data, train_ids[rank::2])  # 15 and 14, as a DistributedSampler would
    elif case == "equal halves":
        given["data"] = with_train(data, train_ids[:28][rank::2])
    elif case == "seed":
        given["seed"] = rank
    elif case == "features":
        given["data"] = with_rows(data, rows + rank)
    elif case == "one feature":  # in the folder of rank 1, one number of one row is another one
        rows[31, 2] += rank
        with_rows(data, rows).save(folder / f"graph{method}{rank}")
        given["data"] = hl.open(folder / f"graph{method}{rank}")
    elif case == "edges":
        given["data"] = dataset(seed=rank)
    elif case == "aggr":
        given["model"] = model(aggr=("mean", "max")[rank])
    elif case == "width":
        given["model"] = model(hidden=6 + rank)
    elif case == "setting of the method":
        name, values = METHOD_SETTING[method]
        given["method"] = kind(**settings | {name: values[rank]})
    elif case == "lr":
        given["options"] = {"lr": 0.01 * (1 + rank)}
    elif case == "epochs":
        given["options"] = {"epochs": 1 + rank}
    elif case == "train_step":
        given["options"] = {"train_step": cross_entropy} if rank else {}
    elif case == "budget":
        given["options"] = {"budget": f"{1 + rank}GiB"}
    elif case == "optimizer":
        given["options"] = {"optimizer": partial(torch.optim.RMSprop, alpha=0.5 + rank / 10)}
    elif case == "optimizer of torch":
        optimizer = torch.optim.RMSprop(given["model"].parameters())
        given["options"] = {"optimizer": optimizer, "schedule": partial(StepLR, step_size=1), "schedule_every": "step"}
    elif case == "out, show and checkpoints on rank 0":
        given["options"] = {"out": folder / f"run{method}", "show": True, "checkpoint_s": 0.0} if rank == 0 else {}
    elif case == "out on rank 1":
        given["options"] = {"out": folder / "none", "checkpoint_s": 0.0} if rank == 1 else {}
    elif case == "workers" and method == "sampled":  # other methods have no such setting
        given["method"] = kind(**settings | {"workers": rank, "look_ahead": 1 + rank})
    elif case == "weights":
        torch.manual_seed(rank)
        given["model"] = model()
    elif case == "one in memory, one mapped":
        if rank == 1:
            data.save(folder / f"mapped{method}")
            given["data"] = hl.open(folder / f"mapped{method}")
    else:
        assert case in ("nothing", "workers"), case
    return given


def cross_entropy(net: nn.Module, batch: hl.Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch), batch.labels)


class CountSeeds(hl.Callback):
    """Counts the seeds of all steps and ranks."""

    num_seeds = 0.0

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        self.num_seeds += step.size


def train(case: str, method: str, world: hl.World, folder: Path) -> str:
    """ "NUM_SEEDS seeds, the same weights" of a run by a Trainer, or its error."""
    given = arguments(case, method, world.rank, folder)
    finds_ranks = case in ("own halves", "nothing")  # as most scripts let it
    options = {"epochs": 1, "show": False, "world": None if finds_ranks else world} | given["options"]
    seeds = CountSeeds()
    net = given["model"]
    try:
        hl.Trainer(net, given["data"], given["method"], seed=given["seed"], callbacks=[seeds], **options).fit()
    except ValueError as error:
        return str(error)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    weights_of_first = weights.clone()
    dist.broadcast(weights_of_first, 0)
    which = "the same" if torch.equal(weights_of_first, weights) else "other"
    return f"{seeds.num_seeds:.0f} seeds, {which} weights"


def train_in_own_loop(case: str, method: str, world: hl.World, folder: Path) -> str:
    """ "NUM_SEEDS seeds" of a loop of the user's own over all ranks, or its error."""
    given = arguments(case, method, world.rank, folder)
    net = given["model"]
    try:
        loader = given["method"].loader(given["data"], "train", model=net, seed=given["seed"], world=world)
    except ValueError as error:
        return str(error)
    num_seeds = 0
    for batch in loader:
        loss = nn.functional.cross_entropy(net(batch), batch.labels, reduction="sum") / batch.total_seeds
        loss.backward()
        num_seeds += batch.num_seeds
        if method == "historical":
            batch.commit()
    return f"{world.sum([num_seeds])[0]:.0f} seeds"


def try_all(folder: Path) -> dict[str, dict[str, str]]:
    """The outcome of every case on this rank, by the call and the case."""
    world = hl.World.current()
    outcomes: dict[str, dict[str, str]] = {}
    for method in METHODS:
        cases = [*REFUSED, *REFUSED_BY_TRAINER, *ALLOWED, *ALLOWED_FOR_TRAINER]
        outcomes[f"hl.Trainer by {method}"] = {case: train(case, method, world, folder) for case in cases}
        if method != "own":  # it has no loader
            by_loader = {case: train_in_own_loop(case, method, world, folder) for case in [*REFUSED, *ALLOWED]}
            outcomes[f"a loader of {method}"] = by_loader
    world.close()
    return outcomes
