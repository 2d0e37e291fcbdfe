"""History tables: rows, half precision, files, state and ages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hopline.distributed.world import World
from hopline.tables.allocators import MappedFiles, SharedFiles
from hopline.tables.history import Histories, report_ages
from hopline.util import trace
from tests.support.helpers import randn


def test_rows_come_back_as_they_were_written():
    histories = Histories(10)
    rows = randn(5, 4)
    histories.write(0, [slice(2, 4), slice(7, 10)], rows)
    positions = torch.tensor([7, 2, 9, 0])
    assert torch.equal(
        histories.read(0, positions, rows), torch.stack([rows[2], rows[0], rows[4], torch.zeros(4).double()])
    )
    histories.write(1, [slice(0, 10)], randn(10, 3, 2))  # any width, any shape
    assert histories.tables[1].shape == (10, 3, 2)


def test_tables_can_be_kept_in_half_precision_and_in_files(tmp_path: Path):
    rows = randn(10, 4).float()
    halves = Histories(10, dtype=torch.bfloat16)
    halves.write(0, [slice(0, 10)], rows)
    assert halves.tables[0].dtype == torch.bfloat16
    assert torch.equal(halves.read(0, torch.arange(10), rows), rows.bfloat16().float())

    map_tensor = Histories(10, MappedFiles(tmp_path / "tables"))
    assert not map_tensor.read(0, torch.arange(10), rows).any()
    map_tensor.write(0, [slice(0, 10)], rows)
    assert (tmp_path / "tables" / "h.0.bin").stat().st_size == rows.nbytes
    assert torch.equal(map_tensor.read(0, torch.arange(10), rows), rows)


def test_tables_that_the_disk_cannot_hold_are_refused_before_they_are_written(small_disk: Path):
    """A page without space would end the process by SIGBUS."""
    rows = randn(1000, 4).float()
    Histories(1000, MappedFiles(small_disk / "tables")).write(0, [slice(0, 1000)], rows)
    with pytest.raises(ValueError, match=r"h\.1\.bin \(No space left .* 625 KiB"):
        Histories(40_000, MappedFiles(small_disk / "tables")).write(1, [slice(0, 1000)], rows)
    assert not (small_disk / "tables" / "h.1.bin").exists()


def test_all_ranks_hear_of_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"h\.0\.bin \(No space left"):
        SharedFiles(tmp_path, World.alone(), False).new("h", 0, (3, 4), torch.float32)

    second_rank = World.alone()
    monkeypatch.setattr(second_rank, "local_rank", 1)
    monkeypatch.setattr(second_rank, "any", lambda flag: True)  # the first rank of the host has a problem
    with pytest.raises(ValueError, match="another rank could not write"):
        SharedFiles(tmp_path, second_rank, False).new("h", 0, (3, 4), torch.float32)


def test_rows_of_another_width_raise_an_assertion():
    histories = Histories(10)
    histories.write(0, [slice(0, 2)], randn(2, 4))
    with pytest.raises(AssertionError, match="layer 0"):
        histories.write(0, [slice(0, 2)], randn(2, 5))


def test_the_state_dict_restores_rows_ages_and_steps():
    one = Histories(6)
    other = Histories(6)
    one.write(0, [slice(0, 6)], randn(6, 2))
    one.step = 4
    one.stamp([slice(1, 3)], 4)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.tables[0], one.tables[0])
    assert torch.equal(other.written, one.written)
    assert other.step == 4
    one.tables[0][:] = 0
    assert other.tables[0].any()  # a copy


def test_ages_are_counted_in_steps():
    histories = Histories(6)
    counters = trace.Counters()
    for step, slab in ((1, slice(0, 2)), (5, slice(2, 4)), (80, slice(4, 5))):
        histories.stamp([slab], step)
    histories.step = 82
    with trace.listen(counters):
        report_ages(histories.ages(torch.arange(6)))
    counters.next_epoch()
    counts = counters.last_epoch()
    assert counts["history.rows"] == 6
    assert counts["history.never_written"] == 1
    assert counts["history.age_sum"] == 2 * 81 + 2 * 77 + 2
    assert counts["history.age.to_2"] == 1
    assert counts["history.age.older"] == 4
