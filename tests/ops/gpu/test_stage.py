"""Kernels that claim and stage cold rows, against torch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hopline.ops.gather_tiers import new_counts
from hopline.ops.gpu import tiers as gpu_tiers
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint, randn

pytestmark = RUNS_ON_GPU
NUM_ROWS = 300
NUM_HOT = 60
DEVICE = torch.device(KERNEL_DEVICE)


def hot_slots() -> torch.Tensor:
    hot_slot = torch.full((NUM_ROWS,), -1, dtype=torch.int32)
    hot_slot[randint(0, NUM_ROWS, 1000).unique()[:NUM_HOT]] = torch.arange(NUM_HOT, dtype=torch.int32)
    return hot_slot


def claim_rows(trees: list[torch.Tensor], hot_slot: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    claims = torch.full((capacity,), gpu_tiers.unclaimed(torch.int32), dtype=torch.int32, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    stamp = torch.zeros(NUM_ROWS, dtype=torch.int32, device=DEVICE)
    for nodes in trees:
        gpu_tiers.claim(nodes.to(DEVICE), hot_slot.to(DEVICE), stamp, 7, claims, count)
    return claims, count


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cold_rows_are_claimed_once(dtype: torch.dtype):
    hot_slot = hot_slots()
    hot_slot[5] = -2 - (NUM_HOT + 1)  # staged at present, and wanted again
    trees = [torch.cat([randint(-1, NUM_ROWS, 400, seed=s), torch.tensor([5, 5, -1])]).to(dtype) for s in (1, 2)]
    claims, count = claim_rows(trees, hot_slot, NUM_ROWS)
    expected = torch.cat(trees).long()
    expected = expected[expected >= 0].unique()
    expected = expected[hot_slot[expected] < 0]
    assert int(count) == expected.numel()
    assert torch.equal(claims.sort().values[: expected.numel()].cpu().long(), expected)
    assert bool((claims.sort().values[expected.numel() :] == gpu_tiers.unclaimed(torch.int32)).all())


def test_claims_beyond_the_capacity_are_counted_but_not_stored():
    claims, count = claim_rows([torch.arange(NUM_ROWS)], torch.full((NUM_ROWS,), -1, dtype=torch.int32), 100)
    assert int(count) == NUM_ROWS
    assert claims.unique().numel() == 100
    assert int(claims.max()) < NUM_ROWS


@parametrize_kernel(
    [((3,), torch.bfloat16), ((2, 150), torch.float32), ((), torch.float64)],
    shape=[(), (3,), (256,), (2, 150)],
    dtype=[torch.bfloat16, torch.float32, torch.float64],
)
def test_gather_aside_gives_the_rows_of_host_memory(shape: tuple[int, ...], dtype: torch.dtype):
    rows = randn(NUM_ROWS, *shape).to(dtype)
    ids = randint(0, NUM_ROWS, 250)
    ours = gpu_tiers.gather_host_rows(rows.pin_memory() if DEVICE.type == "cuda" else rows, ids.to(DEVICE))
    assert torch.equal(ours.cpu(), rows[ids])


@parametrize_kernel(
    [
        (True, (2, 150), torch.float32),
        (False, (3,), torch.float32),
        (True, (), torch.float64),
        (False, (256,), torch.float64),
    ],
    add=[False, True],
    shape=[(), (3,), (256,), (2, 150)],
    dtype=[torch.float32, torch.float64],
)
def test_rows_are_put_and_added_into_the_hosts(shape: tuple[int, ...], dtype: torch.dtype, add: bool):
    table = randn(NUM_ROWS, *shape).to(dtype)
    ids = randn(NUM_ROWS).argsort()[:250]
    rows = randn(250, *shape, seed=2).to(dtype)
    expected = table.clone()
    expected[ids] = expected[ids] + rows if add else rows
    table = table.pin_memory() if DEVICE.type == "cuda" else table
    gpu_tiers.put_host_rows(table, ids.to(DEVICE), rows.to(DEVICE), add=add)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(table, expected)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.float32, 7), (torch.float64, 300)])
def test_staged_rows_are_read_where_they_stand(dtype: torch.dtype, width: int):
    rows = randn(NUM_ROWS, width).to(dtype)
    hot_slot = hot_slots()
    hot_ids = (hot_slot >= 0).nonzero().view(-1)
    capacity = 50
    hot = torch.zeros(NUM_HOT + 2 * capacity, width, dtype=dtype)
    hot[hot_slot[hot_ids].long()] = rows[hot_ids]
    cold = rows.pin_memory() if DEVICE.type == "cuda" else rows
    hot = hot.to(DEVICE)
    hot_slot = hot_slot.to(DEVICE)
    count = torch.tensor([40], dtype=torch.int32, device=DEVICE)
    fetched = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    expected = (hot_slot < 0).nonzero().view(-1)[:capacity].int()
    gpu_tiers.stage(hot, cold, hot_slot, expected, count, NUM_HOT, fetched)
    gpu_tiers.point(hot_slot, expected, count, NUM_HOT)
    assert (int(fetched), int((hot_slot < -1).sum())) == (40, 40)
    # The next window takes over what both want, from the device.
    again = torch.cat([expected[30:40], (hot_slot == -1).nonzero().view(-1)[-20:].int()])
    number = torch.tensor([again.numel()], dtype=torch.int32, device=DEVICE)
    gpu_tiers.stage(
        hot, torch.zeros_like(cold) if DEVICE.type == "cpu" else cold, hot_slot, again, number, 110, fetched
    )
    assert int(fetched) == 60
    assert torch.equal(hot[110:120].cpu(), rows[expected[30:40].long().cpu()])
    gpu_tiers.point(hot_slot, expected, count, None)
    gpu_tiers.stage(hot, cold, hot_slot, again, number, 110, fetched)
    gpu_tiers.point(hot_slot, again, number, 110)
    counts = new_counts(DEVICE)
    ids = torch.arange(NUM_ROWS, device=DEVICE)
    assert torch.equal(gpu_tiers.gather_tiers(hot, cold, hot_slot, ids, counts).cpu(), rows)
    assert counts.sum(0).tolist() == [NUM_HOT, NUM_ROWS - NUM_HOT - 30, 30]
