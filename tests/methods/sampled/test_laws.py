"""Draws by weight and by LABOR in training: batches, ranks, resumed runs, micro-batches, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GraphConv, SAGEConv

import hopline as hl
from hopline.budget.micro_batches import micro_batch_of
from hopline.core.batch import Batch
from hopline.core.graph import Graph
from hopline.core.sampler import NeighborSampler
from hopline.data.dataset import Dataset
from hopline.methods.sampled.loader import Loader
from hopline.nn import GNN
from hopline.ops.random import derive_key
from tests.support.helpers import (
    assert_close,
    assert_same_batches,
    dataset_of,
    gradients,
    graph_of,
    plain_gnn,
    randint,
    randn,
    random_graph,
)
from tests.support.ranks import AgreeingWorld
from tests.training.test_checkpoint import StopAfter, have_same_weights

EDGES = random_graph(60, 500, weight=True, loops=True)
WEIGHT = torch.where(randint(0, 4, EDGES.num_edges, seed=4) == 0, 0.0, randn(EDGES.num_edges, seed=5).abs())
GRAPH = Graph(EDGES.indptr, EDGES.indices, {**EDGES.edge, "w": WEIGHT})
X = randn(60, 5)
DATA = replace(dataset_of(GRAPH, X), splits={"train": torch.arange(2, 50), "test": torch.arange(50, 60)})
LAWS: dict[str, dict[str, Any]] = {
    "weight": {"weight": "w"},
    "labor": {"law": "labor"},
    "labor, kept": {"law": "labor", "law_every": 3},
}


def method(**changes: Any) -> hl.Sampled:
    return hl.Sampled(**({"fanouts": (4, 3), "batch_size": 12, "workers": 0} | changes))


def loader(world: hl.World | None = None, **changes: Any) -> Loader:
    made = method(**changes).loader(DATA, "train", seed=5, world=world)
    assert isinstance(made, Loader)
    return made


def model_of(conv: Any, **options: Any) -> GNN:
    torch.manual_seed(0)
    return GNN([conv(5, 6, **options), conv(6, 3, **options)]).double()


def gradients_of(model: nn.Module, batches: list[Batch], total: int) -> dict[str, Tensor]:
    """Gradients of the sum of the losses of all seeds over `total`."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        (nn.functional.cross_entropy(model(batch), batch.labels, reduction="sum") / total).backward()
    return {name: gradient.clone() for name, gradient in gradients(model).items()}


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"law": "poisson"}, "law must be 'uniform' or 'labor'"),
        ({"law": "labor", "weight": "w"}, "leave out weight=w"),
        ({"law": "labor", "replace": True}, "leave out replace"),
        ({"weight": "w", "replace": True}, "leave out replace"),
        ({"law": "labor", "layout": "tree"}, "set layout=block"),
        ({"weight": "w", "layout": "tree"}, "set layout=block"),
        ({"law": "labor", "law_every": 0}, "law_every must be at least 1"),
        ({"law_every": 2}, "law=labor alone"),
        ({"weight": 3}, "weight must be"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method(**settings)


def test_draws_that_are_not_uniform_take_blocks() -> None:
    assert [method(**law).layout for law in ({}, *LAWS.values())] == ["auto", "block", "block", "block"]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_weights_that_cannot_be_drawn_by_are_refused_before_the_first_batch(bad: float) -> None:
    weight = WEIGHT.clone()
    weight[7] = bad
    with pytest.raises(ValueError, match="edge array 'w' has weights that are negative, NaN, infinite"):
        NeighborSampler(Graph(GRAPH.indptr, GRAPH.indices, {"w": weight}), (2,), weight="w")


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ({"weight": WEIGHT}, "one of the dataset's, weight"),
        ({"w": WEIGHT.long()}, "convert it by .float()"),
        ({"w": WEIGHT[:, None]}, "one number per edge"),
        ({"w": WEIGHT, "inclusion": WEIGHT}, "rename it"),
    ],
)
def test_edge_arrays_that_are_no_weights_are_refused(edge: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborSampler(Graph(GRAPH.indptr, GRAPH.indices, edge), (2,), weight="w")


def test_an_edge_array_of_the_name_of_the_probabilities_is_none_of_them() -> None:
    graph = Graph(GRAPH.indptr, GRAPH.indices, {"inclusion": WEIGHT})
    (block,) = NeighborSampler(graph, (3,)).sample(torch.arange(20), 1)
    assert block.inclusion is None


def test_a_budget_that_cuts_edges_is_refused_with_weights() -> None:
    budget = hl.Budget(host="1GiB", over_budget="cut")
    with pytest.raises(ValueError, match="set over_budget=split"):
        hl.Trainer(model_of(SAGEConv), DATA, method(weight="w"), budget=budget, show=False)


# ---- batches


@pytest.mark.parametrize("law", LAWS)
def test_ranks_and_threads_draw_what_one_process_draws(law: str) -> None:
    alone = list(loader(batch_size=24, **LAWS[law]))
    assert len(alone) == 2
    in_threads = loader(**{**LAWS[law], "batch_size": 24, "workers": 2})
    for batch, expected in zip(in_threads, alone, strict=True):
        assert_same_batches(batch, expected)

    model = model_of(SAGEConv)
    by_rank = [list(loader(AgreeingWorld(rank, 2), **LAWS[law])) for rank in (0, 1)]
    for expected, *shares in zip(alone, *by_rank, strict=True):
        assert [share.num_seeds for share in shares] == [12, 12]
        ours = gradients_of(model, shares, 24)
        for name, gradient in gradients_of(model, [expected], 24).items():
            assert_close(ours[name], gradient, 1e-12)


@pytest.mark.parametrize("law", LAWS)
def test_an_epoch_goes_on_where_it_was_left(law: str) -> None:
    batches = list(loader(**LAWS[law]).epoch(3))
    for done in (1, 2, 3):
        rest = loader(**LAWS[law]).epoch(3, done=done, examples_done=12 * done)
        for batch, expected in zip(rest, batches[done:], strict=True):
            assert_same_batches(batch, expected)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_steps_of_a_group_draw_by_one_key(every: int) -> None:
    sampler = NeighborSampler(GRAPH, (4, 3), law="labor")
    epoch_key = derive_key(5, 1)
    for step, batch in enumerate(loader(law="labor", law_every=every, batch_size=7).epoch(1)):
        assert batch.key == derive_key(epoch_key, step)  # dropout is new in every step
        draw_key = derive_key(epoch_key, step // every * every)
        for block, expected in zip(batch.blocks, sampler.sample(batch.seeds, draw_key), strict=True):
            assert torch.equal(block.src_ids, expected.src_ids)
            assert torch.equal(block.part.src_idx, expected.part.src_idx)


@pytest.mark.parametrize("num_layers", [2, 3])
def test_every_layer_has_other_numbers_by_labor(num_layers: int) -> None:
    blocks = NeighborSampler(GRAPH, (2,) * num_layers, law="labor", edge_ids=True).sample(torch.tensor([0]), 3)
    of_hub = {tuple(block.part.edge_ids[:2].tolist()) for block in blocks}  # type: ignore[index]
    assert len(of_hub) == num_layers


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_micro_batches_add_up(law: str, scaled: bool) -> None:
    model = model_of(GraphConv)
    for batch in loader(**{**LAWS[law], "scale_sums": scaled}):
        pieces = [micro_batch_of(batch, ids).batch() for ids in torch.randperm(12).split(5)]
        ours = gradients_of(model, pieces, 12)
        for name, gradient in gradients_of(model, [batch], 12).items():
            assert_close(ours[name], gradient, 1e-12)


# ---- what is learnt


@pytest.mark.parametrize("law", ["weight", "labor"])
@pytest.mark.parametrize("conv", [SAGEConv, GraphConv, GCNConv])
def test_all_in_edges_have_the_gradients_of_plain_pyg(conv: Any, law: str) -> None:
    model = model_of(conv)
    sums = conv is GraphConv
    (batch,) = loader(fanouts=(-1, -1), batch_size=60, scale_sums=sums, **LAWS[law])
    ours = gradients_of(model, [batch], 48)
    model.zero_grad(set_to_none=True)
    out = plain_gnn(model, X, GRAPH)[batch.seeds]
    nn.functional.cross_entropy(out, batch.labels).backward()
    for name, gradient in gradients(model).items():
        assert_close(ours[name], gradient, 1e-12)


@pytest.mark.parametrize("law", LAWS)
def test_a_run_is_resumed_exactly_and_infers_on_samples(law: str, tmp_path: Path) -> None:
    def trainer(out: Path, stop: int = 0, **settings: Any) -> hl.Trainer:
        torch.manual_seed(0)
        model = GNN([GCNConv(5, 6), GCNConv(6, 3)], dropout=0.3).double()
        how = method(workers=1, **LAWS[law])
        options = {"epochs": 3, "show": False, "checkpoint_s": 0.0, "inference": "sampled", **settings}
        callbacks = [StopAfter(stop)] if stop else []
        return hl.Trainer(model, DATA, how, out=out, callbacks=callbacks, **options)

    whole = trainer(tmp_path / "whole")
    expected = whole.fit()
    with pytest.raises(RuntimeError, match="enough"):
        trainer(tmp_path / "cut", stop=6).fit()
    resumed = trainer(tmp_path / "cut", resume=True)
    ours = resumed.fit()
    assert have_same_weights(whole, resumed)
    assert [epoch.loss for epoch in ours.history] == [epoch.loss for epoch in expected.history]
    assert ours.test == expected.test


def test_a_plain_module_draws_by_weight() -> None:
    """Of a node with one edge of positive weight, every batch has this edge alone."""
    num_nodes = 30
    dst = torch.arange(num_nodes).repeat_interleave(5)
    src = randint(0, num_nodes, dst.numel(), seed=2)
    graph = graph_of(src, dst, num_nodes, w=torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0]).repeat(num_nodes))
    data: Dataset = replace(dataset_of(graph, randn(num_nodes, 5)), splits={"train": torch.arange(num_nodes)})
    module = SAGEConv(5, 3).double()
    for batch in hl.Sampled(fanouts=(4,), batch_size=10, weight="w").loader(data, "train", model=module):
        union = batch.union()
        assert torch.equal(union.src_ids[union.part.src_idx[:10].long()], src.view(-1, 5)[batch.seeds, 2])
        assert union.part.indptr.tolist()[:11] == list(range(11))
