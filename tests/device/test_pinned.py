"""Memory registered as pinned for as long as its tensor lives, with a stand-in for the CUDA driver."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from hopline import ops
from hopline.device import pinned
from tests.support.helpers import randn

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Driver:
    """A stand-in for cudart that remembers what is registered, and refuses what it is told to."""

    def __init__(self, refuse: tuple[int, ...] = ()) -> None:
        self.registered: dict[int, tuple[int, int]] = {}
        self.refuse = refuse

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
        if flags in self.refuse:
            return 1
        self.registered[start] = (num_bytes, flags)
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.registered[start]
        return 0


def test_memory_is_registered_in_place_for_as_long_as_the_tensor_lives() -> None:
    driver = Driver()
    rows = randn(30, 4)
    start = rows.data_ptr()
    assert pinned.register(rows, driver) is None
    assert driver.registered == {start: (30 * 4 * 8, pinned.MAPPED)}
    assert rows.data_ptr() == start
    del rows
    gc.collect()
    assert not driver.registered


def test_two_tensors_over_the_same_memory_are_registered_once() -> None:
    driver = Driver()
    rows = randn(30, 4)
    same = rows.view(30, 4)
    assert pinned.register(rows, driver) is None
    assert pinned.register(same, driver) is None
    del rows
    gc.collect()
    assert len(driver.registered) == 1  # the other still needs it
    del same
    gc.collect()
    assert not driver.registered


def test_a_copy_is_not_registered() -> None:
    rows = randn(30, 4)
    assert pinned.register(rows, Driver()) is None
    assert pinned.is_registered(rows)
    assert not pinned.is_registered(copy.deepcopy(rows))


def test_memory_that_may_only_be_read_is_registered_as_such() -> None:
    driver = Driver(refuse=(pinned.MAPPED,))
    rows = randn(30, 4)
    assert pinned.register(rows, driver) is None
    assert driver.registered[rows.data_ptr()][1] == pinned.MAPPED | pinned.READ_ONLY


def test_a_refusal_gives_its_reason() -> None:
    driver = Driver(refuse=(pinned.MAPPED, pinned.MAPPED | pinned.READ_ONLY))
    assert pinned.register(randn(3, 4), driver) == "CUDA error 1"


def test_a_tensor_that_begins_on_a_page_of_another_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says that its first byte is, since it locks whole pages."""
    page = pinned.PAGE
    memory = torch.zeros(8 * page, dtype=torch.uint8)
    first = -memory.data_ptr() % page
    before, across, within, beyond = (
        memory[first + start : first + stop]
        for start, stop in ((0, page + 100), (page + 100, 3 * page), (page + 200, page + 300), (4 * page, 5 * page))
    )
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    assert all(pinned.is_readable(tensor) for tensor in (before, across, within, beyond))  # as torch's own memory is
    assert pinned.register(before, Driver()) is None
    assert pinned.is_readable(before)
    assert not pinned.is_readable(across)
    assert pinned.is_readable(within)
    assert pinned.is_readable(beyond)
    del before
    gc.collect()
    assert pinned.is_readable(across)


def test_new_memory_has_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = []
    monkeypatch.setattr(pinned, "register", registered.append)
    rows = pinned.zeros((3, 5), torch.float64)
    assert not rows.any()
    assert rows.data_ptr() % pinned.PAGE == 0
    assert registered[0] is rows
    # What `is_pinned()` asks about is the first byte of the storage: it must be on a locked page too.
    assert rows.untyped_storage().data_ptr() == rows.data_ptr()
    assert pinned.zeros((0, 5), torch.float32).shape == (0, 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_pinning_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        pinned.pin(randn(3, 4))


@pytest.mark.gpu
@needs_gpu
def test_new_memory_is_pinned_as_torch_sees_it() -> None:
    rows = pinned.zeros((1000, 7), torch.float64)
    assert rows.is_pinned()
    assert pinned.is_readable(rows)
    ops.add_rows(rows, torch.tensor([3, 900], device="cuda"), torch.ones(2, 7, device="cuda"))
    torch.cuda.synchronize()
    assert rows.sum() == 14


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_reads_registered_memory() -> None:
    rows = torch.arange(1 << 20, dtype=torch.float32)
    start = rows.data_ptr()
    assert pinned.pin(rows) is rows
    assert rows.data_ptr() == start
    assert rows.is_pinned()
    assert pinned.pin(rows) is rows
    again = torch.frombuffer(rows.numpy(), dtype=torch.float32)
    assert again.is_pinned()
    del rows
    gc.collect()
    assert torch.zeros(3, device="cuda").sum().item() == 0  # no error is left behind


@pytest.mark.gpu
@needs_gpu
def test_a_mapped_file_is_pinned_in_place_or_copied_when_asked(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(1 << 20, dtype=np.float32))
    mapped = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="c"))
    copied = pinned.pin(mapped, copy=True)
    assert copied.is_pinned()
    assert torch.equal(copied, mapped)
    assert torch.zeros(3, device="cuda").sum().item() == 0
