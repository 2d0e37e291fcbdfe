"""Edge options: reading in chunks, reversing, grouping by destination, self-loops and duplicates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hopline.data.edges import Edges, check_same_arrays, edge_chunks, group, index_dtype, join, npy_edges, prepare
from hopline.data.options import EdgeOptions, edge_options, merge


def test_options_are_checked_by_name_and_value() -> None:
    assert edge_options({"symmetrize": True}) == EdgeOptions(symmetrize=True)
    with pytest.raises(ValueError, match=r"'symetrize'.*'symmetrize'"):
        edge_options({"symetrize": True})
    with pytest.raises(ValueError, match="'keep', 'remove' or 'add'"):
        edge_options({"self_loops": "drop"})
    with pytest.raises(ValueError, match="choose 'keep' or 'remove'"):
        edge_options({"duplicates": "no"})
    with pytest.raises(ValueError, match="positive number"):
        edge_options({"chunk_edges": 0})


def test_ids_are_stored_small() -> None:
    assert index_dtype(2**31 - 1) == torch.int32
    assert index_dtype(2**31) == torch.int64


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_file_of_edges_is_read_in_chunks(tmp_path: Path, layout: str, dtype: type) -> None:
    edges = np.arange(46, dtype=dtype).reshape(2, 23)
    np.save(tmp_path / "e.npy", edges if layout == "rows" else np.ascontiguousarray(edges.T))
    chunks = list(npy_edges(tmp_path / "e.npy", 5))
    assert max(c.size(1) for c in chunks) == 5
    assert np.array_equal(torch.cat(chunks, 1).numpy(), edges)
    assert np.array_equal(torch.cat([c for c, _ in edge_chunks(tmp_path / "e.npy", None, 7)], 1).numpy(), edges)
    np.save(tmp_path / "bad.npy", np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"bad\.npy must hold .*\[2, E\]"):
        list(npy_edges(tmp_path / "bad.npy", 5))


def test_chunks_are_split_together_with_their_edge_arrays() -> None:
    edges = torch.arange(20).reshape(2, 10)
    weight = torch.arange(10.0)
    cut = list(edge_chunks([(edges, {"weight": weight}), (edges.numpy(), {"weight": weight})], None, 4))
    assert [c.size(1) for c, _ in cut] == [4, 4, 2, 4, 4, 2]
    assert torch.cat([a["weight"] for _, a in cut]).tolist() == [*range(10), *range(10)]
    with pytest.raises(ValueError, match="must be whole numbers"):
        list(edge_chunks(torch.rand(2, 3), None, 4))
    with pytest.raises(ValueError, match="must be whole numbers"):
        list(edge_chunks(torch.zeros(3, 3, dtype=torch.int64), None, 4))
    with pytest.raises(ValueError, match="'weight' has 10 rows for 3 edges"):
        list(edge_chunks(edges[:, :3], {"weight": weight}, 4))


def test_an_edge_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"Edge 102 .*3 to 9.* 9 nodes"):
        prepare(torch.tensor([[0, 1, 3], [1, 2, 9]]), {}, 9, 100, EdgeOptions())
    with pytest.raises(ValueError, match=r"Edge 0 .*-1 to 0"):
        prepare(torch.tensor([[-1], [0]]), {}, 9, 0, EdgeOptions())
    with pytest.raises(ValueError, match="holds nan"):
        prepare(torch.tensor([[1], [0]]), {"weight": torch.tensor([float("nan")])}, 9, 0, EdgeOptions())


def pairs(edges: Edges) -> list[tuple[int, int]]:
    return list(zip(edges.src.tolist(), edges.dst.tolist(), strict=True))


def test_reversed_edges_follow_their_edge_and_loops_are_not_doubled() -> None:
    index = torch.tensor([[0, 1, 2], [1, 1, 0]])
    edges = prepare(index, {"weight": torch.tensor([5.0, 6.0, 7.0])}, 3, 0, EdgeOptions(symmetrize=True))
    assert pairs(edges) == [(0, 1), (1, 0), (1, 1), (2, 0), (0, 2)]
    assert edges.edge["weight"].tolist() == [5, 5, 6, 7, 7]
    assert pairs(prepare(index, {}, 3, 0, EdgeOptions(self_loops="remove"))) == [(0, 1), (2, 0)]


def test_grouping_is_stable_and_follows_the_options() -> None:
    edges = prepare(
        torch.tensor([[3, 1, 3, 2, 3], [4, 3, 4, 4, 3]]), {"weight": torch.arange(5.0)}, 5, 0, EdgeOptions()
    )
    degrees, grouped = group(edges, 3, 5, EdgeOptions())
    assert degrees.tolist() == [2, 3]
    assert (grouped.src.tolist(), grouped.edge["weight"].tolist()) == ([1, 3, 3, 3, 2], [1, 4, 0, 2, 3])
    degrees, grouped = group(edges, 3, 5, EdgeOptions(duplicates="remove"))
    assert degrees.tolist() == [2, 2]
    assert (grouped.src.tolist(), grouped.edge["weight"].tolist()) == ([1, 3, 3, 2], [1, 4, 0, 3])
    degrees, grouped = group(edges, 3, 5, EdgeOptions(self_loops="add"))
    assert degrees.tolist() == [2, 4]
    assert (grouped.src.tolist()[-1], grouped.edge["weight"].tolist()[-1]) == (4, 1)


def test_chunks_must_carry_the_same_arrays() -> None:
    index = torch.zeros(1, dtype=torch.int32)
    plain = Edges(index, index, {})
    weighted = Edges(index, index, {"weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"Not all chunks .*'weight'"):
        check_same_arrays(plain, weighted)
    with pytest.raises(ValueError, match="Not all chunks"):
        join([weighted, plain], 3)
    assert join([], 3).src.dtype == torch.int32


@pytest.mark.parametrize("from_caller", [{}, {"tables": {}, "edge": None}])
def test_tables_and_edge_arrays_of_a_file_stay_if_the_caller_adds_none(from_caller: dict[str, Any]) -> None:
    from_file = {"name": "file", "tables": {"year": 1}, "edge": {"weight": 2}}
    assert merge(from_file, from_caller) == from_file


def test_a_table_of_the_caller_joins_those_of_the_file_and_wins_over_one_with_its_name() -> None:
    merged = merge({"tables": {"year": 1, "part": 2}}, {"tables": {"part": 3, "time": 4}})
    assert merged == {"tables": {"year": 1, "part": 3, "time": 4}}
