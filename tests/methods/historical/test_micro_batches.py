"""A historical batch in pieces is the batch: gradients, loss, rows and gradients that are committed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.budget.guard import Guard
from hopline.contract import Budget
from hopline.core.sizes import Sizes
from hopline.methods.historical.micro_batches import GuardedHistoricalUnit, LayerBytes, MicroBatches
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.historical.work import HistoricalWork
from hopline.nn import GNN
from tests.equivalence.test_5_historical import DATA, MODELS, work_of
from tests.helpers import dataset_of, graph_of, guarded, randint, randn

UNIT = 1e6
"""What a node or an edge takes in these tests: far more than rows do, so that only their number counts."""


class Counting(LayerBytes):
    """Memory is nodes and edges."""

    is_sure = True  # type: ignore[assignment]

    def predict_peak(self, l: int, sizes: Sizes) -> float:
        return UNIT * (sum(sizes.nodes) + sum(sizes.edges))


class ByLayers(Guard):
    """Goes by what the layers take."""

    def predict_peak_of_sizes(self, sizes: Sizes) -> float:
        return math.inf


def guard(work: HistoricalWork, most: int, **settings: Any) -> Guard:
    """The guard that keeps the work's steps to so many nodes and edges from now on."""
    work.layer_bytes = Counting(work.model, None)
    found = ByLayers(work.job, Budget(**settings), int(UNIT * most))
    guarded(work, work.method, found)
    return found


def step_of(work: HistoricalWork, total: int = 50) -> tuple[Tensor, list[Any], dict[int, Tensor], dict[int, Tensor]]:
    """(loss, gradients, rows that will be committed, gradients that will be) of a batch."""
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


