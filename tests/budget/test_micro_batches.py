"""Micro-batches of a batch have its gradients and fit, and a cut batch keeps as many edges as fit.

`bound_bytes` stands for the memory of a step: a fixed number of bytes per node and edge of each layer (`COSTS`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline import ops
from hopline.budget import micro_batches
from hopline.budget.plan import CutBy
from hopline.budget.predictor import Costs
from hopline.core.batch import Batch, Block, Part
from hopline.core.batch_sizes import Sizes
from hopline.core.row_handles import ReducedRows, Rows
from hopline.core.tree_layout import TreeSampler
from hopline.device.meter import meter_of
from hopline.nn import GNN
from hopline.nn.whole_module import Whole
from tests.support.helpers import (
    CONVS,
    GNN_OPTIONS,
    batch_of,
    edges_of,
    generator,
    gnn_of,
    gradients,
    graph_of,
    randint,
    randn,
    random_graph,
    stack_of,
)

GRAPH = random_graph(60, 400, weight=True, attr=2)
X = randn(60, 6)
Y = randint(0, 3, 60)
COSTS = Costs((8.0, 16.0, 32.0), (4.0, 8.0), 100.0)
"""Bytes per node (input, hidden, output) and per edge of two layers, and a constant."""


def make_batch(num_seeds: int = 40, fanouts: tuple[int, ...] = (4, 3), handle: bool = False, key: int = 1) -> Batch:
    """A sampled batch with labels; with `handle`, its rows stay in their table."""
    seeds = ops.permutation(key, GRAPH.num_nodes)[:num_seeds]
    return replace(batch_of(GRAPH, X, fanouts, seeds, key=key, handle=handle), y=Y[seeds])


def gradients_of_step(model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    """Gradients of the mean loss over the seeds of all batches."""
    total = sum(b.num_seeds for b in batches)
    model.zero_grad(set_to_none=True)
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(model(batch), batch.labels)
        (loss * (batch.num_seeds / total)).backward()
    return {name: grad.clone() for name, grad in gradients(model).items()}


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every gradient is within `tolerance`, relative to the largest of all expected gradients."""
    scale = max(float(grad.abs().max()) for grad in expected.values())
    assert scale > 0
    for name, grad in expected.items():
        assert float((ours[name] - grad).abs().max()) <= tolerance * scale, name


def groups_of(num_seeds: int, num_micro_batches: int) -> list[Tensor]:
    """Seeds in random groups of about equal size."""
    return [ids for ids in ops.permutation(3, num_seeds).tensor_split(num_micro_batches) if ids.numel()]


def pieces_of(batch: Batch, groups: list[Tensor]) -> list[Batch]:
    """The micro-batches of a batch, by groups of seeds."""
    return [micro_batches.micro_batch_of(batch, group).batch() for group in groups]


# ---- pieces


@pytest.mark.parametrize("name", CONVS)
def test_gradients_of_the_micro_batches_add_up(name: str):
    model = GNN(stack_of(name, 6, 8, 3), dropout=0.5).double()
    batch = make_batch()
    expected = gradients_of_step(model, [batch])
    for num_micro_batches in (2, 7):
        assert_same(gradients_of_step(model, pieces_of(batch, groups_of(40, num_micro_batches))), expected, 1e-10)


@pytest.mark.parametrize("name", [n for n in GNN_OPTIONS if n not in ("batch-norm", "jk-last", "everything")])
def test_gradients_of_the_micro_batches_add_up_for_every_gnn_option(name: str):
    model = gnn_of(name)
    model.dropout = 0.4
    model.input_dropout = 0.3
    batch = make_batch(fanouts=(3,) * model.num_layers)
    expected = gradients_of_step(model, [batch])
    assert_same(gradients_of_step(model, pieces_of(batch, groups_of(40, 5))), expected, 1e-10)


