"""Sampling hop by hop: kernels equal their definition, and the definition equals what it is for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hopline import ops
from hopline.ops import hops
from hopline.ops.hops import Relation
from hopline.ops.random import derive_key
from tests.ops.cpu.test_sampling import assert_chi_square
from tests.support.helpers import generator, randint

SIZES = (50, 40, 30)
"""Nodes of each type."""
SEEDS = [(1, torch.tensor([3, 5, 3, 7])), (0, torch.tensor([1, 1, 3]))]
"""Repeated seeds, and types not in order."""


def random_relation(
    source: int, destination: int, fanouts: Sequence[int], number: int, times: str = "", weighted: bool = False
) -> Relation:
    """A relation with isolated nodes, double edges and a hub, destination 3. times: "", "edge" or "node"."""
    draw = generator(number)
    degrees = torch.randint(0, 9, (SIZES[destination],), generator=draw)
    degrees[torch.rand(degrees.shape, generator=draw) < 0.2] = 0
    degrees[3] = 60
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    num_edges = int(indptr[-1])
    indices = torch.randint(SIZES[source], (num_edges,), generator=draw)
    row = torch.arange(SIZES[destination]).repeat_interleave(degrees)
    weight = torch.rand(num_edges, generator=draw) * (torch.rand(num_edges, generator=draw) < 0.7) if weighted else None
    time = None
    if times:
        time = torch.randint(0, 8, (num_edges if times == "edge" else SIZES[source],), generator=draw)
        edge_time = time if times == "edge" else time[indices]
        order = torch.argsort(row * 100 + edge_time, stable=True)
        indices = indices[order]
        time = edge_time[order] if times == "edge" else time
    return Relation(source, destination, indptr, indices, fanouts, number, time, times == "node", weight)


def random_relations(times: str = "", weighted: bool = False) -> list[Relation]:
    ends_and_fanouts = [(0, 0, (3, -1)), (1, 0, (2, 4)), (0, 1, (5, 0)), (2, 1, (-1, 100))]
    return [random_relation(*item, number, times, weighted) for number, item in enumerate(ends_and_fanouts)]


def assert_same(ours, expected) -> None:
    for our_type, expected_type in zip([*ours[0], *ours[1]], [*expected[0], *expected[1]], strict=True):
        for our_field, expected_field in zip(our_type, expected_type, strict=True):
            if isinstance(expected_field, Tensor):
                assert torch.equal(our_field, expected_field)
            else:
                assert our_field == expected_field


@pytest.mark.parametrize("times", ["", "edge", "node"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_kernels_equal_the_definition(times: str, weighted: bool, replace: bool):
    relations = random_relations(times, weighted)
    bounds = randint(0, 8, 7) if times else None
    for is_disjoint in (False, True) if not times else (True,):
        for only_last in (False, True):
            arguments = (relations, SEEDS, 3, replace, is_disjoint, bounds, only_last)
            assert_same(ops.sample_hops(*arguments), hops.sample_hops(*arguments))


def test_int32_graphs_have_the_samples_of_int64_ones():
    relations = random_relations()
    narrow = [relation._replace(indptr=relation.indptr.int(), indices=relation.indices.int()) for relation in relations]
    assert_same(ops.sample_hops(narrow, SEEDS, 3), ops.sample_hops(relations, SEEDS, 3))


def edges_by_hand(relations: Sequence[Relation], num_hops: int) -> set[tuple[int, int, int, int]]:
    """(relation, edge, destination, source) of all edges that hops reach from SEEDS; a node is expanded once."""
    reached = {(kind, int(node)) for kind, nodes in SEEDS for node in nodes}
    frontier = set(reached)
    edges = set()
    for _ in range(num_hops):
        sources = set()
        for number, relation in enumerate(relations):
            for kind, node in frontier:
                if kind == relation.destination:
                    for e in range(int(relation.indptr[node]), int(relation.indptr[node + 1])):
                        source = int(relation.indices[e])
                        edges.add((number, e, node, source))
                        sources.add((relation.source, source))
        frontier = sources - reached
        reached |= sources
    return edges


def sampled_edges(relations: Sequence[Relation], rows, edges) -> list[tuple[int, int, int, int]]:
    return [
        (number, int(e), int(rows[relation.destination].nodes[d]), int(rows[relation.source].nodes[s]))
        for number, (relation, of_relation) in enumerate(zip(relations, edges, strict=True))
        for s, d, e in zip(of_relation.sources, of_relation.destinations, of_relation.edge_ids, strict=True)
    ]


def test_all_edges_are_those_of_a_search_by_hand():
    relations = [relation._replace(fanouts=(-1, -1, -1)) for relation in random_relations()]
    once = [(kind, nodes.unique()) for kind, nodes in SEEDS]
    rows, edges = ops.sample_hops(relations, once, 3)
    ours = sampled_edges(relations, rows, edges)
    assert len(ours) == len({*ours})  # no node is expanded twice
    assert {*ours} == edges_by_hand(relations, 3)


def test_every_repeated_seed_has_a_row_and_draws_of_its_own():
    relation = random_relation(0, 0, (4,), 1)
    (rows,), (edges,) = ops.sample_hops([relation], [(0, torch.full((50,), 3))], 1)
    assert rows.nodes[:50].tolist() == [3] * 50
    assert rows.per_hop[0] == 50
    assert len({tuple(draws.tolist()) for draws in edges.edge_ids.view(50, 4)}) > 40
    # Where node 3 is reached again, it is its first row.
    is_hub = relation.indices[edges.edge_ids] == 3
    assert not is_hub.any() or bool((edges.sources[is_hub] == 0).all())


def test_examples_that_are_disjoint_share_no_row():
    relations = random_relations()
    rows, edges = ops.sample_hops(relations, SEEDS, 3, is_disjoint=True)
    assert rows[1].examples[:4].tolist() == [0, 1, 2, 3]
    assert rows[0].examples[:3].tolist() == [4, 5, 6]
    for of_type in rows:
        pairs = torch.stack([of_type.examples, of_type.nodes])
        assert pairs.unique(dim=1).size(1) == pairs.size(1)
    for relation, of_relation in zip(relations, edges, strict=True):
        destinations = rows[relation.destination].examples[of_relation.destinations]
        assert torch.equal(destinations, rows[relation.source].examples[of_relation.sources])


def test_counts_of_hops_are_those_of_the_edges_and_rows():
    relations = random_relations()
    rows, edges = ops.sample_hops(relations, SEEDS, 3)
    for of_type in rows:
        assert sum(of_type.per_hop) == of_type.nodes.numel()
        assert len(of_type.per_hop) == 3
    for relation, of_relation in zip(relations, edges, strict=True):
        assert sum(of_relation.per_hop) == of_relation.edge_ids.numel()
        # The edges of a hop belong to rows that the hop before has reached.
        hop_of_row = torch.arange(3).repeat_interleave(torch.tensor(rows[relation.destination].per_hop))
        expected = torch.arange(2).repeat_interleave(torch.tensor(of_relation.per_hop))
        assert torch.equal(hop_of_row[of_relation.destinations], expected)


def test_another_relation_changes_no_draw_of_the_others():
    relations = random_relations()
    _, edges = ops.sample_hops([r._replace(fanouts=r.fanouts[:1]) for r in relations], SEEDS, 3)
    for number, relation in enumerate(relations):
        _, (alone,) = ops.sample_hops([relation._replace(fanouts=relation.fanouts[:1])], SEEDS, 3)
        assert torch.equal(alone.edge_ids, edges[number].edge_ids)


# ---- laws

DEGREE = 12
FANOUT = 4
COUNT = 4000
STAR = (torch.tensor([0, DEGREE]), torch.arange(DEGREE))


def draws_of(
    weight: Tensor | None = None, replace: bool = False, key: int = 5, times: Tensor | None = None, bound: int = 0
) -> Tensor:
    """[COUNT * FANOUT] edges that COUNT rows of one node draw."""
    relation = Relation(0, 1, *STAR, (FANOUT,), derive_key(key), times, False, weight)
    bounds = None if times is None else torch.full((COUNT,), bound)
    seeds = [(1, torch.zeros(COUNT, dtype=torch.int64))]
    _, (edges,) = ops.sample_hops([relation], seeds, 2, replace, times is not None, bounds)
    return edges.edge_ids


@pytest.mark.parametrize("replace", [False, True])
def test_edges_are_drawn_with_equal_chances(replace: bool):
    counts = torch.bincount(draws_of(replace=replace), minlength=DEGREE)
    # Without replacement the counts of a row's edges are negatively correlated: the statistic shrinks by this factor.
    scale = 1.0 if replace else (DEGREE - 1) / (DEGREE - FANOUT)
    assert_chi_square(counts, COUNT * FANOUT / DEGREE, DEGREE - 1, scale)


def test_edges_within_a_time_are_drawn_with_equal_chances_and_later_ones_never():
    drawn = draws_of(times=torch.arange(DEGREE) // 2, bound=3)
    assert_chi_square(torch.bincount(drawn, minlength=DEGREE)[:8], COUNT * FANOUT / 8, 7, 7 / (8 - FANOUT))
    assert int(drawn.max()) == 7


def test_weighted_draws_have_the_chances_of_their_weights():
    weight = torch.arange(DEGREE).double()
    with_replacement = torch.bincount(draws_of(weight, replace=True), minlength=DEGREE)
    assert_chi_square(with_replacement[1:], COUNT * FANOUT * weight[1:] / weight.sum(), DEGREE - 2)
    assert with_replacement[0] == 0
    first = torch.bincount(draws_of(weight).view(COUNT, FANOUT)[:, 0], minlength=DEGREE)
    assert_chi_square(first[1:], COUNT * weight[1:] / weight.sum(), DEGREE - 2)
    assert (draws_of(weight) > 0).all()


def test_a_row_that_is_not_cut_keeps_its_edges_of_weight_0():
    weight = torch.tensor([0.0, 1.0, 0.0, 0.0])
    relation = Relation(0, 1, torch.tensor([0, 2, 4]), torch.arange(4), (2,), 1, weight=weight)
    _, (edges,) = ops.sample_hops([relation], [(1, torch.tensor([0, 1]))], 2)
    assert edges.edge_ids.tolist() == [0, 1, 2, 3]
    # Beside a row that is cut, too; and with replacement nothing of weight 0 is drawn.
    relation = relation._replace(
        indptr=torch.tensor([0, 2, 5]), indices=torch.arange(5), weight=torch.tensor([0, 1.0, 0, 0, 3])
    )
    _, (edges,) = ops.sample_hops([relation], [(1, torch.tensor([0, 1]))], 2)
    assert edges.edge_ids.tolist() == [0, 1, 4]
    _, (edges,) = ops.sample_hops([relation._replace(weight=torch.zeros(5))], [(1, torch.tensor([0]))], 2, replace=True)
    assert edges.per_hop == [0]


@pytest.mark.parametrize("times", ["edge", "node"])
@pytest.mark.parametrize("fanout", [1, 3, 100])
def test_the_last_edges_are_those_of_brute_force_with_ties(times: str, fanout: int):
    relation = random_relation(0, 0, (fanout,), 2, times)
    assert relation.times is not None
    edge_time = relation.times[relation.indices] if times == "node" else relation.times
    seeds = torch.arange(50)
    bounds = seeds % 9 - 1
    _, (edges,) = ops.sample_hops([relation], [(0, seeds)], 1, is_disjoint=True, bounds=bounds, only_last=True)
    for node in range(50):
        row = torch.arange(int(relation.indptr[node]), int(relation.indptr[node + 1]))
        expected = row[edge_time[row] <= bounds[node]][-fanout:]
        assert edges.edge_ids[edges.destinations == node].tolist() == expected.tolist()


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("times", ["edge", "node"])
def test_edges_after_the_bound_change_nothing(times: str, only_last: bool):
    """Poison: what lies after a seed's time gets other sources, is moved further away, and is added to."""
    relation = random_relation(0, 0, (3, 3), 4, times)
    assert relation.times is not None
    edge_time = relation.times[relation.indices] if times == "node" else relation.times
    bound = 4
    row = torch.arange(50).repeat_interleave(relation.indptr.diff())
    is_past = edge_time <= bound
    late_sources = (edge_time > bound).nonzero().view(-1)
    poisoned_time = torch.where(is_past, edge_time, edge_time + 1000)
    rows = torch.cat([row, row[late_sources], torch.arange(50)])
    times_of = torch.cat([poisoned_time, poisoned_time[late_sources], torch.full((50,), 9999)])
    other = relation.times.max() if times == "node" else None
    late_node = int(relation.times.argmax())
    assert other is None or other > bound
    new_sources = torch.full((late_sources.numel() + 50,), late_node)
    sources = torch.cat([torch.where(is_past, relation.indices, late_node), new_sources])
    order = torch.argsort(rows * 100_000 + times_of, stable=True)
    counts = torch.bincount(rows, minlength=50)
    poisoned = relation._replace(
        indptr=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        indices=sources[order],
        times=times_of[order] if times == "edge" else relation.times,
    )
    seeds = [(0, torch.arange(50))]
    bounds = torch.full((50,), bound)
    before_rows, before = ops.sample_hops([relation], seeds, 1, False, True, bounds, only_last)
    after_rows, after = ops.sample_hops([poisoned], seeds, 1, False, True, bounds, only_last)
    assert torch.equal(before_rows[0].nodes, after_rows[0].nodes)
    assert torch.equal(before[0].sources, after[0].sources)
    assert torch.equal(before[0].destinations, after[0].destinations)
    assert before[0].per_hop == after[0].per_hop != [0, 0]


