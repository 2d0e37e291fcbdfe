from __future__ import annotations

import copy
import itertools
import math
import time
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline import ops
from hopline.budget import micro_batches
from hopline.budget.predictor import Costs
from hopline.contract import CutBy
from hopline.core.batch import Batch, Block, Part
from hopline.core.row_handles import ReducedRows, Rows
from hopline.core.sizes import Sizes
from hopline.core.tree_layout import TreeSampler
from hopline.device.meter import meter_of
from hopline.nn import GNN
from hopline.nn.whole_module import Whole
from tests.helpers import (
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


def made(num_seeds: int = 40, fanouts: tuple[int, ...] = (4, 3), handle: bool = False, key: int = 1) -> Batch:
    seeds = ops.permutation(key, GRAPH.num_nodes)[:num_seeds]
    return replace(batch_of(GRAPH, X, fanouts, seeds, key=key, handle=handle), y=Y[seeds])


def step(model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    """Gradients of the mean loss over the seeds of all batches."""
    total = sum(b.num_seeds for b in batches)
    model.zero_grad(set_to_none=True)
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(model(batch), batch.labels)
        (loss * (batch.num_seeds / total)).backward()
    return {name: grad.clone() for name, grad in gradients(model).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    scale = max(float(grad.abs().max()) for grad in expected.values())
    assert scale > 0
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) <= tolerance * scale, name


def groups_of(num_seeds: int, num_micro_batches: int) -> list[Tensor]:
    return [ids for ids in ops.permutation(3, num_seeds).tensor_split(num_micro_batches) if ids.numel()]


def pieces_of(batch: Batch, groups: list[Tensor]) -> list[Batch]:
    return [micro_batches.micro_batch_of(batch, group).batch() for group in groups]


# ---- pieces


@pytest.mark.parametrize("name", CONVS)
def test_gradients_of_the_pieces_add_up(name: str):
    model = GNN(stack_of(name, 6, 8, 3), dropout=0.5).double()
    batch = made()
    expected = step(model, [batch])
    for num_micro_batches in (2, 7):
        assert_same(step(model, pieces_of(batch, groups_of(40, num_micro_batches))), expected, 1e-10)


@pytest.mark.parametrize("name", [n for n in GNN_OPTIONS if n not in ("batch-norm", "jk-last", "everything")])
def test_gradients_of_the_pieces_add_up_for_every_kind_of_model(name: str):
    model = gnn_of(name)
    model.dropout = 0.4
    model.input_dropout = 0.3
    batch = made(fanouts=(3,) * model.num_layers)
    expected = step(model, [batch])
    assert_same(step(model, pieces_of(batch, groups_of(40, 5))), expected, 1e-10)


def test_in_float32_gradients_are_equal_to_rounding():
    model = GNN([conv.float() for conv in stack_of("sage-mean", 6, 32, 3)], dropout=0.5)
    batch = made(60)
    batch = replace(batch, x=batch.x.float())  # type: ignore[union-attr]
    assert_same(step(model, pieces_of(batch, groups_of(60, 6))), step(model, [batch]), 1e-6)


@pytest.mark.parametrize("handle", ["read", "handle", "reduced"])
def test_rows_go_with_their_piece_however_they_are_held(handle: str):
    model = GNN(stack_of("sage-mean", 6, 8, 3)).double()
    batch = made(handle=handle != "read")
    if handle == "reduced":
        assert isinstance(batch.x, Rows)
        batch = replace(batch, x=model.read_ahead(batch.x, batch.blocks[0]))
        assert isinstance(batch.x, ReducedRows)
    pieces = pieces_of(batch, groups_of(40, 4))
    assert all(type(p.x) is type(batch.x) for p in pieces)
    assert_same(step(model, pieces), step(model, [made()]), 1e-10)


def test_a_piece_has_the_edges_of_its_seeds_and_no_others():
    batch = replace(made(), tables={"z": X[made().input_ids] * 2})
    chosen = torch.tensor([7, 2, 30])
    found = micro_batches.micro_batch_of(batch, chosen).batch()
    assert torch.equal(found.seeds, batch.seeds[chosen])
    assert torch.equal(found.labels, batch.labels[chosen])
    wanted = set(found.seeds.tolist())
    for ours, whole in zip(reversed(found.blocks), reversed(batch.blocks), strict=True):
        assert set(ours.dst_ids.tolist()) == wanted
        assert sorted(edges_of(ours)) == sorted((s, d) for s, d in edges_of(whole) if d in wanted)
        ids = ours.part.edge_ids
        assert ids is not None
        assert torch.equal(ours.edge["weight"], GRAPH.edge["weight"][ids])
        assert torch.equal(ours.edge["attr"], GRAPH.edge["attr"][ids])
        wanted = set(ours.src_ids.tolist())
    for inner, outer in itertools.pairwise(found.blocks):
        assert torch.equal(inner.dst_ids, outer.src_ids)
    assert torch.equal(found.x, X[found.input_ids])  # type: ignore[arg-type]
    assert torch.equal(found.tables["z"], 2 * X[found.input_ids])  # type: ignore[arg-type]


def test_batch_norms_are_refused_by_name():
    model = gnn_of("batch-norm").train()
    with pytest.raises(ValueError, match=r"norms\.0\S* is a BatchNorm1d.*norm='layer'"):
        micro_batches.check_split(model)
    micro_batches.check_split(model.eval())
    micro_batches.check_split(gnn_of("layer-norm"))


def test_what_cannot_be_split_is_refused_by_name():
    with pytest.raises(ValueError, match=r"GATConv runs on all edges.*hl.nn.GNN"):
        micro_batches.check_split(Whole(pyg.GATConv(6, 3)))
    blocks = TreeSampler(GRAPH, (2, 2)).sample(torch.arange(4), 1)
    with pytest.raises(ValueError, match=r"TreeBlock cannot be split.*layout=block"):
        micro_batches.micro_batch_of(Batch(torch.arange(4), blocks, None, None), torch.arange(2))


@pytest.mark.parametrize("handle", ["read", "handle", "reduced"])
def test_what_a_piece_takes_besides_its_step_is_known_by_its_sizes(handle: str):
    graph = random_graph(4000, 40_000, weight=handle == "read")
    seeds = torch.arange(1500)
    x = randn(4000, 16)
    batch = replace(batch_of(graph, x, (5, 5), seeds, handle=handle != "read"), y=randint(0, 3, 1500))
    if handle == "reduced":
        assert isinstance(batch.x, Rows)
        batch = replace(batch, x=GNN(stack_of("sage-mean", 16, 8, 3)).double().read_ahead(batch.x, batch.blocks[0]))
    groups = groups_of(1500, 4)
    takes = micro_batches.MicroBatchBytes.of(batch, batch.seeds.device)
    for group, sizes in zip(groups, micro_batches.sizes_of(batch, groups), strict=True):
        with meter_of("cpu") as meter:
            found = micro_batches.micro_batch_of(batch, group).batch()
        assert Sizes.of(found) == sizes
        assert found.num_bytes <= takes.resident(sizes) <= found.num_bytes + 2024
        assert found.num_bytes <= meter.peak_bytes <= takes.while_made(sizes) <= 2 * meter.peak_bytes


# ---- how seeds are grouped


def bytes_of(sizes: Sizes) -> float:
    return COSTS.bound(sizes)


def test_balanced_groups_cost_about_the_same():
    cost = torch.rand(500, generator=generator(0), dtype=torch.float64) ** 4
    groups = micro_batches.balanced_groups(cost, 7)
    assert torch.equal(torch.cat(groups).sort().values, torch.arange(500))
    sums = torch.stack([cost[group].sum() for group in groups])
    assert sums.max() < 1.03 * sums.min()
    assert len(micro_batches.balanced_groups(cost[:3], 7)) == 3


def test_a_seed_costs_what_it_takes_alone_where_nothing_is_shared():
    # Two levels of a tree: node 0 reads 1 and 2, which read 3 .. 5.
    graph = graph_of(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 0, 1, 1, 2]), 6)
    batch = batch_of(graph, None, (-1, -1), torch.tensor([0]))
    block = batch.blocks[0]
    assert (block.num_src, block.num_dst, block.num_edges) == (6, 3, 5)
    # What is a source again as its own destination is counted once more: nodes 0, 1 and 2 at the input, 0 below.
    alone = micro_batches.seed_costs(batch, COSTS)
    inputs = {0: 3, 1: 3, 2: 2}
    hidden = 3
    expected = 8 * sum(inputs.values()) + 16 * hidden + 32 + 4 * 5 + 8 * 2
    assert alone.tolist() == [expected]


