"""The predicted peak of a step: never below the measured one, and close to it once steps were measured.

    bound       from the widths alone: at least the peak of every conv and every option of `GNN`, and not far above
    expected    fitted to measured steps: a linear peak within 1 %
    margin      grows with the residuals, and with the distance from the measured steps

Synthetic peaks (`linear_bytes`, `convex_bytes`) test the fit; `measure_step` measures real steps on the CPU.
"""

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
from hopline.core.batch_sizes import Sizes
from hopline.device.meter import meter_of
from hopline.nn import GNN
from hopline.nn.whole_module import Whole
from tests.support.helpers import CONVS, GNN_OPTIONS, batch_of, gnn_of, randn, random_graph, stack_of

GRAPH = random_graph(3000, 30_000, attr=2)
X = randn(3000, 6)
COSTS = Costs((4.0, 8.0, 16.0), (2.0, 3.0), 1000.0)
"""Bytes per node and per edge of two layers, and a constant: above every coefficient of `linear_bytes`."""


def measure_step(model: nn.Module, batch: Batch) -> int:
    """The measured peak of forward and backward, in bytes."""
    model.zero_grad(set_to_none=True)
    with meter_of("cpu") as meter:
        model(batch).square().mean().backward()
    return meter.peak_bytes


@torch.no_grad()
def measure_forward(model: nn.Module, batch: Batch) -> int:
    """The measured peak of forward without gradients, in bytes."""
    with meter_of("cpu") as meter:
        model(batch)
    return meter.peak_bytes


def batch_at(num_seeds: int, key: int = 1, fanouts: tuple[int, ...] = (5, 5), handle: bool = False) -> Batch:
    """A batch at random seeds of the key."""
    seeds = ops.permutation(key, GRAPH.num_nodes)[:num_seeds]
    return batch_of(GRAPH, X, fanouts, seeds, key=key, handle=handle)


def test_sizes_count_the_nodes_and_edges_of_the_blocks():
    batch = batch_at(10)
    first, last = batch.blocks
    assert Sizes.of(batch) == Sizes((first.num_src, last.num_src, 10), (first.num_edges, last.num_edges))


@pytest.mark.parametrize("name", CONVS)
def test_the_peak_of_every_conv_is_below_the_bound(name: str):
    model = GNN(stack_of(name, 6, 32, 16), dropout=0.5).double()
    measure_step(model, batch_at(2))  # the first call probes how to call the conv, which takes memory of its own
    for num_seeds, handle in ((1, False), (150, False), (150, True)):
        batch = batch_at(num_seeds, handle=handle)
        costs = costs_of(model, batch.x, 2)
        sizes = Sizes.of(batch)
        assert measure_step(model, batch) <= costs.bound(sizes)
        assert measure_forward(model, batch) <= costs.forward_only().bound(sizes)


@pytest.mark.parametrize("name", GNN_OPTIONS)
def test_the_peak_of_every_gnn_option_is_below_the_bound(name: str):
    model = gnn_of(name)
    fanouts = (5,) * model.num_layers
    measure_step(model, batch_at(2, fanouts=fanouts))
    batch = batch_at(150, fanouts=fanouts)
    costs = costs_of(model, batch.x, len(fanouts))
    sizes = Sizes.of(batch)

    assert measure_step(model, batch) <= costs.bound(sizes)
    assert measure_forward(model, batch) <= costs.forward_only().bound(sizes)


def test_the_peak_of_a_module_without_layers_is_below_the_bound():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([pyg.GATConv(6, 16, heads=2), pyg.GATConv(32, 4)])

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    model = Whole(Plain().double())
    batch = batch_at(200)
    assert measure_step(model, batch) <= costs_of(model, batch.x, 2).bound(Sizes.of(batch))


def test_the_bound_is_below_eight_times_the_peak():
    """A looser bound would split batches that fit, as long as nothing was measured."""
    for name in ("sage-mean", "gcn", "gin", "gat"):
        model = GNN(stack_of(name, 6, 64, 64), dropout=0.5).double()
        measure_step(model, batch_at(2))
        batch = batch_at(1000, handle=True)
        assert costs_of(model, batch.x, 2).bound(Sizes.of(batch)) < 8 * measure_step(model, batch)


def draw_sizes(rng: np.random.Generator) -> Sizes:
    """Sizes of a step in about the usual proportions: 9 : 3 : 1 nodes and 12 : 4 edges, each off by up to 20 %."""
    size = int(rng.integers(100, 5000))
    counts = [max(1, int(size * share * rng.uniform(0.8, 1.2))) for share in (9, 3, 1, 12, 4)]
    return Sizes(tuple(counts[:3]), tuple(counts[3:]))


