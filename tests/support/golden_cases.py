"""The cases of the golden record: small fixed runs of every method, and what is written down of each.

A case names a model, a method, a dataset and settings. `train` runs it and returns a *result*, plain
data of three kinds:

    counts   whole numbers (edges, rows, steps): equal on every machine
    floats   losses, metrics, projections of the final weights: equal to the bit on one machine and
             to 1e-10 in float64 on another
    bits     checksums of the final weights: equal on one machine

Data and first weights are whole numbers over powers of two, made by a hash written out here, so that
no library can change them. Every case is float64 with at most ten optimizer steps, but for those whose
name begins with `float32` or `bf16`.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline import infer, ops
from hopline.core.partition import make_partition
from hopline.core.sampler import NeighborSampler
from hopline.core.seed_order import seed_batches
from hopline.core.tree_layout import TreeSampler
from hopline.data.placement import place
from hopline.data.synthetic import planted_partition
from hopline.distributed.world import World
from hopline.methods.historical.edge_dropout import drop_edges
from hopline.methods.historical.groups import Groups
from hopline.methods.partitioned.parts import Parts
from hopline.methods.partitioned.rank_histories import PartAssignment
from hopline.methods.sampled.captured_step import CapturedWork
from hopline.shards.layout import shard_layouts
from hopline.tables.hot_rows import hottest, out_degrees

Result = dict[str, Any]
"""The recorded result of a case: field -> numbers, texts, or lists of them."""

# ---- numbers that no library decides


def whole_numbers(count: int, seed: int, limit: int) -> Tensor:
    """[count] int64 in [0, limit): SplitMix64 of (seed, position)."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) + np.array([seed << 32], dtype=np.uint64)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return torch.from_numpy((mixed % np.uint64(limit)).astype(np.int64))


def dyadic(count: int, seed: int) -> Tensor:
    """[count] float64 in [-1, 1), multiples of 1/1024: exact in every precision that training uses."""
    return (whole_numbers(count, seed, 2048) - 1024).double() / 1024


