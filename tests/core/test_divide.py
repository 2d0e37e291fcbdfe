"""Ways to divide nodes into parts: by labels and by METIS. `test_partition.py` has the partitions."""

from __future__ import annotations

import sys

import pytest
import torch

from hopline.core import partition as divide
from tests.support.helpers import graph_of, randint, random_graph


def test_as_many_labels_as_parts_are_numbered_in_order() -> None:
    labels = torch.tensor([7, -1, 7, 30, 30, 30])
    assert divide.by_labels(labels, 3).tolist() == [1, 0, 1, 2, 2, 2]


@pytest.mark.parametrize(("num_labels", "num_parts"), [(3, 8), (10, 4), (50, 7), (1, 5), (7, 100)])
def test_more_or_fewer_labels_than_parts_are_merged_or_split_evenly(num_labels: int, num_parts: int) -> None:
    sizes = torch.bincount(divide.by_labels(randint(0, num_labels, 4000), num_parts), minlength=num_parts)
    mean = 4000 / num_parts
    assert int(sizes.max()) <= max(mean * 1.1, mean + 1)
    assert int(sizes.min()) >= min(mean * 0.9, mean - 1)


def test_labels_are_merged_whole_where_that_is_nearly_even() -> None:
    labels = torch.repeat_interleave(torch.arange(8), torch.tensor([98, 101, 100, 99, 102, 100, 103, 97]))
    labels = labels[torch.randperm(800, generator=torch.Generator().manual_seed(0))]
    parts = divide.by_labels(labels, 4)
    assert torch.equal(parts.long(), labels // 2)


def test_empty_parts_get_a_node_of_the_largest() -> None:
    assert divide.without_empty(torch.tensor([2, 2, 2, 2, 0], dtype=torch.int32), 4).tolist() == [2, 2, 3, 1, 0]


def test_without_pymetis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ValueError, match=r"pip install pymetis.*streaming"):
        divide.by_metis(random_graph(), 2, 0, False)


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_edge_index_out_of_range_is_refused(bad: int) -> None:
    graph = graph_of(torch.tensor([1, bad]), torch.tensor([0, 1]), 3)
    with pytest.raises(ValueError, match="hopline verify"):
        divide.check_edges(graph)
