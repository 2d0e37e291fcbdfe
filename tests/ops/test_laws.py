"""Draws by weight: their definition against counting, and the kernels against the definition."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from hopline import ops
from hopline.ops import reference
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.random import derive_key
from tests.ops.cpu.test_sampling import assert_chi_square
from tests.support.helpers import randint

FANOUTS = (0, 1, 2, 10, 70, -1)


def ugly_rows(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """(indptr, indices) with empty rows, short ones, a hub and double edges."""
    degrees = randint(0, 20, 80)
    degrees[[0, 5, 79]] = 0
    degrees[7] = 3000
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return indptr, randint(0, 80, int(indptr[-1]), seed=3).to(dtype)


def ugly_weights(indptr: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_edges] weights of very different sizes. A third is 0, and so are all of the nodes 9 and 10."""
    num_edges = int(indptr[-1])
    exponents = randint(-20, 20, num_edges, seed=5).double()
    weight = torch.where(randint(0, 3, num_edges, seed=6) == 0, 0.0, exponents.exp())
    weight[indptr[9] : indptr[11]] = 0
    return weight.to(dtype)


def assert_same_draws(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """The same edges in the same order. Probabilities come from a logarithm, of which libraries round the last bit."""
    for our_tensor, expected_tensor in zip(ours, expected, strict=True):
        assert our_tensor.dtype == expected_tensor.dtype
        if our_tensor.is_floating_point():
            assert torch.allclose(our_tensor.cpu(), expected_tensor, rtol=1e-12, atol=0)
        else:
            assert torch.equal(our_tensor.cpu(), expected_tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_draws_are_those_of_the_definition(dtype: torch.dtype) -> None:
    indptr, indices = ugly_rows()
    weight = ugly_weights(indptr, dtype)
    nodes = torch.cat([torch.arange(80), torch.tensor([7, 7, 3])])
    for fanout in FANOUTS:
        for draw_ids in (None, ops.draw_ids(nodes, nodes % 3 == 0)):
            arguments = (indptr, indices, weight, nodes, fanout, -(2**63), draw_ids)
            assert_same_draws(cpu_sampling.sample_weighted(*arguments), reference.sample_weighted(*arguments))
    assert ops.sample_weighted(indptr, indices, weight, nodes[:0], 3, 1).ids.numel() == 0


@cache
def weighted_picks(weight: tuple[float, ...], fanout: int, count: int) -> tuple[Tensor, Tensor]:
    """([count, drawn], [count, drawn]) positions that many nodes draw by the same weights, and their probabilities."""
    degree = len(weight)
    indices = torch.arange(degree).repeat(count)
    sample = ops.sample_weighted(
        torch.arange(count + 1) * degree,
        indices,
        torch.tensor(weight, dtype=torch.float64).repeat(count),
        torch.arange(count),
        fanout,
        derive_key(3, 1, 0),
    )
    return sample.ids.view(count, -1), sample.inclusion.view(count, -1)


WEIGHTS = [(1.0, 1.0, 1.0), (0.5, 3.0, 0.0, 8.0), tuple(np.linspace(0.1, 4, 30)), (1e-280, 3e-280, 2e-280)]


@pytest.mark.parametrize("weight", WEIGHTS, ids=["equal", "zero", "long", "tiny"])
def test_picks_by_weight_have_the_chances_of_an_urn(weight: tuple[float, ...]) -> None:
    count = 20000
    positions, _ = weighted_picks(weight, 2, count)
    chance = torch.tensor(weight, dtype=torch.float64) / sum(weight)
    positive = chance > 0
    first = torch.bincount(positions[:, 0], minlength=len(weight))
    assert not first[~positive].any()
    assert_chi_square(first[positive], count * chance[positive], int(positive.sum()) - 1)

    # The second pick is one of those that are left.
    pairs = torch.bincount(positions[:, 0] * len(weight) + positions[:, 1], minlength=len(weight) ** 2)
    expected = (chance[:, None] * chance / (1 - chance[:, None])).fill_diagonal_(0).view(-1)
    cells = expected > 0
    assert not pairs[~cells].any()
    assert_chi_square(pairs[cells], count * expected[cells], int(cells.sum()) - 1)


def test_zero_weights_are_never_drawn() -> None:
    indptr, indices = ugly_rows()
    weight = ugly_weights(indptr, torch.float64)
    nodes = torch.arange(80)
    for fanout in (1, 5, 5000):
        drawn = ops.sample_weighted(indptr, indices, weight, nodes, fanout, 3)
        assert (weight[drawn.edge_ids] > 0).all()
        positives = torch.tensor([int((weight[indptr[v] : indptr[v + 1]] > 0).sum()) for v in nodes])
        assert torch.equal(drawn.indptr.diff(), positives.clamp(max=fanout))
        is_whole = torch.repeat_interleave(positives <= fanout, drawn.indptr.diff())
        assert (drawn.inclusion[is_whole] == 1).all()
        assert (drawn.inclusion > 0).all()
        assert (drawn.inclusion <= 1).all()
    everything = ops.sample_weighted(indptr, indices, weight, nodes, -1, 3)
    assert torch.equal(everything.edge_ids, torch.arange(indices.numel()))


def test_a_smaller_fanout_is_a_prefix_of_a_larger() -> None:
    indptr, indices = ugly_rows()
    weight = ugly_weights(indptr, torch.float32)
    large = ops.sample_weighted(indptr, indices, weight, torch.arange(80), 12, 4)
    for fanout in (1, 5, 11):
        small = ops.sample_weighted(indptr, indices, weight, torch.arange(80), fanout, 4)
        for node in range(80):
            ours = small.edge_ids[small.indptr[node] : small.indptr[node + 1]]
            assert torch.equal(ours, large.edge_ids[large.indptr[node] : large.indptr[node + 1]][:fanout])


@pytest.mark.parametrize("fanout", [1, 3])
def test_sums_over_probabilities_have_the_expectation_of_the_full_sum(fanout: int) -> None:
    weight = tuple(np.linspace(0.05, 4, 12))
    values = torch.linspace(-3, 5, 12, dtype=torch.float64)
    positions, inclusion = weighted_picks(weight, fanout, 200_000)
    for at_edges in (values, values * torch.tensor(weight)):
        estimates = (at_edges[positions] / inclusion).sum(1)
        sigma = float(estimates.std()) / math.sqrt(estimates.numel())
        assert abs(float(estimates.mean() - at_edges.sum())) < 4 * sigma


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 1e-310, 1e305])
def test_weights_that_cannot_be_drawn_by_are_refused(bad: float) -> None:
    indptr = torch.tensor([0, 3])
    weight = torch.tensor([1.0, bad, 2.0], dtype=torch.float64)
    for module in (ops, reference):
        with pytest.raises(ValueError, match="negative, NaN, infinite"):
            module.sample_weighted(indptr, torch.zeros(3).long(), weight, torch.tensor([0]), 1, 1)