def communities(num: int = 8, size: int = 60) -> Batch:
    """Seeds of several groups of nodes, in mixed order, that share neighbours within their group only."""
    dst = torch.arange(num * size).repeat_interleave(6)
    src = dst // size * size + torch.randint(0, size, dst.shape, generator=generator(5))
    seeds = ops.permutation(9, num * size)[: num * size // 2]
    return batch_of(graph_of(src, dst, num * size), None, (4, 4), seeds)


@pytest.mark.parametrize(
    ("limit", "first", "grow", "tried"),
    [
        (100.0, 1, 2, [1]),
        (10.0, 1, 2, [1, 2, 4, 8, 10]),  # 13 are too many by less than a half
        (10.0, 1, 1.5, [1, 2, 3, 4, 6, 9, 10]),
        (30.0, 3, 2, [3, 4]),  # 34 are hardly more than 30, and yet another number is tried
        (0.5, 40, 2, [40, 80, 100]),  # no more pieces than there are rows, whether these fit or not
    ],
)
def test_pieces_grow_until_they_fit_or_cannot_be_cut(limit: float, first: int, grow: float, tried: list[int]):
    numbers: list[int] = []

    def cut(num_micro_batches: int) -> list[range]:
        numbers.append(num_micro_batches)
        return [range(100)[start::num_micro_batches] for start in range(num_micro_batches)]

    pieces, taken = micro_batches.find_fewest(
        cut, lambda pieces: float(max(map(len, pieces))), limit, first=first, most=100, grow=grow
    )
    assert numbers == tried
    assert len(pieces) == tried[-1]
    assert taken == math.ceil(100 / tried[-1])
    assert (taken <= limit) == (limit > 1)


def test_every_piece_fits():
    batch = communities()
    full = bytes_of(Sizes.of(batch))
    for share in (1.0, 0.6, 0.3, 0.1):
        pieces = micro_batches.split_to_fit(batch, bytes_of, share * full, COSTS)
        assert max(bytes_of(p.sizes) for p in pieces) <= share * full
        assert torch.equal(torch.cat([p.seed_idx for p in pieces]).sort().values, torch.arange(batch.num_seeds))
        assert len(pieces) == 1 if share == 1.0 else len(pieces) > 1


def test_pieces_down_to_single_seeds_and_a_seed_that_does_not_fit():
    batch = made(10)
    alone = max(bytes_of(micro_batches.micro_batch_of(batch, torch.tensor([i])).sizes) for i in range(10))
    pieces = micro_batches.split_to_fit(batch, bytes_of, alone, COSTS)
    assert max(bytes_of(p.sizes) for p in pieces) <= alone
    with pytest.raises(ValueError, match=r"one seed takes .* more, make the fan-outs smaller, or set over_budget=cut"):
        micro_batches.split_to_fit(batch, bytes_of, 0.9 * alone, COSTS)


def test_some_seeds_alone_in_smaller_groups():
    batch = communities()
    among = ops.permutation(4, batch.num_seeds)[:50]
    (together,) = map(bytes_of, micro_batches.sizes_of(batch, [among]))
    groups = micro_batches.groups_to_fit(batch, bytes_of, together, COSTS, among=among, first=2)
    assert len(groups) == 2
    assert torch.equal(torch.cat(groups).sort().values, among.sort().values)
    # Where less was aimed at than a seed takes, seeds go alone as long as they fit at all.
    alone = micro_batches.groups_to_fit(batch, bytes_of, 1.0, COSTS, among=among, max_bytes=together)
    assert [group.numel() for group in alone] == [1] * 50


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.4])
def test_the_first_group_is_as_large_as_fits(share: float):
    batch = made(200)
    whole = bytes_of(Sizes.of(batch))
    groups = micro_batches.groups_to_fit(batch, bytes_of, share * whole, COSTS)
    assert torch.equal(torch.cat(groups).sort().values, torch.arange(batch.num_seeds))
    taken = [bytes_of(sizes) for sizes in micro_batches.sizes_of(batch, groups)]
    assert max(taken) <= share * whole
    even = micro_batches.balanced_groups(micro_batches.seed_costs(batch, COSTS), len(groups))
    evenly = [bytes_of(sizes) for sizes in micro_batches.sizes_of(batch, even)]
    if len(groups) <= micro_batches.MAX_FILLED_GROUPS:
        assert taken[0] > max(0.85 * share * whole, *evenly)
    assert sum(taken) <= 1.02 * sum(evenly)


