"""Grids of test cases that stay small: all pairs of values instead of all combinations.

A full product over shapes, reductions, weights and dtypes grows by a factor with every axis, and most of its cases
repeat one another: a fault nearly always shows for one value of one axis, or for two values of two axes together.
`pairwise` covers every such pair with about as many cases as the two longest axes have combinations.

Triton's interpreter is some hundred times slower than a compiled kernel. `parametrize_kernel` therefore runs a few
named cases of a grid wherever the tests run, and the whole grid on a GPU:

                            without CUDA      with CUDA     `pytest -m gpu` with CUDA
    interpreted cases       run               run           run
    all other cases         skipped           run           run
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.interpreter import search_language_once

HAS_CUDA = torch.cuda.is_available()
GPU_ONLY = (pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device"))
"""Marks of a case that runs on a GPU and nowhere else."""
RUNS_ON_GPU = [pytest.mark.gpu] if HAS_CUDA else []
"""The `pytestmark` of a module of kernel tests: `pytest -m gpu` selects all of it where there is a GPU.

Without CUDA the same tests run in Triton's interpreter, so the marker `gpu` would say too much.
"""


def pairwise(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every pair of values of any two axes occurs, in the order of the axes.

    Deterministic and greedy: a case starts at the first pair that is still missing and takes, axis by axis, the value
    that adds most missing pairs (the earliest one among equals).
    """
    sizes = [len(values) for values in axes.values()]
    if not all(sizes):
        raise ValueError(f"every axis needs a value: {[name for name, values in axes.items() if not len(values)]}")
    if len(sizes) == 1:
        (values,) = axes.values()
        return [(value,) for value in values]

    # A pair is ((axis, value), (later axis, value)), by positions. A dict is a set that keeps its order.
    missing = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    rows = []
    while missing:
        chosen = dict(next(iter(missing)))
        for axis in range(len(sizes)):
            if axis not in chosen:
                chosen[axis] = _best_value(axis, sizes[axis], chosen, missing)
        for pair in itertools.combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(chosen[axis] for axis in range(len(sizes))))
    columns = list(axes.values())
    return [tuple(column[i] for column, i in zip(columns, row, strict=True)) for row in rows]


def _best_value(axis: int, size: int, chosen: dict[int, int], missing: dict[Any, None]) -> int:
    """The value of an axis that adds most missing pairs to the values chosen so far."""

    def num_new(value: int) -> int:
        return sum(tuple(sorted(((axis, value), other))) in missing for other in chosen.items())

    return max(range(size), key=num_new)


def parametrize_pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over `pairwise` cases."""
    return pytest.mark.parametrize(tuple(axes), [pytest.param(*case, id=_id(case)) for case in pairwise(**axes)])


def parametrize_kernel(interpreted: Sequence[tuple[Any, ...]], **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over all combinations, of which those not in `interpreted` need a GPU."""
    search_language_once()
    grid = list(itertools.product(*axes.values()))
    if not interpreted or any(case not in grid for case in interpreted):
        raise ValueError(f"interpreted cases {list(interpreted)} must be some of the grid over {list(axes)}")
    cases = [pytest.param(*case, id=_id(case), marks=() if case in interpreted else GPU_ONLY) for case in grid]
    return pytest.mark.parametrize(tuple(axes), cases)


def _id(case: tuple[Any, ...]) -> str:
    """The values of a case, joined by dashes."""
    return "-".join(str(getattr(value, "__name__", value)).removeprefix("torch.") for value in case)
