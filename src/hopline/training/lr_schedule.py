"""Learning-rate schedules, stepped once per epoch."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, ReduceLROnPlateau, StepLR

from hopline.training.settings import EVERY, Schedule


class Scheduler:
    """The rate after each epoch: first the warm-up, then the schedule."""

    def __init__(self, spec: Schedule, optimizer: Optimizer, epochs: int) -> None:
        self.epoch = 0
        self.warmup = spec.warmup
        self.floor = spec.floor
        self.optimizer = optimizer
        self._plateau: ReduceLROnPlateau | None = None
        self._by_epoch: CosineAnnealingLR | StepLR | None = None
        every = EVERY.get(spec.name) if spec.every is None else spec.every
        if spec.name == "plateau":
            assert every is not None
            self._plateau = ReduceLROnPlateau(
                optimizer,
                mode="max",
                factor=spec.factor,
                patience=every,
                min_lr=spec.floor,
                threshold=0.0,
            )
        elif spec.name == "cosine":
            self._by_epoch = CosineAnnealingLR(optimizer, max(1, epochs - spec.warmup), eta_min=spec.floor)
        elif spec.name == "step":
            assert every is not None
            self._by_epoch = StepLR(optimizer, every, gamma=spec.factor)

        # The warm-up's first factor is set by its constructor, so it comes last.
        self._warmup: LinearLR | None = None
        if spec.warmup:
            self._warmup = LinearLR(optimizer, start_factor=1 / (spec.warmup + 1), total_iters=spec.warmup)

    def _schedulers(self) -> dict[str, LRScheduler]:
        schedulers = {"plateau": self._plateau, "by_epoch": self._by_epoch, "warmup": self._warmup}
        return {name: scheduler for name, scheduler in schedulers.items() if scheduler is not None}

    def state_dict(self) -> dict[str, Any]:
        states = {name: scheduler.state_dict() for name, scheduler in self._schedulers().items()}
        return {"epoch": self.epoch, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; where the run now has another number of epochs, with the rates of such a run."""
        self.epoch = state["epoch"]
        cosine = self._by_epoch if isinstance(self._by_epoch, CosineAnnealingLR) else None
        num_epochs = 0 if cosine is None else cosine.T_max
        for name, scheduler in self._schedulers().items():
            scheduler.load_state_dict(state[name])
        if cosine is None or cosine.T_max == num_epochs:
            return

        cosine.T_max = num_epochs
        if cosine.last_epoch > 0:  # before, the rate is the warm-up's
            # Torch makes each rate from the one before, and after the last epoch that is the floor for good.
            share = (1 + math.cos(math.pi * min(cosine.last_epoch / num_epochs, 1))) / 2
            for group, base_lr in zip(self.optimizer.param_groups, cosine.base_lrs, strict=True):
                lr = float(self.floor + (base_lr - self.floor) * share)
                if isinstance(group["lr"], Tensor):  # a captured step reads it where it is
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def step(self, value: float, *, evaluated: bool) -> None:
        """After an epoch; `value` (higher is better) counts for the plateau where it was just evaluated."""
        self.epoch += 1
        if self._warmup is not None and self.epoch <= self.warmup:
            self._warmup.step()
        elif self._plateau is not None:
            if evaluated:
                self._plateau.step(value)
        elif self._by_epoch is not None:
            self._by_epoch.step()
            for group in self.optimizer.param_groups:  # StepLR knows no floor
                if isinstance(group["lr"], Tensor):  # on a GPU, which is not waited for
                    group["lr"].clamp_(min=self.floor)
                else:
                    group["lr"] = max(group["lr"], self.floor)
