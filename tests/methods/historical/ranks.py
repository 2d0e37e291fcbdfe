"""What several ranks do in tests of historical training, and one process that does the same."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg

import hopline as hl
from hopline.distributed.world import World
from hopline.methods.historical.groups import Groups
from hopline.methods.partitioned.rank_histories import Owners, PartAssignment, SharedHistories
from hopline.nn import GNN
from tests.support.helpers import dataset_of, randn, random_graph
from tests.support.ranks import KillRank

DATA = dataset_of(random_graph(num_nodes=60, num_edges=300), randn(60, 6))


def trainer_of(world: World, settings: dict[str, Any], out: str | None = None, **train: Any) -> hl.Trainer:
    torch.manual_seed(0)
    dropout = train.pop("dropout", 0.0)
    norm = train.pop("norm", None)
    model = GNN([pyg.GCNConv(6, 8), pyg.GCNConv(8, 8), pyg.GCNConv(8, 3)], dropout=dropout, norm=norm).double()
    method = hl.Historical(**({"num_parts": 6, "parts_per_batch": 1, "partition": "random"} | settings))
    callbacks = [KillRank(*train.pop("kill"))] if "kill" in train else []
    train = {"epochs": 3, "show": False, "resume": out is not None} | train
    return hl.Trainer(model, DATA, method, world=world, out=out, callbacks=callbacks, **train)


def result_of(trainer: hl.Trainer) -> dict[str, Any]:
    """Losses of all epochs and final weights."""
    run = trainer.fit()
    return {
        "losses": [epoch.loss for epoch in run.history],
        "weights": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist(),
    }


def train_all(world: World, cases: list[dict[str, Any]], two_hosts: bool) -> list[dict[str, Any]]:
    """The result of every case. two_hosts: each rank takes itself for the only one of its host."""
    if two_hosts:
        world.node = world.rank
        world.local_rank = 0
        world.local_size = 1
    return [result_of(trainer_of(world, **case)) for case in cases]


def alone(case: dict[str, Any], two_hosts: bool = False) -> dict[str, Any]:
    """The oracle: one process that trains, in a step, the batches that two ranks have in one."""
    settings: dict[str, Any] = {"accumulate": 2} | case
    trainer = trainer_of(World.alone(), **settings)
    work: Any = trainer.work
    if two_hosts:  # a batch has parts of one host alone
        two_hosts_assignment = PartAssignment(0, (0, 1), (range(3), range(3, 6)))
        groups = Groups(work.method, two_hosts_assignment, work.job.seed)
        work.groups.turns_of = lambda epoch: [(group,) for turn in groups.turns_of(epoch) for group in turn]
    return result_of(trainer)


def check_tables(world: World, two_hosts: bool) -> str:
    """Tables over three ranks: rows and ages read by all, sums collected by their owners, and the state."""
    if two_hosts:  # ranks 0 and 2 are on the first, rank 1 is on the second
        world.node = world.rank % 2
        world.local_size = 1 + (world.rank != 1)
        world.local_rank = int(world.rank == 2)
    shares = PartAssignment.of(world, 6)
    owners = Owners(world, shares, torch.tensor([0, 2, 3, 7, 8, 10, 12]))
    expected = randn(12, 4)
    own_rows = slice(owners.own.start, owners.own.stop)
    assert shares.parts == ((range(2), range(4, 6), range(2, 4)) if two_hosts else (range(2), range(2, 4), range(4, 6)))
    histories = SharedHistories(owners)
    assert (histories.num_rows == 12) != two_hosts
    histories.table(0, expected)
    world.barrier()
    histories.write(0, [own_rows], expected[own_rows])
    histories.stamp([own_rows], world.rank + 1)
    histories.step = 4
    world.barrier()
    positions = torch.tensor([[0, 3, 9, 11], [], [2, 7, 8, 10]][world.rank], dtype=torch.int64)
    source = histories.begin_reading([0], positions)
    assert (source is histories) != two_hosts
    assert torch.equal(source.rows(0, positions), expected[positions])
    owner_by_position = [next(r for r, span in enumerate(owners.spans) if int(p) in span) for p in positions]
    assert source.ages(positions).tolist() == [3 - rank for rank in owner_by_position]

    positions_by_rank = [torch.arange(12)[rank::2] for rank in range(3)]
    expected_sums = torch.zeros(12, 4).double()
    for rank, at_positions in enumerate(positions_by_rank):
        expected_sums[at_positions] += expected[at_positions] * (rank + 1)
    ours = owners.collect(positions_by_rank[world.rank], expected[positions_by_rank[world.rank]] * (world.rank + 1))
    torch.testing.assert_close(ours, expected_sums[own_rows])

    state = histories.state_dict()
    assert state["tables"]["0"].shape[0] == (12 if world.rank == 0 else 0)
    state = {"tables": {"0": expected + 1}, "written": torch.arange(12), "step": 20}
    histories.load_state_dict(state)
    assert torch.equal(histories.begin_reading([0], positions).rows(0, positions), expected[positions] + 1)
    state_after = histories.state_dict()
    if world.rank == 0:
        assert torch.equal(state_after["tables"]["0"], expected + 1)
        assert state_after["written"].tolist() == list(range(12))
    return "checked"
