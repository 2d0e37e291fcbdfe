"""Pairwise grids: every pair of values of any two axes occurs, in few cases, always the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.grids import HAS_CUDA, pairwise, parametrize_kernel, parametrize_pairwise

AXES: dict[str, dict[str, Sequence[Any]]] = {
    "one axis": {"a": [1, 2, 3]},
    "two axes": {"a": [1, 2, 3], "b": "xy"},
    "one value each": {"a": [1], "b": [2], "c": [3]},
    "one long axis": {"a": list(range(26)), "b": [False, True], "c": "pqr"},
    "five of two": {name: [False, True] for name in "abcde"},
    "uneven": {"a": list(range(4)), "b": list(range(7)), "c": [0, 1], "d": list(range(5)), "e": list(range(3))},
    "ten of three": {name: [0, 1, 2] for name in "abcdefghij"},
    "equal values of two axes": {"a": [0, 1], "b": [0, 1], "c": [0, 1]},
    "values without a hash": {"a": [[1], [2]], "b": [{}, {"x": 1}], "c": [None, [3]]},
}


@pytest.mark.parametrize("name", AXES)
def test_every_pair_of_values_of_two_axes_occurs_and_no_case_twice(name: str):
    columns = list(AXES[name].values())
    cases = pairwise(**AXES[name])
    assert all(value in column for case in cases for value, column in zip(case, columns, strict=True))
    for a, b in itertools.combinations(range(len(columns)), 2):
        pairs = [(case[a], case[b]) for case in cases]
        for pair in itertools.product(columns[a], columns[b]):
            assert pair in pairs, f"{pair} of axes {a} and {b}"
    if len(columns) == 1:
        assert cases == [(value,) for value in columns[0]]
    assert all(case not in cases[:i] for i, case in enumerate(cases))
    assert pairwise(**AXES[name]) == cases, "always the same"


def test_cases_are_few():
    sizes = {name: len(pairwise(**axes)) for name, axes in AXES.items()}
    assert sizes["two axes"] == 6  # two axes have no smaller cover than their product
    assert sizes["one long axis"] == 26 * 3
    assert sizes["five of two"] <= 8  # of 32
    assert sizes["uneven"] <= 45  # of 840; 35 are the pairs of the two longest
    assert sizes["ten of three"] <= 25  # of 59049


def test_an_axis_without_values_is_refused():
    with pytest.raises(ValueError, match=r"\['b'\]"):
        pairwise(a=[1, 2], b=[])


def test_cases_are_parametrized_by_name():
    mark = parametrize_pairwise(kind=[int, str], weighted=[False, True]).mark
    names, cases = mark.args
    assert names == ("kind", "weighted")
    assert [case.values for case in cases] == pairwise(kind=[int, str], weighted=[False, True])
    assert cases[0].id == "int-False"


def test_only_the_interpreted_cases_of_a_kernel_run_without_a_gpu():
    _, cases = parametrize_kernel([(1, "b")], size=[0, 1], kind=["a", "b"]).mark.args
    assert [case.values for case in cases] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    marks = {case.values: {mark.name: mark for mark in case.marks} for case in cases}
    assert marks.pop((1, "b")) == {}
    for of_a_case in marks.values():
        assert of_a_case.keys() == {"gpu", "skipif"}
        assert of_a_case["skipif"].args == (not HAS_CUDA,)


@pytest.mark.parametrize("interpreted", [[], [(2, "a")], [(0,)]], ids=str)
def test_interpreted_cases_must_be_of_the_grid(interpreted: list[tuple]):
    with pytest.raises(ValueError, match=r"\['size', 'kind'\]"):
        parametrize_kernel(interpreted, size=[0, 1], kind=["a", "b"])
