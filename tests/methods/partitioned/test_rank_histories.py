"""History tables of several ranks: real processes on one host, and on two simulated hosts."""

from __future__ import annotations

import pytest
import torch

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.methods.partitioned.rank_histories import Owners, PartAssignment, Snapshot
from tests.methods.historical.ranks import check_tables
from tests.support.helpers import randn, shared_memory_of_hopline


@pytest.mark.parametrize("two_hosts", [False, True])
@pytest.mark.alone  # other tests share memory too
def test_three_ranks_read_what_each_other_wrote(two_hosts: bool):
    before = shared_memory_of_hopline()
    assert run(check_tables, LaunchSettings(devices=3, timeout_s=30), two_hosts) == "checked"
    assert shared_memory_of_hopline() <= before


def test_alone_one_rank_keeps_everything():
    owners = Owners(World.alone(), PartAssignment(0, (0,), (range(2),)), torch.tensor([0, 3, 5]))
    assert (owners.own, owners.host) == (range(5), range(5))
    positions = torch.tensor([1, 4])
    rows = randn(2, 3)
    assert owners.runs(positions) == [slice(0, 2)]
    expected = torch.zeros(5, 3).double().index_add_(0, positions, rows)
    assert torch.equal(owners.collect(positions, rows), expected)


def test_a_snapshot_finds_rows_by_their_positions():
    rows = randn(3, 2)
    snapshot = Snapshot(torch.tensor([2, 5, 9]), {1: rows}, torch.tensor([4, -1, 7]), step=9)
    assert torch.equal(snapshot.rows(1, torch.tensor([9, 2, 9])), rows[[2, 0, 2]])
    assert snapshot.read(1, torch.tensor([5]), rows.float()).dtype == torch.float32
    assert snapshot.ages(torch.tensor([5, 2, 9])).tolist() == [-1, 5, 2]