@pytest.mark.parametrize("handle", ["read", "handle", "reduced"])
def test_a_micro_batch_holds_its_rows_as_the_batch_does(handle: str):
    model = GNN(stack_of("sage-mean", 6, 8, 3)).double()
    batch = make_batch(handle=handle != "read")
    if handle == "reduced":
        assert isinstance(batch.x, Rows)
        batch = replace(batch, x=model.read_ahead(batch.x, batch.blocks[0]))
        assert isinstance(batch.x, ReducedRows)
    pieces = pieces_of(batch, groups_of(40, 4))
    assert all(type(p.x) is type(batch.x) for p in pieces)
    assert_same(gradients_of_step(model, pieces), gradients_of_step(model, [make_batch()]), 1e-10)


def test_a_micro_batch_has_the_edges_of_its_seeds_and_no_others():
    batch = replace(make_batch(), tables={"z": X[make_batch().input_ids] * 2})
    seed_idx = torch.tensor([7, 2, 30])
    micro_batch = micro_batches.micro_batch_of(batch, seed_idx).batch()
    assert torch.equal(micro_batch.seeds, batch.seeds[seed_idx])
    assert torch.equal(micro_batch.labels, batch.labels[seed_idx])

    expected_dst = set(micro_batch.seeds.tolist())
    for ours, whole in zip(reversed(micro_batch.blocks), reversed(batch.blocks), strict=True):
        assert set(ours.dst_ids.tolist()) == expected_dst
        assert sorted(edges_of(ours)) == sorted((s, d) for s, d in edges_of(whole) if d in expected_dst)
        ids = ours.part.edge_ids
        assert ids is not None
        assert torch.equal(ours.edge["weight"], GRAPH.edge["weight"][ids])
        assert torch.equal(ours.edge["attr"], GRAPH.edge["attr"][ids])
        expected_dst = set(ours.src_ids.tolist())
    for inner, outer in itertools.pairwise(micro_batch.blocks):
        assert torch.equal(inner.dst_ids, outer.src_ids)
    assert torch.equal(micro_batch.x, X[micro_batch.input_ids])  # type: ignore[arg-type]
    assert torch.equal(micro_batch.tables["z"], 2 * X[micro_batch.input_ids])  # type: ignore[arg-type]


def test_batch_norms_in_training_are_refused_by_name():
    model = gnn_of("batch-norm").train()
    with pytest.raises(ValueError, match=r"norms\.0\S* .*BatchNorm1d.*norm='layer'"):
        micro_batches.check_split(model)
    micro_batches.check_split(model.eval())
    micro_batches.check_split(gnn_of("layer-norm"))


def test_what_cannot_be_split_is_refused_by_name():
    with pytest.raises(ValueError, match=r"GATConv .*all edges.*hl\.nn\.GNN"):
        micro_batches.check_split(Whole(pyg.GATConv(6, 3)))
    blocks = TreeSampler(GRAPH, (2, 2)).sample(torch.arange(4), 1)
    with pytest.raises(ValueError, match=r"TreeBlock .*layout=block"):
        micro_batches.micro_batch_of(Batch(torch.arange(4), blocks, None, None), torch.arange(2))


@pytest.mark.parametrize("handle", ["read", "handle", "reduced"])
def test_the_bytes_of_a_micro_batch_are_predicted_from_its_sizes(handle: str):
    graph = random_graph(4000, 40_000, weight=handle == "read")
    seeds = torch.arange(1500)
    x = randn(4000, 16)
    batch = replace(batch_of(graph, x, (5, 5), seeds, handle=handle != "read"), y=randint(0, 3, 1500))
    if handle == "reduced":
        assert isinstance(batch.x, Rows)
        batch = replace(batch, x=GNN(stack_of("sage-mean", 16, 8, 3)).double().read_ahead(batch.x, batch.blocks[0]))
    groups = groups_of(1500, 4)
    micro_batch_bytes = micro_batches.MicroBatchBytes.of(batch, batch.seeds.device)
    for group, sizes in zip(groups, micro_batches.sizes_of(batch, groups), strict=True):
        with meter_of("cpu") as meter:
            micro_batch = micro_batches.micro_batch_of(batch, group).batch()
        assert Sizes.of(micro_batch) == sizes
        assert micro_batch.num_bytes <= micro_batch_bytes.resident(sizes) <= micro_batch.num_bytes + 2024
        assert micro_batch.num_bytes <= meter.peak_bytes <= micro_batch_bytes.while_built(sizes) <= 2 * meter.peak_bytes


