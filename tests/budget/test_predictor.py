from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from hopline import ops
from hopline.budget import micro_batches
from hopline.budget.predictor import DEVIATIONS, ENOUGH, Costs, Predictor, costs_of
from hopline.core.batch import Batch
from hopline.core.sizes import Sizes
from hopline.device.meter import meter_of
from hopline.nn import GNN
from hopline.nn.whole_module import Whole
from tests.helpers import CONVS, GNN_OPTIONS, batch_of, gnn_of, randn, random_graph, stack_of

GRAPH = random_graph(3000, 30_000, attr=2)
X = randn(3000, 6)
COSTS = Costs((4.0, 8.0, 16.0), (2.0, 3.0), 1000.0)


def taken(model: nn.Module, batch: Batch) -> int:
    model.zero_grad(set_to_none=True)
    with meter_of("cpu") as meter:
        model(batch).square().mean().backward()
    return meter.peak_bytes


@torch.no_grad()
def taken_forward(model: nn.Module, batch: Batch) -> int:
    with meter_of("cpu") as meter:
        model(batch)
    return meter.peak_bytes


def batch_at(num_seeds: int, key: int = 1, fanouts: tuple[int, ...] = (5, 5), handle: bool = False) -> Batch:
    seeds = ops.permutation(key, GRAPH.num_nodes)[:num_seeds]
    return batch_of(GRAPH, X, fanouts, seeds, key=key, handle=handle)


def test_sizes_are_those_of_the_blocks():
    batch = batch_at(10)
    first, last = batch.blocks
    assert Sizes.of(batch) == Sizes((first.num_src, last.num_src, 10), (first.num_edges, last.num_edges))


@pytest.mark.parametrize("name", CONVS)
def test_no_conv_exceeds_the_bound(name: str):
    model = GNN(stack_of(name, 6, 32, 16), dropout=0.5).double()
    taken(model, batch_at(2))  # how a conv is called is found out once
    for num_seeds, handle in ((1, False), (150, False), (150, True)):
        batch = batch_at(num_seeds, handle=handle)
        costs = costs_of(model, batch.x, 2)
        sizes = Sizes.of(batch)
        assert taken(model, batch) <= costs.bound(sizes)
        assert taken_forward(model, batch) <= costs.forward_only().bound(sizes)


@pytest.mark.parametrize("name", GNN_OPTIONS)
def test_no_model_exceeds_the_bound(name: str):
    model = gnn_of(name)
    fanouts = (5,) * model.num_layers
    taken(model, batch_at(2, fanouts=fanouts))
    batch = batch_at(150, fanouts=fanouts)
    costs = costs_of(model, batch.x, len(fanouts))
    sizes = Sizes.of(batch)
    assert taken(model, batch) <= costs.bound(sizes)
    assert taken_forward(model, batch) <= costs.forward_only().bound(sizes)


def test_a_model_that_is_not_made_of_layers_has_a_bound_too():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([pyg.GATConv(6, 16, heads=2), pyg.GATConv(32, 4)])

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    model = Whole(Plain().double())
    batch = batch_at(200)
    assert taken(model, batch) <= costs_of(model, batch.x, 2).bound(Sizes.of(batch))


def test_the_bound_is_not_far_off():
    """Or it would split batches that fit, before anything was measured."""
    for name in ("sage-mean", "gcn", "gin", "gat"):
        model = GNN(stack_of(name, 6, 64, 64), dropout=0.5).double()
        taken(model, batch_at(2))
        batch = batch_at(1000, handle=True)
        assert costs_of(model, batch.x, 2).bound(Sizes.of(batch)) < 8 * taken(model, batch)


def drawn(rng: np.random.Generator) -> Sizes:
    size = int(rng.integers(100, 5000))
    near = [max(1, int(size * share * rng.uniform(0.8, 1.2))) for share in (9, 3, 1, 12, 4)]
    return Sizes(tuple(near[:3]), tuple(near[3:]))


