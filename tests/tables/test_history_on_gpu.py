"""History tables for a GPU: training is the same wherever they are and however rows are moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

import hopline as hl
from hopline.data.synthetic import planted_partition
from hopline.device import row_mover
from hopline.device.row_mover import RowMover
from hopline.layerwise.engine import Boundaries
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph
from hopline.tables.allocators import Where, allocator_at, choose_where
from hopline.tables.history import Histories
from tests.support.grids import RUNS_ON_GPU
from tests.support.helpers import KERNEL_DEVICE, randint, randn

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMALL_BUFFERS = "host, small buffers"
WAYS: dict[str, Where] = {"device": "device", "pinned": "pinned", "host": "host", SMALL_BUFFERS: "host"}


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that limits a mover to two buffers of a few bytes, so that most moves need several."""

    def shrink(num_bytes: int) -> None:
        monkeypatch.setattr(row_mover, "NUM_BUFFERS", 2)
        monkeypatch.setattr(row_mover, "BUFFER_BYTES", num_bytes)
        if DEVICE.type == "cpu":  # without a GPU too, rows go through the buffers
            monkeypatch.setattr(RowMover, "_is_on_device", lambda mover, table: False)

    return shrink


def histories_at(
    where: Where, num_rows: int, device: torch.device = DEVICE, *, name: str = "h", dtype: torch.dtype | None = None
) -> Histories:
    """Histories whose rows a device reads and writes."""
    return Histories(num_rows, allocator_at(where, device, folder=None), name=name, dtype=dtype, mover=RowMover(device))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rows_come_back_as_from_plain_tables(way: str, dtype: torch.dtype | None, small_buffers: Callable[[int], None]):
    if way == SMALL_BUFFERS:
        small_buffers(7 * 20)  # seven rows of five float32
    plain = Histories(200, dtype=dtype)
    ours = histories_at(WAYS[way], 200, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        row_ranges = [slice(start, start + 25) for start in torch.randperm(8, generator=generator)[:3].mul(25).tolist()]
        rows = randn(75, 5, seed=step).float()
        positions = randint(0, 200, 90, seed=step)
        if step:
            reader = ours.prefetch((0, 1), positions)
            pulled = {l: reader.read(l, positions, rows.to(DEVICE)) for l in (0, 1)}
            for l in (0, 1):
                assert torch.equal(pulled[l].cpu(), plain.read(l, positions, rows))
                subset = reader.read_subset(l, positions, torch.tensor([5, 2, 80]), rows.to(DEVICE))
                assert torch.equal(subset, pulled[l][[5, 2, 80]])
            assert torch.equal(reader.ages(positions), plain.ages(positions))
        for l in (0, 1):
            plain.write(l, row_ranges, rows + l)
            ours.write(l, row_ranges, (rows + l).to(DEVICE), ours.now())
        for both in (plain, ours):
            both.step += 1
            both.stamp(row_ranges, both.step)
    state = ours.state_dict()
    restored = histories_at(WAYS[way], 200, dtype=dtype)
    restored.load_state_dict(state)
    every = torch.arange(200)
    for l in (0, 1):
        assert torch.equal(state["tables"][str(l)], plain.tables[l])
        assert torch.equal(restored.rows(l, every).cpu(), plain.tables[l])
    ours.write(0, every[:3], torch.ones(3, 5))
    ours.write(0, every[[7, 4]], torch.full((2, 5), 2.0, device=DEVICE))
    assert ours.rows(0, every[:8])[:, 0].cpu().tolist() == [
        1,
        1,
        1,
        plain.tables[0][3, 0],
        2,
        *plain.tables[0][5:7, 0],
        2,
    ]


@pytest.mark.parametrize("where", ["device", "pinned", "host"])
def test_sums_begin_at_zero_and_are_added_up(where: Where):
    ours = histories_at(where, 50)
    gradients: dict[int, torch.Tensor] = {}

    def keep(l: int, rows: torch.Tensor) -> None:
        gradients[l] = rows.cpu().clone()

    for round_number in range(2):
        between = Boundaries(ours, device=DEVICE, dtype=torch.float64, keep_gradients=keep)
        expected = torch.zeros(50, 3, dtype=torch.float64)
        for seed in range(3):
            positions = randn(50, seed=seed + round_number).argsort()[:20]
            rows = randn(20, 3, seed=seed)
            between.add(0, positions, rows.to(DEVICE))
            expected[positions] += rows
        between.gradients_complete(0)
        assert torch.equal(between.gradient(0, torch.arange(40)).cpu(), expected[:40])
        assert torch.equal(gradients[0], expected)


@pytest.mark.parametrize("where", ["pinned", "host"])
def test_a_pull_sees_what_was_pushed_before_it_and_nothing_after(where: Where, small_buffers: Callable[[int], None]):
    small_buffers(1 << 10)
    ours = histories_at(where, 10)
    ours.write(0, [slice(0, 10)], torch.ones(10, 2, device=DEVICE))
    positions = torch.arange(10)
    before = ours.prefetch((0,), positions)
    ours.write(0, [slice(0, 10)], torch.full((10, 2), 2.0, device=DEVICE))
    after = ours.prefetch((0,), positions)
    like = torch.empty(0, device=DEVICE)
    assert [float(r.read(0, positions, like).mean()) for r in (before, after)] == [1.0, 2.0]
    assert after.stamps(positions).tolist() == [-1] * 10


def test_a_mover_has_at_most_its_limit_of_buffers(small_buffers: Callable[[int], None]):
    small_buffers(4 * 12)  # four rows of three float32
    mover = RowMover(DEVICE)
    table = torch.zeros(50, 3)
    rows = randn(50, 3).float()

    mover.push(table, [slice(10, 30), slice(0, 10), slice(30, 50)], rows.to(DEVICE))
    assert [buffer.memory.nbytes for buffer in mover._buffers] == [48, 48]
    mover.flush()
    expected = torch.cat([rows[20:30], rows[:20], rows[30:]])
    assert torch.equal(table, expected)

    pulled = mover.pull({0: table}, torch.arange(20, 40))
    assert torch.equal(pulled[0].wait().cpu(), expected[20:40])
    assert len(mover._buffers) == 2


def test_rows_of_the_host_are_written_after_what_was_pushed_before(small_buffers: Callable[[int], None]):
    small_buffers(1 << 10)
    mover = RowMover(DEVICE)
    table = torch.zeros(4, 3)
    mover.push(table, [slice(0, 4)], torch.ones(4, 3, device=DEVICE))
    mover.push(table, torch.tensor([2, 1]), torch.full((2, 3), 2.0))
    mover.flush()
    assert table[:, 0].tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize("where", [pytest.param(where, marks=NEEDS_GPU) for where in ("pinned", "host")])
def test_rows_may_be_freed_while_they_are_converted_for_a_table_of_another_type(where: Any):
    ours = histories_at(where, 1000, dtype=torch.bfloat16)
    every = torch.arange(1000)
    ours.write(0, [slice(0, 1000)], torch.zeros(1000, 256, device=DEVICE), ours.now())
    assert ours.mover is not None
    with torch.cuda.stream(ours.mover.stream):
        torch.cuda._sleep(100_000_000)  # the stream of the tables is behind that of the computation

    rows = torch.ones(1000, 256, device=DEVICE)
    ours.write(0, [slice(0, 1000)], rows, ours.now())
    del rows
    new_tensors = [torch.full((1000, 256), 2.0, device=DEVICE) for _ in range(4)]  # these take memory that is free

    assert ours.rows(0, every).eq(1).all()
    assert all(bool(other.eq(2).all()) for other in new_tensors)


@pytest.mark.parametrize("_", [pytest.param(0, marks=NEEDS_GPU, id="gpu")])
def test_rows_that_have_waited_are_not_written_over_rows_that_are_being_read(_: int):
    ours = histories_at("pinned", 1000)
    every = torch.arange(1000)
    ours.write(0, [slice(0, 1000)], torch.ones(1000, 64, device=DEVICE), ours.now())
    later = torch.full((1000, 64), 2.0, device=DEVICE)
    computed = ours.now()
    assert ours.rows(0, every).eq(1).all()  # compiled, and with memory at hand: nothing below waits for the device

    torch.cuda._sleep(100_000_000)  # the computation is behind the stream of the tables
    read = ours.rows(0, every)
    ours.write(0, [slice(0, 1000)], later, computed)  # as with lag=1, of the step before

    assert read.eq(1).all()
    assert ours.rows(0, every).eq(2).all()


def test_auto_puts_tables_on_the_device_if_they_fit_and_have_no_folder(tmp_path: Path):
    cpu = torch.device("cpu")
    assert choose_where(1, cpu, "auto", None) == "host"
    assert choose_where(1, cpu, "pinned", None) == "pinned"
    if torch.cuda.is_available():
        assert choose_where(1 << 20, DEVICE, "auto", None) == "device"
        assert choose_where(1 << 20, DEVICE, "auto", tmp_path) == "host"
        assert choose_where(1 << 60, DEVICE, "auto", None) == "host"


DATA: dict[str, Any] = {"num_nodes": 300, "num_edges": 2400, "num_classes": 4, "num_features": 10, "seed": 3}
MODELS = {
    "gcn": lambda: [pyg.GCNConv(10, 16), pyg.GCNConv(16, 12), pyg.GCNConv(12, 4)],
    "sage": lambda: [pyg.SAGEConv(10, 16), pyg.SAGEConv(16, 12, aggr="max"), pyg.SAGEConv(12, 4)],
    "gat": lambda: [pyg.GATConv(10, 4, heads=3), pyg.GATConv(12, 12), pyg.GATConv(12, 4)],
}


def train(model: str, device: str, *, norm: str | None = None, **settings: Any) -> tuple[list[float], torch.Tensor]:
    """Losses by epoch, and all weights in one vector, of a short historical run in float64."""
    torch.manual_seed(0)
    data = planted_partition(**DATA)
    net = hl.nn.GNN(MODELS[model](), dropout=0.3, norm=norm).double()
    method = hl.Historical(**({"num_parts": 8, "parts_per_batch": 2, "partition": "random"} | settings))
    run = hl.Trainer(net, data, method, epochs=3, device=device, show=False).fit()
    return [epoch.loss for epoch in run.history], torch.cat([p.detach().cpu().flatten() for p in net.parameters()])


@cache
def train_with_plain_tables(*settings: tuple[str, Any]) -> tuple[list[float], torch.Tensor]:
    """Losses and weights on the CPU, trained once for all kinds of tables."""
    return train("gcn", "cpu", **dict(settings))


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        *((way, {"edge_dropout": 0.2, "lag": 1}) for way in WAYS),
        *((way, {"compensate": True}) for way in WAYS),
        ("device", {}),
        (SMALL_BUFFERS, {"lag": 1}),
    ],
    ids=str,
)
def test_training_is_the_same_with_every_kind_of_table(
    way: str, settings: dict[str, Any], small_buffers: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    expected = train_with_plain_tables(*settings.items())
    if way == SMALL_BUFFERS:
        small_buffers(1024)

    def new_histories(partitioned: PartitionedGraph, name: str) -> Histories:
        return histories_at(WAYS[way], partitioned.partition.num_nodes, torch.device("cpu"), name=name)

    monkeypatch.setattr(PartitionedGraph, "_new_histories", new_histories)
    losses, weights = train("gcn", "cpu", **settings)
    assert losses == expected[0]
    assert torch.equal(weights, expected[1])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"lag": 1, "groups": "fixed"},
    {"compensate": True},
    {"edge_dropout": 0.2, "refresh_every": 1},
    {"halo": "drop", "norm": "batch"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("_", [pytest.param(0, marks=NEEDS_GPU, id="gpu")])
def test_a_gpu_trains_as_the_cpu_does(
    settings: dict[str, Any], model: str, _: int, small_buffers: Callable[[int], None]
):
    if model != "gcn" and settings.keys() & {"refresh_every", "halo"}:
        pytest.skip("once is enough")
    expected = train(model, "cpu", **settings)
    for way in WAYS if model == "gcn" else ("device", "pinned"):
        if way == SMALL_BUFFERS:
            small_buffers(64 * 16 * 8)  # 64 of the widest rows
        losses, weights = train(model, "cuda", **settings, tables=WAYS[way])
        assert losses == pytest.approx(expected[0], rel=1e-8)
        torch.testing.assert_close(weights, expected[1], rtol=1e-6, atol=1e-8)
        if way == "device":
            first = weights
        assert torch.equal(weights, first), "bit for bit, wherever the tables are"


@pytest.mark.parametrize("_", [pytest.param(0, marks=NEEDS_GPU, id="gpu")])
def test_a_run_on_a_gpu_is_resumed_from_its_checkpoint_also_with_tables_in_files(_: int, tmp_path: Path):
    def run(epochs: int, out: Path, resume: bool = False, **settings: Any) -> list[float]:
        torch.manual_seed(0)
        net = hl.nn.GNN(MODELS["gcn"](), dropout=0.3)
        method = hl.Historical(num_parts=8, parts_per_batch=2, partition="random", lag=1, **settings)
        trainer = hl.Trainer(
            net, planted_partition(**DATA), method, epochs=epochs, device="cuda", show=False, out=out, resume=resume
        )
        return [epoch.loss for epoch in trainer.fit().history]

    whole = run(4, tmp_path / "whole", tables="pinned")
    run(2, tmp_path / "cut", tables="pinned")
    assert run(4, tmp_path / "cut", resume=True, tables="pinned") == whole
    assert run(4, tmp_path / "files", folder=tmp_path / "tables") == whole
    assert list((tmp_path / "tables").iterdir())