# ---- how seeds are grouped


def bound_bytes(sizes: Sizes) -> float:
    """The bytes that a step of these sizes is said to take."""
    return COSTS.bound(sizes)


def test_balanced_groups_cost_about_the_same():
    cost = torch.rand(500, generator=generator(0), dtype=torch.float64) ** 4
    groups = micro_batches.balanced_groups(cost, 7)
    assert torch.equal(torch.cat(groups).sort().values, torch.arange(500))
    sums = torch.stack([cost[group].sum() for group in groups])
    assert sums.max() < 1.03 * sums.min()
    assert len(micro_batches.balanced_groups(cost[:3], 7)) == 3


def test_the_cost_of_a_seed_is_that_of_its_own_tree():
    # Two levels of a tree: node 0 reads 1 and 2, which read 3 .. 5.
    graph = graph_of(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 0, 1, 1, 2]), 6)
    batch = batch_of(graph, None, (-1, -1), torch.tensor([0]))
    block = batch.blocks[0]
    assert (block.num_src, block.num_dst, block.num_edges) == (6, 3, 5)

    # Each hidden row (0, 1 and 2) counts its own sources, itself included: 3 + 3 + 2 input rows, of which the block
    # holds 6 distinct ones. Then come 3 hidden rows, one output row, and 5 and 2 edges.
    alone = micro_batches.seed_costs(batch, COSTS)
    inputs = {0: 3, 1: 3, 2: 2}
    hidden = 3
    expected = 8 * sum(inputs.values()) + 16 * hidden + 32 + 4 * 5 + 8 * 2

    assert alone.tolist() == [expected]