def predictor_after(truth: Callable[[Sizes], float], steps: int, seed: int = 0) -> Predictor:
    """A predictor after measured steps whose peaks are given by a function of their sizes."""
    rng = np.random.default_rng(seed)
    predictor = Predictor(COSTS)
    for _ in range(steps):
        sizes = draw_sizes(rng)
        predictor.observe(sizes, int(truth(sizes)))
    return predictor


def linear_bytes(sizes: Sizes) -> float:
    """A peak that is linear in every size."""
    return float(np.array([1.0, 2.5, 4, 0.5, 2, 700]) @ sizes.array)


def test_before_enough_steps_the_predicted_peak_is_the_bound():
    predictor = predictor_after(linear_bytes, ENOUGH - 1)
    sizes = Sizes((900, 300, 100), (1000, 400))
    assert not predictor.is_sure
    assert predictor.predict_peak(sizes) == COSTS.bound(sizes)
    assert Predictor(COSTS).expected_bytes(sizes) == COSTS.bound(sizes)
    assert predictor_after(linear_bytes, ENOUGH).predict_peak(sizes) < COSTS.bound(sizes)


def test_a_linear_peak_is_learnt_within_one_percent():
    predictor = predictor_after(linear_bytes, 30)
    rng = np.random.default_rng(1)
    held_out = [draw_sizes(rng) for _ in range(50)]
    errors = [abs(predictor.expected_bytes(s) - linear_bytes(s)) / linear_bytes(s) for s in held_out]
    assert np.mean(errors) < 0.01
    for sizes in held_out:
        assert linear_bytes(sizes) <= predictor.predict_peak(sizes) <= 1.1 * linear_bytes(sizes)


def test_the_margin_of_a_predicted_peak_grows_with_the_residuals():
    rng = np.random.default_rng(2)
    noisy = predictor_after(lambda sizes: linear_bytes(sizes) * rng.uniform(0.9, 1.1), 60)
    calm = predictor_after(linear_bytes, 60)
    sizes = Sizes((900, 300, 100), (1000, 400))

    noisy_margin = noisy.predict_peak(sizes) / noisy.expected_bytes(sizes)
    calm_margin = calm.predict_peak(sizes) / calm.expected_bytes(sizes)
    assert noisy_margin > 1.1 > calm_margin

    for _ in range(300):
        sizes = draw_sizes(rng)
        peak_bytes = linear_bytes(sizes) * rng.uniform(0.9, 1.1)
        assert peak_bytes <= noisy.predict_peak(sizes)


def test_the_margin_is_larger_for_sizes_beyond_all_observed_steps():
    predictor = predictor_after(linear_bytes, 30)
    inside = Sizes((9000, 3000, 1000), (12_000, 4000))
    outside = Sizes((90_000, 30_000, 10_000), (120_000, 40_000))
    margins = [predictor.predict_peak(s) / predictor.expected_bytes(s) for s in (inside, outside)]
    assert margins[1] > margins[0] + 0.05


def convex_bytes(sizes: Sizes) -> float:
    """The larger of two linear peaks, as of two moments of a step: the proportions decide which one it is."""
    return max(float(np.array(a) @ sizes.array) for a in ([1.0, 2.5, 0, 0.5, 0, 700], [0, 1.0, 40, 0, 6, 100]))


def test_a_step_larger_than_an_observed_one_is_predicted_at_most_in_proportion():
    predictor = Predictor(COSTS)
    # 4000 input rows are shared by all seeds, so a smaller step has more input rows per seed.
    for seeds in (10, 20, 40, 80, 160, 320):
        largest = Sizes((4000 + 4 * seeds, 4 * seeds, seeds), (8 * seeds, 3 * seeds))
        predictor.observe(largest, int(convex_bytes(largest)))

    margin = 1 + max(0.02, DEVIATIONS * predictor._fit.deviation)
    for ratio in (1.05, 1.2, 1.6):
        larger = Sizes((4000 + 4 * 320, 4 * 320, int(320 * ratio)), (8 * 320, 3 * 320))
        in_proportion = margin * ratio * convex_bytes(largest)
        assert convex_bytes(larger) <= predictor.predict_peak(larger) <= in_proportion + 1

    assert predictor._fit.max_miss == pytest.approx(0, abs=2)
    predictor.observe(largest, int(1.5 * convex_bytes(largest)))
    assert predictor._fit.max_miss == pytest.approx(0.5 * convex_bytes(largest), rel=1e-3)


def test_the_predictor_follows_a_change_of_the_peak():
    predictor = predictor_after(linear_bytes, 20)
    rng = np.random.default_rng(3)
    for _ in range(400):
        sizes = draw_sizes(rng)
        predictor.observe(sizes, int(1.5 * linear_bytes(sizes)))
    sizes = draw_sizes(rng)
    assert abs(predictor.expected_bytes(sizes) / (1.5 * linear_bytes(sizes)) - 1) < 0.01