def learnt(truth: Callable[[Sizes], float], steps: int, seed: int = 0) -> Predictor:
    rng = np.random.default_rng(seed)
    predictor = Predictor(COSTS)
    for _ in range(steps):
        sizes = drawn(rng)
        predictor.observe(sizes, int(truth(sizes)))
    return predictor


def linear(sizes: Sizes) -> float:
    return float(np.array([1.0, 2.5, 4, 0.5, 2, 700]) @ sizes.array)


def test_before_enough_steps_the_bound_is_promised():
    predictor = learnt(linear, ENOUGH - 1)
    sizes = Sizes((900, 300, 100), (1000, 400))
    assert not predictor.is_sure
    assert predictor.predict_peak(sizes) == COSTS.bound(sizes)
    assert Predictor(COSTS).expected_bytes(sizes) == COSTS.bound(sizes)
    assert learnt(linear, ENOUGH).predict_peak(sizes) < COSTS.bound(sizes)


def test_what_is_linear_is_learnt():
    predictor = learnt(linear, 30)
    rng = np.random.default_rng(1)
    held_out = [drawn(rng) for _ in range(50)]
    errors = [abs(predictor.expected_bytes(s) - linear(s)) / linear(s) for s in held_out]
    assert np.mean(errors) < 0.01
    for sizes in held_out:
        assert linear(sizes) <= predictor.predict_peak(sizes) <= 1.1 * linear(sizes)


def test_a_promise_grows_with_the_residuals():
    rng = np.random.default_rng(2)
    noisy = learnt(lambda sizes: linear(sizes) * rng.uniform(0.9, 1.1), 60)
    calm = learnt(linear, 60)
    sizes = Sizes((900, 300, 100), (1000, 400))
    assert (
        noisy.predict_peak(sizes) / noisy.expected_bytes(sizes)
        > 1.1
        > calm.predict_peak(sizes) / calm.expected_bytes(sizes)
    )
    kept = [linear(s) * rng.uniform(0.9, 1.1) <= noisy.predict_peak(s) for s in (drawn(rng) for _ in range(300))]
    assert all(kept)


def test_what_goes_beyond_all_steps_seen_is_promised_with_care():
    predictor = learnt(linear, 30)
    inside = Sizes((9000, 3000, 1000), (12_000, 4000))
    outside = Sizes((90_000, 30_000, 10_000), (120_000, 40_000))
    margins = [predictor.predict_peak(s) / predictor.expected_bytes(s) for s in (inside, outside)]
    assert margins[1] > margins[0] + 0.05


def convex(sizes: Sizes) -> float:
    """The larger of two moments: which one it is depends on the proportions."""
    return max(float(np.array(a) @ sizes.array) for a in ([1.0, 2.5, 0, 0.5, 0, 700], [0, 1.0, 40, 0, 6, 100]))


def test_a_step_somewhat_larger_than_one_seen_takes_so_much_more_at_most():
    predictor = Predictor(COSTS)
    for seeds in (10, 20, 40, 80, 160, 320):  # pieces have more input rows for a seed than the whole
        predictor.observe(
            sizes := Sizes((4000 + 4 * seeds, 4 * seeds, seeds), (8 * seeds, 3 * seeds)), int(convex(sizes))
        )
    for times in (1.05, 1.2, 1.6):
        larger = Sizes((4000 + 4 * 320, 4 * 320, int(320 * times)), (8 * 320, 3 * 320))
        assert (
            convex(larger)
            <= predictor.predict_peak(larger)
            <= (1 + max(0.02, DEVIATIONS * predictor._learnt.deviation)) * times * convex(sizes) + 1
        )
    assert predictor._learnt.unsteady == pytest.approx(0, abs=2)
    predictor.observe(sizes, int(1.5 * convex(sizes)))
    assert predictor._learnt.unsteady == pytest.approx(0.5 * convex(sizes), rel=1e-3)


