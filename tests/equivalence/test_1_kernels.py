"""Identity 1: reference = Numba for the same key, bit for bit, over random graphs, keys and shapes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hopline.ops import cpu, cpu_reduce, reference
from tests.helpers import randint, randn

ROUNDS = range(60)


def random_csr(draw: random.Random) -> tuple[Tensor, Tensor]:
    """(indptr, indices) with empty rows, short rows, and one far longer than any fan-out."""
    num_nodes = draw.choice([1, 2, 17, 300])
    degrees = [draw.choice([0, 1, 2, 3, draw.randrange(30), draw.randrange(200)]) for _ in range(num_nodes)]
    degrees[draw.randrange(num_nodes)] += draw.choice([0, 3000])
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    indices = randint(0, num_nodes, int(indptr[-1]), seed=draw.randrange(10**6))
    return indptr, indices.to(draw.choice([torch.int32, torch.int64]))


def random_key(draw: random.Random) -> int:
    return draw.choice([0, 1, -1, draw.randrange(-(2**63), 2**63), 2**63 - 1, -(2**63)])


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", ROUNDS)
def test_sampling(seed: int) -> None:
    draw = random.Random(seed)
    indptr, indices = random_csr(draw)
    nodes = randint(0, indptr.numel() - 1, draw.choice([0, 1, 5, 400]), seed=seed)
    for fanout in (-1, 1, 2, draw.randrange(3, 20), draw.choice([40, 100])):
        for replace in (False, True) if fanout > 0 else (False,):
            arguments = (indptr, indices, nodes, fanout, random_key(draw), replace)
            assert_same(cpu.sample_neighbors(*arguments), reference.sample_neighbors(*arguments))
    assert_same(cpu.row_positions(indptr, nodes), reference.row_positions(indptr, nodes))


@pytest.mark.parametrize("seed", ROUNDS)
def test_relabelling_gathering_and_grouping(seed: int) -> None:
    draw = random.Random(seed)
    top = draw.choice([3, 100, 10**6, 2**40])
    seeds = randint(0, top, draw.choice([0, 1, 50]), seed=seed).unique()
    neighbors = randint(0, top, draw.choice([0, 1, 700]), seed=seed + 1)
    neighbors = neighbors.int() if top < 2**31 and draw.random() < 0.5 else neighbors
    assert_same(cpu.relabel(seeds, neighbors), reference.relabel(seeds, neighbors))

    dtype = draw.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
    rows = (50 * randn(30, draw.randrange(1, 20), seed=seed)).to(dtype)
    ids = randint(0, 30, draw.choice([0, 1, 99]), seed=seed)
    assert_same((cpu.gather_rows(rows, ids),), (reference.gather_rows(rows, ids),))

    keys, groups = randint(0, 9, draw.choice([0, 1, 300]), seed=seed), 9 + draw.randrange(3)
    assert_same(cpu.group_edges(keys, groups), reference.group_edges(keys, groups))
    indptr, indices = random_csr(draw)
    assert_same((cpu.self_loops(indptr, indices),), (reference.self_loops(indptr, indices),))


@pytest.mark.parametrize("seed", ROUNDS)
def test_reductions(seed: int) -> None:
    draw = random.Random(seed)
    indptr, indices = random_csr(draw)
    dtype = draw.choice([torch.float32, torch.float64])
    shape = draw.choice([(), (1,), (5,), (33,), (2, 3)])
    rows = randn(indptr.numel() - 1, *shape, seed=seed, dtype=dtype)
    weight = draw.choice([None, randn(indices.numel(), seed=seed + 1, dtype=dtype)])
    for how in ("sum", "mean", "max"):
        arguments = (rows, indptr, indices, how, weight)
        assert_same((cpu_reduce.reduce_edges(*arguments),), (reference.reduce_edges(*arguments),))


@pytest.mark.parametrize("seed", ROUNDS)
def test_dropout(seed: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16])
    x = randn(draw.choice([0, 1, 60]), *draw.choice([(), (1,), (6,), (64,), (3, 5)]), seed=seed, dtype=dtype)
    ids = randint(0, draw.choice([5, 2**50]), x.size(0), seed=seed)
    arguments = (x, draw.choice([0.0, 1.0, draw.random()]), random_key(draw), ids)
    assert_same((cpu_reduce.keyed_dropout(*arguments),), (reference.keyed_dropout(*arguments),))