# ---- bad input: an error, and never memory out of bounds


@pytest.mark.parametrize("module", [ops, hops])
@pytest.mark.parametrize(
    ("changed", "seeds"),
    [
        ({}, [50]),
        ({}, [-1]),
        ({}, [2**62]),
        ({"indices": torch.tensor([99, 1])}, [0]),
        ({"indices": torch.tensor([-5, 1])}, [0]),
        ({"indptr": torch.tensor([0, 2, 1])}, [1]),
        ({"indptr": torch.tensor([0, 2, 7])}, [1]),
        ({"indptr": torch.tensor([-3, 2, 2])}, [0]),
        ({"times": torch.tensor([1]), "are_node_times": True}, [0]),
    ],
)
def test_ids_outside_the_graph_are_refused(module, changed, seeds):
    relation = Relation(0, 0, torch.tensor([0, 2, 2]), torch.tensor([0, 1]), (-1, -1), 1)._replace(**changed)
    bounds = torch.full((len(seeds),), 9) if "times" in changed else None
    with pytest.raises(ValueError, match="outside the graph"):
        module.sample_hops([relation], [(0, torch.tensor(seeds))], 1, is_disjoint=bounds is not None, bounds=bounds)


@pytest.mark.parametrize("module", [ops, hops])
@pytest.mark.parametrize("of_nodes", [False, True])
def test_times_that_do_not_ascend_never_let_the_future_in(module, of_nodes: bool):
    star = Relation(0, 1, torch.tensor([0, 6]), torch.arange(6), (-1,), 1, are_node_times=of_nodes)
    refused = 0
    for seed in range(60):
        times = randint(0, 10, 6, seed=seed)
        arguments = ([star._replace(times=times)], [(1, torch.tensor([0]))], 2, False, True, torch.tensor([5]))
        try:
            _, (edges,) = module.sample_hops(*arguments)
        except ValueError:
            refused += 1
            continue
        assert (times[edges.edge_ids] <= 5).all()
    assert refused > 10


@pytest.mark.parametrize("module", [ops, hops])
def test_too_few_bounds_or_weights_are_refused(module):
    relation = Relation(0, 0, torch.tensor([0, 2]), torch.tensor([0, 0]), (1,), 1, times=torch.tensor([0, 1]))
    seeds = [(0, torch.tensor([0, 0]))]
    with pytest.raises(ValueError, match="one bound for each of 2 examples"):
        module.sample_hops([relation], seeds, 1, is_disjoint=True, bounds=torch.tensor([3]))
    with pytest.raises(ValueError, match="one bound for each of 0 examples"):
        module.sample_hops([relation], seeds, 1, bounds=torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="one weight for each edge"):
        module.sample_hops([relation._replace(times=None, weight=torch.ones(1))], seeds, 1)


@pytest.mark.parametrize("module", [ops, hops])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("replace", [False, True])
def test_weights_that_nothing_can_be_drawn_by_are_refused(module, bad: float, replace: bool):
    relation = Relation(0, 1, torch.tensor([0, 3]), torch.arange(3), (2,), 1, weight=torch.tensor([1.0, bad, 1.0]))
    with pytest.raises(ValueError, match="weight"):
        module.sample_hops([relation], [(1, torch.tensor([0]))], 2, replace)
