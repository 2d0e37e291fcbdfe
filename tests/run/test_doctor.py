"""The findings of `hopline doctor`."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from hopline import ops
from hopline.run import doctor
from tests.support.runs import command


def findings() -> dict[str, tuple[str, bool]]:
    return {what: (finding, fine) for what, finding, fine in doctor.examine()}


def test_doctor_says_what_pygs_loaders_sample_by(monkeypatch: pytest.MonkeyPatch):
    installed = [set()]
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name in installed[0] or None)
    assert "`import hopline.pyg`" in doctor._samplers_of_pyg()
    installed[0] = {"torch_sparse"}
    assert doctor._samplers_of_pyg() == "sample by torch_sparse"


def test_doctor_finds_nothing_wrong_on_this_machine():
    report = findings()
    assert all(fine for _, fine in report.values()), report
    assert report["torch"][0].split("+")[0] == torch.__version__.split("+")[0]  # one of them may leave out "+cu128"
    assert "equal to their definitions" in report["kernels"][0]
    assert {"python", "cores", "memory", "gpu", "kernel cache"} <= report.keys()


def test_a_missing_package_is_bad_unless_it_is_optional(monkeypatch: pytest.MonkeyPatch):
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    report = findings()
    assert report["numba"] == ("not installed: pip install numba", False)
    assert report["triton"] == ("not installed (optional)", True)


def test_kernels_that_differ_from_their_definition_are_found(monkeypatch: pytest.MonkeyPatch):
    plain = ops.sample_neighbors

    def wrong(*args: object) -> object:
        sample = plain(*args)  # type: ignore[arg-type]
        return sample._replace(ids=sample.ids.roll(1))

    monkeypatch.setattr(ops, "sample_neighbors", wrong)
    finding, fine = findings()["kernels"]
    assert not fine
    assert "differs from its definition" in finding


def test_a_cache_that_cannot_be_written_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "kernel_cache", lambda: Path("/proc/nowhere"))
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    finding, fine = findings()["kernel cache"]
    assert not fine
    assert "set NUMBA_CACHE_DIR" in finding


def test_the_command_fails_where_something_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "examine", lambda: iter([("numba", "0.61", True), ("kernels", "broken", False)]))
    status, out, err = command("doctor")
    assert status == 1
    assert out.splitlines() == ["ok   numba            0.61", "BAD  kernels          broken"]
    assert err == ""
