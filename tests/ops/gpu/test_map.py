"""The device id map with a stamp per node, and the sorting map behind it, against the CPU's map."""

from __future__ import annotations

import pytest
import torch

from hopline.ops import reference
from hopline.ops.cpu.sampling import IdMap
from hopline.ops.gpu import sampling as gpu_sampling
from hopline.ops.gpu.sampling import DeviceIdMap
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint

pytestmark = RUNS_ON_GPU
CUDA = torch.cuda.is_available()
DEVICE = torch.device(KERNEL_DEVICE)


@parametrize_kernel(
    [(True, torch.int32), (True, torch.int64), (False, torch.int32)],
    dense=[True, False],
    dtype=[torch.int32, torch.int64],
)
def test_equals_the_map_of_the_cpu_over_several_batches(dense: bool, dtype: torch.dtype) -> None:
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
def test_ids_are_a_copy(dense: bool) -> None:
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


def test_the_steps_begin_again_after_the_last() -> None:
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