# ---- fewer edges


def ordered(batch: Batch, by: CutBy, key: int = 0) -> list[Tensor]:
    return [torch.from_numpy(numbers) for numbers in micro_batches.edge_numbers(batch, by, key)]


def with_edges(batch: Batch, order: list[Tensor], count: int) -> Batch:
    """The batch with the first `count` edges of the order, and what they need: by walking over Python's sets."""
    first = set(torch.cat(order).sort().values[:count].tolist())
    wanted = list(range(batch.num_seeds))
    blocks = []
    for block, numbers in zip(reversed(batch.blocks), reversed(order), strict=True):
        part = block.part
        starts = block.part.indptr.tolist()
        edges = [[e for e in range(starts[d], starts[d + 1]) if int(numbers[e]) in first] for d in wanted]
        flat = [e for row in edges for e in row]
        sources = sorted({*wanted, *part.src_idx[flat].tolist()})
        place = {node: i for i, node in enumerate(sources)}
        indptr = torch.tensor([0, *np.cumsum([len(row) for row in edges]).tolist()])
        src_idx = torch.tensor([place[s] for s in part.src_idx[flat].tolist()], dtype=torch.int32)
        new = Part(indptr, src_idx, {n: rows[flat] for n, rows in part.edge.items()})
        blocks.insert(0, Block(block.src_ids[sources], len(wanted), (new,), block.graph, block.key))
        wanted = sources
    return replace(batch, blocks=tuple(blocks), x=X[blocks[0].src_ids])


