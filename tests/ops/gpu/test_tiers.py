"""Gathering, claiming and staging hot and cold rows on the GPU (or in Triton's interpreter) against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopline.ops.gather_tiers import gather_tiers_reference, new_counts
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint, randn

gpu_tiers = pytest.importorskip("hopline.ops.gpu.tiers")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)
NUM_ROWS = 300
NUM_HOT = 60


def tiers(rows: Tensor, num_hot: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(hot, place) of randomly chosen rows, on the kernels' device."""
    chosen = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))[:num_hot]
    hot_slot = torch.full((NUM_ROWS,), -1, dtype=torch.int32)
    hot_slot[chosen] = torch.arange(num_hot, dtype=torch.int32)
    return rows[chosen].to(KERNEL_DEVICE), hot_slot.to(KERNEL_DEVICE)


def readable(rows: Tensor) -> Tensor:
    """Host rows as a kernel may read them."""
    return rows.pin_memory() if KERNEL_DEVICE == "cuda" else rows


@pytest.mark.parametrize("num_hot", [0, 1, 50, NUM_ROWS])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_reads_as_the_definition_says(num_hot: int, id_dtype: torch.dtype) -> None:
    rows = randn(NUM_ROWS, 16, dtype=torch.float32)
    hot, hot_slot = tiers(rows, num_hot)
    ids = torch.cat([randint(0, NUM_ROWS, 300), torch.tensor([-1, 0, NUM_ROWS - 1, -1])]).to(id_dtype)
    counts = new_counts(KERNEL_DEVICE)
    expected_counts = new_counts("cpu")
    ours = gpu_tiers.gather_tiers(hot, readable(rows), hot_slot, ids.to(KERNEL_DEVICE), counts)
    expected = gather_tiers_reference(hot.cpu(), rows, hot_slot.cpu(), ids, expected_counts)
    assert torch.equal(ours.cpu(), expected)
    assert counts.sum(0).tolist() == expected_counts.sum(0).tolist()


@pytest.mark.parametrize("staged", [True, False])
def test_staged_rows_are_read_as_the_definition_says(staged: bool) -> None:
    rows = randn(NUM_ROWS, 16, dtype=torch.float32)
    hot, hot_slot = tiers(rows, 50)
    staged_ids = (hot_slot < 0).nonzero().view(-1)[:30]
    hot_slot[staged_ids] = -2 - torch.arange(50, 80, dtype=torch.int32, device=hot_slot.device)
    hot = torch.cat([hot, -rows[staged_ids.cpu()].to(hot.device)])  # so that one sees where a row came from
    ids = torch.cat([randint(0, NUM_ROWS, 300), torch.tensor([-1])])
    counts = new_counts(KERNEL_DEVICE)
    expected_counts = new_counts("cpu")
    ours = gpu_tiers.gather_tiers(
        hot, readable(rows), hot_slot, ids.to(KERNEL_DEVICE), counts, ids.argsort().to(KERNEL_DEVICE), staged
    )
    expected = gather_tiers_reference(hot.cpu(), rows, hot_slot.cpu(), ids, expected_counts, staged)
    assert torch.equal(ours.cpu(), expected)
    assert counts.sum(0).tolist() == expected_counts.sum(0).tolist()
    assert bool((expected_counts.sum(0)[2] > 0) == staged)


@parametrize_kernel(
    [
        (torch.float32, (128,)),
        (torch.float32, ()),
        (torch.bfloat16, (7,)),
        (torch.float16, (2, 3)),
        (torch.float64, (7,)),
        (torch.int8, (1,)),
        (torch.int8, (128,)),
        (torch.int64, (2, 3)),
        (torch.bool, (7,)),
    ],
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool],
    shape=[(), (1,), (7,), (128,), (2, 3)],
)
def test_rows_of_any_type_and_width_are_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = (10 * randn(NUM_ROWS, *shape)).to(dtype)
    hot, hot_slot = tiers(rows, 60)
    ids = randint(0, NUM_ROWS, 90).to(KERNEL_DEVICE)
    ours = gpu_tiers.gather_tiers(hot, readable(rows), hot_slot, ids)
    assert (ours.dtype, ours.device) == (dtype, ids.device)
    assert torch.equal(ours.cpu(), rows[ids.cpu()])


