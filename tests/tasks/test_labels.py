"""Kinds of labels: found by their values, checked, counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hopline.data.arrays import as_tensor
from hopline.tasks.kinds import LabelKind
from hopline.tasks.labels import LABELS, is_labelled, normalize_labels

NAN = float("nan")


@pytest.mark.parametrize(
    ("y", "kind"),
    [
        ([0, 3, -1], "single"),
        ([0.0, 2.0, NAN], "single"),
        ([[1.0], [NAN], [0.0]], "single"),
        ([0.5, 1.0, NAN], "regression"),
        ([[0.5], [1.0]], "regression"),
        ([-0.25, 3.0], "regression"),
        ([[0, 1], [1, 1]], "multi"),
        ([[0.0, 1.0], [1.0, 1.0]], "multi"),
        ([[0.0, 1.0], [1.0, NAN]], "multi"),  # refused by its values, not trained as numbers
        ([[0.0, 2.0], [1.0, 1.0]], "regression"),
        ([[0, 2], [1, 1]], "multi"),  # whole numbers: refused by their values
    ],
)
def test_the_kind_follows_from_the_values(y: list, kind: str):
    assert normalize_labels(as_tensor(np.array(y)), None)[1] == kind


@pytest.mark.parametrize(
    ("y", "kind", "expected"),
    [
        ([0, 3, 7], "regression", [0.0, 3.0, 7.0]),
        ([[0, 1], [1, 1]], "regression", [[0.0, 1.0], [1.0, 1.0]]),
        ([0, 1, 1], "binary", [0, 1, 1]),
        ([1.0, NAN, 0.0], "single", [1, -1, 0]),
    ],
)
def test_a_kind_that_is_named_decides(y: list, kind: LabelKind, expected: list):
    labels, found = normalize_labels(torch.tensor(y), kind)
    assert found == kind
    assert labels.tolist() == expected


@pytest.mark.parametrize(
    ("y", "kind", "words"),
    [
        ([0.5, 1.0], "single", "task='single' must be whole numbers.*task='regression'"),
        ([0.5, 1.0], "binary", "task='binary' must be whole numbers"),
        ([[1.0, 0.0]], "binary", "only fits task='multi' or task='regression'"),
        ([0, 1], "multi", "give a 2-D array"),
        ([[[0.5]]], "regression", r"\[num_nodes, k\]"),
        ([0, 300_000_000], "single", "A label is 300000000.*task='regression'"),
        (3.0, None, "single number"),
    ],
)
def test_labels_of_another_kind_are_refused_with_what_to_type(y: object, kind: LabelKind | None, words: str):
    with pytest.raises(ValueError, match=words):
        normalize_labels(torch.tensor(y), kind)


def test_yes_and_no_are_the_classes_1_and_0():
    labels, kind = normalize_labels(torch.tensor([True, False, True]), None)
    assert (labels.tolist(), kind) == ([1, 0, 1], "single")


def test_numbers_keep_their_precision():
    assert normalize_labels(torch.tensor([0.5], dtype=torch.float64), None)[0].dtype == torch.float64
    assert normalize_labels(torch.tensor([0.5], dtype=torch.float16), None)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "y", "count", "num_outputs"),
    [
        ("single", torch.tensor([0, 4, -1]), 5, 5),
        ("binary", torch.tensor([0, 0]), 2, 1),
        ("multi", torch.zeros(3, 7), 7, 7),
        ("regression", torch.zeros(3), 1, 1),
        ("regression", torch.zeros(3, 2), 2, 2),
    ],
)
def test_classes_and_targets_are_counted(kind: LabelKind, y: Tensor, count: int, num_outputs: int):
    assert LABELS[kind].count(y) == count
    assert LABELS[kind].num_outputs(count) == num_outputs


def test_a_node_without_any_label_is_found():
    assert is_labelled(torch.tensor([0, -1, 3])).tolist() == [True, False, True]
    assert is_labelled(torch.tensor([0.5, NAN, -3.0])).tolist() == [True, False, True]
    assert is_labelled(torch.tensor([[NAN, 0.5], [NAN, NAN]])).tolist() == [True, False]
    assert is_labelled(torch.zeros(2, 3)).tolist() == [True, True]
