"""Edges per second of PyG's sampling operators by hopline, beside torch-sparse and GraphBolt where they are installed.

    .venv/bin/python benchmarks/pyg_operators.py [--scale 0.1] [--only untyped,typed,temporal,weighted] [--workers 0,2]

Graphs are made by a generator: `untyped` has 2M nodes and 40M edges with hubs. `typed` has the node types, relations
and counts of ogbn-mag, with reverse relations: 1.9M nodes, 42M edges. `temporal` and `weighted` are the untyped graph
with times of edges, or weights. Fan-outs (15, 10, 5), typed (10, 10) per relation; 1,024 seeds a batch, times are
disjoint batches.

CPU seconds are those of the calling thread in the operator alone: best of 5 passes over some batches. With
workers, wall seconds of PyG's NeighborLoader, which also gathers a row of one column per node.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader

import hopline.pyg

BATCH = 1024
BATCHES = 8
PASSES = 5
FANOUTS = [15, 10, 5]
TYPED_FANOUTS = [10, 10]
MAG_NODES = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field": 59_965}
MAG_EDGES = {
    ("author", "affiliated", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has", "field"): 7_505_078,
}


def ends(num_nodes: int, num_edges: int) -> Tensor:
    """[num_edges] node ids, some far more frequent than others: the density falls as 1 / sqrt(id)."""
    return (torch.rand(num_edges, dtype=torch.float64).square_() * num_nodes).long()


def csc(sources: Tensor, destinations: Tensor, num_destinations: int) -> tuple[Tensor, Tensor]:
    """(colptr, row) of some edges."""
    order = torch.argsort(destinations)
    counts = torch.bincount(destinations, minlength=num_destinations)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), sources[order]


class Untyped:
    """One relation, with or without times or weights."""

    def __init__(self, scale: float, kind: str) -> None:
        num_nodes = int(2_000_000 * scale)
        num_edges = 20 * num_nodes
        self.colptr, self.row = csc(ends(num_nodes, num_edges), torch.randint(num_nodes, (num_edges,)), num_nodes)
        self.options: dict[str, Any] = {}
        self.times = self.weight = None
        if kind == "temporal":
            degrees = self.colptr.diff().repeat_interleave(self.colptr.diff())
            place = torch.arange(num_edges) - self.colptr[:-1].repeat_interleave(self.colptr.diff())
            self.times = place * 1_000_000 // degrees
            self.options = {"disjoint": True}
        elif kind == "weighted":
            self.weight = torch.rand(num_edges)
        self.seeds = torch.randperm(num_nodes)[: BATCH * BATCHES].split(BATCH)

    def operator(self, seeds: Tensor) -> int:
        bounds = None if self.times is None else torch.full_like(seeds, 500_000)
        out = torch.ops.pyg.neighbor_sample(
            self.colptr, self.row, seeds, FANOUTS, edge_time=self.times, seed_time=bounds, edge_weight=self.weight,
            csc=True, **self.options,
        )  # fmt: skip
        return out[0].numel()

    def torch_sparse(self, seeds: Tensor) -> int:
        return torch.ops.torch_sparse.neighbor_sample(self.colptr, self.row, seeds, FANOUTS, False, True)[1].numel()

    def graphbolt(self) -> Callable[[], int]:
        """A pass over all seeds by GraphBolt's sampler."""
        gb = importlib.import_module("dgl.graphbolt")
        items = gb.ItemSet(torch.cat(self.seeds), names="seed_nodes")
        graph = gb.fused_csc_sampling_graph(self.colptr, self.row)
        pipe = gb.ItemSampler(items, batch_size=BATCH).sample_neighbor(graph, [torch.tensor([f]) for f in FANOUTS])
        batches = gb.DataLoader(pipe, num_workers=0)
        return lambda: sum(g.sampled_csc.indices.numel() for batch in batches for g in batch.sampled_subgraphs)

    def loader(self, workers: int) -> NeighborLoader:
        destinations = torch.arange(self.colptr.numel() - 1).repeat_interleave(self.colptr.diff())
        data = Data(x=torch.zeros(self.colptr.numel() - 1, 1), edge_index=torch.stack([self.row, destinations]))
        options: dict[str, Any] = {}
        if self.times is not None:
            data.edge_time = self.times
            options = {"time_attr": "edge_time", "input_time": torch.full((BATCH * BATCHES,), 500_000)}
        if self.weight is not None:
            data.edge_weight = self.weight
            options = {"weight_attr": "edge_weight"}
        seeds = torch.cat(self.seeds)
        return NeighborLoader(
            data, FANOUTS, input_nodes=seeds, batch_size=BATCH, num_workers=workers, is_sorted=True, **options
        )


