"""Groups of parts: which parts form a batch in an epoch, which rank trains it, and the block of its edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopline.core.partition import make_partition
from hopline.core.sampler import NeighborSampler, full_block
from hopline.distributed.world import World
from hopline.methods.historical.groups import Groups
from hopline.methods.historical.settings import Historical
from hopline.methods.partitioned.parts import Parts, without_halo
from hopline.methods.partitioned.rank_histories import PartAssignment
from tests.methods.historical.test_work import GRAPH, trainer_of


def test_blocks_of_fixed_groups_are_cached_and_those_of_redrawn_groups_are_not():
    fixed: Any = trainer_of(groups="fixed").work
    redrawn: Any = trainer_of().work
    for work in (fixed, redrawn):
        for epoch in (1, 2):
            for group in work.groups.groups_of(epoch):
                work.batch(group, 0)
    assert len(fixed.partitioned.parts._cached_blocks) == 3
    # Only the groups of a sweep over all parts may be cached, if they happen to be drawn.
    assert set(redrawn.partitioned.parts._cached_blocks) <= {(0, 1), (2, 3), (4, 5)}
    assert {frozenset(g) for g in fixed.groups.groups_of(1)} == {frozenset(g) for g in fixed.groups.groups_of(2)}


def test_max_batches_leaves_the_other_parts_to_later_epochs():
    work: Any = trainer_of(max_batches=2).work
    groups = [work.groups.groups_of(epoch) for epoch in range(1, 9)]
    assert all(len(of_epoch) == 2 for of_epoch in groups)
    assert {part for of_epoch in groups for group in of_epoch for part in group} == set(range(6))


@pytest.mark.parametrize("settings", [{}, {"compensate": True}, {"halo": "drop"}], ids=str)
def test_edge_dropout_needs_a_key_and_depends_on_it(settings: dict[str, Any]):
    work: Any = trainer_of(edge_dropout=0.5, **settings).work
    (group, *_) = work.groups.groups_of(1)
    without_dropout = work.batch(group, None)
    with_dropout = work.batch(group, 7)
    with_other_key = work.batch(group, 8)
    assert 0.3 < with_dropout.block.num_edges / without_dropout.block.num_edges < 0.7
    assert with_dropout.block.part.edge_ids.tolist() != with_other_key.block.part.edge_ids.tolist()
    assert torch.equal(with_dropout.block.src_ids, without_dropout.block.src_ids)

    if without_dropout.out_neighbors is not None:
        assert with_dropout.out_neighbors.block.num_edges < without_dropout.out_neighbors.block.num_edges


def test_without_halo_only_edges_inside_the_batch_are_left():
    nodes = torch.tensor([4, 9, 2, 30])
    block = without_halo(full_block(NeighborSampler(GRAPH, (-1,)), nodes))
    assert torch.equal(block.src_ids, nodes)

    src, dst = GRAPH.edge_index()
    is_inside = torch.isin(src, nodes) & torch.isin(dst, nodes)
    edges = sorted(map(tuple, nodes[block.edge_index].t().tolist()))
    assert edges == sorted(map(tuple, torch.stack([src, dst])[:, is_inside].t().tolist()))

    run = trainer_of(halo="drop").fit()
    assert run.history[-1].loss < run.history[0].loss


def groups_of(assignment: PartAssignment, **settings: Any) -> Groups:
    """The groups of six parts, as shared by the ranks of an assignment."""
    method = Historical(**({"num_parts": 6, "parts_per_batch": 1, "partition": "random"} | settings))
    return Groups(method, assignment, seed=0)


ALONE = PartAssignment(0, (0,), (range(6),))


@pytest.mark.parametrize("groups", ["fixed", "redrawn"])
def test_ranks_of_a_host_take_the_groups_in_order(groups: Any):
    one_rank = groups_of(ALONE, groups=groups)
    two_ranks = groups_of(PartAssignment(1, (0, 0), (range(3), range(3, 6))), groups=groups)
    four_ranks = groups_of(
        PartAssignment(1, (0, 0, 0, 0), (range(1), range(1, 3), range(3, 4), range(4, 6))), groups=groups
    )
    for epoch in (1, 2):
        groups_of_epoch = one_rank.groups_of(epoch)
        assert two_ranks.turns_of(epoch) == [tuple(groups_of_epoch[i : i + 2]) for i in (0, 2, 4)]
        assert four_ranks.turns_of(epoch) == [tuple(groups_of_epoch[:4]), (*groups_of_epoch[4:], (), ())]
    partition = make_partition(GRAPH, 6, "range", seed=0)
    assert Parts(GRAPH, partition, two_ranks.assignment).own_groups == [(3,), (4,), (5,)]


def test_ranks_of_several_hosts_take_the_parts_of_their_host():
    groups = groups_of(PartAssignment(0, (0, 1, 0), (range(2), range(4, 6), range(2, 4))))
    for epoch in (1, 2, 3):
        turns = groups.turns_of(epoch)
        assert sorted(p for a, _, c in turns for p in a + c) == [0, 1, 2, 3]
        assert sorted(p for _, b, _ in turns for p in b) == [4, 5]
        assert sorted(groups.groups_of(epoch)) == [(p,) for p in range(6)]
    assert len({tuple(groups.turns_of(epoch)) for epoch in range(8)}) > 2
    few = groups_of(PartAssignment(0, (0, 1), (range(3), range(3, 6))), max_batches=3)
    assert [len([g for g in turn if g]) for turn in few.turns_of(1)] == [2, 1]


def test_every_rank_owns_a_contiguous_range_of_parts():
    assert PartAssignment.of(World.alone(), 6) == ALONE
    assert not ALONE.several_hosts
    two_hosts = PartAssignment(0, (0, 1, 0), (range(2), range(4, 6), range(2, 4)))
    assert (two_hosts.parts_of_host(0), two_hosts.parts_of_host(1), two_hosts.several_hosts) == (
        range(4),
        range(4, 6),
        True,
    )


def test_fewer_parts_than_ranks_are_refused():
    world = World.alone()
    world.size = 3
    with pytest.raises(ValueError, match=r"num_parts=2 .*3 ranks"):
        PartAssignment.of(world, 2)