@pytest.mark.parametrize("weight", [torch.ones(2), torch.ones(3, 1), torch.ones(3).long()])
def test_weights_that_are_no_number_per_edge_are_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="one per edge"):
        ops.sample_weighted(torch.tensor([0, 3]), torch.zeros(3).long(), weight, torch.tensor([0]), 1, 1)


# ---- LABOR


def test_labor_draws_are_those_of_the_definition() -> None:
    for dtype in (torch.int32, torch.int64):
        indptr, indices = ugly_rows(dtype)
        copies = ops.edge_copies(indptr, indices)
        nodes = torch.cat([torch.arange(80), torch.tensor([7, 7, 3])])
        for fanout in FANOUTS:
            arguments = (indptr, indices, nodes, fanout, -(2**63), copies if fanout != 2 else None)
            assert_same_draws(cpu_sampling.sample_labor(*arguments), reference.sample_labor(*arguments))
    assert ops.sample_labor(indptr, indices, nodes[:0], 3, 1).ids.numel() == 0


def test_copies_of_edges_are_counted() -> None:
    indptr = torch.tensor([0, 0, 6, 7, 10])
    indices = torch.tensor([3, 1, 3, 2, 1, 3, 3, 1, 1, 2])
    expected = [0, 0, 1, 0, 1, 2, 0, 0, 1, 0]
    for module in (ops, reference):
        assert module.edge_copies(indptr, indices).tolist() == expected
        assert module.edge_copies(torch.tensor([0, 3, 3, 5]), torch.tensor([4, 2, 3, 4, 5])) is None
        assert module.edge_copies(torch.tensor([0]), torch.tensor([]).long()) is None
    indptr, indices = ugly_rows()
    ours, expected = cpu_sampling.edge_copies(indptr, indices), reference.edge_copies(indptr, indices)
    assert ours is not None
    assert expected is not None
    assert_same_draws((ours,), (expected,))


