"""Checks that each rank runs for sampling on shards. Everything is compared with the whole dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import hopline as hl
from hopline.core.batch import Batch, Block
from hopline.core.sampler import NeighborSampler
from hopline.core.seed_order import share_of
from hopline.distributed.all_to_all import Channel, RowRequest
from hopline.distributed.world import World
from hopline.inference import distributed as shard_infer
from hopline.methods.sampled.collective_loader import CollectiveLoader
from hopline.nn.gcn_norm import gcn_weights
from hopline.shards.collective_sampler import CollectiveSampler
from hopline.shards.shard import Shard
from tests.support.helpers import randint
from tests.support.ranks import KillRank

KEY = 12345


def assert_same_blocks(ours: tuple[Block, ...], theirs: tuple[Block, ...]) -> None:
    """Bit for bit, with edge arrays and edge ids."""
    assert len(ours) == len(theirs)
    for block, expected in zip(ours, theirs, strict=True):
        assert block.num_dst == expected.num_dst
        assert torch.equal(block.src_ids, expected.src_ids)
        assert torch.equal(block.part.indptr, expected.part.indptr)
        assert torch.equal(block.part.src_idx, expected.part.src_idx)
        assert block.edge.keys() == expected.edge.keys()
        assert all(torch.equal(block.edge[name], rows) for name, rows in expected.edge.items())
        if block.part.edge_ids is not None:
            assert expected.part.edge_ids is not None
            assert torch.equal(block.part.edge_ids, expected.part.edge_ids)
        for add_loops in (False, True):
            conv = GCNConv(2, 2, add_self_loops=add_loops)
            for weight, other in zip(
                gcn_weights(conv, block, torch.float64), gcn_weights(conv, expected, torch.float64), strict=True
            ):
                assert (weight is None and other is None) or torch.equal(weight, other)  # type: ignore[arg-type]


def check_questions(channel: Channel, shard: Shard) -> None:
    """Row requests of any size, also of no rows, get the rows of their owners."""
    all_nodes = torch.arange(shard.num_nodes)
    table = (all_nodes[:, None] * 10 + torch.arange(3)).to(torch.bfloat16)
    for number in range(3):
        count = [7, 0, shard.num_nodes][(number + channel.rank) % 3]
        positions = randint(0, shard.num_nodes, count, seed=number)
        request = RowRequest(channel, shard.ptr, positions)
        first = shard.ptr[channel.rank]
        assert torch.equal(request.reply(table[request.rows + first]), table[positions])
        counts = (request.rows + first) % 4
        entries = torch.repeat_interleave(request.rows + first, counts)
        indptr, (replied,) = request.reply_lists(counts, [entries])
        assert torch.equal(indptr.diff(), positions % 4)
        assert torch.equal(replied, torch.repeat_interleave(positions, positions % 4))


def check_sampler(channel: Channel, shard: Shard, data: hl.Dataset, place: Tensor) -> None:
    """Samples are those of one process: for seeds of any owner, for no seeds, and for all neighbours."""
    cases: list[tuple[tuple[int, ...], bool, dict[str, Any]]] = [
        ((3, 2), False, {}),
        ((2, 3), True, {"replace": True}),
        ((-1, -1), False, {}),
        ((4, -1, 1), False, {}),
        ((2, 2, 2), True, {"replace": True}),
        ((3, 2), False, {"weight": "weight"}),
        ((2, -1, 2), True, {"weight": "weight"}),
        ((3, 2), False, {"law": "labor"}),
        ((2, -1, 2), True, {"law": "labor"}),
    ]
    for fanouts, one_list, law in cases:
        options = {"edge_ids": True, "one_list": one_list, **law}
        sampler = CollectiveSampler(shard, channel, fanouts, **options)
        oracle = NeighborSampler(data.graph, fanouts, **options)
        for count in (9, 0):
            seeds = randint(0, data.num_nodes, 30, seed=channel.rank).unique()[: count * (channel.rank + 1)]
            blocks, *_ = sampler.sample(place[seeds], KEY)
            assert_same_blocks(blocks, oracle.sample(seeds, KEY))


def check_loader(world: World, shard: Shard, data: hl.Dataset) -> list[int]:
    """Batches are those of one process. Returns the number of seeds of each batch of this rank."""
    method = hl.Sampled(fanouts=(3, 2), batch_size=4)
    loader = method.loader(shard, "train", seed=5, world=world)
    assert isinstance(loader, CollectiveLoader)
    unsharded = hl.Sampled(fanouts=(3, 2), batch_size=4 * world.size).loader(data, "train", seed=5)
    oracle = NeighborSampler(data.graph, method.fanout_per_layer)
    sizes = []
    assert len(loader) == len(unsharded)
    for _ in range(2):
        for batch, union in zip(loader, unsharded, strict=True):
            assert isinstance(batch.key, int)
            assert (batch.key, batch.total_seeds) == (union.key, union.num_seeds)
            assert torch.isin(batch.seeds, union.seeds).all()
            assert_same_blocks(batch.blocks, oracle.sample(batch.seeds, batch.key))
            assert torch.equal(batch.x, data.x.read(batch.input_ids))  # type: ignore[arg-type]
            assert batch.tables.keys() == {"words", "half"}
            for name, rows in batch.tables.items():
                assert torch.equal(rows, data.tables[name].read(batch.input_ids))  # type: ignore[arg-type]
            assert torch.equal(batch.labels, data.labels[batch.seeds])
            sizes.append(batch.num_seeds)
    whole_epoch = [batch.seeds.tolist() for batch in loader.epoch(1)]
    assert [batch.seeds.tolist() for batch in loader.epoch(1, done=1, examples_done=4 * world.size)] == whole_epoch[1:]
    ids = torch.tensor([7, 3, 59, 20])
    in_order = hl.Sampled(fanouts=(1,), batch_size=2, shuffle=False).loader(shard, ids, world=world)
    seeds = torch.cat([batch.seeds for batch in in_order])
    steps = ids.split(2 * world.size)
    assert torch.equal(seeds, torch.cat([share_of(step, world.rank, world.size) for step in steps]))
    return sizes


def check_early_end(world: World, shard: Shard) -> None:
    """A loop that ends early keeps the ranks in step: the next epoch is complete."""
    loader = hl.Sampled(fanouts=(2,), batch_size=2, look_ahead=3).loader(shard, "train", world=world)
    batches = iter(loader)
    first: Batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert torch.equal(next(loader.epoch(1)).seeds, first.seeds)
    total = sum(batch.num_seeds for batch in loader.epoch(2))
    assert world.sum([total])[0] == len(loader.examples)


def check_weights(channel: Channel, shard: Shard) -> None:
    """All ranks refuse weights that only one of them has."""
    wrong = shard.edge["weight"].clone()
    if channel.rank == 0:
        wrong[0] = -1
    with pytest.raises(ValueError, match="'weight' has weights that are negative"):
        CollectiveSampler(replace(shard, edge={"weight": wrong}), channel, (2,), weight="weight")


def check_differences(world: World, shard: Shard) -> None:
    """Ranks with different arguments are refused before the first batch."""
    if world.size > 1:
        with pytest.raises(ValueError, match=r"differ in method\.batch_size \(3 against 2\)"):
            hl.Sampled(fanouts=(2,), batch_size=2 + world.rank).loader(shard, world=world)
        with pytest.raises(ValueError, match=r"differ in the seeds \(6 nodes against 5"):
            hl.Sampled(fanouts=(2,)).loader(shard, torch.arange(5 + world.rank), world=world)
        hl.Sampled(fanouts=(2,), workers=min(world.rank, 1)).loader(shard, world=world)  # a rank may have more threads
        other = replace(shard, cut=str(world.rank))
        with pytest.raises(ValueError, match="differ in the cut"):
            hl.shards.ShardedData(other, world)


def own_loop(world: World, data: hl.Dataset | Shard, kind: str) -> list[float]:
    """Losses over all ranks of a few steps of a user's own training loop."""
    convs = {"sage": SAGEConv, "gcn": GCNConv, "gat": GATConv}[kind]
    torch.manual_seed(1)
    model = hl.nn.GNN([convs(4, 8), convs(8, 5)], dropout=0.3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    loader = hl.Sampled(fanouts=(4, 3), batch_size=6 // world.size).loader(data, "train", seed=2, world=world)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            assert batch.total_seeds is not None
            loss = torch.nn.functional.cross_entropy(model(batch), batch.labels, reduction="sum") / batch.total_seeds
            loss.backward()
            world.sum_gradients(model.parameters())
            optimizer.step()
            losses.append(world.sum([float(loss.detach())])[0])
    return losses


def train_run(
    world: World, data: hl.Dataset, kind: str, inference: str, out: str | None = None, kill: int | None = None
) -> dict[str, Any]:
    """A run of the Trainer: losses, metrics and weights. kill: the step after which rank 1 dies."""
    convs = {"sage": SAGEConv, "gcn": GCNConv, "gat": GATConv}[kind]
    torch.manual_seed(1)
    options: dict[str, Any] = {"dropout": 0.3}
    if kind == "gcn":
        options |= {"encoder": torch.nn.Linear(4, 4), "jk": "cat", "head": torch.nn.Linear(10, 5)}
    model = hl.nn.GNN([convs(4, 5), convs(5, 5)], **options).double()
    method = hl.Sampled(fanouts=(4, 3), batch_size=6 // world.size)
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.05, "show": False, "inference": inference}
    settings |= {"checkpoint_s": 0.0, "resume": True} if out else {}
    callbacks = [] if kill is None else [KillRank(1, kill)]
    run = hl.Trainer(model, data, method, world=world, out=out, callbacks=callbacks, **settings).fit()
    return {
        "losses": [epoch.loss for epoch in run.history],
        "metrics": [evaluation.metrics["accuracy"] for evaluation in run.evaluations],
        "weights": [float(p.detach().square().sum()) for p in model.parameters()],
    }


def train_on_shards(world: World, folder: str, out: str, kill: int | None) -> dict[str, Any]:
    return train_run(world, hl.shards.open(Path(folder) / f"shards-{world.size}", world), *RUNS[0], out, kill)


RUNS = [("sage", "exact"), ("gcn", "exact"), ("gat", "sampled")]


def check_exact(world: World, shard: Shard, data: hl.Dataset) -> None:
    """Layer-wise inference on shards is that of one process."""
    for kind, convs in (("sage", SAGEConv), ("gcn", GCNConv), ("gat", GATConv)):
        torch.manual_seed(2)
        options: dict[str, Any] = {}
        if kind == "gcn":
            options = {"encoder": torch.nn.Linear(4, 4), "initial_residual": 0.1, "head": torch.nn.Linear(4, 5)}
        model = hl.nn.GNN([convs(4, 4), convs(4, 4), convs(4, 4)], **options).double()
        for name in ("x", "words"):
            shard_of_table = replace(shard, tables={"x": _narrow(shard.tables[name])})
            unsharded = replace(data, tables={"x": _narrow(data.tables[name])})
            ours = shard_infer.exact(model, shard_of_table, Channel(world), chunk_edges=50)
            expected = hl.infer.exact(model, unsharded)[shard.nodes]
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
            rows = torch.tensor([2, 0, 9]) if world.rank == world.size - 1 else torch.empty(0, dtype=torch.int64)
            ours = shard_infer.exact(model, shard_of_table, Channel(world), rows)
            torch.testing.assert_close(ours, expected[rows], rtol=1e-12, atol=1e-12)


def _narrow(table: hl.extend.Table) -> hl.extend.Table:
    """The first four columns; sparse rows stay sparse."""
    dense = table.read(torch.arange(len(table)))[:, :4].contiguous()
    return (
        hl.extend.SparseTable.from_dense(dense)
        if isinstance(table, hl.extend.SparseTable)
        else hl.extend.TensorTable(dense)
    )


def check(world: World, folder: str) -> dict[str, Any]:
    data = hl.open(Path(folder) / "data")
    shard = hl.shards.open_shard(Path(folder) / f"shards-{world.size}", world.rank)
    place = torch.empty(data.num_nodes, dtype=torch.int64)
    channel = Channel(world)
    place[channel.all_gather(shard.nodes)] = torch.arange(data.num_nodes)
    check_questions(channel, shard)
    check_weights(channel, shard)
    check_sampler(channel, shard, data, place)
    sizes = check_loader(world, shard, data)
    check_early_end(world, shard)
    check_exact(world, shard, data)
    check_differences(world, shard)
    # Seeds for fewer ranks than there are.
    few = hl.Sampled(fanouts=(2, 2), batch_size=5).loader(shard, torch.tensor([4]), world=world)
    alone = [batch.num_seeds for batch in few]
    return {
        "losses": {kind: own_loop(world, shard, kind) for kind in ("sage", "gcn", "gat")},
        "runs": [train_run(world, hl.shards.ShardedData(shard, world), *run) for run in RUNS],
        "seeds": world.sum([sum(sizes), sum(alone)]),
        "batches": [len(sizes), len(alone)],
    }
