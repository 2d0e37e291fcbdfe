"""Meters of memory: the peak and the laps of what lives at once, on the host and on a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hopline.budget.guard import limit_cuda_memory
from hopline.budget.plan import Budget
from hopline.device.meter import TensorMeter, free_bytes, meter_of
from tests.support.helpers import batch_of, conv_of, randn, random_graph

MB = 1 << 20
FLOATS = MB // 4


def test_counts_what_lives_at_once():
    with meter_of("cpu") as meter:
        first = torch.zeros(FLOATS)
        del first
        second = torch.zeros(2 * FLOATS)
        third = torch.zeros(3 * FLOATS)
    assert second.numel() + third.numel() == 5 * FLOATS
    assert meter.peak_bytes == 5 * MB


def test_views_and_work_in_place_take_nothing():
    rows = torch.zeros(4, FLOATS)
    with meter_of("cpu") as meter:
        rows.t().add_(1)
        for view in rows.unbind():
            view.mul_(2)
    assert meter.peak_bytes == 0


def test_a_storage_lives_as_long_as_anything_that_holds_it():
    with meter_of("cpu") as meter:
        array = torch.zeros(FLOATS).numpy()
        view = torch.zeros(FLOATS)[:1]
        gc.collect()
        torch.zeros(FLOATS)
    assert array.size + view.numel() > 0
    assert meter.peak_bytes == 3 * MB


def test_what_an_out_argument_grows_by_is_counted():
    with meter_of("cpu") as meter:
        out = torch.empty(0)
        torch.add(torch.ones(1), torch.ones(FLOATS), out=out)
    assert meter.peak_bytes == 2 * MB + 4


def test_counts_what_autograd_keeps_and_makes():
    weight = torch.ones(FLOATS, requires_grad=True)
    with meter_of("cpu") as meter:
        hidden = weight.exp()  # kept for backward
        hidden.exp().sum().backward()  # so is this; backward makes its gradient, and that of the weights
    # Two results; then the gradient of the inner one beside both; then, with one result gone, the weights'.
    assert 3 * MB <= meter.peak_bytes <= 4 * MB + 64
    with meter_of("cpu") as again:
        weight.detach().sum()
    assert again.peak_bytes == 4


def test_what_was_there_before_does_not_count_when_it_is_freed():
    before = torch.zeros(FLOATS)
    with TensorMeter() as meter:
        before = torch.zeros(2 * FLOATS)
        torch.zeros(FLOATS)
    assert before.numel() == 2 * FLOATS
    assert meter.peak_bytes == 3 * MB


def test_a_lap_is_counted_above_what_was_there_when_it_began():
    with meter_of("cpu") as meter:
        first = torch.zeros(4 * FLOATS)
        second = torch.zeros(FLOATS)
        del first
        meter.lap()
        third = torch.zeros(2 * FLOATS)
        del third, second
    assert meter.peak_bytes == 5 * MB
    assert meter.lap_bytes == 2 * MB


def test_nested_meters_both_count():
    with meter_of("cpu") as outer:
        held_tensor = torch.zeros(FLOATS)
        with meter_of("cpu") as inner:
            torch.zeros(FLOATS)
    assert held_tensor.numel() == FLOATS
    assert (outer.peak_bytes, inner.peak_bytes) == (2 * MB, MB)


def test_a_step_gives_the_same_numbers_under_the_meter():
    graph = random_graph()
    x = randn(50, 6)
    conv = conv_of("gat", 6, 4)
    block = batch_of(graph, x, (3,)).blocks[0]
    plain = conv(x, block.edge_index)
    with meter_of("cpu") as meter:
        assert torch.equal(conv(x, block.edge_index), plain)
    assert meter.peak_bytes > plain.numel() * 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_counts_by_its_allocator():
    torch.zeros(1, device="cuda")
    with meter_of("cuda") as meter:
        torch.zeros(FLOATS, device="cuda")
        held_tensor = torch.zeros(8 * FLOATS, device="cuda")
        meter.lap()
        torch.zeros(2 * FLOATS, device="cuda")
    assert held_tensor.numel() == 8 * FLOATS
    # A block that is at hand may be larger by up to a MiB.
    assert (meter.peak_bytes, meter.lap_bytes) == (pytest.approx(10 * MB, abs=2 * MB), pytest.approx(2 * MB, abs=MB))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_free_on_a_gpu_is_within_the_limit_of_the_process():
    device = torch.device("cuda", 0)
    held_tensor = torch.zeros(MB, device=device)
    gc.collect()
    torch.cuda.empty_cache()
    limit_bytes = torch.cuda.memory_reserved(device) + (1 << 30)  # other tests may have left something
    before = free_bytes(device)
    total = torch.cuda.get_device_properties(device).total_memory
    with limit_cuda_memory(Budget(device=str(limit_bytes)), device):
        assert held_tensor.nbytes < limit_bytes - free_bytes(device) < limit_bytes
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * limit_bytes, dtype=torch.uint8, device=device)
        torch.empty(free_bytes(device) // 2, dtype=torch.uint8, device=device)
    assert torch.cuda.get_per_process_memory_fraction(device) == 1
    assert abs(free_bytes(device) - before) < 0.01 * total


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of resident memory")
@pytest.mark.parametrize("conv", ["sage", "gat"])
def test_agrees_with_the_growth_of_resident_memory(conv: str):
    script = Path(__file__).parents[2] / "benchmarks" / "predict_memory.py"
    # Freed memory goes back at once, or holes between blocks would be counted as growth.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MB), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), "--resident", conv]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=settings)
    assert process.returncode == 0, process.stderr
    counted, resident = map(int, process.stdout.split()[-2:])
    assert counted > 100e6
    assert abs(counted - resident) < 0.1 * resident
