"""Identity 2: any stack of tiers reads what the plain tensor holds, also after writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hopline.tables import CachedTable, SparseTable, Table, TensorTable, TieredTable
from tests.support.helpers import randint, randn

NUM_ROWS = 60


def in_memory(rows: Tensor, folder: Path) -> Table:
    """A table in host memory."""
    return TensorTable(rows.clone())


def mapped(rows: Tensor, folder: Path) -> Table:
    """A table in a memory-mapped file."""
    np.save(folder / "rows.npy", rows.numpy())
    return TensorTable(torch.from_numpy(np.load(folder / "rows.npy", mmap_mode="r+")))


def cached(below: Callable[[Tensor, Path], Table], num_hot: int) -> Callable[[Tensor, Path], Table]:
    """A function that makes a table with a cache of `num_hot` rows over another one."""

    def make(rows: Tensor, folder: Path) -> Table:
        return CachedTable(below(rows, folder), randint(0, NUM_ROWS, num_hot, seed=num_hot).unique())

    return make


def tiered(below: Callable[[Tensor, Path], Table], num_hot: int | None) -> Callable[[Tensor, Path], Table]:
    """A function that makes a tiered table with `num_hot` hot rows; None: all rows."""

    def make(rows: Tensor, folder: Path) -> Table:
        hot = None if num_hot is None else randint(0, NUM_ROWS, num_hot, seed=num_hot).unique()
        return TieredTable(below(rows, folder), hot, "cpu")

    return make


def sparse(rows: Tensor, folder: Path) -> Table:
    """A table that stores no zeros; it is read-only."""
    return SparseTable.from_dense(rows)


WRITABLE: dict[str, Callable[[Tensor, Path], Table]] = {
    "memory": in_memory,
    "mapped": mapped,
    "cache-over-memory": cached(in_memory, 20),
    "cache-over-mapped": cached(mapped, 20),
    "empty-cache": cached(mapped, 0),
    "cache-of-everything": cached(mapped, 10_000),
    "cache-over-cache-over-mapped": cached(cached(mapped, 40), 10),
    "three-caches": cached(cached(cached(in_memory, 5), 20), 3),
    "tiers-over-memory": tiered(in_memory, 20),
    "tiers-over-mapped": tiered(mapped, 20),
    "nothing-hot": tiered(mapped, 0),
    "everything-hot": tiered(mapped, None),
    "tiers-over-cache-over-mapped": tiered(cached(mapped, 20), 10),
}
STACKS = {
    **WRITABLE,
    "sparse": sparse,
    "cache-over-sparse": cached(sparse, 20),
    "tiers-over-sparse": tiered(sparse, 20),
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_every_stack_of_tables_reads_the_rows_of_the_tensor(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    rows = randn(NUM_ROWS, 5, dtype=dtype)
    rows[rows.abs() < 0.5] = 0
    table = STACKS[name](rows, tmp_path)
    assert (table.shape, table.dtype, len(table)) == ((NUM_ROWS, 5), dtype, NUM_ROWS)
    for seed, count in enumerate([0, 1, 200, 13]):
        ids = randint(0, NUM_ROWS, count, seed=seed)
        assert torch.equal(table.read(ids), rows[ids])
        assert torch.equal(table[ids], rows[ids])
    stored = table.storage()
    assert stored is None or torch.equal(stored, rows)


@pytest.mark.parametrize("name", WRITABLE)
def test_every_tier_reads_the_rows_that_were_written(name: str, tmp_path: Path) -> None:
    rows = randn(NUM_ROWS, 5, dtype=torch.float32)
    table = WRITABLE[name](rows, tmp_path)
    for seed in range(6):
        ids = randint(0, NUM_ROWS, 25, seed=seed).unique()
        new = randn(ids.numel(), 5, seed=seed)
        rows[ids] = new.float()
        table.write(ids, new)
        everything = torch.arange(NUM_ROWS)
        below = table
        while True:  # every tier holds the new rows, not only the uppermost
            assert torch.equal(below.read(everything), rows)
            if not isinstance(below, CachedTable | TieredTable):
                break
            below = below.below
    if name == "cache-over-mapped":
        assert np.array_equal(np.load(tmp_path / "rows.npy"), rows.numpy())


@pytest.mark.parametrize("name", STACKS)
def test_an_id_that_is_not_there_is_refused_by_every_stack(name: str, tmp_path: Path) -> None:
    table = STACKS[name](randn(NUM_ROWS, 5), tmp_path)
    for bad in (-1, NUM_ROWS):
        with pytest.raises((IndexError, ValueError), match=rf"outside 0 \.\. {NUM_ROWS - 1}"):
            table.read(torch.tensor([3, bad]))


@pytest.mark.parametrize("name", WRITABLE)
def test_a_mask_is_not_a_list_of_ids(name: str, tmp_path: Path) -> None:
    table = WRITABLE[name](randn(NUM_ROWS, 5), tmp_path)
    with pytest.raises(ValueError, match="1-D"):
        table[torch.ones(NUM_ROWS, dtype=torch.bool)]
