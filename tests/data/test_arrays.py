"""Arrays on disk: what is written is what a memory map and NumPy read."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from hopline.data.arrays import DTYPES, ArrayWriter, as_tensor, file_bytes, map_npy, npy_header


@pytest.mark.parametrize("name", list(DTYPES))
def test_what_is_written_is_what_is_mapped_and_what_numpy_reads(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    rows = (torch.arange(60).reshape(12, 5) % 2).to(dtype)
    path = tmp_path / "rows.npy"
    writer = ArrayWriter(path, dtype, (5,))
    for piece in rows.split(5):
        writer.append(piece)
    writer.close()
    assert path.stat().st_size == file_bytes(dtype, writer.shape)
    assert torch.equal(map_npy(path, dtype, writer.shape), rows)
    by_numpy = np.load(path, allow_pickle=False)
    assert by_numpy.shape == (12, 5)
    if dtype != torch.bfloat16:
        assert np.array_equal(by_numpy, rows.numpy())


def test_large_rows_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopline.data.arrays.BYTES_AT_ONCE", 64)
    rows = torch.randn(100, 3)
    writer = ArrayWriter(tmp_path / "a.npy", rows.dtype, (3,))
    writer.append(rows)
    writer.close()
    assert np.array_equal(np.load(tmp_path / "a.npy"), rows.numpy())


def test_an_empty_array_survives(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "a.npy", torch.int64)
    writer.close()
    assert map_npy(tmp_path / "a.npy", torch.int64, (0,)).shape == (0,)
    assert np.load(tmp_path / "a.npy").shape == (0,)


def test_the_header_is_one_that_numpy_understands() -> None:
    file = io.BytesIO(npy_header(torch.float32, (2**40, 128, 3)))
    assert np.lib.format.read_magic(file) == (1, 0)
    assert np.lib.format.read_array_header_1_0(file) == ((2**40, 128, 3), False, np.dtype("<f4"))
    assert len(file.getvalue()) == 128


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex64 cannot be stored"):
        ArrayWriter(tmp_path / "a.npy", torch.complex64)
    with pytest.raises(ValueError, match="too many dimensions"):
        npy_header(torch.float32, (1,) * 40)
    with pytest.raises(ValueError, match="give numbers"):
        as_tensor(["a", "b"])


def test_a_private_map_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "a.npy", torch.int64)
    writer.append(torch.arange(4))
    writer.close()
    private = map_npy(tmp_path / "a.npy", torch.int64, (4,), copy_on_write=True)
    private[0] = 9
    assert map_npy(tmp_path / "a.npy", torch.int64, (4,)).tolist() == [0, 1, 2, 3]
