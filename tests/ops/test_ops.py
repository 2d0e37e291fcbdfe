"""The public functions of `ops`: which kernels they choose, and which arguments they refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hopline import ops
from hopline.ops import reference
from hopline.ops.cpu import reduce as cpu_reduce
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.reference import SortedIdMap

ONE = torch.tensor([0])
POINTERS = torch.tensor([0, 1])
ROWS = torch.ones(1, 2)
SAMPLE = (torch.tensor([0, 9]), torch.arange(9), ONE, 3)
CALLS: dict[str, tuple[Callable[..., Any], Any, tuple]] = {
    "sample_neighbors": (ops.sample_neighbors, cpu_sampling, (POINTERS, ONE, ONE, 1, 5)),
    "row_entries": (ops.row_entries, cpu_sampling, (POINTERS, ONE)),
    "relabel": (ops.relabel, cpu_sampling, (ONE, ONE)),
    "gather_rows": (ops.gather_rows, cpu_sampling, (ROWS, ONE)),
    "group_by_key": (ops.group_by_key, cpu_sampling, (ONE, 1)),
    "self_loops": (ops.self_loops, cpu_sampling, (POINTERS, ONE)),
    "reduce_edges": (ops.reduce_edges, cpu_reduce, (ROWS, POINTERS, ONE, "sum")),
    "keyed_dropout": (ops.keyed_dropout, cpu_reduce, (ROWS, 0.5, 3, ONE)),
}


@pytest.mark.parametrize("name", CALLS)
def test_ids_on_the_cpu_choose_the_numba_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, module, arguments = CALLS[name]
    monkeypatch.setattr(module, name, lambda *a: "numba")
    monkeypatch.setattr(reference, name, lambda *a: "reference")
    assert function(*arguments) == "numba"
    monkeypatch.setattr(ops, "_is_on_cpu", lambda t: False)
    assert function(*arguments) == "reference"


@pytest.mark.parametrize(
    ("has_triton", "expected"), [(True, "hopline.ops.gpu.sampling"), (False, "hopline.ops.reference")]
)
def test_ids_on_a_gpu_choose_the_triton_kernel_if_triton_is_there(
    has_triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_has_triton", lambda: has_triton)
    gpu_ids = SimpleNamespace(device=torch.device("cuda"), is_cuda=True)
    assert ops._twin(gpu_ids, cpu_sampling, "sampling").__name__ == expected  # type: ignore[arg-type]


def test_an_id_map_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(ops.new_id_map(9, torch.device("cpu")), ops.IdMap)
    assert type(ops.new_id_map(9, torch.device("meta"))) is SortedIdMap
    monkeypatch.setattr(ops, "_has_triton", lambda: False)
    monkeypatch.setattr(ops, "SortedIdMap", lambda num_nodes, device: (num_nodes, device))
    assert ops.new_id_map(9, torch.device("cuda")) == (9, torch.device("cuda"))


def test_a_key_in_a_tensor_is_a_key() -> None:
    key = torch.tensor([5])
    for ours, expected in zip(ops.sample_neighbors(*SAMPLE, key), ops.sample_neighbors(*SAMPLE, 5), strict=True):
        assert torch.equal(ours, expected)
    x = torch.ones(9, 3)
    ids = torch.arange(9)
    assert torch.equal(ops.keyed_dropout(x, 0.5, key, ids), ops.keyed_dropout(x, 0.5, 5, ids))


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
    with pytest.raises(ValueError, match=r"shape \[1\], got \[2\]"):
        ops.reduce_edges(ROWS, POINTERS, ONE, "sum", torch.ones(2))


def test_relabel_refuses_negative_ids() -> None:
    with pytest.raises(ValueError, match="out of range"):
        ops.relabel(ONE, torch.tensor([-2, 3]))


def test_kernels_do_not_load_triton_behind_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would end the process."""
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.raises(ValueError, match=r"`import hopline\.interop` before `import tensorflow`"):
        ops.gpu_kernels("sampling")
