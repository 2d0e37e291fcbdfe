"""Random runs within a budget: method, model, graph with hubs and budget. Prints what was predicted and measured.

    PYTHONPATH=src python -m tests.budget.random_budgets [--number 200] [--first 0] [--method FullBatch]

A case first asks for the least budget, with one that is far too small. The budget is then this least one, or a
multiple of it, or a little less. A run has two epochs, with exact evaluation after each. All steps are measured by
hopline's own meter. The outcome of a case is one of these:

    kept       no step took more than the limit, nor more than predicted
    over       a step took more than the limit
    above      a step took more than predicted, and not more than the limit
    refused    the plan, or a step before it ran, was refused by an error
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.budget.plan import DoesNotFit
from tests.support.helpers import generator

NUM_FEATURES = 16
NUM_CLASSES = 5
GRAPHS = ("hub", "hubs", "power law", "even")
MODELS = ("SAGE", "GCN", "GAT", "GIN", "PNA", "GraphConv")
SHARES = (0.8, 1.0, 1.0, 1.0, 1.1, 1.5, 2.0, 4.0)
"""Budgets, as multiples of the least one that the refusal names."""


@dataclass(frozen=True)
class Case:
    """A run within a budget, drawn from a seed."""

    seed: int
    graph: str
    num_nodes: int
    num_edges: int
    model: str
    is_pyg: bool
    """Whether the model is one of PyG's own, such as `GraphSAGE`, and not `hl.nn.GNN`."""
    num_layers: int
    width: int
    options: dict[str, Any]
    """Further arguments of `hl.nn.GNN`."""
    method: hl.extend.Method
    share: float
    """The budget, as a multiple of the least one."""

    @property
    def name(self) -> str:
        kind = "PyG" if self.is_pyg else "GNN"
        options = "".join(f" {name}={value}" for name, value in self.options.items() if name != "dropout")
        graph = f"{self.graph} {self.num_nodes}/{self.num_edges}"
        changed = [f for f in fields(self.method) if getattr(self.method, f.name) != f.default]  # type: ignore[arg-type]
        settings = ", ".join(f"{f.name}={getattr(self.method, f.name)}" for f in changed)
        model = f"{kind} {self.model} {self.num_layers}x{self.width}{options}"
        return f"{type(self.method).__name__}({settings}) {model}, {graph}"


def draw_case(seed: int, method_name: str | None = None) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    num_nodes = rng.choice([1000, 2000, 5000, 10_000, 20_000])
    num_layers = rng.choice([1, 2, 2, 3])
    model = rng.choice(MODELS)
    is_pyg = model != "GraphConv" and rng.random() < 0.4
    options: dict[str, Any] = {"dropout": rng.choice([0.0, 0.5])}
    if not is_pyg and rng.random() < 0.3:
        options |= rng.choice([{"jk": "cat"}, {"norm": "layer"}, {"norm": "batch"}, {"residual": True}])
    return Case(
        seed=seed,
        graph=rng.choice(GRAPHS),
        num_nodes=num_nodes,
        num_edges=rng.choice([2, 5, 15]) * num_nodes,
        model=model,
        is_pyg=is_pyg,
        num_layers=num_layers,
        width=rng.choice([8, 32, 64]),
        options=options,
        method=_draw_method(rng, method_name, num_layers),
        share=rng.choice(SHARES),
    )