class Typed:
    """The shape of ogbn-mag, with reverse relations."""

    def __init__(self, scale: float) -> None:
        self.num_nodes = {name: int(count * scale) for name, count in MAG_NODES.items()}
        self.graph: dict[tuple[str, str, str], tuple[Tensor, Tensor]] = {}
        for (source, name, destination), count in MAG_EDGES.items():
            sources = ends(self.num_nodes[source], int(count * scale))
            destinations = ends(self.num_nodes[destination], int(count * scale))
            if source == destination:
                sources, destinations = torch.cat([sources, destinations]), torch.cat([destinations, sources])
            else:
                reverse = (destination, f"rev_{name}", source)
                self.graph[reverse] = csc(destinations, sources, self.num_nodes[source])
            self.graph[source, name, destination] = csc(sources, destinations, self.num_nodes[destination])
        self.seeds = torch.randperm(self.num_nodes["paper"])[: BATCH * BATCHES].split(BATCH)

    def _arguments(self, seeds: Tensor) -> list[Any]:
        names = {"__".join(relation): graph for relation, graph in self.graph.items()}
        colptrs = {name: colptr for name, (colptr, _) in names.items()}
        rows = {name: row for name, (_, row) in names.items()}
        fanouts = dict.fromkeys(names, TYPED_FANOUTS)
        return [list(self.num_nodes), list(self.graph), colptrs, rows, {"paper": seeds}, fanouts]

    def operator(self, seeds: Tensor) -> int:
        out = torch.ops.pyg.hetero_neighbor_sample(*self._arguments(seeds), csc=True)
        return sum(row.numel() for row in out[0].values())

    def torch_sparse(self, seeds: Tensor) -> int:
        sample = torch.ops.torch_sparse.hetero_neighbor_sample
        out = sample(*self._arguments(seeds), len(TYPED_FANOUTS), False, True)
        return sum(row.numel() for row in out[1].values())

    def loader(self, workers: int) -> NeighborLoader:
        data = HeteroData()
        for name, count in self.num_nodes.items():
            data[name].x = torch.zeros(count, 1)
        for relation, (colptr, row) in self.graph.items():
            destinations = torch.arange(colptr.numel() - 1).repeat_interleave(colptr.diff())
            data[relation].edge_index = torch.stack([row, destinations])
        seeds = ("paper", torch.cat(self.seeds))
        return NeighborLoader(
            data, TYPED_FANOUTS, input_nodes=seeds, batch_size=BATCH, num_workers=workers, is_sorted=True
        )


def rate(run: Callable[[], int]) -> float:
    """Million edges per CPU second of this thread, the best pass. run: a pass; it returns how many edges it drew."""
    run()
    best = 0.0
    for _ in range(PASSES):
        begin = time.thread_time()
        edges = run()
        best = max(best, edges / (time.thread_time() - begin) / 1e6)
    return best


def loader_rate(loader: NeighborLoader) -> float:
    """Million edges per wall second, the best of three epochs, workers' start included."""
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        edges = sum(batch.num_edges for batch in loader)
        best = max(best, edges / (time.perf_counter() - begin) / 1e6)
    return best


def measure(graph: Untyped | Typed, kind: str, workers: list[int]) -> Iterator[tuple[str, float]]:
    """Yield (what, million edges per second)."""
    torch.set_num_threads(1)
    yield "hopline, operator alone", rate(lambda: sum(graph.operator(seeds) for seeds in graph.seeds))
    if kind in ("untyped", "typed") and importlib.util.find_spec("torch_sparse"):
        importlib.import_module("torch_sparse")  # defines its operators
        yield "torch-sparse, operator alone", rate(lambda: sum(graph.torch_sparse(seeds) for seeds in graph.seeds))
    if kind == "untyped" and isinstance(graph, Untyped) and importlib.util.find_spec("dgl"):
        yield "GraphBolt, sampler alone", rate(graph.graphbolt())
    for count in workers:
        yield f"hopline, NeighborLoader with {count} workers", loader_rate(graph.loader(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="untyped,typed,temporal,weighted")
    parser.add_argument("--workers", default="0,2")
    options = parser.parse_args()
    print(f"operators by {hopline.pyg.info()['neighbor_sample']}, scale {options.scale}")
    results = {}
    for kind in options.only.split(","):
        torch.manual_seed(0)
        graph = Typed(options.scale) if kind == "typed" else Untyped(options.scale, kind)
        for what, value in measure(graph, kind, [int(count) for count in options.workers.split(",") if count]):
            print(f"{kind:<10} {what:<40} {value:8.2f} M edges/s", flush=True)
            results[f"{kind}: {what}"] = round(value, 2)
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