def labor_picks(row: list[int], fanout: int, count: int) -> Tensor:
    """[count, fanout] places in one row that are drawn by many keys."""
    indptr = torch.tensor([0, len(row)])
    indices = torch.tensor(row)
    copies = ops.edge_copies(indptr, indices)
    node = torch.tensor([0])
    keys = [derive_key(5, 1, step) for step in range(count)]
    return torch.stack([ops.sample_labor(indptr, indices, node, fanout, key, copies).edge_ids for key in keys])


@pytest.mark.parametrize("row", [[9, 3, 4, 7, 2], [9, 3, 9, 9, 2]], ids=["single", "copies"])
def test_every_in_edge_is_as_likely_as_any_other_by_labor(row: list[int]) -> None:
    count = 6000
    positions = labor_picks(row, 2, count)
    # Both picks of a node together vary less, by (d - k) / (d - 1).
    assert_chi_square(torch.bincount(positions.view(-1), minlength=5), count * 2 / 5, 4, scale=4 / 3)
    pairs = torch.bincount(positions[:, 0] * 5 + positions[:, 1], minlength=25).view(5, 5)
    cells = pairs[~torch.eye(5, dtype=torch.bool)]
    assert_chi_square(cells, count / 20, 19)


def test_nodes_with_the_same_sources_draw_the_same_by_labor() -> None:
    row = randint(0, 1000, 30)
    order = torch.randperm(30)
    indices = torch.cat([row, row[order]])
    drawn = ops.sample_labor(torch.tensor([0, 30, 60]), indices, torch.tensor([0, 1]), 7, 8)
    assert torch.equal(drawn.ids[:7], drawn.ids[7:])


def test_labor_draws_fewer_distinct_sources_than_plain_sampling() -> None:
    num_nodes = 300
    indptr = torch.arange(num_nodes + 1) * 40
    indices = randint(0, num_nodes, 40 * num_nodes)
    nodes = torch.arange(num_nodes)
    by_labor = [ops.sample_labor(indptr, indices, nodes[:60], 5, key).ids.unique().numel() for key in range(50)]
    plain = [ops.sample_neighbors(indptr, indices, nodes[:60], 5, key).ids.unique().numel() for key in range(50)]
    assert max(by_labor) < min(plain)
    assert sum(by_labor) < 0.75 * sum(plain)


def test_a_smaller_fanout_is_a_prefix_of_a_larger_by_labor() -> None:
    indptr, indices = ugly_rows()
    large = ops.sample_labor(indptr, indices, torch.arange(80), 12, 4)
    for fanout in (1, 5, 11):
        small = ops.sample_labor(indptr, indices, torch.arange(80), fanout, 4)
        for node in range(80):
            ours = small.edge_ids[small.indptr[node] : small.indptr[node + 1]]
            assert torch.equal(ours, large.edge_ids[large.indptr[node] : large.indptr[node + 1]][:fanout])