def test_a_bound_is_raised_after_a_step_exceeded_it():
    predictor = Predictor(COSTS)
    sizes = Sizes((900, 300, 100), (1000, 400))
    predictor.observe(sizes, int(2 * COSTS.bound(sizes)))
    assert predictor.predict_peak(sizes) >= 1.99 * COSTS.bound(sizes)


def test_expected_bytes_are_monotone_in_every_size():
    predictor = predictor_after(lambda s: 3.0 * s.nodes[0] + 500, 40)
    base = Sizes((900, 300, 100), (1000, 400))
    for position in range(5):
        counts = [*base.nodes, *base.edges]
        counts[position] += 500
        assert predictor.expected_bytes(Sizes(tuple(counts[:3]), tuple(counts[3:]))) >= predictor.expected_bytes(base)


@pytest.mark.parametrize("name", ["sage-mean", "gcn", "gat", "gin"])
def test_peaks_of_held_out_steps_are_predicted_within_three_percent(name: str):
    model = GNN(stack_of(name, 6, 32, 32), dropout=0.5).double()
    measure_step(model, batch_at(2))
    predictor = Predictor(costs_of(model, X, 2))
    for step, num_seeds in enumerate((50, 100, 200, 400, 800, 1200, 300, 600)):
        batch = batch_at(num_seeds, key=step)
        predictor.observe(Sizes.of(batch), measure_step(model, batch))
    errors = []
    for step, num_seeds in enumerate((70, 150, 350, 500, 700, 1000)):
        batch = batch_at(num_seeds, key=100 + step)
        errors.append(abs(predictor.expected_bytes(Sizes.of(batch)) / measure_step(model, batch) - 1))
    assert np.mean(errors) < 0.03


def test_answers_in_other_threads_belong_to_one_observed_step():
    """A prediction never mixes the factors of one fit with the margins of another."""
    predictor = Predictor(COSTS)
    sizes = Sizes((500, 100, 20), (900, 80))
    answers: set[float] = set()
    has_learnt = threading.Event()

    def ask() -> None:
        while not has_learnt.is_set():
            answers.add(predictor.predict_peak(sizes))

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ask) for _ in range(2)]
        answers_between_steps = {predictor.predict_peak(sizes)}
        for number in range(200):
            observed = Sizes((100 + number, 50, 10), (300 + 2 * number, 40))
            predictor.observe(observed, int(0.3 * COSTS.bound(observed)) + number % 7)
            answers_between_steps.add(predictor.predict_peak(sizes))
        has_learnt.set()
        for future in futures:
            future.result()

    assert answers <= answers_between_steps
    assert predictor.num_seen == 200


@pytest.mark.parametrize("name", ["sage-mean", "gcn", "gat"])
def test_predicted_peaks_of_micro_batches_hold_after_whole_batches_alone(name: str):
    """Micro-batches have other proportions: shared neighbours make the outer layers large, and move the peak."""
    model = GNN(stack_of(name, 6, 32, 16), dropout=0.5).double()
    measure_step(model, batch_at(2))
    predictor = Predictor(costs_of(model, X, 2))
    for key in range(ENOUGH + 2):
        whole = batch_at(900, key)
        predictor.observe(Sizes.of(whole), measure_step(model, whole))
    for num_micro_batches in (2, 6, 30):
        piece = micro_batches.micro_batch_of(whole, torch.arange(0, 900, num_micro_batches)).batch()  # type: ignore[possibly-undefined]
        sizes = Sizes.of(piece)
        assert measure_step(model, piece) <= predictor.predict_peak(sizes)
        predictor.observe(sizes, measure_step(model, piece))
        assert predictor.predict_peak(sizes) < 1.2 * measure_step(model, piece)


def test_many_small_steps_do_not_make_large_ones_look_small():
    predictor = Predictor(Costs((64.0, 608.0, 888.0), (160.0, 160.0), 70_000.0))

    def peak_of(num_seeds: int) -> int:
        # The peak of a small step is at another moment, when only gradients of the weights are in memory.
        return max(2300, 400 * num_seeds)

    def sizes_of(num_seeds: int) -> Sizes:
        return Sizes((4 * num_seeds, 2 * num_seeds, num_seeds), (4 * num_seeds, 2 * num_seeds))

    for num_seeds in (1, 1, 2, 64, 128, 256):
        predictor.observe(sizes_of(num_seeds), peak_of(num_seeds))
    for step in range(1000):
        predictor.observe(sizes_of(1 + step % 3), peak_of(1 + step % 3))
    assert predictor.predict_peak(sizes_of(256)) >= peak_of(256)
