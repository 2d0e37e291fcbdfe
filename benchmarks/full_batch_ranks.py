"""Full-batch training by ranks: what each holds at most, what travels, and that it learns what plain PyG learns.

    python benchmarks/full_batch_ranks.py [--nodes 60000] [--edges 600000] [--width 64] [--ranks 1,2,4]
    python benchmarks/full_batch_ranks.py --accuracy FOLDER [--seeds 5] [--no-dropout] [--device cuda]

The first: one forward and backward of two layers on a random graph in equal parts, by gloo. Peaks are the largest of
any rank of what lives at most of what torch allocates, above its shard, its rows and the weights; bytes are those that
all ranks receive in a step. The second: test accuracy of a GCN on cora.npz and coauthor_physics.npz of a folder.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from full_batch import Meter, made_up
from torch import Tensor, nn

import hopline as hl
from hopline.core.batch import Batch
from hopline.core.partition import Partition
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.methods.full_batch.compression import COMPRESSED, HalfPrecisionTransport
from hopline.shards.convs.runner import ShardConvs
from hopline.shards.convs.trimming import trimmed_convs
from hopline.shards.layout import ShardLayout, shard_layouts
from hopline.shards.transports import LocalTransport, P2PTransport, Transport

MODELS: dict[str, Any] = {"GAT": pyg.GATConv, "SAGE-mean": pyg.SAGEConv}
KINDS = ("forward", "refetch", "gradient")
WAYS: dict[str, dict[str, Any]] = {
    "sequential": {"mode": "sequential"},
    "sequential, depth=0": {"mode": "sequential", "depth": 0},
    "stored": {"mode": "stored"},
    "one_shot": {"mode": "one_shot"},
    "sequential, trim": {"mode": "sequential", "trim": True},
    "sequential, bf16": {"mode": "sequential", "compress": "bf16_both"},
}
PEAKS = ("sequential", "sequential, depth=0")
"""Ways whose peaks are compared between numbers of ranks."""
LABELLED = 0.01
"""Share of the nodes that have a loss where layers are trimmed."""


def gnn_of(name: str, width: int) -> hl.nn.GNN:
    torch.manual_seed(0)
    return hl.nn.GNN([MODELS[name](width, width), MODELS[name](width, width)])


def transport_of(world: World, layout: ShardLayout, compress: str) -> Transport:
    if world.size == 1:
        return LocalTransport(layout)
    kinds = COMPRESSED[compress]
    return HalfPrecisionTransport(layout, world, kinds) if kinds else P2PTransport(layout, world=world)


def measured(world: World, model: hl.nn.GNN, layout: ShardLayout, x: Tensor, way: dict[str, Any]) -> dict[str, Any]:
    """The largest peak of any rank, and the bytes that all receive in a step."""
    transport = transport_of(world, layout, way.get("compress", "none"))
    options = {"mode": way["mode"], "depth": way.get("depth", 1)}
    whole = ShardConvs.of(layout, transport, **options)
    seeds = torch.arange(layout.num_own)
    blocks = (whole.block(),) * model.num_layers
    if way.get("trim"):
        seeds = seeds[: int(LABELLED * seeds.numel())]
        is_needed = torch.zeros(layout.num_own, dtype=torch.bool)
        is_needed[seeds] = True
        trimmed = trimmed_convs(whole, is_needed, model.num_layers, **options)
        blocks = tuple(convs.block() for convs in trimmed)
    batch = Batch(layout.own_ids[seeds], blocks, x, None, output_idx=seeds)

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    step()  # finds out how the convs run, and exchanges degrees
    gc.collect()
    transport.traffic.clear()
    with Meter() as meter:
        step()
    sent = world.sum([transport.traffic[kind] for kind in KINDS])
    return {"peak": world.max([float(meter.peak)])[0], **dict(zip(KINDS, sent, strict=True))}


def on_rank(world: World, num_nodes: int, num_edges: int, width: int) -> dict[str, dict[str, Any]]:
    """By model and way."""
    part_of = (torch.arange(num_nodes) * world.size // num_nodes).int()
    layout = shard_layouts(made_up(num_nodes, num_edges), Partition(part_of, world.size))[world.rank]
    x = torch.randn(num_nodes, width, generator=torch.Generator().manual_seed(1))[layout.own_ids]
    ways = {way: options for way, options in WAYS.items() if world.size > 1 or way in PEAKS}
    return {
        name: {way: measured(world, gnn_of(name, width), layout, x, options) for way, options in ways.items()}
        for name in MODELS
    }


def memory_and_traffic(ranks: list[int], *sizes: int) -> None:
    found = {n: run(on_rank, LaunchSettings(devices=n, timeout_s=300), *sizes) for n in ranks}
    print("| model | way | ranks | peak MB of a rank | of the one before |\n|---|---|---|---|---|")
    for name, way in itertools.product(MODELS, PEAKS):
        before = None
        for n in ranks:
            peak = found[n][name][way]["peak"] / 1e6
            print(f"| {name} | {way} | {n} | {peak:.1f} | {'' if before is None else f'{peak / before:.2f}'} |")
            before = peak
    print(
        "\n| model | ranks | way | forward MB | refetched MB | gradients MB | peak MB |\n|---|---|---|---|---|---|---|"
    )
    for name in MODELS:
        for n in ranks[1:]:
            for way, row in found[n][name].items():
                sent = " | ".join(f"{row[kind] / 1e6:.1f}" for kind in KINDS)
                print(f"| {name} | {n} | {way} | {sent} | {row['peak'] / 1e6:.1f} |")


DATASETS: dict[str, dict[str, Any]] = {
    "cora": {"epochs": 200, "dropout": 0.5, "input_dropout": 0.5},
    "coauthor_physics": {"epochs": 60, "dropout": 0.5, "input_dropout": 0.0},
}
OPTIMIZER: dict[str, Any] = {"lr": 0.01, "weight_decay": 5e-4}


class PlainGCN(nn.Module):
    """Two layers of 16, in PyG alone."""

    def __init__(self, data: hl.Dataset, dropout: float, input_dropout: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.GCNConv(data.num_features, 16), pyg.GCNConv(16, data.num_classes)])
        self.dropout, self.input_dropout = dropout, input_dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training and self.input_dropout:
            values = nn.functional.dropout(x.values(), self.input_dropout)
            x = torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True)
        x = self.convs[0](x, edge_index).relu()
        return self.convs[1](nn.functional.dropout(x, self.dropout, self.training), edge_index)


def by_pyg(
    data: hl.Dataset, seed: int, epochs: int, dropout: float, input_dropout: float, device: str = "cpu"
) -> float:
    """Test accuracy of the weights that are best on validation, by a plain loop over the whole graph."""
    torch.manual_seed(seed)
    model, y = PlainGCN(data, dropout, input_dropout).to(device), data.labels.to(device)
    edge_index = data.graph.edge_index().to(device)
    csr = data.x.read_csr(torch.arange(data.num_nodes))
    assert csr is not None
    indptr, columns, values = csr
    rows = torch.repeat_interleave(torch.arange(data.num_nodes), indptr.diff())
    index = torch.stack([rows, columns.long()])
    x = torch.sparse_coo_tensor(index, values.float(), (data.num_nodes, data.num_features)).coalesce().to(device)
    optimizer = torch.optim.Adam(model.parameters(), **OPTIMIZER)
    best, splits = (-1.0, 0.0), {name: ids.to(device) for name, ids in data.splits.items()}
    train_ids = splits["train"]
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, edge_index)[train_ids], y[train_ids]).backward()
        optimizer.step()
        with torch.no_grad():
            right = model.eval()(x, edge_index).argmax(dim=-1) == y
        valid, test = (right[splits[split]].double().mean().item() for split in ("valid", "test"))
        best = max(best, (valid, test), key=lambda pair: pair[0])
    return best[1]


def by_shards(
    data: hl.Dataset, seed: int, epochs: int, dropout: float, input_dropout: float, device: str = "cpu"
) -> float:
    torch.manual_seed(seed)
    convs = [pyg.GCNConv(data.num_features, 16), pyg.GCNConv(16, data.num_classes)]
    model = hl.nn.GNN(convs, dropout=dropout, input_dropout=input_dropout)
    method = hl.FullBatch(num_shards=8, partition="metis" if device == "cpu" else "streaming")
    options = OPTIMIZER | {"epochs": epochs, "seed": seed, "show": False, "device": device}
    return hl.Trainer(model, data, method, **options).fit().test


def accuracy(folder: Path, num_seeds: int, without: dict[str, Any]) -> None:
    print("| dataset | plain PyG | FullBatch | difference |\n|---|---|---|---|")
    for name, options in DATASETS.items():
        data = hl.from_npz(folder / f"{name}.npz").normalized()
        theirs, ours = (
            [100 * train(data, seed, **options | without) for seed in range(num_seeds)] for train in (by_pyg, by_shards)
        )
        cells = [f"{statistics.fmean(v):.2f} ± {statistics.stdev(v):.2f}" for v in (theirs, ours)]
        difference = statistics.fmean(ours) - statistics.fmean(theirs)
        print(f"| {name} | {cells[0]} | {cells[1]} | {difference:+.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=60_000)
    parser.add_argument("--edges", type=int, default=600_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--accuracy", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-dropout", action="store_true", help="draw nothing: both must reach the same")
    args = parser.parse_args()
    if args.accuracy is not None:
        without = {"dropout": 0.0, "input_dropout": 0.0} if args.no_dropout else {}
        accuracy(args.accuracy, args.seeds, without | {"device": args.device})
    else:
        memory_and_traffic([int(n) for n in args.ranks.split(",")], args.nodes, args.edges, args.width)


if __name__ == "__main__":
    main()
