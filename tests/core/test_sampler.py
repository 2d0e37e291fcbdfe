"""Neighbour sampling: valid blocks, draws that depend on key and node alone, and refused seeds and fan-outs.

A node draws the same in-edges whatever other seeds are in the batch, and in whichever thread.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hopline import ops
from hopline.core.batch import Batch, Block
from hopline.core.graph import Graph
from hopline.core.sampler import NeighborSampler, full_block, in_neighborhood
from hopline.core.seed_order import seed_batches
from hopline.ops import reference
from hopline.util.config import check_fanouts
from tests.support.helpers import assert_same_batches, edges_of, graph_of, neighbors_of, randint, random_graph

# ---- seeds


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 99, 100, 101, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_seed_comes_exactly_once(batch_size: int, shuffle: bool) -> None:
    ids = torch.arange(300)[randint(0, 2, 300).bool()][:100] * 3
    batches = list(seed_batches(ids, batch_size, 4, shuffle=shuffle))
    assert [b.numel() for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert 1 <= batches[-1].numel() <= batch_size
    all_seeds = torch.cat(batches)
    assert torch.equal(all_seeds.sort().values, ids.sort().values)
    assert shuffle != torch.equal(all_seeds, ids)


@pytest.mark.parametrize(("size", "expected"), [(10, [4, 4]), (8, [4, 4]), (3, [])])
def test_drop_last_leaves_out_only_a_batch_that_is_not_full(size: int, expected: list[int]) -> None:
    batches = list(seed_batches(torch.arange(size), 4, 1, drop_last=True))
    assert [b.numel() for b in batches] == expected
    assert torch.unique(torch.cat([*batches, torch.empty(0).long()])).numel() == sum(expected)


def test_no_seeds_make_no_batches() -> None:
    assert list(seed_batches(torch.empty(0, dtype=torch.int64), 4, 1)) == []


def test_the_order_depends_on_the_key_alone() -> None:
    first, again, other = (torch.cat(list(seed_batches(torch.arange(50), 8, key))) for key in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---- blocks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("fanouts", [(4,), (2, 3), (3, 2, 4), (-1, 2), (-1, -1, -1)], ids=str)
@pytest.mark.parametrize("replace", [False, True], ids=["distinct", "replace"])
def test_blocks_have_distinct_sources_and_as_many_edges_as_the_fan_out(
    dtype: torch.dtype, fanouts: tuple[int, ...], replace: bool
) -> None:
    if replace:
        fanouts = tuple(max(1, f) for f in fanouts)
    graph = random_graph(dtype=dtype, loops=True)
    seeds = torch.tensor([0, 49, 11, 30])
    blocks = NeighborSampler(graph, fanouts, replace=replace, edge_ids=True).sample(seeds, 3)
    assert len(blocks) == len(fanouts)
    assert torch.equal(blocks[-1].dst_ids, seeds)

    for block, fanout in zip(reversed(blocks), fanouts, strict=True):
        assert block.src_ids.dtype == torch.int64
        assert torch.unique(block.src_ids).numel() == block.num_src
        src, dst = graph.edge_index()
        part = block.part
        assert part.edge_ids is not None
        assert edges_of(block) == list(zip(src[part.edge_ids].tolist(), dst[part.edge_ids].tolist(), strict=True))
        degrees = graph.in_degrees(block.dst_ids)
        if fanout < 0:
            expected = degrees
        elif replace:
            expected = torch.where(degrees > 0, torch.full_like(degrees, fanout), 0)
        else:
            expected = degrees.clamp(max=fanout)
        assert torch.equal(part.indptr.diff(), expected)
        assert replace or torch.unique(part.edge_ids).numel() == part.num_edges
    for outer, inner in itertools.pairwise(blocks):
        assert torch.equal(outer.dst_ids, inner.src_ids)


def test_sources_are_numbered_by_first_occurrence_after_the_destinations() -> None:
    graph = random_graph()
    for block in NeighborSampler(graph, (3, 2), edge_ids=True).sample(torch.tensor([31, 0, 8]), 3):
        ids, idx = reference.relabel(block.dst_ids, graph.indices[block.part.edge_ids])
        assert torch.equal(block.src_ids, ids)
        assert torch.equal(block.part.src_idx, idx)


def test_edge_arrays_follow_their_edges() -> None:
    graph = random_graph(weight=True, attr=3)
    graph = Graph(graph.indptr, graph.indices, {**graph.edge, "time": torch.arange(graph.num_edges)})
    for block in NeighborSampler(graph, (3, 2), edge_ids=True).sample(torch.arange(0, 50, 3), 8):
        ids = block.part.edge_ids
        assert ids is not None
        assert torch.equal(block.edge["time"], ids)
        assert torch.equal(block.edge["weight"], graph.edge["weight"][ids])
        assert torch.equal(block.edge["attr"], graph.edge["attr"][ids])


def test_edge_ids_are_returned_only_with_edge_ids_true() -> None:
    (block,) = NeighborSampler(random_graph(), (3,)).sample(torch.arange(4), 8)
    assert block.part.edge_ids is None


def reads_prefixes(inner: Block, outer: Block) -> bool:
    """Whether the edges of each seed in the block of a smaller fan-out are the first in that of a larger."""
    for i in range(inner.num_dst):
        small = [e for e in edges_of(inner) if e[1] == i]
        large = [e for e in edges_of(outer) if e[1] == i]
        if large[: len(small)] != small:
            return False
    return True


def test_a_node_reads_prefixes_of_one_list_in_two_layers_next_to_each_other() -> None:
    blocks = NeighborSampler(random_graph(), (2, 5, 7, 9)).sample(torch.arange(20), 8)
    assert reads_prefixes(blocks[1], blocks[0])
    assert reads_prefixes(blocks[3], blocks[2])
    assert not reads_prefixes(blocks[2], blocks[1])
    assert not reads_prefixes(blocks[3], blocks[0])


def test_one_list_is_read_by_all_layers() -> None:
    blocks = NeighborSampler(random_graph(), (2, 5, 7, 9), one_list=True).sample(torch.arange(20), 8)
    assert all(reads_prefixes(inner, outer) for outer, inner in itertools.pairwise(blocks))


def test_a_node_with_a_self_loop_draws_anew_in_each_layer_and_others_as_without_loops() -> None:
    plain = random_graph(400, 6000)
    loops = torch.arange(0, 400, 2)
    src, dst = plain.edge_index()
    graph = graph_of(torch.cat([src, loops]), torch.cat([dst, loops]), 400)
    nodes = torch.arange(400)
    sampler, one_list = (NeighborSampler(graph, (3, 3, 3, 3), one_list=one) for one in (False, True))
    blocks = sampler.sample(nodes, 8)
    without_loops = NeighborSampler(plain, (3, 3, 3, 3)).sample(nodes, 8)
    is_large = graph.in_degrees() > 3
    for pair in (0, 2):
        lists = [block.src_ids[block.part.src_idx].split(block.part.indptr.diff().tolist()) for block in blocks]
        same = torch.tensor([torch.equal(a, b) for a, b in zip(lists[pair], lists[pair + 1], strict=True)])
        assert same[1::2].all(), "nodes without a loop draw once for both layers"
        assert float(same[0::2][is_large[0::2]].double().mean()) < 0.05
    for ours, expected in zip(blocks, without_loops, strict=True):
        edges = [e for e in edges_of(ours) if e[1] % 2]
        assert edges == [e for e in edges_of(expected) if e[1] % 2]
    blocks = one_list.sample(nodes[:40], 8)
    assert all(reads_prefixes(inner, outer) for outer, inner in itertools.pairwise(blocks))


def test_self_loops_are_searched_for_only_where_a_pair_of_layers_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "self_loops", lambda *_: pytest.fail("the graph was searched for loops"))
    graph = random_graph(loops=True)
    for fanouts, one_list in (((3,), False), ((-1, 3), False), ((3, 3), True)):
        NeighborSampler(graph, fanouts, one_list=one_list).sample(torch.arange(4), 8)
    NeighborSampler(graph, (3, 3)).sample_subgraph(torch.arange(4), 8)


def test_layer_keys_of_a_key_in_a_tensor_equal_those_of_the_number() -> None:
    for key in (5, -(2**63), 2**63 - 1):
        for layer in range(6):
            assert ops.layer_key(torch.tensor([key]), layer).tolist() == [ops.layer_key(key, layer)]  # type: ignore[union-attr]


def test_a_sample_does_not_depend_on_the_other_seeds() -> None:
    sampler = NeighborSampler(random_graph(), (3,))
    (together,) = sampler.sample(torch.arange(50), 5)
    for node in range(50):
        (alone,) = sampler.sample(torch.tensor([node]), 5)
        assert edges_of(alone) == [e for e in edges_of(together) if e[1] == node]


def test_the_key_decides_what_is_drawn() -> None:
    sampler = NeighborSampler(random_graph(), (3, 3))
    draws = {str([edges_of(b) for b in sampler.sample(torch.arange(10), key)]) for key in (1, 1, 2, 3)}
    assert len(draws) == 3


def test_many_threads_sample_what_one_thread_samples() -> None:
    graph = random_graph(2000, 20000, dtype=torch.int32, weight=True)
    sampler = NeighborSampler(graph, (5, 4, 3))
    requests = [(randint(0, 2000, 40, seed=s).unique(), s) for s in range(60)]

    def sample(request: tuple[torch.Tensor, int]) -> Batch:
        seeds, key = request
        return Batch(seeds, sampler.sample(seeds, key), None, None, key=key)

    expected = list(map(sample, requests))
    with ThreadPoolExecutor(8) as pool:
        for ours, theirs in zip(pool.map(sample, requests * 2), expected * 2, strict=True):
            assert_same_batches(ours, theirs)


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_a_seed_that_is_not_a_node_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 49"):
        NeighborSampler(random_graph(), (2,)).sample(torch.tensor([3, bad]), 1)


@pytest.mark.parametrize("seeds", [torch.ones(50, dtype=torch.bool), torch.tensor([[1, 2]]), torch.tensor([1.0])])
def test_seeds_that_are_not_a_list_of_ids_are_refused(seeds: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"int64.*mask\.nonzero"):
        NeighborSampler(random_graph(), (2,)).sample(seeds, 1)


def test_repeated_seeds_are_refused_and_the_sampler_stays_usable() -> None:
    sampler = NeighborSampler(random_graph(), (2,))
    with pytest.raises(ValueError, match="distinct"):
        sampler.sample(torch.tensor([3, 4, 3]), 1)
    (block,) = sampler.sample(torch.tensor([4, 3]), 1)
    assert block.dst_ids.tolist() == [4, 3]


@pytest.mark.parametrize("bad", [-5, 9])
def test_an_edge_index_out_of_range_is_an_error_and_not_a_crash(bad: int) -> None:
    graph = Graph(torch.tensor([0, 2, 2]), torch.tensor([1, bad]))
    sampler = NeighborSampler(graph, (-1, -1))
    for _ in range(2):
        with pytest.raises(ValueError, match="out of range"):
            sampler.sample(torch.tensor([0]), 1)
    blocks = sampler.sample(torch.tensor([1]), 1)
    assert [b.num_edges for b in blocks] == [0, 0]


def test_no_seeds_and_seeds_without_neighbours_make_blocks_without_edges() -> None:
    sampler = NeighborSampler(random_graph(), (2, 2))
    assert [b.num_src for b in sampler.sample(torch.empty(0, dtype=torch.int64), 1)] == [0, 0]
    assert [(b.num_src, b.num_edges) for b in sampler.sample(torch.tensor([49]), 1)] == [(1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("fanouts", "replace", "message"),
    [
        ((), False, "one number per layer"),
        (5, False, "one number per layer"),
        ((3, 0), False, "not 0"),
        ((-2,), False, "not -2"),
        ((2.5,), False, r"not 2\.5"),
        ((3, -1), True, "replace=True"),
    ],
)
def test_invalid_fan_outs_are_refused_with_a_message(fanouts: object, replace: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fanouts(fanouts, replace)  # type: ignore[arg-type]


# ---- whole neighbourhoods


def test_a_full_block_has_every_edge_and_draws_nothing() -> None:
    graph = random_graph(weight=True)
    block = full_block(NeighborSampler(graph, (-1,)), torch.tensor([5, 0]))
    assert block.key is None
    assert edges_of(block) == [(u, v) for v in (5, 0) for u in neighbors_of(graph, v)]
    assert torch.equal(block.edge["weight"][-1:], graph.edge["weight"][int(graph.indptr[1]) - 1 :][:1])


def test_in_neighborhood_is_the_nodes_and_their_sources() -> None:
    graph = random_graph()
    for nodes in ([], [49], [0, 3, 3]):
        expected = sorted({*nodes, *(u for v in nodes for u in neighbors_of(graph, v))})
        assert in_neighborhood(graph, torch.tensor(nodes, dtype=torch.int64)).tolist() == expected
