"""The public functions: where they run, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hopline import ops
from hopline.ops import cpu, cpu_reduce, reference

ONE = torch.tensor([0])
POINTERS = torch.tensor([0, 1])
ROWS = torch.ones(1, 2)
CALLS: dict[str, tuple[Callable[..., Any], Any, tuple]] = {
    "sample_neighbors": (ops.sample_neighbors, cpu, (POINTERS, ONE, ONE, 1, 5)),
    "row_positions": (ops.row_positions, cpu, (POINTERS, ONE)),
    "relabel": (ops.relabel, cpu, (ONE, ONE)),
    "gather_rows": (ops.gather_rows, cpu, (ROWS, ONE)),
    "group_edges": (ops.group_edges, cpu, (ONE, 1)),
    "self_loops": (ops.self_loops, cpu, (POINTERS, ONE)),
    "reduce_edges": (ops.reduce_edges, cpu_reduce, (ROWS, POINTERS, ONE, "sum")),
    "keyed_dropout": (ops.keyed_dropout, cpu_reduce, (ROWS, 0.5, 3, ONE)),
}


@pytest.mark.parametrize("name", CALLS)
def test_ids_on_the_cpu_choose_the_numba_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, module, arguments = CALLS[name]
    monkeypatch.setattr(module, name, lambda *a: "numba")
    monkeypatch.setattr(reference, name, lambda *a: "reference")
    assert function(*arguments) == "numba"
    monkeypatch.setattr(ops, "_on_cpu", lambda t: False)
    assert function(*arguments) == "reference"


def test_the_device_of_the_ids_decides_and_not_that_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "gather_rows", lambda *a: "reference")
    assert ops.gather_rows(ROWS, torch.empty(2, dtype=torch.int64, device="meta")) == "reference"


@pytest.mark.parametrize("name", sorted(ops.__all__))
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(ops, name).__doc__


@pytest.mark.parametrize("reduce", ["add", "min", "", "Mean"])
def test_an_unknown_reduction_is_refused_by_name(reduce: str) -> None:
    with pytest.raises(ValueError, match="sum, mean, max"):
        ops.reduce_edges(ROWS, POINTERS, ONE, reduce)


@pytest.mark.parametrize("reduce", ops.REDUCTIONS)
@pytest.mark.parametrize("source", [-1, 1, 2**31 - 1])
def test_a_source_that_is_not_there_raises(reduce: str, source: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        ops.reduce_edges(ROWS, POINTERS, torch.tensor([source], dtype=torch.int32), reduce)


@pytest.mark.parametrize("indptr", [[0, 2], [-1, 1], [0, 1, 0, 1]], ids=["beyond", "negative", "falls"])
def test_a_damaged_indptr_raises(indptr: list[int]) -> None:
    with pytest.raises(IndexError, match="indptr"):
        ops.reduce_edges(ROWS, torch.tensor(indptr), ONE, "sum")


def test_weights_must_be_one_per_edge() -> None:
    with pytest.raises(ValueError, match="2 weights for 1 edges"):
        ops.reduce_edges(ROWS, POINTERS, ONE, "sum", torch.ones(2))


def test_relabel_refuses_negative_ids() -> None:
    with pytest.raises(ValueError, match="out of range"):
        ops.relabel(ONE, torch.tensor([-2, 3]))


def test_relabel_of_nothing() -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    ids, idx = ops.relabel(nobody, nobody)
    assert ids.numel() == idx.numel() == 0


def test_relabel_of_far_apart_ids() -> None:
    ids, idx = ops.relabel(torch.tensor([2**50]), torch.tensor([3, 2**50, 7, 3]))
    assert ids.tolist() == [2**50, 3, 7]
    assert idx.tolist() == [1, 0, 2, 1]