def assert_pieces_are_the_batch(
    work: HistoricalWork, most: int = 110, tolerance: float = 1e-10, **settings: Any
) -> None:
    work.refresh()
    whole = step_of(work)
    keeper = guard(work, most, **settings)
    found = step_of(work)
    record = keeper.take_record()
    assert record["split"] == 1
    assert record["pieces"] > 1
    torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in MODELS],
    *[(name, {"compensate": True}) for name in ("gat", "gcnii", "pna jumping")],
    ("sage", {"edge_dropout": 0.3}),
    ("gcn", {"lipschitz": 0.3}),
    ("gin", {"halo": "drop", "edge_dropout": 0.2}),
    ("appnp", {"compensate": True, "lipschitz": 0.3, "edge_dropout": 0.2}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_pieces_are_the_batch(name: str, settings: dict[str, Any]):
    torch.manual_seed(0)
    model = MODELS[name](6, 3).double()
    model.dropout = 0.4
    assert_pieces_are_the_batch(work_of(model, **settings), 110 if "halo" not in settings else 40)


def test_in_single_precision_too():
    torch.manual_seed(0)
    assert_pieces_are_the_batch(work_of(MODELS["sage"](6, 3)), tolerance=1e-6)


def test_what_convs_draw_by_themselves_is_drawn_again_on_the_way_back():
    torch.manual_seed(0)
    convs = [pyg.GATConv(6, 4, dropout=0.5), pyg.GATConv(4, 4, dropout=0.5), pyg.GATConv(4, 3)]
    model = GNN(convs, act="tanh").double()
    for conv in convs:
        nn.init.normal_(conv.bias)  # a row without messages is not at a kink of the attention
    work = work_of(model)
    work.refresh()
    guard(work, 110)
    loss, gradients, *_ = step_of(work, 1)
    assert step_of(work, 1)[0] == loss
    directions = [torch.randn_like(p) for p in model.parameters()]
    expected = sum(float((g * v).sum()) for g, v in zip(gradients, directions, strict=True))
    sides = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, v in zip(model.parameters(), directions, strict=True):
                p.add_(v, alpha=sign * 1e-6)
        sides.append(float(step_of(work, 1)[0]))
    assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def few_seeds() -> Iterator[None]:
    """Only one node trains."""
    before = DATA.splits["train"]
    DATA.splits["train"] = before[:1]
    yield
    DATA.splits["train"] = before


def test_a_batch_without_seeds(few_seeds: None):
    torch.manual_seed(0)
    work = work_of(MODELS["gcn"](6, 3).double(), compensate=True)
    work.refresh()
    place = int(work.partition.part_of[0])
    group = tuple(part for part in range(5) if part != place)[:2]

    def step() -> tuple[Any, ...]:
        work.job.module.zero_grad(set_to_none=True)
        unit = work.unit(work.batch(group, 7))
        loss = unit.forward_backward(10)
        return float(loss), [p.grad for p in work.model.parameters()], unit.row_gradients

    whole = step()
    guard(work, 110)
    torch.testing.assert_close(step(), whole, rtol=1e-10, atol=1e-10)

    plain = work_of(MODELS["gcn"](6, 3).double())
    keeper = guard(plain, 110)
    unit = plain.unit(plain.batch(group, 7))
    assert float(unit.forward_backward(10)) == 0
    unit.commit()
    assert all(p.grad is None for p in plain.model.parameters())
    assert all(plain.histories.tables[0][slab].any() for slab in plain.parts.row_ranges_of(group))
    assert keeper.take_record()["split"] == 1


def test_gradients_of_earlier_batches_are_in_the_promise():
    work = work_of(MODELS["gcn"](6, 3).double())
    work.refresh()
    keeper, found = guard(work, 110), []
    for accumulates in (False, True):
        work.job.module.zero_grad(set_to_none=True)
        for p in work.job.module.parameters() if accumulates else ():
            p.grad = torch.ones_like(p)
        work.unit(work.batch((0, 3), 7)).forward_backward(50)
        record = keeper.take_record()
        assert record["split"] == 1
        found.append(record["promised_bytes"])
    assert found[1] - found[0] == sum(p.nbytes for p in work.job.module.parameters())


def test_what_cannot_be_done_is_refused():
    work = work_of(GNN([pyg.GCNConv(6, 8), pyg.GCNConv(8, 3)], norm="batch").double())
    guard(work, 110)
    with pytest.raises(ValueError, match=r"BatchNorm1d.*parts_per_batch"):
        step_of(work)
    for how in ("refuse", "cut", "cut_by_degree", "resample"):
        work = work_of(MODELS["gcn"](6, 3).double())
        guard(work, 110, over_budget=how)
        with pytest.raises(ValueError, match=f"set over_budget=split instead of {how}"):
            step_of(work)


def trained(data: hl.Dataset, limit: int | None, **settings: Any) -> tuple[hl.Trainer, Guard | None, list[Any]]:
    torch.manual_seed(0)
    model = GNN([pyg.GCNConv(8, 32), pyg.GCNConv(32, 32), pyg.GCNConv(32, 3)], dropout=0.3).double()
    method = Historical(num_parts=8, parts_per_batch=4, partition="random", compensate=True)
    trainer = hl.Trainer(model, data, method, epochs=4, lr=0.01, show=False, **settings)
    if limit is not None:
        trainer.guard = Guard(trainer.job, Budget(), limit)
        trainer.work = guarded(trainer.work, method, trainer.guard)
    return trainer, trainer.guard, [epoch.counters for epoch in trainer.fit().history]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_within_a_budget_has_the_same_weights_and_keeps_to_it(accumulate: int):
    graph = graph_of(randint(0, 1200, 6000, 1), randint(0, 1200, 6000, 2), 1200)
    data = dataset_of(graph, randn(1200, 8))
    free, _, _ = trained(data, None, accumulate=accumulate)
    _, measured, counters = trained(data, 1 << 30, accumulate=accumulate)
    assert measured is not None
    assert not any("budget.batches_split" in epoch for epoch in counters)
    limit = int(0.7 * measured.ledger.peak_bytes)
    tight, keeper, counters = trained(data, limit, accumulate=accumulate)
    assert keeper is not None
    for p, q in zip(free.model.parameters(), tight.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    assert 0 < keeper.ledger.peak_bytes <= keeper.ledger.promised_bytes <= limit
    assert all(epoch["budget.batches_split"] == 2 for epoch in counters)
    assert not any("budget.steps_over" in epoch for epoch in counters)
    assert all(2 < epoch["budget.pieces"] < 50 for epoch in counters)
    assert isinstance(next(iter(tight.work.units(1))), GuardedHistoricalUnit)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gcn", {}), ("gat", {"compensate": True}), ("gcn batch norm", {})],
    ids=str,
)
def test_memory_that_runs_out_leaves_no_trace(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """In the batch at once, then in its pieces, each time after everything was computed."""
    fails: list[str] = []

    def failing(kind: type, method: str) -> None:
        whole = getattr(kind, method)

        def then_fail(self: Any, *args: Any) -> Any:
            result = whole(self, *args)
            if fails:
                assert fails.pop(0) == kind.__name__
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        monkeypatch.setattr(kind, method, then_fail)

    failing(HistoricalUnit, "forward_backward")
    failing(MicroBatches, "backward")
    if name == "gcn batch norm":
        work = work_of(GNN([pyg.GCNConv(6, 8), pyg.GCNConv(8, 3)], norm="batch", dropout=0.5).double())
        fails_in = ["HistoricalUnit"]
    else:
        work = work_of(MODELS[name](6, 3).double(), **settings)
        fails_in = ["HistoricalUnit", "MicroBatches"]
    expected = step_of(work)
    buffers = [b.clone() for b in work.job.module.buffers()]
    known: Any = Fixed(UNIT * 1000)
    keeper = Guard(work.job, Budget(), int(UNIT * 10_000), predictor=known)
    guarded(work, work.method, keeper)
    work.layer_bytes = Counting(work.model, None)
    for p in work.job.module.parameters():
        p.grad = torch.ones_like(p)
    fails += fails_in
    if name == "gcn batch norm":
        with pytest.raises(ValueError, match="BatchNorm"):
            work.unit(work.batch((0, 3), 7)).forward_backward(50)
        for p in work.job.module.parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, torch.ones_like(p))
        assert all(torch.equal(b, was) for b, was in zip(work.job.module.buffers(), buffers, strict=True))
        return
    found = step_of(work)
    assert not fails
    record = keeper.take_record()
    assert record["oom"] == 2
    assert record["pieces"] > 2
    assert keeper.target_bytes < keeper.limit_bytes
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class Fixed:
    """A predictor that says the same of every step, and learns nothing."""

    is_sure = True

    def __init__(self, promised: float) -> None:
        self.promised = promised

    def predict_peak(self, sizes: Sizes) -> float:
        return self.promised

    def observe(self, sizes: Sizes, peak_bytes: int) -> None: ...
