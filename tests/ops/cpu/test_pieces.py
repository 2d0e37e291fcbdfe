"""Micro-batches of a batch: nodes and edges that lead to some seeds, against Python sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hopline import ops
from hopline.ops.cpu import cut_batches as cpu_cut_batches
from tests.support.helpers import batch_of, random_graph

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
