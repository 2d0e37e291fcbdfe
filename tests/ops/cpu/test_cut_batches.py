"""Leaving out edges so that a batch fits, and micro-batches of a batch, against Python loops and sets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hopline import ops
from hopline.ops import random
from hopline.ops.cpu import cut_batches as cpu_cut_batches
from tests.support.helpers import batch_of, random_graph


def random_blocks(seed: int = 0) -> tuple[list[cpu_cut_batches.Edges], list[int]]:
    """Two blocks, 12 -> 6 -> 3 nodes, and the numbers of their nodes."""
    rng = np.random.default_rng(seed)
    sizes = [12, 6, 3]
    blocks = []
    for num_src, num_dst in itertools.pairwise(sizes):
        indptr = np.concatenate([[0], rng.integers(0, 5, num_dst).cumsum()])
        blocks.append((indptr, rng.integers(0, num_src, indptr[-1]).astype(np.int32)))
    return blocks, sizes


def pairs(edges: cpu_cut_batches.Edges) -> list[tuple[int, int]]:
    indptr, src_idx = edges
    return list(zip(src_idx.tolist(), np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)).tolist(), strict=True))


def test_drawn_numbers_are_those_of_the_keyed_generator():
    first, second = cpu_cut_batches.draw_numbers([3, 4], -5)
    expected = random.draw(-5, torch.arange(7), 0) & cpu_cut_batches.NEVER
    assert np.concatenate([first, second]).tolist() == expected.tolist()
    assert len(first) == 3


def test_ends_of_edges_are_counted():
    blocks, _ = random_blocks()
    expected = np.zeros(12)
    for src, dst in itertools.chain(*map(pairs, blocks)):
        expected[src] += 1
        expected[dst] += 1
    assert cpu_cut_batches.total_degrees(blocks, 12).tolist() == expected.tolist()


def test_page_rank_is_that_of_the_walk_against_the_edges():
    blocks, _ = random_blocks()
    walk = np.zeros((12, 12))
    for src, dst in itertools.chain(*map(pairs, blocks)):
        walk[src, dst] += 1
    walk /= np.maximum(walk.sum(0), 1)
    rank = np.full(12, 1 / 12)
    for _ in range(8):
        rank = 0.15 / 12 + 0.85 * walk @ rank
    np.testing.assert_allclose(cpu_cut_batches.page_rank(blocks, 12), rank, rtol=1e-12)


@pytest.mark.parametrize("key", [0, 7, -3])
def test_numbers_by_hubs_are_all_different_and_in_the_order_of_the_hubs(key: int):
    blocks, _ = random_blocks()
    hub = np.array([1.0, 2, 2, 4, 1, 1, 3, 1, 1, 5, 1, 1])
    numbers = np.concatenate(cpu_cut_batches.hub_numbers(blocks, hub, key))
    weight = np.array([hub[src] * hub[dst] for src, dst in itertools.chain(*map(pairs, blocks))])
    assert len(set(numbers.tolist())) == len(numbers)
    assert (numbers >= 0).all()
    assert (np.diff(weight[np.argsort(numbers)]) >= 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_entries_say_when_edges_and_nodes_come_in(seed: int):
    (edges, _), (num_src, num_dst, _) = random_blocks(seed)
    rng = np.random.default_rng(seed)
    number = rng.permutation(len(edges[1]))
    dst_entry = rng.integers(-1, 10, num_dst)
    src_entry, edge_entry = cpu_cut_batches.entries(edges, number, dst_entry, num_src)
    for last in range(-1, len(number) + 10):
        present = {d for d in range(num_dst) if dst_entry[d] <= last}
        inside = [n <= last and d in present for n, (_, d) in zip(number, pairs(edges), strict=True)]
        assert (edge_entry <= last).tolist() == inside
        reached = present | {s for (s, _), is_in in zip(pairs(edges), inside, strict=True) if is_in}
        assert set(np.flatnonzero(src_entry <= last).tolist()) == reached
        indptr, src_idx, edge_positions = cpu_cut_batches.cut_block(edges, edge_entry, dst_entry, src_entry, last)
        assert edge_positions.tolist() == np.flatnonzero(inside).tolist()
        chosen = np.flatnonzero(src_entry <= last)
        present_in_order = sorted(present)
        ours = [(int(chosen[s]), present_in_order[d]) for s, d in pairs((indptr, src_idx))]
        assert ours == [pair for pair, is_in in zip(pairs(edges), inside, strict=True) if is_in]


@pytest.mark.parametrize("seed", range(20))
def test_the_last_that_fits_is_found(seed: int):
    rng = np.random.default_rng(seed)
    kinds = [rng.integers(0, 50, rng.integers(0, 40)) for _ in range(3)]  # some entries are equal
    price = np.array([3, 1, 2])
    limit = int(rng.integers(0, 200))

    def taken(last: int) -> int:
        return sum(p * int((values <= last).sum()) for p, values in zip(price, kinds, strict=True))

    every = sorted({-1, *np.concatenate(kinds).tolist()})
    expected = max(last for last in every if taken(last) <= limit or last == -1)
    calls: list[int] = []

    def fits(counts: np.ndarray) -> bool:
        calls.append(1)
        return int(counts @ price) <= limit

    assert cpu_cut_batches.last_that_fits([k.copy() for k in kinds], fits) == expected
    assert len(calls) <= 40


BATCH = batch_of(random_graph(300, 3000), None, (4, 3, -1), torch.arange(0, 300, 2))


def count_by_sets(seeds: np.ndarray) -> list[int]:
    """Nodes of each layer, then edges of each block, that lead to the seeds, counted with Python sets."""
    nodes = [len(seeds)]
    edges = []
    have = set(seeds.tolist())
    for block in reversed(BATCH.blocks):
        indptr = block.part.indptr.tolist()
        src_idx = block.part.src_idx.tolist()
        used = [e for d in have for e in range(indptr[d], indptr[d + 1])]
        have = have | {src_idx[e] for e in used}
        nodes.insert(0, len(have))
        edges.insert(0, len(used))
    return [*nodes, *edges]


@pytest.mark.parametrize("num_groups", [1, 3, 64, 150])
def test_counts_of_nodes_and_edges_are_those_of_sets(num_groups: int):
    groups = [ids.numpy() for ids in ops.permutation(1, 150).tensor_split(num_groups)]
    blocks = [(b.part.indptr.numpy(), b.part.src_idx.numpy()) for b in BATCH.blocks]
    num_nodes = [*[b.num_src for b in BATCH.blocks], 150]
    assert cpu_cut_batches.count(blocks, num_nodes, groups).tolist() == [count_by_sets(group) for group in groups]
    some = groups[:-1]  # seeds that are in no group
    assert cpu_cut_batches.count(blocks, num_nodes, some).tolist() == [count_by_sets(group) for group in some]


def test_take_gives_the_edges_of_some_destinations():
    block = BATCH.blocks[0]
    part = block.part
    for size in (0, 1, 20):
        dst_idx = ops.permutation(2, block.num_dst)[:size]
        indptr, edges = ops.row_entries(part.indptr, dst_idx)
        nodes, src_idx = ops.relabel(dst_idx, part.src_idx[edges])
        edges_taken = cpu_cut_batches.take(part.indptr, part.src_idx, block.num_src, dst_idx, with_positions=True)
        for ours, expected in zip(edges_taken, (indptr, src_idx, nodes, edges), strict=True):
            assert ours is not None
            assert torch.equal(ours, expected)
        assert cpu_cut_batches.take(part.indptr, part.src_idx, block.num_src, dst_idx, with_positions=False)[3] is None
