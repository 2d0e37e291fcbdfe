"""Micro-batches of a historical batch: runs of its nodes that fit, with all its edges, seeds and rows.

A run is a slice of the nodes of a batch. That micro-batches train as the batch does is `test_micro_batches.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from hopline.budget.micro_batches import edges_of_run
from hopline.contract import Job
from hopline.core.batch_sizes import Sizes
from hopline.core.examples import Examples
from hopline.methods.historical.micro_batches import (
    MicroBatch,
    Probe,
    balanced_runs,
    check_micro_batches,
    runs_to_fit,
    typical_run,
    whole_sizes,
)
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.work import HistoricalWork
from hopline.methods.partitioned.layer_bytes import LayerBytes, at_layer
from hopline.nn import GNN
from tests.support.helpers import dataset_of, randn, random_graph, usual_task

GRAPH = random_graph(num_nodes=60, num_edges=300)
DATA = dataset_of(GRAPH, randn(60, 6))


def work_of(train_ids: torch.Tensor = DATA.splits["train"], **settings: Any) -> HistoricalWork:
    """Historical training of three GCN layers on six parts."""
    model = GNN([pyg.GCNConv(6, 8), pyg.GCNConv(8, 8), pyg.GCNConv(8, 3)]).double()
    method = Historical(**({"num_parts": 6, "parts_per_batch": 3, "partition": "random"} | settings))
    job = Job(
        data=DATA,
        model=model,
        module=model,
        examples=Examples(train_ids),
        task=usual_task(3),
    )
    return method.bind(job)


def ends_of(runs: list[slice]) -> list[int]:
    """The ends of runs, after a check that they follow one another from 0."""
    assert all(a.stop == b.start for a, b in pairwise(runs))
    assert runs[0].start == 0
    return [run.stop for run in runs]


def test_runs_end_with_parts_where_these_are_small_enough():
    weight = torch.ones(100, dtype=torch.int64)
    assert ends_of(balanced_runs(weight, [24, 51, 74, 100], 4)) == [24, 51, 74, 100]
    assert ends_of(balanced_runs(weight, [24, 51, 74, 100], 2)) == [51, 100]
    assert ends_of(balanced_runs(weight, [24, 51, 74, 100], 1)) == [100]
    assert ends_of(balanced_runs(weight, [20, 100], 5)) == [20, 40, 60, 80, 100]
    assert ends_of(balanced_runs(weight, [0, 100, 100], 2)) == [50, 100]  # parts may be empty
    assert len(balanced_runs(weight, [24, 51, 74, 100], 100)) == 100


def test_within_a_part_runs_have_about_equal_weight():
    weight = torch.randint(1, 20, (500,), generator=torch.Generator().manual_seed(0))
    weight[7] = 900
    runs = balanced_runs(weight, [500], 10)
    sums = [int(weight[run].sum()) for run in runs]
    assert len(runs) <= 10
    assert sum(sums) == int(weight.sum())
    assert all(total <= int(weight.sum()) / 10 + int(weight[run].max()) for total, run in zip(sums, runs, strict=True))


def test_runs_fit_the_limit_and_a_node_above_it_is_refused():
    block = work_of().batches.make((0, 1, 2), 1).block  # type: ignore[union-attr]

    def edges_of(sizes: Sizes) -> float:
        return float(sizes.edges[0])

    degrees = block.part.indptr.diff()
    limit = int(degrees.max())
    runs, largest = runs_to_fit(block, [block.num_dst], edges_of, limit)
    edges_of_runs = [int(degrees[run].sum()) for run in runs]

    assert largest == max(edges_of_runs) <= limit
    assert sum(edges_of_runs) == block.num_edges
    with pytest.raises(ValueError, match=r"one node .*parts_per_batch smaller"):
        runs_to_fit(block, [block.num_dst], edges_of, limit - 1)
    with pytest.raises(ValueError, match="own rows leave 0 B"):
        runs_to_fit(block, [block.num_dst], edges_of, -5)


def test_the_node_with_most_edges_is_measured_in_every_layer_if_it_is_no_training_node_too():
    hub = GRAPH.in_degrees().argmax()
    work = work_of(DATA.splits["train"][DATA.splits["train"] != hub], num_parts=1, parts_per_batch=1)
    hist_batch = work.batch((0,), 1)
    assert hist_batch is not None
    measured: list[tuple[int, Sizes]] = []

    class Recorded(LayerBytes):
        def learn(self, l: int, sizes: Sizes, peak_bytes: int, seconds: float | None = None) -> None:
            measured.append((l, sizes))

    Probe(work, hist_batch).teach(Recorded(work.model, DATA.x), 0.0)
    num_edges = int(GRAPH.in_degrees()[hub])
    for l in range(3):
        assert any(sizes.nodes[-1] == 1 and sizes.edges == (num_edges,) for layer, sizes in measured if layer == l)


def test_micro_batches_have_the_edges_seeds_and_rows_of_the_batch():
    hist_batch = work_of(edge_dropout=0.2).batch((0, 2, 5), 3)
    assert hist_batch is not None
    whole = hist_batch.block
    seeds = []
    edges = []
    for number, run in enumerate([slice(0, 7), slice(7, 8), slice(8, whole.num_dst)]):
        micro_batch = MicroBatch(hist_batch, number, run)
        micro_edges = micro_batch.edges()
        block = micro_edges.block
        own_idx = micro_edges.own_idx
        halo_idx = micro_edges.halo_idx
        assert block.key == whole.key
        assert block.layer_hooks is None  # what completes the batch's rows knows nothing of a piece
        assert torch.equal(block.dst_ids, whole.src_ids[run])
        assert torch.equal(block.src_ids, torch.cat([whole.src_ids[own_idx], whole.src_ids[whole.num_dst + halo_idx]]))
        dst = block.dst_ids[block.edge_index[1]]
        edges.append(torch.stack([block.src_ids[block.edge_index[0]], dst]))
        batch = micro_batch.batch(micro_edges)
        seeds.append(batch.seeds)
        assert batch.output_idx is not None
        assert batch.y is not None
        assert DATA.y is not None
        assert torch.equal(block.dst_ids[batch.output_idx], batch.seeds)
        assert torch.equal(batch.y, DATA.y[batch.seeds])
        assert micro_batch.has_seeds == bool(batch.num_seeds)
        assert torch.equal(batch.input_rows.read(), DATA.x.read(block.src_ids))  # type: ignore[union-attr]

    assert torch.equal(torch.cat(seeds), hist_batch.batch.seeds)
    assert torch.equal(torch.cat(edges, dim=1), whole.src_ids[whole.edge_index])


def test_runs_of_a_block_have_all_its_edges():
    block = work_of().batch((1, 4), 3).block  # type: ignore[union-attr]
    edges = []
    for run in (slice(0, 4), slice(4, block.num_dst)):
        part, src_idx = edges_of_run(block, run)
        assert torch.equal(block.src_ids[src_idx], part.src_ids)
        assert torch.equal(part.dst_ids, block.src_ids[run])
        edges.append(part.src_ids[part.edge_index])
    assert torch.equal(torch.cat(edges, dim=1), block.src_ids[block.edge_index])


def test_sizes_of_a_batch_and_of_one_layer():
    model = work_of().model
    assert at_layer(model, Sizes((9, 4), (20,)), 1) == Sizes((0, 9, 4, 0), (0, 20, 0))

    encoded = GNN([pyg.GCNConv(6, 6), pyg.GCNConv(6, 6)], encoder=nn.Linear(6, 6))
    assert at_layer(encoded, Sizes((9, 4), (20,)), 1) == Sizes((4, 9, 4), (0, 20))

    plain, sent = (work_of(compensate=compensate).batch((0, 1), 1) for compensate in (False, True))
    assert plain is not None
    assert sent is not None
    src = plain.block.num_src
    dst = plain.block.num_dst
    edges = plain.block.num_edges
    assert whole_sizes(plain) == Sizes.of(plain.batch) == Sizes((src, src, src, dst), (edges,) * 3)

    assert sent.out_neighbors is not None
    out_neighbors = sent.out_neighbors.block
    more = out_neighbors.num_edges

    assert whole_sizes(sent) == Sizes(
        (src, src + out_neighbors.num_src, src + out_neighbors.num_src, dst + out_neighbors.num_dst),
        (edges, edges + more, edges + more),
    )


def test_models_with_batch_norm_or_unkeyed_dropout_are_refused_by_name():
    convs = [pyg.GCNConv(6, 8), pyg.GCNConv(8, 3)]
    with pytest.raises(ValueError, match=r"norms\.0\.module .*BatchNorm1d.*parts_per_batch smaller"):
        check_micro_batches(GNN(convs, norm="batch"))
    check_micro_batches(GNN(convs, norm="batch").eval())
    with_unkeyed_dropout = GNN(convs, encoder=nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6)))
    with pytest.raises(ValueError, match=r"encoder\.0 .*input_dropout="):
        check_micro_batches(with_unkeyed_dropout)
    check_micro_batches(GNN(convs, encoder=nn.Linear(6, 6), dropout=0.5, norm="layer"))


def test_a_typical_run_has_median_edges_or_has_seeds():
    hist_batch = work_of().batch((0, 1, 2), 1)
    assert hist_batch is not None
    indptr = hist_batch.block.part.indptr
    seeds = hist_batch.batch.output_idx
    assert seeds is not None
    for count in (1, 4, hist_batch.block.num_dst):
        run = typical_run(hist_batch, count, with_seeds=False)
        edges = indptr[count:] - indptr[:-count]
        assert run.stop - run.start == count
        assert int(edges[run.start]) == int(edges.median())
        run = typical_run(hist_batch, count, with_seeds=True)
        assert run.stop - run.start == count
        assert bool(((seeds >= run.start) & (seeds < run.stop)).any())


def test_the_bytes_of_each_layer_are_learnt_separately():
    layers = LayerBytes(work_of().model, DATA.x)
    assert not layers.is_sure

    whole = Sizes((40, 40, 40, 30), (90, 90, 90))
    bound = layers.together(whole)
    assert bound == sum(layers.predict_peak(l, Sizes((40, 30), (90,))) for l in range(3))

    for l in range(3):
        for num in (10, 12, 15, 20, 30, 40):
            layers.learn(l, Sizes((num, num // 2), (3 * num,)), 1000 * (l + 1) * num)
    assert layers.is_sure
    for l in range(3):
        assert layers.predict_peak(l, Sizes((20, 10), (60,))) == pytest.approx(20_000 * (l + 1), rel=0.05)
    assert layers.together(whole) < bound
