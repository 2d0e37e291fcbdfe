"""Shared arrays are not copied: the pickle is small, and one process reads what another writes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hopline.distributed import shared_memory
from hopline.distributed.shared_memory import SharedArray, share
from hopline.interop.dlpack import from_any


def answer(pipe: Any, array: SharedArray) -> None:
    """The other process: reads, reads again when told, then writes."""
    pipe.send(array.tensor.tolist())
    pipe.recv()
    pipe.send(array.tensor.tolist())
    array.tensor[-1] = 7
    pipe.send(None)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_two_processes_read_and_write_the_same_memory(method: str):
    array = share(torch.arange(4))
    context: Any = multiprocessing.get_context(method)
    our_end, their_end = context.Pipe()
    process = context.Process(target=answer, args=(their_end, array))
    process.start()
    assert our_end.recv() == [0, 1, 2, 3]
    array.tensor[0] = 9
    our_end.send(None)
    assert our_end.recv() == [9, 1, 2, 3]
    our_end.recv()
    process.join(20)
    assert array.tensor.tolist() == [9, 1, 2, 7]
    shared_memory.release()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.float64])
def test_every_type_and_shape_comes_back(dtype: torch.dtype):
    for shape in ((3, 5), (), (0, 4), (2, 0)):
        array = share(torch.ones(shape, dtype=dtype))
        back = pickle.loads(pickle.dumps(array)).tensor
        assert back.dtype == dtype
        assert torch.equal(back, array.tensor)
    shared_memory.release()


def test_a_large_array_has_a_small_pickle():
    assert len(pickle.dumps(share(torch.zeros(10_000_000)))) < 500
    shared_memory.release()


def test_an_array_that_is_not_contiguous_is_copied_in_order():
    array = share(torch.arange(6).view(2, 3).t())
    assert pickle.loads(pickle.dumps(array)).tensor.tolist() == [[0, 3], [1, 4], [2, 5]]
    shared_memory.release()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are found by way of /proc")
def test_a_mapped_file_is_shared_by_its_path_and_stays_read_only(tmp_path: Path):
    np.save(tmp_path / "rows.npy", np.arange(5000, dtype=np.float32))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    tensor = torch.frombuffer(bytearray(8), dtype=torch.float32)  # one that is in no file, for comparison
    assert share(tensor).tensor.data_ptr() != tensor.data_ptr()
    tensor = from_any(mapped)[100:]
    array = share(tensor)
    assert array.tensor.data_ptr() == tensor.data_ptr()
    assert array.file == str(tmp_path / "rows.npy")
    assert not array.writable
    assert torch.equal(pickle.loads(pickle.dumps(array)).tensor, tensor)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are found by way of /proc")
def test_a_private_mapping_and_a_replaced_file_are_copied(tmp_path: Path):
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros(5000, dtype=np.float32))
    private = torch.from_numpy(np.load(path, mmap_mode="c"))
    private[0] = 5  # which the file does not know
    assert float(pickle.loads(pickle.dumps(share(private))).tensor[0]) == 5
    whole = torch.from_numpy(np.load(path, mmap_mode="r+"))
    np.save(tmp_path / "new.npy", np.ones(5000, dtype=np.float32))
    os.replace(tmp_path / "new.npy", path)
    assert float(pickle.loads(pickle.dumps(share(whole))).tensor[0]) == 0
    shared_memory.release()


def test_a_file_replaced_after_it_was_sent_is_refused(tmp_path: Path):
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros(5000, dtype=np.float32))
    sent = pickle.dumps(SharedArray(str(path), 128, torch.zeros(5000), writable=False))
    np.save(tmp_path / "new.npy", np.ones(5000, dtype=np.float32))
    os.replace(tmp_path / "new.npy", path)
    with pytest.raises(ValueError, match="no longer there"):
        pickle.loads(sent)
    shared_memory.release()


def test_a_handle_whose_sender_has_ended_says_so():
    code = "import pickle, sys, torch; from hopline.distributed.shared_memory import share; "
    code += "sys.stdout.buffer.write(pickle.dumps(share(torch.zeros(9))))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    with pytest.raises(ValueError, match="must run on this host"):
        pickle.loads(process.stdout)


def test_what_was_sent_is_kept_until_it_is_released():
    sent = pickle.dumps(share(torch.ones(3)))  # nobody here holds the array
    assert pickle.loads(sent).tensor.tolist() == [1, 1, 1]
    shared_memory.release()
    with pytest.raises(ValueError, match="no longer there"):
        pickle.loads(sent)


def test_where_memory_without_a_name_is_not_to_be_had_a_file_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    array = share(torch.arange(3))
    assert isinstance(array.file, str)
    back = pickle.loads(pickle.dumps(array))
    array.tensor[0] = 8
    assert back.tensor.tolist() == [8, 1, 2]
    shared_memory.release()
    Path(array.file).unlink()
