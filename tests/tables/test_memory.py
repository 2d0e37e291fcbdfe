"""Tables in memory and in mapped files: reads, writes, and what kernels may read directly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hopline.tables import TensorTable
from tests.support.helpers import randint, randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_reads_rows_of_any_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = (10 * randn(30, *shape)).to(dtype)
    table = TensorTable(rows)
    ids = randint(0, 30, 50)
    assert torch.equal(table.read(ids), rows[ids])
    assert table.shape == tuple(rows.shape)
    assert table.dtype == dtype
    assert table.num_bytes == rows.numel() * rows.element_size()
    assert table.storage() is rows


def test_what_is_read_is_a_copy() -> None:
    table = TensorTable(randn(4, 2))
    table.read(torch.tensor([1])).zero_()
    assert table.rows[1].any()


def test_writes_convert_to_the_stored_type() -> None:
    table = TensorTable(torch.zeros(4, 2, dtype=torch.float16))
    table.write(torch.tensor([3, 1]), torch.tensor([[1.5, 2.5], [3.5, 4.5]], dtype=torch.float64))
    assert table[torch.tensor([1, 3])].tolist() == [[3.5, 4.5], [1.5, 2.5]]


def test_a_read_only_table_is_not_written() -> None:
    rows = randn(4, 2)
    table = TensorTable(rows.clone(), read_only=True)
    with pytest.raises(TypeError, match="read-only"):
        table.write(torch.tensor([0]), torch.zeros(1, 2))
    assert torch.equal(table.rows, rows)


def test_a_mapped_file_is_read_and_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((6, 3), dtype=np.float32))
    table = TensorTable(torch.from_numpy(np.load(path, mmap_mode="r+")))
    table.write(torch.tensor([4]), torch.ones(1, 3))
    assert np.load(path)[:, 0].tolist() == [0, 0, 0, 0, 1, 0]


def test_kernels_read_all_rows_from_one_place() -> None:
    rows = randn(4, 2)
    table = TensorTable(rows)
    for device in (None, "cpu"):
        tiers = table.tiers(device)
        assert tiers is not None
        assert tiers.hot is rows
        assert tiers.cold is None
        assert tiers.hot_slot is None
    assert table.tiers("cuda") is None  # a GPU does not read memory that is not pinned
    assert TensorTable(rows.T).tiers() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reads_pinned_rows_and_its_own() -> None:
    rows = randn(4, 2)
    for table in (TensorTable(rows.pin_memory()), TensorTable(rows.cuda())):
        tiers = table.tiers("cuda")
        assert tiers is not None
        assert tiers.hot is table.rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpu_writes_to_pinned_rows_and_its_own(dtype: torch.dtype) -> None:
    ids = torch.tensor([3, 0, 70]).cuda()
    new = randn(3, 5).to(dtype).cuda()
    for table in (TensorTable(randn(90, 5).to(dtype).pin_memory()), TensorTable(randn(90, 5).to(dtype).cuda())):
        expected = table.rows.cpu().clone()
        expected[ids.cpu()] = new.cpu()
        table.write(ids, new)
        assert torch.equal(table.read(ids), new)
        torch.cuda.synchronize()
        assert torch.equal(table.rows.cpu(), expected)
