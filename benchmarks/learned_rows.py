"""A graph without features: learned input rows, by sampling, by history and in full batch.

    PYTHONPATH=src python benchmarks/learned_rows.py --data ogbn_arxiv_nofeat.npz RUN [RUN ...]
    PYTHONPATH=src python benchmarks/learned_rows.py --data ogbn_arxiv_nofeat.npz --parts parts.npy --make-parts 80

A RUN is a method and its settings, such as `sampled,lr=0.01,epochs=15` or `historical,rows_dropout=0.5,per_batch=20`;
`full` is the third. Edges in both directions, a learned row of 128 per node with dropout of its own (`rows_dropout`),
SAGE layers of 128 with layer norm, early stopping on validation. Parts are METIS's, made with `--make-parts` where that
is installed and read with `--parts`; nodes are in their order.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.core.partition import make_partition

WIDTH = 128


class LearnedRows(nn.Module):
    """A row for each node, whose number is its only feature."""

    def __init__(self, num_nodes: int, dropout: float) -> None:
        super().__init__()
        self.rows, self.out_features = nn.Embedding(num_nodes, WIDTH), WIDTH
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.rows.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.rows(x[:, 0].long()))


def both_ways(graph: hl.Graph) -> hl.Graph:
    src, dst = graph.edge_index()
    return from_edges(torch.cat([src, dst]), torch.cat([dst, src]), graph.num_nodes)


def from_edges(src: Tensor, dst: Tensor, num_nodes: int) -> hl.Graph:
    dst, order = dst.long().sort(stable=True)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(dst, minlength=num_nodes), 0, out=indptr[1:])
    return hl.Graph(indptr, src[order].int())


def in_order(data: hl.Dataset, graph: hl.Graph, part_of: Tensor) -> hl.Dataset:
    """The nodes part by part, and their numbers as features."""
    order = part_of.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel())
    src, dst = graph.edge_index()
    assert data.y is not None
    return dataclasses.replace(
        data,
        graph=from_edges(position[src.long()], position[dst.long()], data.num_nodes),
        y=data.y[order],
        tables={"x": hl.extend.TensorTable(torch.arange(data.num_nodes).float().view(-1, 1))},
        splits={name: position[ids].sort().values for name, ids in data.splits.items()},
        alternatives=(),
        folder=None,
    )


def method_of(name: str, num_parts: int, given: dict[str, str]) -> Any:
    if name == "historical":
        size, groups = int(given.pop("per_batch", 20)), given.pop("groups", "fixed")
        others: dict[str, Any] = {"edge_dropout": float(given.pop("edge_dropout", 0.0))}
        others |= {"compensate": given.pop("compensate", "") == "true", "groups": groups}
        return hl.Historical(num_parts=num_parts, parts_per_batch=size, partition="range", **others)
    if name == "sampled":
        return hl.Sampled(fanouts=tuple(map(int, given.pop("fanouts", "15-10").split("-"))), batch_size=1024)
    if name != "full":
        raise SystemExit(f"{name}: write sampled, historical or full")
    return hl.FullBatch(num_shards=1, partition="range")


def trained(spec: str, data: hl.Dataset, num_parts: int, device: str) -> None:
    name, *settings = spec.split(",")
    given = dict(setting.split("=", 1) for setting in settings)
    method, began = method_of(name, num_parts, given), time.perf_counter()
    torch.manual_seed(int(given.get("seed", 0)))
    layers = int(given.pop("layers", 2))
    widths = [*[WIDTH] * layers, data.num_classes]
    model = hl.nn.GNN(
        [SAGEConv(WIDTH, width) for width in widths[1:]],
        dropout=float(given.pop("dropout", 0.5)),
        norm="layer",
        encoder=LearnedRows(data.num_nodes, float(given.pop("rows_dropout", 0))),
    )
    options: dict[str, Any] = {
        "epochs": int(given.pop("epochs", 60)),
        "lr": float(given.pop("lr", 0.003)),
        "weight_decay": float(given.pop("weight_decay", 0)),
        "patience": int(given.pop("patience", 15)),
        "seed": int(given.pop("seed", 0)),
    }
    if given:
        raise SystemExit(f"{spec}: there is no setting {', '.join(given)}")
    run = hl.Trainer(model, data, method, device=device, show=False, **options).fit()
    print(
        f"{spec}: valid {100 * run.valid:.2f}, test {100 * run.test:.2f}, best epoch {run.best_epoch} of {run.epochs}, "
        f"last loss {run.history[-1].loss:.3f}, {time.perf_counter() - began:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", type=Path, help="a .npy file of the part of each node")
    parser.add_argument("--make-parts", type=int, default=0, help="how many parts --parts is to be written with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("runs", nargs="*")
    args = parser.parse_args()
    data = hl.from_npz(args.data)
    graph = both_ways(data.graph)
    if args.parts is not None and not args.make_parts:
        part_of = torch.from_numpy(np.load(args.parts)).long()
    else:
        part_of = make_partition(graph, args.make_parts or 80).part_of.long()
        if args.parts is not None:
            np.save(args.parts, part_of.numpy().astype(np.int32))
    data = in_order(data, graph, part_of)
    for spec in args.runs:
        trained(spec, data, int(part_of.max()) + 1, args.device)


if __name__ == "__main__":
    main()
