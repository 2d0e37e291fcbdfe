"""Partitions: few edges are cut, parts are even, and a cached partition is read again.

On planted communities METIS must cut less than a fourth, and streaming less than half, of what chance cuts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hopline.core import partition as module
from hopline.core.graph import Graph
from hopline.core.partition import (
    Partition,
    cut_fraction,
    describe,
    edge_counts,
    graph_hash,
    halo_sizes,
    make_partition,
)
from hopline.data.formats.npz import from_npz
from tests.support.helpers import graph_of, randint, random_graph

ALL_WAYS = ("metis", "streaming", "random", "range")


def planted_communities(both_ways: bool) -> Graph:
    """40 shuffled communities of 500 nodes, 80% of 100k edges inside."""
    num_nodes = 20_000
    num_edges = 100_000
    size = 500
    src = randint(0, num_nodes, num_edges)
    dst = src // size * size + randint(0, size, num_edges, seed=1)
    outside = num_edges // 5
    dst[:outside] = randint(0, num_nodes, outside, seed=2)
    shuffled = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(3))
    src = shuffled[src]
    dst = shuffled[dst]
    if both_ways:
        src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    return graph_of(src, dst, num_nodes)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("num_parts", [8, 40])
def test_planted_communities_are_cut_far_less_than_by_chance(num_parts: int, both_ways: bool) -> None:
    graph = planted_communities(both_ways)
    by_chance = cut_fraction(graph, make_partition(graph, num_parts, "random"))
    for how, factor, slack in (("metis", 4, 0.1), ("streaming", 2, 0.1)):
        partition = make_partition(graph, num_parts, how)
        cut = cut_fraction(graph, partition)
        print(f"{how}, {num_parts} parts: cut {cut:.1%}, by chance {by_chance:.1%}")
        assert cut * factor < by_chance
        mean = graph.num_nodes / num_parts
        assert int(partition.sizes.min()) >= mean * (1 - slack)
        assert int(partition.sizes.max()) <= mean * (1 + slack)


@pytest.mark.parametrize("how", ALL_WAYS)
@pytest.mark.parametrize("num_parts", [1, 2, 7, 50])
def test_a_part_is_one_row_range_in_which_nodes_ascend(how: str, num_parts: int) -> None:
    partition = make_partition(random_graph(loops=True), num_parts, how)
    assert partition.ptr.tolist() == [0, *partition.sizes.cumsum(0).tolist()]
    assert partition.order.sort().values.tolist() == list(range(50))
    assert torch.equal(partition.position[partition.order], torch.arange(50))
    for part in range(num_parts):
        nodes = partition.order[partition.ptr[part] : partition.ptr[part + 1]]
        assert torch.equal(nodes, (partition.part_of == part).nonzero().view(-1))
        assert nodes.numel() > 0
    assert (partition.how, partition.num_parts) == (how, num_parts)


@pytest.mark.parametrize("how", ALL_WAYS)
def test_the_same_seed_gives_the_same_parts(how: str) -> None:
    graph = random_graph(400, 2000)
    parts = [make_partition(graph, 5, how, seed=seed).part_of for seed in (1, 1, 2)]
    assert torch.equal(parts[0], parts[1])
    assert how == "range" or not torch.equal(parts[0], parts[2])


@pytest.mark.parametrize("how", ["random", "range"])
def test_parts_that_ignore_the_edges_are_even(how: str) -> None:
    assert set(make_partition(random_graph(), 7, how).sizes.tolist()) == {7, 8}


def test_labels_are_taken_as_parts() -> None:
    labels = randint(0, 4, 50)
    partition = make_partition(random_graph(), 4, labels=labels)
    assert torch.equal(partition.part_of.long(), labels)
    assert partition.how == "labels"
    assert int(make_partition(random_graph(), 10, labels=labels).sizes.max()) <= 6


@pytest.mark.parametrize("how", ALL_WAYS)
def test_a_graph_without_edges_is_divided_without_cut_or_halo(how: str) -> None:
    graph = Graph(torch.zeros(11, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    partition = make_partition(graph, 3, how)
    assert int(partition.sizes.max()) <= 4
    assert cut_fraction(graph, partition) == 0
    assert halo_sizes(graph, partition).tolist() == [0, 0, 0]


def test_impossible_requests_are_refused_with_a_message() -> None:
    graph = random_graph()
    for num_parts in (0, 51, 2.0):
        with pytest.raises(ValueError, match=r"50 nodes .*1 to 50"):
            make_partition(graph, num_parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metis, streaming"):
        make_partition(graph, 2, "meits")
    with pytest.raises(ValueError, match="each of the 50"):
        make_partition(graph, 2, labels=torch.zeros(49, dtype=torch.int64))
    with pytest.raises(ValueError, match="slack=1"):
        make_partition(graph, 2, "streaming", slack=1)
    with pytest.raises(ValueError, match="hopline verify"):
        make_partition(Graph(torch.tensor([0, 1, 1]), torch.tensor([2])), 2, "streaming")


@pytest.mark.parametrize(
    ("part_of", "message"),
    [([0, 1, 3], "from 0 to 2"), ([0, -1, 1], "from 0 to 2"), ([0, 1, 1], "part 2 has no nodes")],
)
def test_a_partition_refuses_invalid_part_numbers(part_of: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition(torch.tensor(part_of, dtype=torch.int32), 3)
    with pytest.raises(ValueError, match="int32"):
        Partition(torch.tensor(part_of), 3)


# ---- the cache on disk


def test_a_cached_partition_is_read_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(400, 2000)
    first = make_partition(graph, 5, cache=tmp_path / "kept")
    monkeypatch.setattr(module, "divide", None)  # nothing is computed
    again = make_partition(graph, 5, cache=tmp_path / "kept")
    assert torch.equal(first.part_of, again.part_of)
    assert (first.how, first.settings, first.num_parts) == (again.how, again.settings, again.num_parts)
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_other_edges_or_settings_have_cache_files_of_their_own(tmp_path: Path) -> None:
    graph = random_graph(400, 2000)
    changed = graph.indices.clone()
    changed[-1] += 1 if changed[-1] < 398 else -1
    moved = graph.indptr.clone()
    moved[1] -= 1
    labels = randint(0, 3, 400)
    cases: tuple[tuple[Graph, dict[str, Any]], ...] = (
        (graph, {}),
        (Graph(graph.indptr, changed), {}),
        (Graph(moved, graph.indices), {}),
        (graph, {"seed": 1}),
        (graph, {"how": "streaming"}),
        (graph, {"how": "streaming", "slack": 0.2}),
        (graph, {"labels": labels}),
        (graph, {"labels": labels.flip(0)}),
    )
    for other, options in cases:
        make_partition(other, 4, cache=tmp_path, **options)
    make_partition(graph, 5, cache=tmp_path)

    assert len(list(tmp_path.glob("*.json"))) == 9


@pytest.mark.parametrize("damage", ["array", "cut", "missing", "json", "other"])
def test_a_damaged_cache_file_is_replaced(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    graph = random_graph(400, 2000)
    first = make_partition(graph, 5, cache=tmp_path)
    (array,) = tmp_path.glob("*.npy")
    (metadata,) = tmp_path.glob("*.json")
    if damage == "array":
        array.write_bytes(array.read_bytes()[:-1] + b"\1")
    elif damage == "cut":
        array.write_bytes(array.read_bytes()[:-4])
    elif damage == "missing":
        array.unlink()
    elif damage == "json":
        metadata.write_text("{")
    else:
        np.save(array, np.zeros(3))
    again = make_partition(graph, 5, cache=tmp_path)
    assert torch.equal(first.part_of, again.part_of)

    messages = caplog.text
    caplog.clear()
    assert messages.count("\n") == 1
    assert "damaged" in messages

    make_partition(graph, 5, cache=tmp_path)
    assert not caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    make_partition(random_graph(), 3, cache=tmp_path / "file")
    assert "could not be kept" in caplog.text


def test_the_hash_of_a_graph_depends_on_every_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HASH_BYTES", 64)
    graph = random_graph()
    hashes = {graph_hash(graph)}
    for i in range(graph.num_edges):
        indices = graph.indices.clone()
        indices[i] += 1
        hashes.add(graph_hash(Graph(graph.indptr, indices)))
    assert len(hashes) == graph.num_edges + 1


# ---- edges that are cut, and halos


def test_a_partition_of_another_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="of 60 nodes"):
        edge_counts(random_graph(), make_partition(random_graph(60), 4, "range"))


def two_parts() -> tuple[Graph, Partition]:
    """A graph of four nodes and six edges, and parts {0, 1} and {2, 3}: counted by hand below."""
    src = torch.tensor([1, 2, 3, 3, 0, 2])
    dst = torch.tensor([0, 0, 0, 1, 3, 2])
    return graph_of(src, dst, 4), Partition(torch.tensor([0, 0, 1, 1], dtype=torch.int32), 2)


def test_edge_counts_cut_fraction_and_halo_sizes_of_two_parts() -> None:
    graph, partition = two_parts()
    assert edge_counts(graph, partition).tolist() == [[1, 3], [1, 1]]
    assert cut_fraction(graph, partition) == pytest.approx(4 / 6)
    assert halo_sizes(graph, partition).tolist() == [2, 1]


def test_describe_shows_sizes_cut_halos_and_edge_counts() -> None:
    graph, partition = two_parts()
    text = describe(graph, partition)
    assert text.splitlines() == [
        "Partition(4 nodes in 2 parts, how=given)",
        "  sizes: 2 to 2, mean 2",
        "  cut: 66.7% of 6 edges",
        "  halo nodes per node of a part: 0.50 to 1.00, mean 0.75",
        "  edges into a part (row) from a part (column):",
        "               0      1",
        "        0      1      3",
        "        1      1      1",
    ]
    many = make_partition(random_graph(), 17, "random")
    assert len(describe(random_graph(), many).splitlines()) == 4


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (9999, "9999"),
        (10_000, "10k"),
        (56_789, "56.8k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (1_234_567, "1.23M"),
        (999_600_000, "1G"),
        (999_600_000_000, "1T"),
    ],
)
def test_long_counts_are_abbreviated(count: int, text: str) -> None:
    assert module._short(count) == text


def test_progress_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for how in ("metis", "streaming"):
        make_partition(random_graph(), 4, how, show=True)
        make_partition(random_graph(), 4, how)
    assert capsys.readouterr().err.count("Partitioning") == 2


def test_streaming_halves_the_cut_of_a_real_graph(real_data: Path) -> None:
    graph = from_npz(real_data / "cora.npz").graph
    cut = {how: cut_fraction(graph, make_partition(graph, 10, how)) for how in ALL_WAYS}
    assert cut["metis"] < cut["streaming"] < cut["random"] / 2