def communities(num: int = 8, size: int = 60) -> Batch:
    """Seeds of several communities in mixed order: they share neighbours within their community only."""
    dst = torch.arange(num * size).repeat_interleave(6)
    src = dst // size * size + torch.randint(0, size, dst.shape, generator=generator(5))
    seeds = ops.permutation(9, num * size)[: num * size // 2]
    return batch_of(graph_of(src, dst, num * size), None, (4, 4), seeds)


@pytest.mark.parametrize(
    ("limit", "first", "grow", "expected_tries"),
    [
        (100.0, 1, 2, [1]),
        (10.0, 1, 2, [1, 2, 4, 8, 10]),  # with 8 the largest has 13 rows, less than half too many: 10 is tried, not 16
        (10.0, 1, 1.5, [1, 2, 3, 4, 6, 9, 10]),
        (30.0, 3, 2, [3, 4]),  # with 3 the largest has 34 rows, hardly too many, and yet the number must grow
        (0.5, 40, 2, [40, 80, 100]),  # never more micro-batches than rows, even if single rows do not fit
    ],
)
def test_the_number_of_micro_batches_grows_until_they_fit_or_have_one_row(
    limit: float, first: int, grow: float, expected_tries: list[int]
):
    numbers_tried: list[int] = []

    def cut(num_micro_batches: int) -> list[range]:
        numbers_tried.append(num_micro_batches)
        return [range(100)[start::num_micro_batches] for start in range(num_micro_batches)]

    pieces, largest = micro_batches.find_fewest(
        cut, lambda pieces: float(max(map(len, pieces))), limit, first_number=first, max_number=100, max_growth=grow
    )
    assert numbers_tried == expected_tries
    assert len(pieces) == expected_tries[-1]
    assert largest == math.ceil(100 / expected_tries[-1])
    assert (largest <= limit) == (limit > 1)


def split_to_fit(batch: Batch, limit: float) -> list[micro_batches.MicroBatch]:
    """The micro-batches of a batch, as few as fit."""
    groups = micro_batches.groups_to_fit(batch, bound_bytes, limit, COSTS)
    return [micro_batches.micro_batch_of(batch, group) for group in groups]


def test_every_micro_batch_fits():
    batch = communities()
    full = bound_bytes(Sizes.of(batch))
    for share in (1.0, 0.6, 0.3, 0.1):
        pieces = split_to_fit(batch, share * full)
        assert max(bound_bytes(p.sizes) for p in pieces) <= share * full
        assert torch.equal(torch.cat([p.seed_idx for p in pieces]).sort().values, torch.arange(batch.num_seeds))
        assert len(pieces) == 1 if share == 1.0 else len(pieces) > 1


def test_a_batch_is_split_down_to_single_seeds_and_a_seed_that_does_not_fit_is_refused():
    batch = make_batch(10)
    alone = max(bound_bytes(micro_batches.micro_batch_of(batch, torch.tensor([i])).sizes) for i in range(10))
    pieces = split_to_fit(batch, alone)
    assert max(bound_bytes(p.sizes) for p in pieces) <= alone
    with pytest.raises(ValueError, match=r"over_budget=cut \(changes"):
        split_to_fit(batch, 0.9 * alone)


def test_some_seeds_of_a_batch_are_split_into_smaller_groups():
    batch = communities()
    among = ops.permutation(4, batch.num_seeds)[:50]
    (together,) = map(bound_bytes, micro_batches.sizes_of(batch, [among]))
    groups = micro_batches.groups_to_fit(batch, bound_bytes, together, COSTS, among=among, first=2)
    assert len(groups) == 2
    assert torch.equal(torch.cat(groups).sort().values, among.sort().values)

    # A target below the bytes of a single seed: every seed is alone, as long as it keeps to max_bytes.
    alone = micro_batches.groups_to_fit(batch, bound_bytes, 1.0, COSTS, among=among, max_bytes=together)
    assert [group.numel() for group in alone] == [1] * 50


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.4])
def test_the_first_group_is_as_large_as_fits(share: float):
    batch = make_batch(200)
    whole = bound_bytes(Sizes.of(batch))
    groups = micro_batches.groups_to_fit(batch, bound_bytes, share * whole, COSTS)
    assert torch.equal(torch.cat(groups).sort().values, torch.arange(batch.num_seeds))

    bytes_of_groups = [bound_bytes(sizes) for sizes in micro_batches.sizes_of(batch, groups)]
    assert max(bytes_of_groups) <= share * whole

    even_groups = micro_batches.balanced_groups(micro_batches.seed_costs(batch, COSTS), len(groups))
    bytes_of_even_groups = [bound_bytes(sizes) for sizes in micro_batches.sizes_of(batch, even_groups)]
    if len(groups) <= micro_batches.MAX_FILLED_GROUPS:
        assert bytes_of_groups[0] > max(0.85 * share * whole, *bytes_of_even_groups)

    assert sum(bytes_of_groups) <= 1.02 * sum(bytes_of_even_groups)


# ---- fewer edges


def edge_order(batch: Batch, by: CutBy, key: int = 0) -> list[Tensor]:
    """The rank of every edge of every block in the order in which edges are kept."""
    return [torch.from_numpy(numbers) for numbers in micro_batches.edge_numbers(batch, by, key)]


def with_edges(batch: Batch, order: list[Tensor], count: int) -> Batch:
    """The oracle of cutting: the batch with the first `count` edges of the order, built with Python sets."""
    cut_block = set(torch.cat(order).sort().values[:count].tolist())
    dst_idx = list(range(batch.num_seeds))
    blocks = []
    for block, numbers in zip(reversed(batch.blocks), reversed(order), strict=True):
        part = block.part
        starts = block.part.indptr.tolist()
        edges = [[e for e in range(starts[d], starts[d + 1]) if int(numbers[e]) in cut_block] for d in dst_idx]
        flat = [e for row in edges for e in row]
        sources = sorted({*dst_idx, *part.src_idx[flat].tolist()})
        position_of = {node: i for i, node in enumerate(sources)}
        indptr = torch.tensor([0, *np.cumsum([len(row) for row in edges]).tolist()])
        src_idx = torch.tensor([position_of[s] for s in part.src_idx[flat].tolist()], dtype=torch.int32)
        new = Part(indptr, src_idx, {n: rows[flat] for n, rows in part.edge.items()})
        blocks.insert(0, Block(block.src_ids[sources], len(dst_idx), (new,), block.graph, block.key))
        dst_idx = sources
    return replace(batch, blocks=tuple(blocks), x=X[blocks[0].src_ids])


