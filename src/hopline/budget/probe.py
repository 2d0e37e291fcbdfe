"""Measured steps of a copy of the model before a run, so that its plan need not rely on the bound.

The bound by widths is far above the peaks of steps. A plan by the bound would split batches that fit.
`measure_steps` trains a copy of the model on batches of 1, 2, 4, ... seeds and gives each peak to the
predictor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from hopline.budget.plan import Outline
from hopline.budget.predictor import Predictor
from hopline.contract import Job
from hopline.core.batch import Batch
from hopline.core.batch_sizes import Sizes
from hopline.device.meter import meter_of
from hopline.device.out_of_memory import free_memory, is_out_of_memory
from hopline.device.snapshots import preserve_rng
from hopline.nn.probe import copy_module
from hopline.units.batch_unit import BatchUnit
from hopline.units.job import for_copy
from hopline.units.own_threads import own_threads

# ---- ends of the probe, once the predictor is sure

MAX_PROBE_SEEDS = 1024
LARGE_STEP_BYTES = 256 << 20
"""A step whose peak is larger is the last. A rule of thumb: it takes some tenths of a second on a CPU.

Bytes and not seconds, so that a plan does not depend on how busy the machine is. If a plan is refused, the
message names a larger budget, which must still be enough when the user tries it.
"""


def measure_steps(
    predictor: Predictor, outline: Outline, draw: Callable[[int], Batch], limit: float = math.inf
) -> None:
    """Measure steps of a copy of the model with 1, 2, 4, ... seeds, and give their peaks to the predictor.

    It ends when the next step is expected to take more than `limit` bytes, or when a step runs out of
    memory. It also ends when the predictor is sure and the last step was large, by its seeds or its bytes.
    Torch's random state is restored at the end.

    draw: makes a batch of that many seeds, on the host.
    """
    job = job_of(outline)
    num_train = len(outline.job.examples)
    num_seeds = 1
    is_first = True
    with preserve_rng(outline.device), own_threads(job):
        while True:
            try:
                batch = draw(num_seeds)
                sizes = Sizes.of(batch)
                # The first step always runs: before it, the expected bytes are the bound.
                if predictor.num_seen and predictor.expected_bytes(sizes) > limit:
                    break
                batch = batch.to(outline.device)
                start_s = time.perf_counter()
                with meter_of(outline.device) as meter:
                    BatchUnit(job, batch).forward_backward(batch.num_examples)
                seconds = seconds_since(start_s, outline.device)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                break  # the expected bytes were too low; the predictor keeps the steps it has
            job.module.zero_grad(set_to_none=True)
            if is_first:  # convs of the copy are tried out when they first run, so it does not count
                is_first = False
                continue
            predictor.observe(sizes, meter.peak_bytes, seconds)
            was_large = num_seeds >= min(MAX_PROBE_SEEDS, num_train) or meter.peak_bytes > LARGE_STEP_BYTES
            if predictor.is_sure and was_large:
                break
            num_seeds = min(2 * num_seeds, num_train)
    free_memory(outline.device)


def seconds_since(start_s: float, device: torch.device) -> float:
    """Seconds since `start_s` of `time.perf_counter`, once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def job_of(outline: Outline) -> Job:
    """The job with a copy of the model, so that the probe does not change the model, and without messages."""
    return for_copy(outline.job, copy_module(outline.job.module).train())