@pytest.mark.parametrize("by", get_args(CutBy))
@pytest.mark.parametrize("seed", range(4))
def test_the_most_edges_that_fit_are_kept(by: CutBy, seed: int):
    batch = made(6, (3, 2), key=seed)
    order = ordered(batch, by, seed)
    assert torch.cat(order).unique().numel() == sum(b.num_edges for b in batch.blocks)
    every = [with_edges(batch, order, count) for count in range(torch.cat(order).numel() + 1)]
    taken = [bytes_of(Sizes.of(b)) for b in every]
    assert taken == sorted(taken)
    for limit in (*taken[:: max(1, len(taken) // 9)], *[t - 0.5 for t in taken[1::5]], 1e9):
        if limit < taken[0]:
            continue
        best = max(count for count, needed in enumerate(taken) if needed <= limit)
        found = micro_batches.cut_to_fit(batch, bytes_of, limit, by, key=seed)
        assert Sizes.of(found) == Sizes.of(every[best])
        for ours, theirs in zip(found.blocks, every[best].blocks, strict=True):
            assert sorted(edges_of(ours)) == sorted(edges_of(theirs))


@pytest.mark.parametrize("name", ["sage-mean", "gcn", "gat-edges", "graph"])
def test_a_cut_batch_is_a_batch_of_the_edges_kept(name: str):
    batch = made(20)
    order = ordered(batch, "degree")
    expected = with_edges(batch, order, 30)
    cut = micro_batches.cut_to_fit(batch, bytes_of, bytes_of(Sizes.of(expected)), "degree")
    model = GNN(stack_of(name, 6, 8, 3), dropout=0.5).double()
    assert_same(step(model, [cut]), step(model, [expected]), 1e-10)


def test_cutting_a_batch_read_ahead_reads_it_anew():
    model = GNN(stack_of("sage-mean", 6, 8, 3)).double()
    batch = made(handle=True)
    assert isinstance(batch.x, Rows)
    ahead = replace(batch, x=model.read_ahead(batch.x, batch.blocks[0]))
    limit = 0.6 * bytes_of(Sizes.of(batch))
    cut = [micro_batches.cut_to_fit(b, bytes_of, limit) for b in (ahead, made())]
    assert_same(step(model, cut[:1]), step(model, cut[1:]), 1e-10)


def test_hubs_lose_their_edges_first():
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


def test_random_cuts_are_those_of_their_key():
    batch = made()
    limit = 0.7 * bytes_of(Sizes.of(made()))
    first, again, other = (
        edges_of(micro_batches.cut_to_fit(batch, bytes_of, limit, key=k).blocks[0]) for k in (1, 1, 2)
    )
    assert first == again != other


def test_seeds_that_do_not_fit_without_any_edge_are_refused():
    with pytest.raises(ValueError, match=r"the seeds alone take more than .* make batch_size smaller"):
        micro_batches.cut_to_fit(made(), bytes_of, 150.0)


@pytest.mark.parametrize("by", get_args(CutBy))
def test_a_million_edges_are_cut_in_a_tenth_of_a_second(by: CutBy):
    sizes = [(300_000, 60_000, 750_000), (60_000, 10_000, 200_000), (10_000, 1000, 50_000)]
    blocks = []
    for num_src, num_dst, num_edges in sizes:
        indptr = torch.linspace(0, num_edges, num_dst + 1).long()
        src_idx = randint(0, num_src, num_edges, seed=num_dst).int()
        blocks.append(Block(torch.arange(num_src), num_dst, (Part(indptr, src_idx),)))
    batch = Batch(torch.arange(1000), tuple(blocks), None, None)
    costs = Costs((8.0, 8.0, 8.0, 8.0), (4.0, 4.0, 4.0), 0.0)
    limit = 0.7 * costs.bound(Sizes.of(batch))
    times = []
    for _ in range(5):
        start = time.thread_time()  # it runs in one thread, whatever else the machine does
        cut = micro_batches.cut_to_fit(batch, costs.bound, limit, by)
        times.append(time.thread_time() - start)
    assert 0.999 * limit < costs.bound(Sizes.of(cut)) <= limit
    assert min(times) < 0.1


def test_the_model_is_left_as_it_was():
    model = GNN(stack_of("sage-mean", 6, 8, 3)).double()
    before = copy.deepcopy(model.state_dict())
    step(model, pieces_of(made(), groups_of(40, 3)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
