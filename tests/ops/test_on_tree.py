"""Every function that models find here is one of the kernels' modules."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("triton")

from hopline.ops import on_tree
from hopline.ops.gpu import dense as gpu_dense
from hopline.ops.gpu import tree as gpu_tree
from hopline.ops.gpu import tree_reduce as gpu_tree_reduce

HOMES = {
    "next_step": gpu_tree.next_step,
    "dense_rows": gpu_tree.dense_rows,
    "rows_by_slot": gpu_tree.rows_by_slot,
    "reduce_tree": gpu_tree_reduce.reduce_tree,
    "hidden_then_reduce": gpu_dense.hidden_then_reduce,
    "beside_linear": gpu_dense.beside_linear,
}


@pytest.mark.parametrize("name", HOMES)
def test_arguments_are_those_of_the_kernel(name: str):
    ours, theirs = (list(inspect.signature(f).parameters) for f in (getattr(on_tree, name), HOMES[name]))
    assert len(ours) == len(theirs)
