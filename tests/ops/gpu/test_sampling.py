"""Sampling, gathering, grouping and id maps on the GPU (or in Triton's interpreter) against the reference."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu.sampling import IdMap
from hopline.ops.gpu import runtime as gpu_runtime
from hopline.ops.gpu import sampling as gpu_sampling
from hopline.ops.gpu.sampling import DeviceIdMap
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint, randn

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)
CUDA = torch.cuda.is_available()
gpu_only = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [t.to(KERNEL_DEVICE) for t in tensors]


def assert_same(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for our_tensor, expected_tensor in zip(ours, expected, strict=True):
        assert our_tensor.device.type == KERNEL_DEVICE
        assert our_tensor.dtype == expected_tensor.dtype
        assert torch.equal(our_tensor.cpu(), expected_tensor)


def csr(dtype: torch.dtype = torch.int64, num_nodes: int = 60) -> tuple[Tensor, Tensor]:
    """(indptr, indices) with empty rows, short ones, some of a usual fan-out, and one of a million."""
    degrees = randint(0, 9, num_nodes)
    degrees[[0, 5, num_nodes - 1]] = 0
    degrees[[7, 8]] = torch.tensor([40, 10**6])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return indptr, randint(0, num_nodes, int(indptr[-1]), seed=3).to(dtype)


# ---- sampling


@parametrize_kernel(
    [(torch.int32, 1), (torch.int64, 5), (torch.int32, 33)],
    dtype=[torch.int32, torch.int64],
    fanout=[1, 2, 5, 15, 33, 70],
)
def test_samples_are_those_of_the_reference(dtype: torch.dtype, fanout: int) -> None:
    indptr, indices = csr(dtype)
    key = 3 if dtype == torch.int32 else -(2**63)
    nodes = torch.cat([torch.arange(60), torch.tensor([8, 8, 7])])
    ours = gpu_sampling.sample_neighbors(*on_device(indptr, indices, nodes), fanout, key)
    assert_same(ours, reference.sample_neighbors(indptr, indices, nodes, fanout, key))


def test_more_nodes_than_one_program_takes_are_sampled() -> None:
    indptr, indices = csr()
    nodes = randint(0, 60, 1100)
    ours = gpu_sampling.sample_neighbors(*on_device(indptr, indices, nodes), 2, 5)
    assert_same(ours, reference.sample_neighbors(indptr, indices, nodes, 2, 5))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_all_neighbours_come_in_order(dtype: torch.dtype) -> None:
    indptr, indices = csr(dtype)
    nodes = torch.tensor([7, 0, 3, 59, 7, 58])
    ours = gpu_sampling.sample_neighbors(*on_device(indptr, indices, nodes), -1, 0)
    assert_same(ours, reference.sample_neighbors(indptr, indices, nodes, -1, 0))
    assert_same(gpu_sampling.row_entries(*on_device(indptr, nodes)), reference.row_entries(indptr, nodes))


@pytest.mark.parametrize("fanout", [-1, 3, 40])
@pytest.mark.parametrize("nodes", [[], [0, 5]], ids=["no nodes", "no edges"])
def test_no_nodes_or_no_edges_give_an_empty_sample(fanout: int, nodes: list[int]) -> None:
    indptr, indices = csr()
    node_ids = torch.tensor(nodes, dtype=torch.int64)
    ours = gpu_sampling.sample_neighbors(*on_device(indptr, indices, node_ids), fanout, 1)
    assert_same(ours, reference.sample_neighbors(indptr, indices, node_ids, fanout, 1))
    assert ours.ids.numel() == 0


def test_node_ids_and_keys_of_other_types_equal_the_reference() -> None:
    indptr, indices = csr()
    nodes = torch.arange(60)
    key = torch.tensor([9])
    expected = reference.sample_neighbors(indptr, indices, nodes, 4, 9)
    assert_same(
        gpu_sampling.sample_neighbors(*on_device(indptr, indices, nodes.int()), 4, key.to(KERNEL_DEVICE)), expected
    )


@pytest.mark.parametrize("fanout", [-1, 3])
def test_ids_that_are_not_contiguous_equal_the_reference(fanout: int) -> None:
    indptr, indices = csr()
    nodes = torch.tensor([7, 1, 3, 0, 58, 2])
    rows = randn(60, 3)
    strided = nodes.to(KERNEL_DEVICE)[::2]
    ours = gpu_sampling.sample_neighbors(*on_device(indptr, indices), strided, fanout, 1)
    assert_same(ours, reference.sample_neighbors(indptr, indices, nodes[::2], fanout, 1))
    assert_same((gpu_sampling.gather_rows(*on_device(rows), strided),), (rows[nodes[::2]],))
    assert gpu_sampling.DeviceIdMap(60, strided.device).add(strided.flip(0)[::2]).tolist() == [0, 1]


@pytest.mark.parametrize("fanout", [-1, 3])
@pytest.mark.parametrize("bad", [-1, 60, 2**40])
def test_a_node_that_is_not_there_raises_and_the_next_call_is_right(fanout: int, bad: int) -> None:
    indptr, indices = on_device(*csr())
    with pytest.raises(ValueError, match="outside the graph"):
        gpu_sampling.sample_neighbors(indptr, indices, torch.tensor([1, bad], device=KERNEL_DEVICE), fanout, 1)
    gpu_sampling.sample_neighbors(indptr, indices, torch.tensor([1], device=KERNEL_DEVICE), fanout, 1)


@pytest.mark.parametrize("indptr", [[0, 9], [-1, 2], [3, 1]], ids=["beyond", "negative", "falls"])
def test_a_damaged_indptr_raises(indptr: list[int]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        gpu_sampling.sample_neighbors(*on_device(torch.tensor(indptr), torch.zeros(4).long(), torch.tensor([0])), 2, 1)


@pytest.mark.gpu
@gpu_only
def test_a_pinned_graph_is_sampled_in_place() -> None:
    indptr, indices = csr(torch.int32)
    nodes = torch.arange(60)
    for fanout in (-1, 5, 70):
        ours = gpu_sampling.sample_neighbors(indptr.pin_memory(), indices.pin_memory(), nodes.cuda(), fanout, 5)
        assert_same(ours, reference.sample_neighbors(indptr, indices, nodes, fanout, 5))
    with pytest.raises(ValueError, match="in host memory"):
        gpu_sampling.sample_neighbors(indptr, indices, nodes.cuda(), 3, 5)


@pytest.mark.gpu
@gpu_only
def test_a_hundred_runs_on_many_nodes_are_equal() -> None:
    indptr, indices = on_device(*csr(torch.int32))
    nodes = randint(0, 60, 10**6).cuda()
    first = gpu_sampling.sample_neighbors(indptr, indices, nodes, 5, 5)
    for _ in range(100):
        again = gpu_sampling.sample_neighbors(indptr, indices, nodes, 5, 5)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---- relabelling


def test_relabelling_accepts_no_ids_and_refuses_negative_ones() -> None:
    nobody = torch.empty(0, dtype=torch.int64, device=KERNEL_DEVICE)
    ids, idx = gpu_sampling.relabel(nobody, nobody)
    assert ids.numel() == idx.numel() == 0
    assert (ids.dtype, idx.dtype) == (torch.int64, torch.int32)
    with pytest.raises(ValueError, match="out of range"):
        gpu_sampling.relabel(nobody, torch.tensor([3, -2], device=KERNEL_DEVICE))


# ---- rows


@parametrize_kernel(
    [
        (torch.float32, (1433,)),
        (torch.float64, (2, 5)),
        (torch.bfloat16, (3,)),
        (torch.bfloat16, (16,)),
        (torch.int64, ()),
        (torch.uint8, (3,)),
        (torch.bool, (1,)),
    ],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
    shape=[(), (1,), (3,), (16,), (2, 5), (1433,)],
)
def test_rows_of_any_type_and_width_are_gathered(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = (50 * randn(30, *shape)).to(dtype)
    for ids in (randint(0, 30, 99)[: 5000 // rows[0].numel()], randint(0, 30, 3).int(), torch.empty(0).long()):
        assert_same((gpu_sampling.gather_rows(*on_device(rows, ids)),), (rows[ids.long()],))


def test_rows_of_views_are_gathered() -> None:
    rows, ids = on_device(randn(31, 6, dtype=torch.float32), randint(0, 30, 50))
    for some in (rows.view(-1)[1:181].view(30, 6), rows[:30, ::2], rows.t()[:, :30].t()):
        assert torch.equal(gpu_sampling.gather_rows(some, ids), some[ids])


def test_few_programs_gather_the_same_rows() -> None:
    rows, ids = on_device(randn(30, 1000, dtype=torch.float32), randint(0, 30, 25))
    assert torch.equal(gpu_sampling.gather_rows(rows, ids, programs=1), rows[ids])


def test_gradients_go_to_the_rows_that_were_read() -> None:
    rows, ids = on_device(randn(30, 4).requires_grad_(), randint(0, 30, 50))
    (grad,) = torch.autograd.grad(gpu_sampling.gather_rows(rows, ids).sum(), rows)
    assert torch.equal(grad[:, 0].cpu(), torch.bincount(ids.cpu(), minlength=30).double())


@pytest.mark.parametrize("bad", [-1, 30, 2**40])
def test_an_id_outside_is_not_followed_and_reported(bad: int) -> None:
    rows, ids = on_device(randn(30, 4), torch.tensor([3, bad]))
    assert torch.equal(gpu_sampling.gather_rows(rows, ids)[0], rows[3])
    with pytest.raises(IndexError, match="outside its table"):
        gpu_runtime.check_device_errors()


def test_what_no_row_can_be_taken_from_is_refused() -> None:
    ids = torch.tensor([0], device=KERNEL_DEVICE)
    with pytest.raises(IndexError, match="empty"):
        gpu_sampling.gather_rows(torch.empty(0, 4, device=KERNEL_DEVICE), ids)
    with pytest.raises(ValueError, match="1-D int32 or int64"):
        gpu_sampling.gather_rows(torch.ones(3, 4, device=KERNEL_DEVICE), ids.bool())
    assert gpu_sampling.gather_rows(torch.ones(3, 0, device=KERNEL_DEVICE), ids).shape == (1, 0)


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("width", [3, 128])
def test_rows_in_host_memory_are_read_from_the_gpu(width: int) -> None:
    rows = randn(5000, width, dtype=torch.bfloat16)
    ids = randint(0, 5000, 3000)
    pinned = rows.pin_memory()
    for programs in (None, 8):
        assert torch.equal(gpu_sampling.gather_rows(pinned, ids.cuda(), programs).cpu(), rows[ids])
    assert torch.equal(gpu_sampling.gather_rows(rows, ids.cuda()).cpu(), rows[ids])
    assert torch.equal(gpu_sampling.gather_rows(pinned[:, 1:], ids.cuda()).cpu(), rows[ids][:, 1:])


@pytest.mark.gpu
@gpu_only
def test_gathering_does_not_wait_for_the_device() -> None:
    rows, ids = on_device(randn(100, 5), randint(0, 100, 40))
    gpu_sampling.gather_rows(rows, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = gpu_sampling.gather_rows(rows, ids)
        _, order = gpu_sampling.group_by_key(ids, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(ours, rows[ids])
    assert torch.equal(ids[order], ids.sort().values)


# ---- edges


@pytest.mark.parametrize("bad", [-1, 9])
def test_a_group_that_is_not_there_is_reported(bad: int) -> None:
    gpu_sampling.group_by_key(torch.tensor([0, bad], device=KERNEL_DEVICE), 9)
    with pytest.raises(IndexError, match="group"):
        gpu_runtime.check_device_errors()


@pytest.mark.parametrize("together", [7, 1 << 24])
def test_self_loops_are_those_of_the_reference(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sampling, "SELF_LOOP_EDGES", together)
    indptr = torch.tensor([0, 0, 4, 4, 9, 30, 30])
    indices = randint(0, 6, 30).int()
    assert_same((gpu_sampling.self_loops(*on_device(indptr, indices)),), (reference.self_loops(indptr, indices),))
    assert gpu_sampling.self_loops(*on_device(torch.tensor([0, 0]), torch.empty(0).int())).numel() == 0


@parametrize_kernel(
    [(True, torch.int32), (True, torch.int64), (False, torch.int32)],
    dense=[True, False],
    dtype=[torch.int32, torch.int64],
)
def test_a_map_equals_the_map_of_the_cpu_over_several_batches(dense: bool, dtype: torch.dtype) -> None:
    ours = DeviceIdMap(300, DEVICE, dense)
    expected = IdMap(300)
    for batch in range(3):
        for hop, size in enumerate((5, 0, 80, 1500)):
            nodes = randint(0, 300, size, seed=10 * batch + hop).to(dtype)
            idx = ours.add(nodes.to(DEVICE))
            assert idx.dtype == torch.int32
            assert torch.equal(idx.cpu(), expected.add(nodes))
            assert ours.size == expected.size
            assert torch.equal(ours.ids().cpu(), expected.ids())
        ours.clear()
        expected.clear()


@pytest.mark.parametrize("dense", [True, False], ids=["stamps", "sorted"])
def test_ids_of_a_map_are_a_copy(dense: bool) -> None:
    ours = DeviceIdMap(9, DEVICE, dense)
    ours.add(torch.tensor([4, 2], device=DEVICE))
    before = ours.ids()
    ours.clear()
    ours.add(torch.tensor([7, 8], device=DEVICE))
    assert before.tolist() == [4, 2]


def test_a_map_has_stamps_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sampling, "DENSE_MAP_BYTES", 80)
    assert DeviceIdMap(10, DEVICE).dense
    assert not DeviceIdMap(11, DEVICE).dense
    assert DeviceIdMap(11, DEVICE, dense=True).dense


def test_the_steps_of_a_map_begin_again_after_the_last() -> None:
    ours = DeviceIdMap(9, DEVICE)
    ours._step = gpu_sampling.LAST_STEP - 1
    for nodes in ([3, 5, 3], [5, 3], [3], [8, 3, 5]):
        assert ours.add(torch.tensor(nodes, device=DEVICE)).tolist() == [nodes.index(n) for n in nodes]
        ours.clear()
    assert ours._step == 3


@pytest.mark.parametrize("dense", [True, False], ids=["stamps", "sorted"])
@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_what_is_not_a_node_is_refused_and_the_map_stays_usable(dense: bool, bad: int) -> None:
    ours = DeviceIdMap(9, DEVICE, dense)
    with pytest.raises(ValueError, match="out of range"):
        ours.add(torch.tensor([3, bad], device=DEVICE))
    ours.clear()
    assert ours.add(torch.tensor([6, 3, 6], device=DEVICE)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [-2, 11])
def test_a_first_node_that_is_out_of_range_writes_nothing_outside_the_arrays(bad: int) -> None:
    ours = DeviceIdMap(9, DEVICE, dense=True)
    around_stamps = torch.zeros(9 + 8, dtype=torch.int64, device=DEVICE)
    around_ids = torch.full((4 + 8,), -7, dtype=torch.int64, device=DEVICE)
    ours._stamps = around_stamps[4:13]
    ours._ids = around_ids[4:8]
    with pytest.raises(ValueError, match="out of range"):
        ours.add(torch.tensor([bad, 3], device=DEVICE))
    assert around_stamps[:4].tolist() + around_stamps[13:].tolist() == 8 * [0]
    assert around_ids[:4].tolist() + around_ids[8:].tolist() == 8 * [-7]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="races need a GPU")
def test_threads_that_race_for_a_few_nodes_give_the_same_order_every_time() -> None:
    nodes = randint(0, 10, 10**6).cuda() * 99_991
    expected = reference.relabel(nodes[:0], nodes)
    ours = DeviceIdMap(10**6, DEVICE)
    for _ in range(100):
        assert torch.equal(ours.add(nodes), expected[1])
        assert torch.equal(ours.ids(), expected[0])
        ours.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="races need a GPU")
def test_many_nodes_give_the_same_order_every_time() -> None:
    nodes = randint(0, 10**6, 10**6).cuda()
    expected = reference.relabel(nodes[:1000].unique(), nodes)
    ours = DeviceIdMap(10**6, DEVICE)
    for _ in range(100):
        ours.add(nodes[:1000].unique())
        assert torch.equal(ours.add(nodes), expected[1])
        assert torch.equal(ours.ids(), expected[0])
        ours.clear()