def _draw_method(rng: random.Random, name: str | None, num_layers: int) -> hl.extend.Method:
    name = name or rng.choice(["Sampled", "Historical", "FullBatch"])
    if name == "Sampled":
        fanouts = tuple(rng.choice([3, 5, 10, -1]) for _ in range(num_layers))
        return hl.Sampled(fanouts=fanouts, batch_size=rng.choice([64, 256, 1024]))
    partition: Any = rng.choice(["metis", "metis", "streaming", "random", "range"])
    if name == "Historical":
        num_parts = rng.choice([4, 10, 40])
        parts_per_batch = rng.choice([1, 2, num_parts // 2])
        further: dict[str, Any] = rng.choice([{}, {}, {"compensate": True}, {"groups": "fixed"}, {"refresh_every": 1}])
        return hl.Historical(num_parts=num_parts, parts_per_batch=parts_per_batch, partition=partition, **further)
    settings: dict[str, Any] = rng.choice(
        [{}, {}, {}, {"trim": True}, {"aggregation": "sequential"}, {"aggregation": "stored"}]
    )
    return hl.FullBatch(num_shards=rng.choice([1, 2, 4, 8]), partition=partition, **settings)


# ---- graphs and models


def dataset_of_case(case: Case) -> hl.Dataset:
    """A graph with loops, double edges and nodes without edges; apart from "even", some nodes are hubs.

    A hub of "hub" and "hubs" has a third of all edges, or as many together, and half of these lead into it.
    """
    draw = generator(case.seed)
    num_nodes = case.num_nodes
    num_edges = case.num_edges
    src = torch.randint(0, num_nodes - 10, (num_edges,), generator=draw)
    dst = torch.randint(0, num_nodes - 10, (num_edges,), generator=draw)
    if case.graph == "power law":
        dst = _skewed(num_edges, num_nodes - 10, draw)
        src = torch.where(torch.rand(num_edges, generator=draw) < 0.5, src, _skewed(num_edges, num_nodes - 10, draw))
    elif case.graph in ("hub", "hubs"):
        num_hubs = 1 if case.graph == "hub" else 5
        hub_of_edge = torch.randint(0, num_hubs, (num_edges // 3,), generator=draw) * (num_nodes // 10)
        half = num_edges // 6
        dst[:half] = hub_of_edge[:half]
        src[half : 2 * half] = hub_of_edge[half : 2 * half]
    order = torch.randperm(num_nodes, generator=draw)
    train, valid, test = order.split([num_nodes // 2, num_nodes // 4, num_nodes - num_nodes // 2 - num_nodes // 4])
    return hl.from_edges(
        torch.stack([src, dst]),
        x=torch.randn(num_nodes, NUM_FEATURES, generator=draw),
        y=torch.randint(0, NUM_CLASSES, (num_nodes,), generator=draw),
        splits={"train": train, "valid": valid, "test": test},
    )


def _skewed(count: int, num_nodes: int, draw: torch.Generator) -> Tensor:
    """[count] int64: nodes of which few are drawn very often, by the cube of a uniform number."""
    return (num_nodes * torch.rand(count, generator=draw) ** 3).long().clamp(max=num_nodes - 1)


def _mlp(in_width: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_width, width), nn.ReLU(), nn.Linear(width, width))


def model_of_case(case: Case, data: hl.Dataset) -> nn.Module:
    """The model of a case."""
    torch.manual_seed(case.seed)
    degrees = torch.bincount(data.graph.in_degrees().clamp(max=100))
    pna = {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"], "deg": degrees}
    if case.is_pyg:
        kind, further = {
            "SAGE": (pyg.GraphSAGE, {}),
            "GCN": (pyg.GCN, {}),
            "GAT": (pyg.GAT, {"heads": 4}),
            "GIN": (pyg.GIN, {}),
            "PNA": (pyg.PNA, pna),
        }[case.model]
        return kind(NUM_FEATURES, case.width, case.num_layers, NUM_CLASSES, dropout=case.options["dropout"], **further)
    convs: dict[str, Callable[[int, int], nn.Module]] = {
        "SAGE": pyg.SAGEConv,
        "GCN": pyg.GCNConv,
        "GAT": lambda a, b: pyg.GATConv(a, b // 4, heads=4),
        "GIN": lambda a, b: pyg.GINConv(_mlp(a, b)),
        "PNA": lambda a, b: pyg.PNAConv(a, b, **pna),
        "GraphConv": pyg.GraphConv,
    }
    widths = [NUM_FEATURES, *[case.width] * case.num_layers]
    layers = [convs[case.model](a, b) for a, b in pairwise(widths)]
    out_width = case.width * (case.num_layers if "jk" in case.options else 1)
    return hl.nn.GNN(layers, head=nn.Linear(out_width, NUM_CLASSES), **case.options)


# ---- a run


@dataclass(frozen=True)
class Outcome:
    """What a run within a budget did."""

    case: Case
    least_bytes: int
    """The least budget, which a refusal has named."""
    budget_bytes: int
    limit_bytes: int = 0
    """The bytes that the plan leaves for a step."""
    predicted_bytes: float = 0.0
    """The largest predicted peak of a step."""
    measured_bytes: int = 0
    """The largest measured peak of a step."""
    error: str = ""
    """The message of a run that was refused."""

    @property
    def verdict(self) -> str:
        if self.error:
            return "refused"
        if self.measured_bytes > self.limit_bytes:
            return "over"
        return "above" if self.measured_bytes > self.predicted_bytes else "kept"

    @property
    def line(self) -> str:
        sizes = [self.least_bytes, self.budget_bytes, self.limit_bytes, self.predicted_bytes, self.measured_bytes]
        numbers = " ".join(f"{size / 1e6:8.3f}" for size in sizes)
        return f"{self.case.seed:4} {self.verdict:>8} x{self.case.share:<4} {numbers} {self.case.name}"


def run_case(case: Case) -> Outcome:
    """Run a case, and measure its steps."""
    data = dataset_of_case(case)

    def trainer_with(budget_bytes: int) -> hl.Trainer:
        model = model_of_case(case, data)
        return hl.Trainer(model, data, case.method, budget=str(budget_bytes), epochs=2, show=False, seed=case.seed)

    with pytest.raises(DoesNotFit) as refused:
        trainer_with(1)
    least_bytes = refused.value.smallest_bytes["host"]
    budget_bytes = int(case.share * least_bytes)
    try:
        trainer = trainer_with(budget_bytes)
        assert trainer.guard is not None
        trainer.guard.measure_every = 1
        trainer.fit()
    except ValueError as error:
        return Outcome(case, least_bytes, budget_bytes, error=str(error))
    return Outcome(
        case,
        least_bytes,
        budget_bytes,
        limit_bytes=trainer.guard.limit_bytes,
        predicted_bytes=trainer.guard.ledger.promised_bytes,
        measured_bytes=trainer.guard.ledger.peak_bytes,
    )


def table_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A row per method, and per method and model: cases, outcomes, and the worst ratios."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        name = type(outcome.case.method).__name__
        groups[name, "all"].append(outcome)
        groups[name, outcome.case.model].append(outcome)
    yield "| method | model | cases | kept | over | above | refused | at the least or more | of limit | of predicted |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (name, model), group in sorted(groups.items()):
        counts = [sum(o.verdict == verdict for o in group) for verdict in ("kept", "over", "above", "refused")]
        wrong = sum(o.verdict == "refused" and o.case.share >= 1 for o in group)
        ran = [o for o in group if not o.error]
        worst = max((o.measured_bytes / o.limit_bytes for o in ran), default=0)
        worst_predicted = max((o.measured_bytes / o.predicted_bytes for o in ran), default=0)
        columns = [name, model, len(group), *counts, wrong, f"{worst:.2f}", f"{worst_predicted:.2f}"]
        yield f"| {' | '.join(map(str, columns))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--method")
    args = parser.parse_args()
    outcomes = []
    print("seed, outcome, share; MB: least budget, budget, limit of a step, predicted, measured; case, seconds, error")
    for seed in range(args.first, args.first + args.number):
        start = time.perf_counter()
        outcome = run_case(draw_case(seed, args.method))
        outcomes.append(outcome)
        print(f"{outcome.line} {time.perf_counter() - start:5.1f}s {outcome.error}", flush=True)
    print("\n".join(table_lines(outcomes)))


if __name__ == "__main__":
    main()
