"""What a run measures of itself: loss, seconds and counters of each epoch, and its peak memory."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import torch

from hopline import ops
from hopline.report.bottleneck import PREPARING_STAGES, TRAINING_STAGES
from hopline.training.callbacks import EpochEnd
from hopline.util import trace
from hopline.util.config import CHANGES_TRAINING

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


class RunTimes:
    """Seconds of stages and counters by epoch, from the library's spans. The trainer makes one per `fit`."""

    def __init__(self) -> None:
        self.timers = trace.Timers()
        self.counters = trace.Counters()

    @contextmanager
    def listen(self) -> Iterator[None]:
        with trace.listen(self.timers), trace.listen(self.counters):
            yield

    def end_training(self, trainer: Trainer, epoch: int, started: float) -> EpochEnd:
        """Synchronise with the device, check the epoch for errors, and collect its loss, times and counters.

        Collective. Counters from now on belong to the next epoch. started: the reading of `time.perf_counter` when
        the epoch began.
        """
        num_seeds = trainer.position.seeds
        if not num_seeds:
            raise ValueError(
                f"the method gave no batches for {trainer.num_seeds:,} training nodes: set drop_last=false, or make "
                f"batch_size smaller {CHANGES_TRAINING}"
            )
        mean_loss = trainer.world.sum([float(trainer.position.loss_sum)])[0] / num_seeds
        trace.end_device_spans()
        ops.check_device_errors()
        # Tables report counters of this epoch, so this comes before `counters.next_epoch`.
        for table in trainer.data.tables.values():
            table.end_epoch()
        if not math.isfinite(mean_loss):
            raise ValueError(
                f"the loss became {mean_loss} in epoch {epoch}: lower lr=, set clip_norm=, and check the features by "
                "`hopline verify`"
            )

        epoch_s = time.perf_counter() - started
        stages = self.timers.this_epoch()
        # Stages that work, without those that wait. For stages in threads, `prepare_s` leaves out the time
        # in which a thread had no core.
        work_s = {name: seconds for name, seconds in stages.items() if name in (*PREPARING_STAGES, *TRAINING_STAGES)}
        work_s |= trainer.work.describe().prepare_s
        self.counters.next_epoch()
        return EpochEnd(
            epoch=epoch,
            loss=mean_loss,
            lr=float(trainer.optimizer.param_groups[0]["lr"]),
            seconds=epoch_s,
            seeds_per_s=num_seeds / epoch_s,
            slowest_stage=max(work_s, key=lambda name: work_s[name], default=""),
            stages=stages,
            work=work_s,
            counters=self.counters.last_epoch(),
        )

    def end_epoch(self) -> None:
        """Times from now on belong to the next epoch. Called after an evaluation, which counts for the epoch before."""
        self.timers.next_epoch()


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Peak memory of this process so far, in bytes: "host", and "device" if that is a GPU."""
    peaks = {"host": peak_memory_bytes()}
    if device.type == "cuda":
        # Reserved, not allocated: other processes cannot use it. Measuring steps for a budget resets the
        # peak to the bytes reserved at that time, which changes little: torch seldom gives them back.
        peaks["device"] = torch.cuda.max_memory_reserved(device)
    return peaks


def peak_memory_bytes() -> int:
    """Peak resident memory of this process so far; without `resource`, the current one."""
    try:
        import resource
    except ImportError:
        return psutil.Process().memory_info().rss
    # `ru_maxrss` is in bytes on macOS, and in KiB on Linux.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