def test_wide_and_unaligned_rows_are_read() -> None:
    wide = randn(NUM_ROWS, 2 * gpu_tiers.MAX_COLUMNS + 3, dtype=torch.float64)
    ids = randint(0, NUM_ROWS, 20).to(KERNEL_DEVICE)
    hot, hot_slot = tiers(wide, 60)
    assert torch.equal(gpu_tiers.gather_tiers(hot, readable(wide), hot_slot, ids).cpu(), wide[ids.cpu()])
    buffer = randn(1 + NUM_ROWS * 4, dtype=torch.float32).to(KERNEL_DEVICE)
    shifted = buffer[1:].view(NUM_ROWS, 4)
    assert torch.equal(gpu_tiers.gather_tiers(shifted, None, None, ids), shifted[ids])


def test_without_cold_rows_no_slots_are_needed() -> None:
    rows = randn(NUM_ROWS, 5).to(KERNEL_DEVICE)
    ids = torch.tensor([3, -1, NUM_ROWS - 1, NUM_ROWS], device=KERNEL_DEVICE)  # the last is none
    counts = new_counts(KERNEL_DEVICE)
    ours = gpu_tiers.gather_tiers(rows, None, None, ids, counts)
    assert torch.equal(ours[[0, 2]], rows[[3, -1]])
    assert not ours[[1, 3]].any()
    assert counts.sum(0).tolist() == [2, 0, 0]
    assert gpu_tiers.gather_tiers(rows, None, None, ids[:0]).shape == (0, 5)
    assert torch.equal(gpu_tiers.gather_tiers(rows, None, None, ids[::2]), rows[[3, -1]])


def test_the_order_of_reading_changes_nothing() -> None:
    rows = randn(NUM_ROWS, 6)
    hot, hot_slot = tiers(rows, 50)
    ids = torch.cat([randint(0, NUM_ROWS, 70), torch.tensor([-1])]).to(KERNEL_DEVICE)
    ours = gpu_tiers.gather_tiers(hot, readable(rows), hot_slot, ids, None, ids.argsort())
    assert torch.equal(ours, gpu_tiers.gather_tiers(hot, readable(rows), hot_slot, ids))


def test_several_programs_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tiers, "GATHER_WORDS", 8)
    rows = randn(NUM_ROWS, 64)
    hot, hot_slot = tiers(rows, 100)
    ids = randint(0, NUM_ROWS, 150)
    counts = new_counts(KERNEL_DEVICE)
    ours = gpu_tiers.gather_tiers(hot, readable(rows), hot_slot, ids.to(KERNEL_DEVICE), counts)
    num_hits = int((hot_slot.cpu()[ids] >= 0).sum())
    assert torch.equal(ours.cpu(), rows[ids])
    assert counts.sum(0).tolist() == [num_hits, 150 - num_hits, 0]
    assert int((counts.sum(1) > 0).sum()) > 1


def test_accesses_are_counted_by_row() -> None:
    counts = torch.zeros(NUM_ROWS, dtype=torch.int32, device=KERNEL_DEVICE)
    ids = randint(-1, 20, 1500).to(KERNEL_DEVICE)
    gpu_tiers.count_ids(counts, ids)
    gpu_tiers.count_ids(counts, ids[:0])
    assert torch.equal(counts.cpu().long(), torch.bincount(ids.cpu()[ids.cpu() >= 0], minlength=NUM_ROWS))


@pytest.mark.gpu
@needs_gpu
def test_gather_tiers_can_be_captured_in_a_cuda_graph() -> None:
    rows = randn(NUM_ROWS, 33, dtype=torch.float32)
    hot, hot_slot = tiers(rows, 50)
    cold = rows.pin_memory()
    ids = randint(0, NUM_ROWS, 400).cuda()
    counts = new_counts("cuda")
    gpu_tiers.gather_tiers(hot, cold, hot_slot, ids, counts)  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = gpu_tiers.gather_tiers(hot, cold, hot_slot, ids, counts)
    counts.zero_()
    for seed in range(3):
        ids.copy_(randint(0, NUM_ROWS, 400, seed))
        graph.replay()
        assert torch.equal(ours.cpu(), rows[ids.cpu()])
    assert int(counts.sum()) == 3 * 400


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