def checksum(tensors: Iterable[Tensor]) -> str:
    """A checksum of the bytes of some tensors; integers count as int64, since their width is no result."""
    digest = hashlib.sha256()
    for tensor in tensors:
        on_host = tensor.detach().cpu()
        values = on_host if on_host.is_floating_point() else on_host.long()
        digest.update(f"{list(values.shape)}".encode())
        digest.update(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def projection(tensor: Tensor) -> float:
    """A number that depends on every element and its place: an inner product, rounded once."""
    values = tensor.detach().cpu().double().flatten()
    return math.fsum((values * dyadic(values.numel(), seed=77)).tolist())


# ---- data

NUM_FEATURES = 8
NUM_CLASSES = 4


def make_data(kind: str, dtype: torch.dtype = torch.float64) -> hl.Dataset:
    """A dataset by name, made anew.

    dense: 240 nodes of mean degree 8, with a hub, self-loops, double edges and three nodes without
    in-edges. thin: 400 nodes, 560 edges and 16 training nodes, so that each of six trimmed layers
    needs other nodes. weighted: dense with edge weights. sparse: dense, half of whose features are 0
    and not stored.
    """
    num_nodes, num_edges, num_train = (400, 560, 16) if kind == "thin" else (240, 1900, 90)
    src = whole_numbers(num_edges, 1, num_nodes)
    dst = whole_numbers(num_edges, 2, num_nodes - 3)
    dst[: num_edges // 8] = 0
    order = torch.argsort(dst, stable=True)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
    edge = {}
    if kind == "weighted":
        edge["weight"] = (whole_numbers(num_edges, 3, 1024).double() + 128)[order] / 512
    y = whole_numbers(num_nodes, 4, NUM_CLASSES)
    x = dyadic(num_nodes * NUM_FEATURES, 5).view(num_nodes, NUM_FEATURES)
    x[torch.arange(num_nodes), y] += 1
    if kind == "sparse":
        x[:, ::2] = 0
    x = x.to(dtype)
    shuffled = torch.argsort(whole_numbers(num_nodes, 6, 1 << 40))
    train, valid, test, _ = shuffled.split([num_train, 50, 60, num_nodes - num_train - 110])
    return hl.Dataset(
        name=f"golden-{kind}",
        graph=hl.Graph(indptr, src[order], edge),
        tables={"x": hl.extend.SparseTable.from_dense(x) if kind == "sparse" else hl.extend.TensorTable(x)},
        y=y,
        splits={"train": train, "valid": valid, "test": test},
        num_classes=NUM_CLASSES,
    )


# ---- models

WIDTH = 8
"""The width of every hidden row, and of the features."""


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _gcn2(num_layers: int) -> list[nn.Module]:
    return [pyg.GCN2Conv(WIDTH, alpha=0.1, theta=0.5, layer=layer + 1) for layer in range(num_layers)]


def _sage(num_layers: int, **options: Any) -> list[nn.Module]:
    return [pyg.SAGEConv(WIDTH, WIDTH, **options) for _ in range(num_layers)]


def _linear(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Linear(in_channels, out_channels)


MODELS: dict[str, Callable[[], hl.nn.GNN]] = {
    "sage": lambda: hl.nn.GNN(
        [*_sage(2), pyg.SAGEConv(WIDTH, NUM_CLASSES)],
        dropout=0.3,
        input_dropout=0.1,
    ),
    "sage-max": lambda: hl.nn.GNN(
        [*_sage(1, aggr="max"), pyg.SAGEConv(WIDTH, NUM_CLASSES)],
        norm="layer",
    ),
    "gcn": lambda: hl.nn.GNN(
        [pyg.GCNConv(WIDTH, WIDTH), pyg.GCNConv(WIDTH, WIDTH), pyg.GCNConv(WIDTH, NUM_CLASSES)],
        dropout=0.2,
        norm="layer",
    ),
    "gin": lambda: hl.nn.GNN(
        [pyg.GINConv(_mlp(), train_eps=True), pyg.GINConv(_mlp(), train_eps=True)],
        head=_linear(WIDTH, NUM_CLASSES),
        norm="batch",
    ),
    "gat": lambda: hl.nn.GNN(
        [pyg.GATConv(WIDTH, 4, heads=2), pyg.GATConv(WIDTH, NUM_CLASSES)],
        dropout=0.2,
    ),
    "gat-dropout": lambda: hl.nn.GNN(
        [pyg.GATConv(WIDTH, 4, heads=2, dropout=0.2), pyg.GATConv(WIDTH, NUM_CLASSES, dropout=0.2)],
        dropout=0.2,
    ),
    "residual": lambda: hl.nn.GNN(
        [*_sage(3), pyg.SAGEConv(WIDTH, NUM_CLASSES)],
        residual=True,
        norm="layer",
        dropout=0.1,
    ),
    "jk": lambda: hl.nn.GNN(
        _sage(3),
        jk="cat",
        head=_linear(3 * WIDTH, NUM_CLASSES),
        dropout=0.2,
    ),
    "gcn2": lambda: hl.nn.GNN(
        _gcn2(6),
        encoder=_linear(WIDTH, WIDTH),
        head=_linear(WIDTH, NUM_CLASSES),
        dropout=0.2,
        input_dropout=0.1,
    ),
    "gcn2-jk": lambda: hl.nn.GNN(
        _gcn2(6),
        encoder=_linear(WIDTH, WIDTH),
        jk="cat",
        jk_encoder=True,
        head=_linear(7 * WIDTH, NUM_CLASSES),
        norm="layer",
        dropout=0.1,
    ),
    "initial": lambda: hl.nn.GNN(
        _sage(6),
        encoder=_linear(WIDTH, WIDTH),
        initial_residual=0.2,
        jk="max",
        jk_encoder=True,
        head=_linear(WIDTH, NUM_CLASSES),
        residual=True,
    ),
    "initial-gat": lambda: hl.nn.GNN(
        [pyg.GATConv(WIDTH, WIDTH) for _ in range(6)],
        encoder=_linear(WIDTH, WIDTH),
        initial_residual=0.2,
        head=_linear(WIDTH, NUM_CLASSES),
    ),
    "gat-norm": lambda: hl.nn.GNN(
        [pyg.GATConv(WIDTH, WIDTH), pyg.GATConv(WIDTH, WIDTH), pyg.GATConv(WIDTH, NUM_CLASSES)],
        norm="layer",
    ),
}
DRAWN_BY_TORCH = ("gat-dropout",)
"""Models whose convs draw from torch's generator, which is another one in another build of torch."""
FANOUTS = (4, 3, 3, 2, 2, 2)
"""Per layer, for models of up to six of them."""


def make_model(name: str, dtype: torch.dtype = torch.float64) -> hl.nn.GNN:
    """A model with first weights from `dyadic`."""
    model = MODELS[name]()
    with torch.no_grad():
        for number, (parameter_name, parameter) in enumerate(model.named_parameters()):
            draws = dyadic(parameter.numel(), 100 + number).view(parameter.shape)
            if parameter.dim() > 1:
                parameter.copy_(draws / 2)
            else:
                # A norm's weight is around 1, a bias around 0.
                parameter.copy_(draws / 8 + (1 if parameter_name.endswith("weight") else 0))
    return model.to(dtype)


def sampled(model: str, **changes: Any) -> hl.Sampled:
    """Neighbour sampling with five batches an epoch on `dense`."""
    settings: dict[str, Any] = {"fanouts": FANOUTS[: len(MODELS[model]().convs)], "batch_size": 20, "workers": 1}
    return hl.Sampled(**(settings | changes))


def historical(**changes: Any) -> hl.Historical:
    """Historical embeddings with four batches an epoch. METIS is left out: its parts are another library's."""
    settings: dict[str, Any] = {"num_parts": 8, "parts_per_batch": 2, "partition": "random"}
    return hl.Historical(**(settings | changes))


def full_batch(**changes: Any) -> hl.FullBatch:
    """Full batch in four shards, one step an epoch."""
    return hl.FullBatch(**({"num_shards": 4, "partition": "random"} | changes))


# ---- cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    model: str
    method: hl.extend.Method
    data: str = "dense"
    dtype: torch.dtype = torch.float64
    """The dtype of the model and the features."""
    epochs: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `Trainer`."""
    stop_at: int | None = None
    """The step in which the run fails, to be resumed from its checkpoint."""
    cached_rows: int | None = None
    """Rows that a `CachedTable` on the host keeps, with the features below it."""

    @property
    def is_float64(self) -> bool:
        """Whether another machine must find the same to 1e-10."""
        return self.dtype == torch.float64


def _sampled_cases() -> dict[str, Case]:
    cases = {
        f"sampled block {model}": Case(model=model, method=sampled(model, layout="block"))
        for model in ("sage", "gcn", "gat", "gat-dropout", "residual", "gcn2", "gcn2-jk", "initial")
    }
    cases |= {
        f"sampled tree {model}": Case(model=model, method=sampled(model, layout="tree"))
        for model in ("sage", "gcn", "gat", "jk", "gcn2-jk", "initial")
    }
    cases["sampled block gin, sums scaled, no workers"] = Case(
        model="gin", method=sampled("gin", layout="block", scale_sums=True, workers=0)
    )
    cases["sampled tree gin"] = Case(model="gin", method=sampled("gin", layout="tree"))
    cases["sampled block sage-max, replacement, adamw, cosine, clipped"] = Case(
        model="sage-max",
        method=sampled("sage-max", layout="block", replace=True, workers=2),
        settings={
            "optimizer": "adamw",
            "weight_decay": 0.01,
            "clip_norm": 0.5,
            "schedule": hl.Schedule(name="cosine", warmup=1),
        },
    )
    cases["sampled block gcn, weights, accumulated, sampled evaluation"] = Case(
        model="gcn",
        data="weighted",
        method=sampled("gcn", layout="block"),
        settings={"accumulate": 2, "inference": "sampled", "weight_decay": 0.01, "weight_decay_rest": 0.0},
    )
    cases["sampled block sage, sparse features, in order"] = Case(
        model="sage", data="sparse", method=sampled("sage", layout="block", shuffle=False, drop_last=True)
    )
    return cases


def _historical_cases() -> dict[str, Case]:
    cases = {
        f"historical {model}": Case(model=model, method=historical())
        for model in ("sage", "gat-dropout", "gcn2", "gcn2-jk", "initial")
    }
    cases |= {
        f"historical compensated {model}": Case(model=model, method=historical(compensate=True))
        for model in ("gcn", "gat", "gcn2-jk", "initial")
    }
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "refreshed": ("gcn2", {"refresh_every": 1, "groups": "fixed"}),
        "refreshed, compensated": ("initial", {"refresh_every": 1, "compensate": True}),
        "refreshed by evaluation": ("residual", {"refresh_every": "evaluation", "warm_up": False}),
        "bf16 storage, lag": ("residual", {"storage": "bf16", "lag": 1}),
        "edges dropped, lipschitz": ("gcn", {"edge_dropout": 0.2, "lipschitz": 0.1, "max_batches": 3}),
        "halo dropped": ("gin", {"halo": "drop"}),
        "float32 storage, range": ("gcn2-jk", {"storage": "float32", "partition": "range"}),
    }
    for name, (model, settings) in variants.items():
        cases[f"historical {model}, {name}"] = Case(model=model, method=historical(**settings))
    cases["historical gcn2-jk, refreshed every other epoch"] = Case(
        model="gcn2-jk", method=historical(refresh_every=2, warm_up=False, max_batches=3), epochs=3
    )
    return cases


def _full_batch_cases() -> dict[str, Case]:
    pairs = [
        ("sweep", "gcn"),
        ("sweep", "gat-dropout"),
        ("sweep", "residual"),
        ("sweep", "gcn2"),
        ("sweep", "gcn2-jk"),
        ("sweep", "initial"),
        ("sweep", "initial-gat"),
        ("sequential", "gin"),
        ("sequential", "gat-dropout"),
        ("sequential", "gcn2-jk"),
        ("stored", "sage-max"),
        ("stored", "gcn2"),
        ("stored", "initial-gat"),
        ("one_shot", "gcn"),
        ("one_shot", "gcn2-jk"),
        ("one_shot", "initial"),
    ]
    cases = {
        f"full batch {aggregation} gat-norm": Case(model="gat-norm", method=full_batch(aggregation=aggregation))
        for aggregation in ("sweep", "stored")
    }
    for aggregation, model in pairs:
        method: Any = full_batch(aggregation=aggregation)
        cases[f"full batch {aggregation} {model}"] = Case(model=model, method=method, epochs=3)
        if model == "gin":
            continue  # batch norms are over all rows, of which trimming leaves some out
        # Without trimming, thin adds nothing to dense but the run that a trimmed one must equal.
        for trim in (False, True) if aggregation == "sweep" else (True,):
            name = f"full batch {aggregation} {model}, thin{', trimmed' if trim else ''}"
            cases[name] = Case(model=model, method=replace(method, trim=trim), data="thin", epochs=2)
    return cases


def _other_cases() -> dict[str, Case]:
    def without_threads(model: str, **changes: Any) -> hl.Sampled:
        # Threads would split batches by what was learnt when they got there, which is never the same.
        return sampled(model, layout="block", workers=0, batch_size=45, **changes)

    return {
        "budget sampled sage": Case(
            model="sage", method=without_threads("sage"), epochs=3, settings={"budget": "180KiB"}
        ),
        "budget sampled gcn2-jk": Case(
            model="gcn2-jk", method=without_threads("gcn2-jk"), epochs=1, settings={"budget": "600KiB"}
        ),
        "budget historical gcn, compensated": Case(
            model="gcn", method=historical(compensate=True), settings={"budget": "540KiB"}
        ),
        "budget historical gcn2-jk": Case(
            model="gcn2-jk", method=historical(parts_per_batch=8), settings={"budget": "1100KiB"}
        ),
        "async sampled block sage": Case(
            model="sage", method=sampled("sage", layout="block"), settings={"evaluate": "async"}
        ),
        "async historical gcn2-jk": Case(model="gcn2-jk", method=historical(), settings={"evaluate": "async"}),
        "resumed sampled block gat-dropout": Case(
            model="gat-dropout", method=sampled("gat-dropout", layout="block"), stop_at=8
        ),
        "resumed sampled tree jk": Case(model="jk", method=sampled("jk", layout="tree"), stop_at=3),
        "resumed historical compensated gcn2-jk": Case(model="gcn2-jk", method=historical(compensate=True), stop_at=6),
        "resumed full batch sweep gcn2-jk": Case(
            model="gcn2-jk", method=full_batch(aggregation="sweep"), epochs=3, stop_at=3
        ),
        "float32 sampled block sage": Case(model="sage", method=sampled("sage", layout="block"), dtype=torch.float32),
        "float32 sampled tree gcn2-jk": Case(
            model="gcn2-jk", method=sampled("gcn2-jk", layout="tree"), dtype=torch.float32
        ),
        "float32 historical compensated gat": Case(
            model="gat", method=historical(compensate=True), dtype=torch.float32
        ),
        "float32 full batch sweep initial, thin, trimmed": Case(
            model="initial", method=full_batch(aggregation="sweep", trim=True), data="thin", dtype=torch.float32
        ),
        "bf16 sampled block sage": Case(
            model="sage",
            method=sampled("sage", layout="block"),
            dtype=torch.float32,
            settings={"precision": "bf16"},
        ),
    }


CASES: dict[str, Case] = _sampled_cases() | _historical_cases() | _full_batch_cases() | _other_cases()
"""Runs of one process on a CPU."""
SAME_RUN: dict[str, str] = {
    "async sampled block sage": "sampled block sage",
    "async historical gcn2-jk": "historical gcn2-jk",
    "resumed sampled block gat-dropout": "sampled block gat-dropout",
    "resumed sampled tree jk": "sampled tree jk",
    "resumed historical compensated gcn2-jk": "historical compensated gcn2-jk",
    "resumed full batch sweep gcn2-jk": "full batch sweep gcn2-jk",
}
"""Cases whose results are those of another, to the bit."""

NEARLY_SAME_RUN: dict[str, str] = {
    f"full batch sweep {model}, thin, trimmed": f"full batch sweep {model}, thin"
    for model in ("gcn", "residual", "gcn2", "gcn2-jk", "initial", "initial-gat")
} | {
    "full batch sequential gcn2-jk": "full batch sweep gcn2-jk",
    "full batch one_shot gcn2-jk": "full batch sweep gcn2-jk",
    "full batch stored gcn2": "full batch sweep gcn2",
    "full batch one_shot initial": "full batch sweep initial",
    "full batch stored initial-gat": "full batch sweep initial-gat",
    "full batch one_shot gcn": "full batch sweep gcn",
    "full batch stored gcn2, thin, trimmed": "full batch sweep gcn2, thin",
}
"""Cases whose results are those of another, to rounding: the same sums in another order."""

_PER_THREAD = (
    "torch adds up the weight gradients of a layer norm per thread, and full batch with attention runs it in "
    "torch's own threads: other bits with another number of them"
)
NOT_REPRODUCIBLE: dict[str, str] = {
    "full batch sweep gat-norm": _PER_THREAD,
    "full batch stored gat-norm": _PER_THREAD,
}
"""Cases on a CPU that are known not to give the same bits every time -> why. They are compared to 1e-10."""

RANK_CASES: dict[str, Case] = {
    "two ranks sampled block sage": Case(model="sage", method=sampled("sage", layout="block", batch_size=10)),
    "two ranks sampled block gat-dropout": Case(
        model="gat-dropout", method=sampled("gat-dropout", layout="block", batch_size=10)
    ),
    "two ranks sampled tree gcn2-jk": Case(model="gcn2-jk", method=sampled("gcn2-jk", layout="tree", batch_size=10)),
    "two ranks historical gcn2-jk": Case(model="gcn2-jk", method=historical(parts_per_batch=1)),
    "two ranks historical compensated gcn, lag": Case(
        model="gcn", method=historical(parts_per_batch=1, compensate=True, lag=1)
    ),
    "two ranks full batch sequential gin": Case(model="gin", method=full_batch(aggregation="sequential"), epochs=3),
    "two ranks full batch sequential gcn2-jk, thin, trimmed": Case(
        model="gcn2-jk", method=full_batch(aggregation="sequential", trim=True), data="thin"
    ),
    "two ranks full batch stored gat": Case(model="gat", method=full_batch(aggregation="stored"), epochs=3),
    "two ranks full batch one_shot initial, trimmed": Case(
        model="initial", method=full_batch(aggregation="one_shot", trim=True), data="thin"
    ),
    "two ranks full batch bf16 rows gcn2": Case(model="gcn2", method=full_batch(compress="bf16_both"), epochs=2),
}
"""Runs of two processes on a CPU."""


def _gpu_cases() -> dict[str, Case]:
    cases = {
        f"captured {model}": Case(model=model, method=sampled(model, layout="tree"))
        for model in ("sage", "gcn", "gat", "gin", "gcn2-jk", "initial")
    }
    cases["float32 captured sage"] = Case(model="sage", method=sampled("sage", layout="tree"), dtype=torch.float32)
    cases["float32 captured gcn2-jk"] = Case(
        model="gcn2-jk", method=sampled("gcn2-jk", layout="tree"), dtype=torch.float32
    )
    cases["bf16 captured sage"] = Case(
        model="sage",
        method=sampled("sage", layout="tree"),
        dtype=torch.float32,
        settings={"precision": "bf16"},
    )
    cases["captured sage, accumulated, clipped, cosine"] = Case(
        model="sage",
        method=sampled("sage", layout="tree"),
        settings={"accumulate": 2, "clip_norm": 0.5, "schedule": hl.Schedule(name="cosine", warmup=1)},
    )
    cases["captured sage, resumed"] = Case(model="sage", method=sampled("sage", layout="tree"), stop_at=8)
    cases["captured sage, async"] = Case(
        model="sage", method=sampled("sage", layout="tree"), settings={"evaluate": "async"}
    )
    cases["block sage, async"] = Case(
        model="sage", method=sampled("sage", layout="block"), settings={"evaluate": "async"}
    )
    for model in ("sage", "gcn", "gat", "gcn2-jk"):
        cases[f"block {model}"] = Case(model=model, method=sampled(model, layout="block"))
    # Rows of 64 bytes: 4 KB are 64 of the 240 rows.
    places: dict[str, dict[str, Any]] = {
        "pinned": {"features": "pinned", "cache": 0},
        "tiered by access": {"features": "pinned", "cache": "4kB"},
        "all pinned": {"features": "pinned", "graph": "pinned", "cache": 0},
        "all on the host": {"features": "host", "graph": "host"},
        "graph on the host": {"features": "device", "graph": "host"},
        "graph on the host, tiered": {"features": "pinned", "graph": "host", "cache": "4kB"},
    }
    for place_name, settings in places.items():
        for layout in ("tree", "block"):
            cases[f"{layout} sage, {place_name}"] = Case(
                model="sage",
                method=sampled("sage", layout=layout, look_ahead=3),
                settings={"placement": hl.Placement(**settings)},
            )
    cases["block sage, cached on the host"] = Case(
        model="sage",
        method=sampled("sage", layout="block"),
        settings={"placement": hl.Placement(features="host", graph="host")},
        cached_rows=64,
    )
    for tables in ("device", "pinned", "host"):
        cases[f"historical gcn2-jk, tables {tables}"] = Case(model="gcn2-jk", method=historical(tables=tables))
        cases[f"historical compensated gcn, tables {tables}"] = Case(
            model="gcn", method=historical(compensate=True, lag=1, tables=tables)
        )
        cases[f"full batch sweep gcn2-jk, tables {tables}"] = Case(
            model="gcn2-jk", method=full_batch(aggregation="sweep", tables=tables), epochs=3
        )
    cases["historical gat, refreshed"] = Case(model="gat", method=historical(refresh_every=1))
    cases["full batch sweep initial, thin, trimmed"] = Case(
        model="initial", method=full_batch(aggregation="sweep", trim=True), data="thin"
    )
    for aggregation in ("sequential", "stored", "one_shot"):
        method: Any = full_batch(aggregation=aggregation)
        cases[f"full batch {aggregation} gcn2-jk"] = Case(model="gcn2-jk", method=method)
    return cases


GPU_CASES: dict[str, Case] = _gpu_cases()
"""Runs of one process on a GPU."""
GPU_SAME_RUN: dict[str, str] = {
    "block sage, async": "block sage",
    "captured sage, async": "captured sage",
}
"""Case on a GPU -> the case whose results it must have, to rounding."""

INFERENCE_MODELS = ("gcn", "gat", "gin", "jk", "gcn2-jk", "initial")


# ---- running a case


class _Recorder(hl.Callback):
    """Keeps every step's loss and the weights of the last epoch, on their device: nothing is waited for."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: dict[str, Tensor] = {}

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        self.losses.append(step.loss)

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        if epoch.epoch == trainer.settings.epochs:
            self.weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


class _Stopped(Exception):
    """Raised by `_Stop`."""


class _Stop(hl.Callback):
    """Ends a run in a step, before that step's checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.step == self.step:
            raise _Stopped


COUNTERS = ("edges.sampled", "sweep.rows", "sweep.edges", "history.rows", "history.age_sum", "history.never_written")
"""Counters of the last epoch that are whole numbers which no machine changes."""


def train(case: Case, device: str = "cpu", world: World | None = None) -> Result:
    """Run a case and return its result; a case with stop_at is interrupted and resumed."""
    if case.stop_at is None:
        return _result(*_fit(case, device, world))
    with tempfile.TemporaryDirectory() as folder:
        options = {"out": Path(folder) / "run", "checkpoint_s": 0.0}
        before = _Recorder()
        try:
            _fit(case, device, world, recorder=before, callbacks=[_Stop(case.stop_at)], **options)
        except _Stopped:
            pass
        else:
            raise AssertionError(f"the run ended before step {case.stop_at}")
        trainer, run, after = _fit(case, device, world, resume=True, **options)
    after.losses = before.losses[: case.stop_at - 1] + after.losses
    return _result(trainer, run, after)


def _fit(
    case: Case,
    device: str,
    world: World | None,
    recorder: _Recorder | None = None,
    callbacks: Iterable[hl.Callback] = (),
    **options: Any,
) -> tuple[hl.Trainer, hl.Run, _Recorder]:
    """Train a case; returns the trainer, the run and the recorder."""
    data = make_data(case.data, case.dtype)
    if case.cached_rows is not None:
        hot_ids = hottest(out_degrees(data.graph), case.cached_rows)
        data = replace(data, tables={"x": hl.extend.CachedTable(data.x, hot_ids)})
    recorder = recorder or _Recorder()
    settings: dict[str, Any] = {"epochs": case.epochs, "lr": 0.01, "seed": 3, "show": False, "device": device}
    trainer = hl.Trainer(
        make_model(case.model, case.dtype),
        data,
        case.method,
        callbacks=[recorder, *callbacks],
        world=world,
        **(settings | dict(case.settings) | options),
    )
    return trainer, trainer.fit(), recorder


def _result(trainer: hl.Trainer, run: hl.Run, recorder: _Recorder) -> Result:
    """The result of a run, as it is written to the record."""
    counters = run.history[-1].counters
    if trainer.plan is not None:
        assert counters.get("budget.batches_split", 0) > 0, "the budget split no batch: make it smaller"
    counts = {name: int(counters[name]) for name in COUNTERS if name in counters}
    # Beside an evaluation a step is captured only if that leaves the time to.
    if isinstance(trainer.work, CapturedWork) and trainer.settings.evaluate == "blocking":
        counts["captured steps"] = sum(step is not None for step in trainer.work.steps.values())
    floating = {name: tensor for name, tensor in recorder.weights.items() if tensor.is_floating_point()}
    return {
        "counts": counts,
        "steps": [float(loss) for loss in recorder.losses],
        "epochs": [epoch.loss for epoch in run.history],
        "valid": [e.metrics[run.metric] for e in run.evaluations if e.split == "valid"],
        "test": [run.test, float(run.best_epoch)],
        "weights": [projection(tensor) for tensor in floating.values()],
        "bits": [checksum(recorder.weights.values())],
    }


def train_ranks(world: World, names: list[str]) -> dict[str, Result]:
    """The named cases of `RANK_CASES`, one after the other in each rank."""
    return {name: train(RANK_CASES[name], world=world) for name in names}


def infer_exactly(model_name: str, device: str = "cpu") -> Result:
    """Exact inference of one model in each of its ways: whole, in chunks, at some nodes, and in a folder."""
    model = make_model(model_name).to(device)
    data = make_data("dense")
    some = torch.tensor([7, 3, 239, 0])
    outputs = {
        "whole": infer.exact(model, data, device=device),
        "chunks": infer.exact(model, data, device=device, chunk_edges=150),
        "bytes": infer.exact(model, data, device=device, chunk_bytes="48KiB"),
        "some": infer.exact(model, data, some, device=device),
        "some again": infer.exact(model, data, some, device=device),
        "some in chunks": infer.exact(model, data, some, device=device, chunk_edges=300),
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs["folder"] = infer.exact(model, data, device=device, chunk_edges=150, folder=folder)
        outputs["folder again"] = infer.exact(model, data, device=device, chunk_edges=150, folder=folder)
    return {
        "counts": {way: rows.size(0) for way, rows in outputs.items()},
        "outputs": [projection(rows) for rows in outputs.values()],
        "bits": [checksum([rows]) for rows in outputs.values()],
    }


# ---- draws, ids and orders


def _loaded(method: hl.Sampled, device: str) -> Iterable[Tensor]:
    """Every whole number in two epochs of batches."""
    data = make_data("dense")
    data = place(data, device=device, fanouts=method.fanout_per_layer)
    loader = method.loader(data, seed=3, device=device)
    for _ in range(2):
        for batch in loader:
            yield from (batch.seeds, batch.labels)
            for block in batch.blocks:
                if method.layout == "tree":
                    yield from (block.tree.nodes, block.tree.counts)  # type: ignore[attr-defined]
                else:
                    yield from (block.src_ids, block.part.indptr, block.part.src_idx)


DRAWS_ON_A_DEVICE: dict[str, Callable[[str], Iterable[Tensor]]] = {
    "blocks": lambda device: _loaded(sampled("sage", layout="block"), device),
    "blocks, replacement": lambda device: _loaded(sampled("sage", layout="block", replace=True), device),
    "blocks, all edges": lambda device: _loaded(sampled("sage", layout="block", fanouts=(-1, 4, -1)), device),
    "trees": lambda device: _loaded(sampled("sage", layout="tree"), device),
    "trees, replacement": lambda device: _loaded(sampled("sage", layout="tree", replace=True), device),
}
"""Draws that a CPU and a GPU have in common."""


def _seeds() -> Iterable[Tensor]:
    ids = make_data("dense").splits["train"]
    for epoch in range(3):
        yield from seed_batches(ids, 20, ops.derive_key(3, epoch))
        yield from seed_batches(ids, 20, ops.derive_key(3, epoch), drop_last=True, done=20)


def _keys() -> Iterable[Tensor]:
    yield torch.tensor([ops.derive_key(3, epoch, step) % (1 << 62) for epoch in range(4) for step in range(4)])
    yield ops.permutation(ops.derive_key(3, 1), 1000)


def _divided_trees() -> Iterable[Tensor]:
    """Trees of the second half of a step's seeds, with edge weights."""
    data = make_data("weighted")
    blocks = TreeSampler(data.graph, (4, 3)).sample(data.splits["train"][45:], 9, 45)
    yield from (blocks[0].tree.nodes, blocks[0].tree.counts)
    yield blocks[0].part.edge["weight"]


def _partitions(how: str) -> Iterable[Tensor]:
    for kind in ("dense", "thin"):
        yield make_partition(make_data(kind).graph, 8, how, seed=3).part_of  # type: ignore[arg-type]


def _groups() -> Iterable[Tensor]:
    graph = make_data("dense").graph
    partition = make_partition(graph, 8, "random", seed=3)
    assignment = PartAssignment.of(World.alone(), 8)
    parts = Parts(graph, partition, assignment)
    for groups in ("redrawn", "fixed"):
        for epoch in range(4):
            for group in Groups(historical(groups=groups), assignment, 3).groups_of(epoch):
                yield torch.tensor(group)
                yield parts.nodes_of(group)


def _dropped_edges() -> Iterable[Tensor]:
    graph = make_data("dense").graph
    (block,) = NeighborSampler(graph, (-1,), edge_ids=True).sample(torch.arange(graph.num_nodes), 0)
    dropped = drop_edges(block, 0.3, 9)
    yield from (dropped.part.indptr, dropped.part.src_idx)


def _dropout_masks() -> Iterable[Tensor]:
    ones = torch.ones(240, WIDTH)
    for p in (0.1, 0.5):
        yield ops.keyed_dropout(ones, p, ops.derive_key(3, 0), torch.arange(240)) != 0


def _shards() -> Iterable[Tensor]:
    graph = make_data("dense").graph
    for layout in shard_layouts(graph, make_partition(graph, 4, "random", seed=3)):
        yield from (layout.own_ids, layout.ptr, layout.degrees, *layout.halos, *layout.sends)
        for part in layout.parts:
            yield from (part.indptr, part.src_idx)


def _planted() -> Iterable[Tensor]:
    data = planted_partition(num_nodes=300, num_edges=2000, num_classes=4, num_features=8, seed=2)
    yield from (data.graph.indptr, data.graph.indices, data.labels, *data.splits.values())


def _blocks_without_loops() -> Iterable[Tensor]:
    """Blocks of a graph without self-loops, whose nodes all draw by the key of a pair of layers."""
    graph = planted_partition(num_nodes=300, num_edges=2000, num_classes=4, num_features=8, seed=2).graph
    for replacement in (False, True):
        for block in NeighborSampler(graph, (4, 3, 3, 2), replace=replacement).sample(torch.arange(0, 300, 20), 9):
            yield from (block.src_ids, block.part.indptr, block.part.src_idx)


DRAWS: dict[str, Callable[[], Iterable[Tensor]]] = {
    "keys and permutations": _keys,
    "seeds of epochs": _seeds,
    "trees, second half, edge weights": _divided_trees,
    "parts at random": lambda: _partitions("random"),
    "parts by streaming": lambda: _partitions("streaming"),
    "parts by range": lambda: _partitions("range"),
    "groups of parts": _groups,
    "edges dropped": _dropped_edges,
    "dropout masks": _dropout_masks,
    "shards": _shards,
    "order of a cache": lambda: [hottest(out_degrees(make_data("dense").graph), 100)],
    "planted graph": _planted,
    "blocks, no self-loops": _blocks_without_loops,
} | {name: (lambda make=make: make("cpu")) for name, make in DRAWS_ON_A_DEVICE.items()}
"""Draws, ids and orders on a CPU: name -> the tensors."""