def test_it_follows_a_change():
    predictor = learnt(linear, 20)
    rng = np.random.default_rng(3)
    for _ in range(400):
        sizes = drawn(rng)
        predictor.observe(sizes, int(1.5 * linear(sizes)))
    sizes = drawn(rng)
    assert abs(predictor.expected_bytes(sizes) / (1.5 * linear(sizes)) - 1) < 0.01


def test_a_bound_that_was_exceeded_is_raised():
    predictor = Predictor(COSTS)
    sizes = Sizes((900, 300, 100), (1000, 400))
    predictor.observe(sizes, int(2 * COSTS.bound(sizes)))
    assert predictor.predict_peak(sizes) >= 1.99 * COSTS.bound(sizes)


def test_more_never_takes_less():
    predictor = learnt(lambda s: 3.0 * s.nodes[0] + 500, 40)
    base = Sizes((900, 300, 100), (1000, 400))
    for place in range(5):
        counts = [*base.nodes, *base.edges]
        counts[place] += 500
        assert predictor.expected_bytes(Sizes(tuple(counts[:3]), tuple(counts[3:]))) >= predictor.expected_bytes(base)


@pytest.mark.parametrize("name", ["sage-mean", "gcn", "gat", "gin"])
def test_held_out_steps_are_predicted(name: str):
    model = GNN(stack_of(name, 6, 32, 32), dropout=0.5).double()
    taken(model, batch_at(2))
    predictor = Predictor(costs_of(model, X, 2))
    for step, num_seeds in enumerate((50, 100, 200, 400, 800, 1200, 300, 600)):
        batch = batch_at(num_seeds, key=step)
        predictor.observe(Sizes.of(batch), taken(model, batch))
    errors = []
    for step, num_seeds in enumerate((70, 150, 350, 500, 700, 1000)):
        batch = batch_at(num_seeds, key=100 + step)
        errors.append(abs(predictor.expected_bytes(Sizes.of(batch)) / taken(model, batch) - 1))
    assert np.mean(errors) < 0.03


def test_asked_in_other_threads_while_it_learns():
    """What an answer is made of belongs together: never factors of one step and margins of another."""
    predictor = Predictor(COSTS)
    sizes = Sizes((500, 100, 20), (900, 80))
    answers: set[float] = set()
    learning = threading.Event()

    def ask() -> None:
        while not learning.is_set():
            answers.add(predictor.predict_peak(sizes))

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        exact = {predictor.predict_peak(sizes)}
        for number in range(200):
            seen = Sizes((100 + number, 50, 10), (300 + 2 * number, 40))
            predictor.observe(seen, int(0.3 * COSTS.bound(seen)) + number % 7)
            exact.add(predictor.predict_peak(sizes))
        learning.set()
        for one in asked:
            one.result()
    assert answers <= exact
    assert predictor.num_seen == 200


@pytest.mark.parametrize("name", ["sage-mean", "gcn", "gat"])
def test_pieces_are_promised_enough_where_only_whole_batches_were_seen(name: str):
    """Proportions of a piece are others: shared neighbours make its outer layers large, and another layer the peak."""
    model = GNN(stack_of(name, 6, 32, 16), dropout=0.5).double()
    taken(model, batch_at(2))
    predictor = Predictor(costs_of(model, X, 2))
    for key in range(ENOUGH + 2):
        whole = batch_at(900, key)
        predictor.observe(Sizes.of(whole), taken(model, whole))
    for num_micro_batches in (2, 6, 30):
        piece = micro_batches.micro_batch_of(whole, torch.arange(0, 900, num_micro_batches)).batch()  # type: ignore[possibly-undefined]
        sizes = Sizes.of(piece)
        assert taken(model, piece) <= predictor.predict_peak(sizes)
        predictor.observe(sizes, taken(model, piece))
        assert predictor.predict_peak(sizes) < 1.2 * taken(model, piece)
