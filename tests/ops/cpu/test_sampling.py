"""The Numba kernels for sampling, relabelling, gathering, grouping and trees."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.random import derive_key
from hopline.ops.tree_slots import Slots
from tests.equivalence.test_1_kernels import random_csr, random_key
from tests.support.helpers import neighbors_of, randint, randn, random_graph

SHAPES = [(2, 1), (3, 1), (3, 2), (5, 4), (20, 5), (21, 5), (41, 10), (64, 15), (1000, 10)]
"""(degree, fan-out): arrays up to degree 4 x fan-out, a hash table beyond."""


@cache
def positions_over_nodes(degree: int, fanout: int, count: int, replace: bool = False) -> Tensor:
    """[count, fanout] positions that many nodes draw under one key."""
    indptr = torch.arange(count + 1) * degree
    indices = torch.arange(degree, dtype=torch.int32).repeat(count)
    sample = cpu_sampling.sample_neighbors(indptr, indices, torch.arange(count), fanout, derive_key(3, 1, 0), replace)
    return sample.ids.long().view(count, fanout)


@cache
def positions_over_keys(degree: int, fanout: int, count: int, replace: bool = False) -> Tensor:
    """[count, fanout] positions that one node draws under many keys."""
    indptr = torch.tensor([0, 0, degree])
    indices = torch.arange(degree)
    node = torch.tensor([1])
    keys = [derive_key(5, 1, step) for step in range(count)]
    return torch.stack([cpu_sampling.sample_neighbors(indptr, indices, node, fanout, key, replace).ids for key in keys])


Picks = Callable[[int, int, int], Tensor]
MANY = pytest.mark.parametrize("picks", [positions_over_nodes, positions_over_keys], ids=["nodes", "keys"])


def many_of(shapes: list[tuple[int, int]], of_keys: list[tuple[int, int]]) -> pytest.MarkDecorator:
    """Many nodes for all shapes; many keys, which take a call each, for some: an array and a hash table."""
    cases = [(positions_over_nodes, *shape) for shape in shapes] + [(positions_over_keys, *shape) for shape in of_keys]
    return pytest.mark.parametrize(("picks", "degree", "fanout"), cases)


def assert_chi_square(counts: Tensor, expected: Tensor | float, degrees: int, scale: float = 1.0) -> None:
    """Neither too far from the expected counts nor too close to them."""
    statistic = scale * float(((counts.double() - expected) ** 2 / expected).sum())
    assert chi2.isf(1 - 1e-4, degrees) < statistic < chi2.isf(1e-4, degrees)


@many_of(SHAPES, [(2, 1), (5, 4), (41, 10), (1000, 10)])
def test_every_neighbour_is_equally_likely(picks: Picks, degree: int, fanout: int) -> None:
    rounds = 4000
    counts = torch.bincount(picks(degree, fanout, rounds).reshape(-1), minlength=degree)
    share = fanout / degree
    # Without replacement the counts vary less than those of a multinomial, by (d - k) / (d - 1).
    assert_chi_square(counts, rounds * share, degree - 1, scale=(degree - 1) / (degree - fanout))


@many_of([s for s in SHAPES if s[1] > 1 and s[0] <= 64], [(5, 4), (41, 10)])
def test_every_ordered_pair_of_picks_is_equally_likely(picks: Picks, degree: int, fanout: int) -> None:
    rounds = 4000
    positions = picks(degree, fanout, rounds)
    for i, j in {(0, 1), (0, fanout - 1), (fanout - 2, fanout - 1)}:
        pairs = torch.bincount(positions[:, i] * degree + positions[:, j], minlength=degree**2).view(degree, degree)
        assert not pairs.diagonal().any()
        cells = pairs[~torch.eye(degree, dtype=torch.bool)]
        assert_chi_square(cells, rounds / cells.numel(), cells.numel() - 1)


@MANY
def test_pairs_of_a_large_neighbourhood_are_equally_likely(picks: Picks) -> None:
    rounds = 4000
    bins = 8
    positions = picks(1000, 10, rounds) % bins
    for i, j in ((0, 1), (0, 9), (4, 5)):
        counts = torch.bincount(positions[:, i] * bins + positions[:, j], minlength=bins**2).view(bins, bins)
        per_bin = 1000 / bins
        expected = torch.full((bins, bins), rounds * per_bin**2 / (1000 * 999))
        expected.diagonal().fill_(rounds * per_bin * (per_bin - 1) / (1000 * 999))
        assert_chi_square(counts, expected, bins**2 - 1)


@many_of([(3, 2), (5, 4), (20, 5), (21, 5), (41, 10)], [(5, 4), (41, 10)])
def test_two_neighbours_are_included_together_as_often_as_they_should(picks: Picks, degree: int, fanout: int) -> None:
    rounds = 4000
    included = torch.zeros(rounds, degree).scatter_(1, picks(degree, fanout, rounds), 1.0)
    together = (included.t() @ included)[~torch.eye(degree, dtype=torch.bool)]
    share = fanout * (fanout - 1) / (degree * (degree - 1))
    z = (together - rounds * share) / math.sqrt(rounds * share * (1 - share))
    assert float(z.abs().max()) < 4.8


def test_nodes_with_consecutive_ids_pick_independently() -> None:
    picks = positions_over_nodes(8, 1, 40000).view(-1, 2)
    assert_chi_square(torch.bincount(picks[:, 0] * 8 + picks[:, 1], minlength=64), 20000 / 64, 63)


def test_consecutive_steps_pick_independently() -> None:
    picks = positions_over_keys(4, 1, 8000).view(-1, 2)
    assert_chi_square(torch.bincount(picks[:, 0] * 4 + picks[:, 1], minlength=16), 4000 / 16, 15)


@MANY
@pytest.mark.parametrize(("degree", "fanout"), [(2, 1), (3, 7), (20, 5)])
def test_with_replacement_every_pick_is_uniform_and_independent(picks: Callable, degree: int, fanout: int) -> None:
    rounds = 4000
    positions = picks(degree, fanout, rounds, True)
    for j in range(fanout):
        assert_chi_square(torch.bincount(positions[:, j], minlength=degree), rounds / degree, degree - 1)
    if fanout > 1:
        pairs = torch.bincount(positions[:, 0] * degree + positions[:, 1], minlength=degree**2)
        assert_chi_square(pairs, rounds / degree**2, degree**2 - 1)


@pytest.mark.parametrize("replace", [False, True])
def test_a_smaller_fanout_is_a_prefix_of_a_larger(replace: bool) -> None:
    graph = random_graph()
    nodes = torch.arange(graph.num_nodes)
    large = cpu_sampling.sample_neighbors(graph.indptr, graph.indices, nodes, 12, 4, replace)
    for fanout in range(1, 12):
        small = cpu_sampling.sample_neighbors(graph.indptr, graph.indices, nodes, fanout, 4, replace)
        for i in range(nodes.numel()):
            prefix = small.edge_ids[int(small.indptr[i]) : int(small.indptr[i + 1])]
            start = int(large.indptr[i])
            assert torch.equal(prefix, large.edge_ids[start : start + prefix.numel()])


def test_minus_one_takes_all_in_order() -> None:
    graph = random_graph()
    nodes = torch.tensor([7, 0, 49, 7])
    sample = cpu_sampling.sample_neighbors(graph.indptr, graph.indices, nodes, -1, 1)
    assert sample.ids.tolist() == [u for v in nodes.tolist() for u in neighbors_of(graph, v)]


def test_with_replacement_fills_the_fanout_except_where_there_is_nothing() -> None:
    graph = random_graph()
    sample = cpu_sampling.sample_neighbors(graph.indptr, graph.indices, torch.arange(50), 9, 1, replace=True)
    degrees = graph.in_degrees()
    assert torch.equal(sample.indptr.diff(), torch.where(degrees > 0, 9, 0))


@pytest.mark.parametrize("fanout", [-1, 1, 4])
@pytest.mark.parametrize("replace", [False, True])
def test_no_nodes_or_no_edges_give_an_empty_sample(fanout: int, replace: bool) -> None:
    replace = replace and fanout > 0
    indptr = torch.zeros(4, dtype=torch.int64)
    indices = torch.empty(0, dtype=torch.int32)
    nobody = torch.empty(0, dtype=torch.int64)
    for nodes in (nobody, torch.arange(3)):
        sample = cpu_sampling.sample_neighbors(indptr, indices, nodes, fanout, 1, replace)
        assert sample.indptr.tolist() == [0] * (nodes.numel() + 1)
        assert sample.ids.numel() == sample.edge_ids.numel() == 0


@pytest.mark.parametrize("fanout", [5, 300])
def test_a_million_neighbours_are_sampled_uniformly(fanout: int) -> None:
    degree = 10**6
    indptr = torch.tensor([0, 3, 3 + degree])
    indices = torch.arange(degree + 3, dtype=torch.int32)
    counts = torch.zeros(50, dtype=torch.int64)
    rounds = 3000 // fanout
    for key in range(rounds):
        sample = cpu_sampling.sample_neighbors(indptr, indices, torch.tensor([1]), fanout, derive_key(key))
        assert torch.unique(sample.edge_ids).numel() == fanout
        counts += torch.bincount((sample.edge_ids - 3) * 50 // degree, minlength=50)
    assert_chi_square(counts, rounds * fanout / 50, 49)
    last = derive_key(rounds - 1)
    plain = reference.sample_neighbors(indptr, indices, torch.tensor([1]), fanout, last)
    assert torch.equal(sample.edge_ids, plain.edge_ids)


@pytest.mark.parametrize("node", [-1, 50, 2**40])
@pytest.mark.parametrize("fanout", [-1, 3])
def test_a_node_that_is_not_there_is_an_error(node: int, fanout: int) -> None:
    graph = random_graph()
    with pytest.raises(ValueError, match=r"outside 0 \.\. 49"):
        cpu_sampling.sample_neighbors(graph.indptr, graph.indices, torch.tensor([0, node]), fanout, 1)


@pytest.mark.parametrize("damage", [[0, 5, 2, 4], [0, 2, 9, 4], [-3, 0, 2, 4]], ids=["falls", "beyond", "negative"])
def test_a_damaged_indptr_is_an_error(damage: list[int]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        cpu_sampling.sample_neighbors(torch.tensor(damage), torch.arange(4), torch.arange(3), 2, 1)


# ---- id maps


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "hash"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_map_numbers_by_first_occurrence_over_many_rounds(dense: bool, dtype: torch.dtype) -> None:
    id_map = cpu_sampling.IdMap(20000, dense=dense)
    for seed, rounds in enumerate([3, 1, 6, 2]):  # grows, is cleared, and grows again
        local_ids: dict[int, int] = {}
        for r in range(rounds):
            nodes = randint(0, 20000, 4000, seed=10 * seed + r).to(dtype)
            expected = [local_ids.setdefault(v, len(local_ids)) for v in nodes.tolist()]
            assert id_map.add(nodes).tolist() == expected
            assert id_map.ids().tolist() == list(local_ids)
            assert id_map.size == len(local_ids)
        id_map.clear()
        assert id_map.size == id_map.ids().numel() == 0


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "hash"])
@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_id_map_refuses_what_is_out_of_range_and_stays_usable(dense: bool, bad: int) -> None:
    id_map = cpu_sampling.IdMap(100, dense=dense)
    with pytest.raises(ValueError, match="out of range"):
        id_map.add(torch.tensor([3, 4, bad, 5]))
    id_map.clear()
    assert id_map.add(torch.tensor([5, 3, 5])).tolist() == [0, 1, 0]


def test_id_map_copies_its_ids() -> None:
    id_map = cpu_sampling.IdMap(10)
    id_map.add(torch.tensor([7]))
    ids = id_map.ids()
    id_map.clear()
    id_map.add(torch.tensor([2]))
    assert ids.tolist() == [7]


def test_id_map_is_a_hash_map_where_an_array_would_be_too_large() -> None:
    assert cpu_sampling.IdMap(1000).dense
    large = cpu_sampling.IdMap(10**12)
    assert not large.dense
    assert large.add(torch.tensor([10**11, 3, 10**11])).tolist() == [0, 1, 0]


# ---- rows


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7,), (16,), (2, 5)], ids=str)
def test_gather_rows_of_any_type_and_width(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = (100 * randn(40, *shape)).to(dtype)
    for ids in (randint(0, 40, 100), randint(0, 40, 3).int(), torch.empty(0, dtype=torch.int64)):
        ours = cpu_sampling.gather_rows(rows, ids)
        assert ours.dtype == dtype
        assert torch.equal(ours, rows[ids.long()])


def test_gather_rows_from_views() -> None:
    rows = randn(40, 9)
    ids = randint(0, 20, 30)
    for view in (rows[:, 1:5], rows.t()[:, :20].t(), rows[::2], rows[1:]):
        assert torch.equal(cpu_sampling.gather_rows(view, ids % view.size(0)), view[ids % view.size(0)])
    assert torch.equal(cpu_sampling.gather_rows(rows, torch.arange(40)[::3]), rows[::3])


def test_gather_rows_from_an_unaligned_buffer() -> None:
    raw = torch.frombuffer(bytearray(range(200)), dtype=torch.uint8)[3:99].view(12, 8)
    assert torch.equal(cpu_sampling.gather_rows(raw, torch.tensor([11, 0])), raw[[11, 0]])


def test_gather_rows_of_nothing() -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    assert cpu_sampling.gather_rows(torch.empty(0, 3), nobody).shape == (0, 3)
    assert cpu_sampling.gather_rows(torch.empty(4, 0), torch.tensor([1, 2])).shape == (2, 0)


def test_gather_rows_from_a_mapped_file(tmp_path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(40, dtype=np.float32).reshape(10, 4))
    rows = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="c"))
    assert torch.equal(cpu_sampling.gather_rows(rows, torch.tensor([9, 0])), rows[[9, 0]])


@pytest.mark.parametrize("bad", [-1, 40, 2**50])
def test_gather_rows_refuses_an_id_that_is_not_there(bad: int) -> None:
    with pytest.raises(IndexError, match=r"outside 0 \.\. 39"):
        cpu_sampling.gather_rows(randn(40, 2), torch.tensor([0, bad]))


@pytest.mark.parametrize("ids", [torch.tensor([True, False]), torch.tensor(3), torch.tensor([[1]])])
def test_gather_rows_refuses_what_is_not_a_list_of_ids(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="1-D"):
        cpu_sampling.gather_rows(randn(40, 2), ids)


def test_gather_rows_keeps_gradients() -> None:
    rows = randn(4, 2).requires_grad_()
    cpu_sampling.gather_rows(rows, torch.tensor([1, 1, 3])).sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


# ---- grouping


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 500])
def test_group_edges_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    keys = randint(0, 20, size).to(dtype)
    for ours, expected in zip(cpu_sampling.group_by_key(keys, 23), reference.group_by_key(keys, 23), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("bad", [-1, 5])
def test_group_edges_refuses_a_group_that_is_not_there(bad: int) -> None:
    with pytest.raises(IndexError, match=r"outside 0 \.\. 4"):
        cpu_sampling.group_by_key(torch.tensor([0, bad]), 5)


@pytest.mark.parametrize("seed", range(30))
def test_trees_are_those_of_the_reference(seed: int):
    draw = random.Random(seed)
    indptr, indices = random_csr(draw)
    seeds = randint(0, indptr.numel() - 1, draw.choice([1, 5, 40]), seed=seed)
    fanouts = tuple(draw.choice([1, 2, 7, 40]) for _ in range(draw.choice([1, 2])))
    slots = Slots(seeds.numel(), fanouts, draw.choice([0, 9]))
    for replace in (False, True):
        arguments = (indptr, indices, seeds, slots, random_key(draw), replace, True)
        for ours, theirs in zip(cpu_sampling.sample_tree(*arguments), reference.sample_tree(*arguments), strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)


def test_a_damaged_graph_is_refused():
    indptr = torch.tensor([0, 2, 5])
    indices = torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="hopline verify"):
        cpu_sampling.sample_tree(indptr, indices, torch.tensor([1]), Slots(1, (2,)), 0)
    with pytest.raises(ValueError, match="outside"):
        cpu_sampling.sample_tree(indptr, indices, torch.tensor([2]), Slots(1, (2,)), 0)
