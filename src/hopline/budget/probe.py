"""Steps of a copy of the model, measured before a run so that a plan need not go by the bound."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from hopline.budget.predictor import Predictor
from hopline.contract import Job, Outline
from hopline.core.batch import Batch
from hopline.core.sizes import Sizes
from hopline.device.meter import meter_of
from hopline.device.out_of_memory import free_memory, is_out_of_memory
from hopline.nn.whole_module import as_walkable
from hopline.units.batch_unit import BatchUnit, own_threads

MAX_PROBE_SEEDS, LONG_S = 1024, 0.3
"""Most seeds of the steps by which a model is learnt, and the seconds after which one is the last."""


def measure_steps(
    predictor: Predictor, outline: Outline, draw: Callable[[int], Batch], limit: float = math.inf
) -> None:
    """Measure steps of a copy of the model: from one seed on to more, none above the limit as far as is known, and none
    that takes long.

    draw: (number of seeds) -> a batch, on the host.
    """
    job, size = job_of(outline), 1
    with torch.random.fork_rng([outline.device] if outline.device.type == "cuda" else []), own_threads(job):
        while True:
            try:
                batch = draw(size)
                sizes, began = Sizes.of(batch), time.perf_counter()
                if predictor.num_seen and predictor.expected_bytes(sizes) > limit:
                    break
                batch = batch.to(outline.device)
                with meter_of(outline.device) as meter:
                    BatchUnit(job, batch).forward_backward(batch.num_seeds)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                break  # what is known was too good, and stays all that is known
            job.module.zero_grad(set_to_none=True)
            predictor.observe(sizes, meter.peak_bytes)
            lasted = time.perf_counter() - began > LONG_S or size >= min(MAX_PROBE_SEEDS, outline.train_ids.numel())
            if predictor.is_sure and lasted:
                break
            size = min(2 * size, outline.train_ids.numel())
    free_memory(outline.device)


def job_of(outline: Outline) -> Job:
    """The job with a copy of the model, so that it leaves no trace in it."""
    module: nn.Module = copy.deepcopy(outline.job.module)
    return replace(outline.job, model=as_walkable(module), module=module.train(), say=lambda text: None)
