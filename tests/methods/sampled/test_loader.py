"""The loader of `Sampled`: its layout, number of threads, shares of ranks, and reads after out of memory.

Its batches are tested in `test_sampled.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.data.placement import place
from hopline.methods.sampled.loader import resolve_layout
from hopline.methods.sampled.work import SampledWork
from hopline.nn import GNN
from hopline.pipeline.stages import resolve_threads
from hopline.tables import TensorTable
from tests.support.helpers import dataset_of, randn, random_graph
from tests.support.ranks import AgreeingWorld

DATA = dataset_of(random_graph(), randn(50, 6))
CPU = torch.device("cpu")


def test_layout_auto_is_block_on_the_cpu():
    model = GNN([SAGEConv(6, 3)])
    assert resolve_layout(hl.Sampled(fanouts=(3,)), DATA, CPU, model) == "block"
    assert resolve_layout(hl.Sampled(fanouts=(3,), layout="tree"), DATA, CPU, model) == "tree"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layout_auto_is_tree_where_a_gpu_reads_graph_and_features():
    model = GNN([SAGEConv(6, 3)])
    gpu = torch.device("cuda", 0)

    def layout(fanouts: tuple[int, ...] = (3,), **placement: Any) -> str:
        return resolve_layout(hl.Sampled(fanouts=fanouts), place(DATA, hl.Placement(**placement), gpu), gpu, model)

    assert {layout(), layout(features="pinned", cache="100"), layout(graph="pinned", features="pinned")} == {"tree"}
    assert layout(features="pinned", cache=0) == "tree"
    assert {layout(graph="host"), layout(features="host"), layout((-1,)), layout((50, 50, 50))} == {"block"}


@pytest.mark.parametrize("layout", ["block", "tree"])
def test_ranks_share_the_seeds_of_each_step_as_in_a_trainer(layout: Any):
    model = GNN([SAGEConv(6, 3), SAGEConv(3, 3)])
    method = hl.Sampled(fanouts=(3, 2), batch_size=4, layout=layout)
    whole = [*replace(method, batch_size=12).loader(DATA, seed=5).epoch(2)]

    worlds = [AgreeingWorld(rank, 3) for rank in range(3)]
    parts = [[*method.loader(DATA, seed=5, world=world).epoch(2)] for world in worlds]
    assert [len(batches) for batches in parts] == [len(whole)] * 3

    for step, union in enumerate(whole):
        shares = [batches[step] for batches in parts]
        assert torch.equal(torch.cat([share.seeds for share in shares]), union.seeds)
        assert {share.total_seeds for share in shares} == {union.num_seeds}
        sources = torch.cat([share.input_ids for share in shares])
        assert set(sources.tolist()) == set(union.input_ids.tolist())  # the same draws

    for world, batches in zip(worlds, parts, strict=True):
        trainer = hl.Trainer(model, DATA, method, seed=5, world=world, show=False)
        assert isinstance(trainer.work, SampledWork)
        batches_of_trainer = [*trainer.work.loader.epoch(2)]
        assert [b.seeds.tolist() for b in batches_of_trainer] == [b.seeds.tolist() for b in batches]
        assert {b.total_seeds for b in batches_of_trainer} == {b.total_seeds for b in batches}


def test_without_a_world_batches_have_no_total_seeds():
    """It may run on each of several ranks, where the seeds of one are not those of all."""
    assert {batch.total_seeds for batch in hl.Sampled(fanouts=(3,), batch_size=16).loader(DATA)} == {None}


def test_layout_tree_gives_tree_blocks():
    for batch in hl.Sampled(fanouts=(3, 2), batch_size=16, layout="tree").loader(DATA):
        assert isinstance(batch.x, torch.Tensor)
        assert all(block.present is not None for block in batch.blocks)
        assert batch.x.shape == (batch.blocks[0].num_src, 6)


def test_workers_and_look_ahead_follow_the_number_of_cores():
    assert resolve_threads("auto", "auto", 2) == (2, 4)
    assert resolve_threads("auto", "auto", 64) == (8, 16)
    assert resolve_threads(0, "auto", 64) == (0, 2)
    assert resolve_threads("auto", 3, 64) == (8, 3)


def test_a_loader_for_a_budget_is_another_loader_of_the_same_batches():
    plain = hl.Sampled(fanouts=(3,), batch_size=4, workers=1).loader(DATA, seed=5)
    sizes_split: list[int] = []

    def split_ahead(batch: hl.Batch) -> hl.Batch:
        sizes_split.append(batch.num_seeds)
        return batch

    guarded = plain.with_budget(split_ahead, batches_on_host=True)
    for ours, expected in zip(guarded.epoch(3), plain.epoch(3), strict=True):
        assert torch.equal(ours.input_ids, expected.input_ids)
        assert torch.equal(ours.seeds, expected.seeds)
    assert sum(sizes_split) == len(plain.examples), "by the new loader alone"
    assert (plain.split_ahead, plain.batches_on_host) == (None, False)


def test_an_epoch_left_early_has_no_times_of_its_stages():
    loader = hl.Sampled(fanouts=(3,), batch_size=4, workers=1).loader(DATA)
    list(loader)
    assert loader.prepare_s
    batches = loader.epoch(2)
    next(batches)
    batches.close()
    assert loader.prepare_s == {}


class OutOfMemoryOnce(TensorTable):
    """A table whose first read is out of memory."""

    reads = 0

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        self.reads += 1
        if self.reads == 1:
            raise torch.OutOfMemoryError("no room")
        return super().read(ids)


def test_rows_are_read_again_after_out_of_memory():
    x = randn(50, 6)
    data = dataset_of(random_graph(), x)
    data = replace(data, tables={"x": OutOfMemoryOnce(x)})
    loader = hl.Sampled(fanouts=(3,), batch_size=16, workers=0).loader(data)
    loader.read_by_gpu = True  # which comes with the ids
    for batch in loader:
        assert torch.equal(batch.x, x[batch.input_ids])  # type: ignore[arg-type]
    assert data.tables["x"].reads == 1 + len(loader)  # type: ignore[attr-defined]
