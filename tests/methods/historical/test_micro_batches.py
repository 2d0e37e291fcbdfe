"""Micro-batches of a historical batch equal the batch: loss, gradients, and rows and gradients to be pushed.

Memory is counted, not measured: a node or an edge takes UNIT bytes. A limit of 110 nodes and edges, or 40 where the
halo is dropped, splits the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.budget.guard import BudgetGuard
from hopline.budget.plan import Budget
from hopline.core.batch_sizes import Sizes
from hopline.methods.historical.micro_batches import GuardedHistoricalUnit, LayerBytes, MicroBatches
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.historical.work import HistoricalWork
from hopline.nn import GNN
from tests.equivalence.test_5_historical import DATA, MODELS, work_of
from tests.support.helpers import dataset_of, graph_of, guarded, randint, randn

UNIT = 1e6
"""Bytes of a node or an edge in these tests: far more than real rows have, so that only counts matter."""


class BytesByCount(LayerBytes):
    """A predictor whose peak is the number of nodes and edges, times UNIT."""

    is_sure = True  # type: ignore[assignment]

    def predict_peak(self, l: int, sizes: Sizes) -> float:
        return UNIT * (sum(sizes.nodes) + sum(sizes.edges))


class GuardByLayers(BudgetGuard):
    """A guard for which no whole batch fits, so that it splits by the predicted peaks of the layers."""

    def predict_peak_of_sizes(self, sizes: Sizes) -> float:
        return math.inf


def guard_steps(work: HistoricalWork, max_units: int, **settings: Any) -> BudgetGuard:
    """BudgetGuard the steps of a work from now on. max_units: nodes and edges that a step may have."""
    work.layer_bytes = BytesByCount(work.model, None)
    step_guard = GuardByLayers(work.job, Budget(**settings), int(UNIT * max_units))
    guarded(work, work.method, step_guard)
    return step_guard


def step_of(work: HistoricalWork, total: int = 50) -> tuple[Tensor, list[Any], dict[int, Tensor], dict[int, Tensor]]:
    """(loss, gradients, rows to be pushed by layer, gradients of rows to be pushed) of one batch."""
    work.job.module.zero_grad(set_to_none=True)
    unit = work.unit(work.batch((0, 3), 7))
    loss = unit.forward_backward(total)
    assert unit.hist_batch is not None
    rows = dict(unit.hist_batch.halo.commits())
    return (
        loss,
        [None if p.grad is None else p.grad.clone() for p in work.job.module.parameters()],
        rows,
        unit.row_gradients,
    )


def assert_micro_batches_equal_the_batch(
    work: HistoricalWork, max_units: int = 110, tolerance: float = 1e-10, **settings: Any
) -> None:
    """One step, whole and then split: the same loss, gradients and rows."""
    work.refresh()
    expected = step_of(work)
    step_guard = guard_steps(work, max_units, **settings)
    ours = step_of(work)
    record = step_guard.take_record()
    assert record["split"] == 1
    assert record["pieces"] > 1
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in MODELS],
    *[(name, {"compensate": True}) for name in ("gat", "gcnii", "pna jumping")],
    ("sage", {"edge_dropout": 0.3}),
    ("gcn", {"lipschitz": 0.3}),
    ("gin", {"halo": "drop", "edge_dropout": 0.2}),
    ("appnp", {"compensate": True, "lipschitz": 0.3, "edge_dropout": 0.2}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_micro_batches_have_the_loss_gradients_and_rows_of_the_batch(name: str, settings: dict[str, Any]):
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    model.dropout = 0.4
    assert_micro_batches_equal_the_batch(work_of(model, **settings), 110 if "halo" not in settings else 40)


def test_micro_batches_equal_the_batch_in_single_precision():
    torch.manual_seed(0)
    assert_micro_batches_equal_the_batch(work_of(MODELS["sage"](6, 3)), tolerance=1e-6)


def test_unkeyed_dropout_is_drawn_again_in_the_backward_pass():
    torch.manual_seed(0)
    convs = [pyg.GATConv(6, 4, dropout=0.5), pyg.GATConv(4, 4, dropout=0.5), pyg.GATConv(4, 3)]
    model = GNN(convs, act="tanh").double()
    for conv in convs:
        nn.init.normal_(conv.bias)  # so that a row without messages is not at a kink, where finite differences fail
    work = work_of(model)
    work.refresh()
    guard_steps(work, 110)
    loss, gradients, *_ = step_of(work, 1)
    assert step_of(work, 1)[0] == loss

    directions = [torch.randn_like(p) for p in model.parameters()]
    expected_derivative = sum(float((g * v).sum()) for g, v in zip(gradients, directions, strict=True))
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, v in zip(model.parameters(), directions, strict=True):
                p.add_(v, alpha=sign * 1e-6)
        losses.append(float(step_of(work, 1)[0]))

    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(expected_derivative, rel=1e-6)


@pytest.fixture
def few_seeds() -> Iterator[None]:
    """Only one node trains."""
    before = DATA.splits["train"]
    DATA.splits["train"] = before[:1]
    yield
    DATA.splits["train"] = before


def test_micro_batches_of_a_batch_without_seeds_equal_the_batch(few_seeds: None):
    torch.manual_seed(0)
    work = work_of(MODELS["gcn"](6, 3).double(), compensate=True)
    work.refresh()
    part_with_seed = int(work.partitioned.partition.part_of[0])
    group = tuple(part for part in range(5) if part != part_with_seed)[:2]

    def step() -> tuple[Any, ...]:
        work.job.module.zero_grad(set_to_none=True)
        unit = work.unit(work.batch(group, 7))
        loss = unit.forward_backward(10)
        return float(loss), [p.grad for p in work.model.parameters()], unit.row_gradients

    expected = step()
    guard_steps(work, 110)
    torch.testing.assert_close(step(), expected, rtol=1e-10, atol=1e-10)

    plain = work_of(MODELS["gcn"](6, 3).double())
    step_guard = guard_steps(plain, 110)
    unit = plain.unit(plain.batch(group, 7))
    assert float(unit.forward_backward(10)) == 0

    unit.commit()
    assert all(p.grad is None for p in plain.model.parameters())
    table = plain.partitioned.histories.tables[0]
    assert all(table[row_range].any() for row_range in plain.partitioned.parts.row_ranges_of(group))
    assert step_guard.take_record()["split"] == 1


def test_the_predicted_peak_counts_gradients_of_earlier_batches():
    work = work_of(MODELS["gcn"](6, 3).double())
    work.refresh()
    step_guard = guard_steps(work, 110)
    predicted = []
    for accumulates in (False, True):
        work.job.module.zero_grad(set_to_none=True)
        for p in work.job.module.parameters() if accumulates else ():
            p.grad = torch.ones_like(p)
        work.unit(work.batch((0, 3), 7)).forward_backward(50)
        record = step_guard.take_record()
        assert record["split"] == 1
        predicted.append(record["promised_bytes"])
    assert predicted[1] - predicted[0] == sum(p.nbytes for p in work.job.module.parameters())


def test_batch_norms_and_cutting_are_refused():
    work = work_of(GNN([pyg.GCNConv(6, 8), pyg.GCNConv(8, 3)], norm="batch").double())
    guard_steps(work, 110)
    with pytest.raises(ValueError, match=r"BatchNorm1d.*parts_per_batch"):
        step_of(work)
    for how in ("refuse", "cut", "cut_by_degree", "resample"):
        work = work_of(MODELS["gcn"](6, 3).double())
        guard_steps(work, 110, over_budget=how)
        with pytest.raises(ValueError, match=f"set over_budget=split instead of {how}"):
            step_of(work)


def train(data: hl.Dataset, limit: int | None, **settings: Any) -> tuple[hl.Trainer, BudgetGuard | None, list[Any]]:
    """(trainer, guard, counters by epoch) of four epochs within a limit in bytes; None: without a guard."""
    torch.manual_seed(0)
    model = GNN([pyg.GCNConv(8, 32), pyg.GCNConv(32, 32), pyg.GCNConv(32, 3)], dropout=0.3).double()
    method = Historical(num_parts=8, parts_per_batch=4, partition="random", compensate=True)
    trainer = hl.Trainer(model, data, method, epochs=4, lr=0.01, show=False, **settings)
    if limit is not None:
        trainer.guard = BudgetGuard(trainer.job, Budget(), limit)
        trainer.work = guarded(trainer.work, method, trainer.guard)
    return trainer, trainer.guard, [epoch.counters for epoch in trainer.fit().history]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_within_a_budget_has_the_same_weights_and_keeps_to_it(accumulate: int):
    graph = graph_of(randint(0, 1200, 6000, 1), randint(0, 1200, 6000, 2), 1200)
    data = dataset_of(graph, randn(1200, 8))
    unlimited, _, _ = train(data, None, accumulate=accumulate)
    _, measured, counters = train(data, 1 << 30, accumulate=accumulate)
    assert measured is not None
    assert not any("budget.batches_split" in epoch for epoch in counters)

    limit = int(0.7 * measured.ledger.peak_bytes)
    tight, step_guard, counters = train(data, limit, accumulate=accumulate)
    assert step_guard is not None
    for our_weight, expected_weight in zip(unlimited.model.parameters(), tight.model.parameters(), strict=True):
        torch.testing.assert_close(our_weight, expected_weight, rtol=1e-9, atol=1e-11)
    assert 0 < step_guard.ledger.peak_bytes <= step_guard.ledger.promised_bytes <= limit
    assert all(epoch["budget.batches_split"] == 2 for epoch in counters)
    assert not any("budget.steps_over" in epoch for epoch in counters)
    assert all(2 < epoch["budget.pieces"] < 50 for epoch in counters)

    assert isinstance(next(iter(tight.work.units(1))), GuardedHistoricalUnit)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gcn", {}), ("gat", {"compensate": True}), ("gcn batch norm", {})],
    ids=str,
)
def test_a_step_that_is_out_of_memory_leaves_gradients_and_buffers_as_they_were(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """In the batch at once, then in its pieces, each time after everything was computed."""
    fails_next: list[str] = []

    def fail_after(kind: type, method: str) -> None:
        run = getattr(kind, method)

        def then_fail(self: Any, *args: Any) -> Any:
            result = run(self, *args)
            if fails_next:
                assert fails_next.pop(0) == kind.__name__
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        monkeypatch.setattr(kind, method, then_fail)

    fail_after(HistoricalUnit, "forward_backward")
    fail_after(MicroBatches, "backward")
    if name == "gcn batch norm":
        work = work_of(GNN([pyg.GCNConv(6, 8), pyg.GCNConv(8, 3)], norm="batch", dropout=0.5).double())
        fails_in = ["HistoricalUnit"]
    else:
        work = work_of(MODELS[name](6, 3).double(), **settings)
        fails_in = ["HistoricalUnit", "MicroBatches"]
    expected = step_of(work)
    buffers = [b.clone() for b in work.job.module.buffers()]
    fixed: Any = FixedPredictor(UNIT * 1000)
    step_guard = BudgetGuard(work.job, Budget(), int(UNIT * 10_000), predictor=fixed)
    guarded(work, work.method, step_guard)
    work.layer_bytes = BytesByCount(work.model, None)
    for p in work.job.module.parameters():
        p.grad = torch.ones_like(p)
    fails_next += fails_in
    if name == "gcn batch norm":
        with pytest.raises(ValueError, match="BatchNorm"):
            work.unit(work.batch((0, 3), 7)).forward_backward(50)
        for p in work.job.module.parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, torch.ones_like(p))
        assert all(torch.equal(b, before) for b, before in zip(work.job.module.buffers(), buffers, strict=True))
        return
    ours = step_of(work)
    assert not fails_next

    record = step_guard.take_record()
    assert record["oom"] == 2
    assert record["pieces"] > 2
    assert step_guard.target_bytes < step_guard.limit_bytes
    for expected_part, our_part in zip(expected, ours, strict=True):
        torch.testing.assert_close(expected_part, our_part, rtol=1e-10, atol=1e-10)


class FixedPredictor:
    """A predictor that predicts the same peak for every step, and learns nothing."""

    is_sure = True

    def __init__(self, promised: float) -> None:
        self.promised = promised

    def predict_peak(self, sizes: Sizes) -> float:
        return self.promised

    def observe(self, sizes: Sizes, peak_bytes: int) -> None: ...