@pytest.mark.parametrize("by", get_args(CutBy))
@pytest.mark.parametrize("seed", range(4))
def test_cutting_keeps_as_many_edges_as_fit(by: CutBy, seed: int):
    batch = make_batch(6, (3, 2), key=seed)
    order = edge_order(batch, by, seed)
    assert torch.cat(order).unique().numel() == sum(b.num_edges for b in batch.blocks)
    batch_by_count = [with_edges(batch, order, count) for count in range(torch.cat(order).numel() + 1)]
    bytes_by_count = [bound_bytes(Sizes.of(b)) for b in batch_by_count]
    assert bytes_by_count == sorted(bytes_by_count)
    for limit in (*bytes_by_count[:: max(1, len(bytes_by_count) // 9)], *[t - 0.5 for t in bytes_by_count[1::5]], 1e9):
        if limit < bytes_by_count[0]:
            continue
        best_count = max(count for count, num_bytes in enumerate(bytes_by_count) if num_bytes <= limit)
        cut_batch = micro_batches.cut_to_fit(batch, bound_bytes, limit, by, key=seed)
        assert Sizes.of(cut_batch) == Sizes.of(batch_by_count[best_count])
        for ours, theirs in zip(cut_batch.blocks, batch_by_count[best_count].blocks, strict=True):
            assert sorted(edges_of(ours)) == sorted(edges_of(theirs))


@pytest.mark.parametrize("name", ["sage-mean", "gcn", "gat-edges", "graph"])
def test_gradients_of_a_cut_batch_are_those_of_a_batch_with_the_edges_left(name: str):
    batch = make_batch(20)
    order = edge_order(batch, "degree")
    expected = with_edges(batch, order, 30)
    cut = micro_batches.cut_to_fit(batch, bound_bytes, bound_bytes(Sizes.of(expected)), "degree")
    model = GNN(stack_of(name, 6, 8, 3), dropout=0.5).double()
    assert_same(gradients_of_step(model, [cut]), gradients_of_step(model, [expected]), 1e-10)


def test_cutting_a_batch_whose_rows_were_reduced_ahead_reads_them_again():
    model = GNN(stack_of("sage-mean", 6, 8, 3)).double()
    batch = make_batch(handle=True)
    assert isinstance(batch.x, Rows)
    ahead = replace(batch, x=model.read_ahead(batch.x, batch.blocks[0]))
    limit = 0.6 * bound_bytes(Sizes.of(batch))
    cut = [micro_batches.cut_to_fit(b, bound_bytes, limit) for b in (ahead, make_batch())]
    assert_same(gradients_of_step(model, cut[:1]), gradients_of_step(model, cut[1:]), 1e-10)


def test_cutting_by_degree_or_pagerank_takes_the_edges_of_hubs_first():
    # Node 0 is read by all; the others read one node of their own each.
    dst = torch.arange(1, 21)
    graph = graph_of(torch.cat([torch.zeros(20, dtype=torch.int64), dst + 20]), torch.cat([dst, dst]), 41)
    batch = batch_of(graph, None, (-1,), dst)
    costs = Costs((8.0, 16.0), (4.0,), 0.0)
    limit = costs.bound(Sizes.of(batch)) - 8 * 4
    for by in ("degree", "pagerank"):
        cut = micro_batches.cut_to_fit(batch, costs.bound, limit, by)
        lost = set(edges_of(batch.blocks[0])) - set(edges_of(cut.blocks[0]))
        assert len(lost) == 8
        assert {source for source, _ in lost} == {0}


def test_a_random_cut_depends_on_the_key_alone():
    batch = make_batch()
    limit = 0.7 * bound_bytes(Sizes.of(make_batch()))
    first, again, other = (
        edges_of(micro_batches.cut_to_fit(batch, bound_bytes, limit, key=k).blocks[0]) for k in (1, 1, 2)
    )
    assert first == again != other


def test_seeds_that_do_not_fit_without_any_edge_are_refused():
    with pytest.raises(ValueError, match=r"seeds alone .*batch_size smaller"):
        micro_batches.cut_to_fit(make_batch(), bound_bytes, 150.0)
