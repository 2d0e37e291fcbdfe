"""Edges become a graph, in memory or chunk by chunk through a folder with bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hopline.data import convert
from hopline.data.convert import Runs, from_edges
from hopline.data.dataset import Dataset
from hopline.data.edges import Edges
from hopline.data.store import verify


def random_edges(num_nodes: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Squares of uniform numbers: some nodes have many edges, and some edges repeat.
    return (torch.rand(2, num_edges, generator=generator) ** 2 * num_nodes).long()


def test_the_graph_is_the_in_edges_in_their_order() -> None:
    edges = random_edges(50, 700)
    dataset = from_edges(edges, edge={"weight": torch.arange(700.0)})
    assert dataset.graph.indices.dtype == torch.int32
    for v in range(dataset.num_nodes):
        into = (edges[1] == v).nonzero().reshape(-1)
        span = slice(int(dataset.graph.indptr[v]), int(dataset.graph.indptr[v + 1]))
        assert dataset.graph.indices[span].tolist() == edges[0, into].tolist()
        assert dataset.graph.edge["weight"][span].tolist() == into.tolist()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"symmetrize": True},
    {"symmetrize": True, "duplicates": "remove"},
    {"self_loops": "remove"},
    {"self_loops": "add", "duplicates": "remove"},
    {"symmetrize": True, "self_loops": "add"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_edges", [37, 10_000])
def test_chunks_through_a_folder_give_the_graph_made_in_memory(
    options: dict[str, Any], chunk_edges: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "NUM_BUCKETS", 16)
    edges = random_edges(90, 1500)
    weight = torch.rand(1500)
    attr = torch.arange(3000).reshape(1500, 2)
    arrays = {"weight": weight, "attr": attr}
    expected = from_edges(edges, num_nodes=95, edge=arrays, **options).graph
    chunks = [(edges[:, i : i + 400], {n: a[i : i + 400] for n, a in arrays.items()}) for i in range(0, 1500, 400)]
    ours = from_edges(iter(chunks), folder=tmp_path / "d", num_nodes=95, chunk_edges=chunk_edges, **options)
    verify(tmp_path / "d")
    assert torch.equal(ours.graph.indptr, expected.indptr)
    assert torch.equal(ours.graph.indices, expected.indices)
    for name, array in expected.edge.items():
        assert torch.equal(ours.graph.edge[name], array)


def test_edge_options_equal_operations_on_the_adjacency_matrix() -> None:
    edges = random_edges(40, 600)
    dense = torch.zeros(40, 40, dtype=torch.int64)
    dense.index_put_((edges[1], edges[0]), torch.ones(600, dtype=torch.int64), accumulate=True)

    def matrix(dataset: Dataset) -> torch.Tensor:
        src, dst = dataset.graph.edge_index()
        counts = torch.zeros(40, 40, dtype=torch.int64)
        return counts.index_put_((dst, src), torch.ones_like(src), accumulate=True)

    loops = torch.diag(dense.diagonal())
    assert torch.equal(matrix(from_edges(edges, num_nodes=40)), dense)
    assert torch.equal(matrix(from_edges(edges, num_nodes=40, symmetrize=True)), dense + dense.t() - loops)
    assert torch.equal(matrix(from_edges(edges, num_nodes=40, duplicates="remove")), (dense > 0).long())
    assert torch.equal(matrix(from_edges(edges, num_nodes=40, self_loops="remove")), dense - loops)
    added = matrix(from_edges(edges, num_nodes=40, self_loops="add"))
    assert torch.equal(added, dense + torch.diag((dense.diagonal() == 0).long()))


def test_the_number_of_nodes_is_derived_from_features_labels_or_ids() -> None:
    edges = torch.tensor([[0, 4], [1, 2]])
    assert from_edges(edges).num_nodes == 5
    assert from_edges([edges, edges]).num_edges == 4
    assert from_edges(edges, x=torch.zeros(7, 2)).num_nodes == 7
    assert from_edges(edges, y=[0] * 6).num_nodes == 6
    assert from_edges(torch.empty(2, 0, dtype=torch.int64), num_nodes=3).num_edges == 0
    with pytest.raises(ValueError, match="give num_nodes="):
        from_edges(iter([edges]))


def test_an_empty_edge_list_can_be_written(tmp_path: Path) -> None:
    dataset = from_edges([], folder=tmp_path / "d", num_nodes=3, self_loops="add")
    assert dataset.graph.indices.tolist() == [0, 1, 2]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[torch.Tensor]:
        yield torch.zeros(2, 5, dtype=torch.int64)
        yield torch.full((2, 5), 77)

    with pytest.raises(ValueError, match=r"Edge 5 .*77 to 77.* 10 nodes"):
        from_edges(chunks(), folder=tmp_path / "d", num_nodes=10)
    assert list(tmp_path.iterdir()) == []


def test_arrays_must_be_in_every_chunk(tmp_path: Path) -> None:
    index = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="Not all chunks"):
        from_edges([index, (index, {"weight": torch.ones(3)})], folder=tmp_path / "d", num_nodes=1)


def test_groups_hold_no_more_than_asked_for(tmp_path: Path) -> None:
    edges = random_edges(9000, 5000)
    with Runs(tmp_path, 9000) as runs:
        for piece in edges.split(1000, dim=1):
            runs.add(Edges(piece[0].int(), piece[1].int(), {}))
        groups = list(runs.groups(600))
        assert groups[0][0] == 0
        assert groups[-1][1] == runs.num_buckets
        assert all(a[1] == b[0] for a, b in pairwise(groups))
        sizes = [runs.read(*group).src.numel() for group in groups]
        assert sum(sizes) == 5000
        assert max(sizes) <= 600
        assert max((last - first) * runs.width for first, last in groups) <= 600


class _LazyEdges:
    """Random edges that are drawn chunk by chunk while they are read, so that they are never all in memory."""

    def __init__(self, num_edges: int, num_nodes: int, chunk: int) -> None:
        self.num_edges = num_edges
        self.num_nodes = num_nodes
        self.chunk = chunk

    def __iter__(self) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for start in range(0, self.num_edges, self.chunk):
            yield rng.integers(0, self.num_nodes, (2, min(self.chunk, self.num_edges - start)))


def test_memory_is_bounded_by_the_chunk_and_not_by_the_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group_sizes: list[int] = []
    original = convert.group

    def spy(edges: Edges, *rest: Any) -> Any:
        group_sizes.append(edges.src.numel())
        return original(edges, *rest)

    monkeypatch.setattr(convert, "group", spy)
    chunk = 50_000
    tracemalloc.start()  # sees what NumPy allocates: the chunks and the order of each group
    dataset = from_edges(
        _LazyEdges(2_000_000, 100_000, chunk), folder=tmp_path / "d", num_nodes=100_000, chunk_edges=chunk
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dataset.num_edges == 2_000_000
    assert len(group_sizes) >= 40
    assert max(group_sizes) <= chunk
    # 2M edges are 32 MB as int64; a few buffers of one chunk are not.
    assert peak < 10_000_000


@pytest.mark.parametrize("to_folder", [False, True])
def test_a_chunk_with_fractions_makes_all_of_an_edge_array_fractions(
    to_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "WIDENED_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, 9, (2, 40), generator=generator)
    whole = torch.randint(0, 9, (40, 2), generator=generator)
    fractions = torch.rand(40, 2, generator=generator)
    chunks = [
        (ends, {"attr": whole, "time": torch.arange(40)}),
        # In another order, too: arrays go by their names.
        (ends, {"time": torch.arange(40, 80), "attr": fractions}),
        (ends, {"attr": whole.int(), "time": torch.arange(80, 120)}),
    ]
    data = from_edges(chunks, num_nodes=9, folder=tmp_path / "out" if to_folder else None)
    order = torch.argsort(ends.repeat(1, 3)[1], stable=True)
    assert torch.equal(data.graph.edge["attr"], torch.cat([whole, fractions, whole])[order])
    assert torch.equal(data.graph.edge["time"], torch.arange(120)[order])
    assert (data.graph.edge["attr"].dtype, data.graph.edge["time"].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("to_folder", [False, True])
def test_a_number_that_would_be_rounded_for_another_chunk_is_refused(to_folder: bool, tmp_path: Path) -> None:
    one = torch.zeros(2, 1, dtype=torch.int64)
    chunks = [(one, {"time": torch.tensor([2**24 + 1])}), (one, {"time": torch.tensor([0.5])})]
    for ordered in (chunks, chunks[::-1]):
        with pytest.raises(ValueError, match=r"'time' holds 16777217 .*fractions"):
            from_edges(ordered, num_nodes=1, folder=tmp_path / "out" if to_folder else None)


def test_edge_arrays_go_along_with_edges_of_every_kind(tmp_path: Path) -> None:
    ends = torch.randint(0, 9, (2, 50))
    weight = torch.rand(50)
    np.save(tmp_path / "e.npy", ends.numpy())
    whole = from_edges(ends, edge={"weight": weight}, num_nodes=9)
    pieces = [ends[:, :7], (ends[:, 7:30], {}), ends[:, 30:]]
    for source in (tmp_path / "e.npy", str(tmp_path / "e.npy"), pieces, iter(pieces)):
        data = from_edges(source, edge={"weight": weight}, num_nodes=9, chunk_edges=11)
        assert torch.equal(data.graph.edge["weight"], whole.graph.edge["weight"])
    with pytest.raises(ValueError, match="'weight' has 51 rows for 50 edges"):
        from_edges(pieces, edge={"weight": torch.rand(51)}, num_nodes=9)
    with pytest.raises(ValueError, match=r"'weight' .*chunks and by edge="):
        from_edges([(ends, {"weight": weight})], edge={"weight": weight}, num_nodes=9)
