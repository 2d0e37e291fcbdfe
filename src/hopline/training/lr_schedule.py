"""The learning rate over the epochs: a warm-up, then a schedule of torch, both stepped once per epoch.

On a GPU the rate of a parameter group may be a tensor that a captured optimizer step reads. Such a tensor
is changed in place, and never read on the host.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, ReduceLROnPlateau, StepLR

from hopline.training.settings import EVERY, Schedule


class Scheduler:
    """Sets the learning rate of an optimizer after each epoch: first by the warm-up, then by the schedule.

    epochs: the number of epochs of the run, after which a cosine reaches its floor.
    """

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

        # Made last: its constructor already multiplies the rate by the first factor of the warm-up. The
        # schedules above must see the full rate. Epoch i of the warm-up has i / (warmup + 1) of it.
        self._warmup: LinearLR | None = None
        if spec.warmup:
            self._warmup = LinearLR(optimizer, start_factor=1 / (spec.warmup + 1), total_iters=spec.warmup)

    def _schedulers(self) -> dict[str, LRScheduler]:
        """Torch's schedulers that are in use, by their names in a checkpoint."""
        schedulers = {"plateau": self._plateau, "by_epoch": self._by_epoch, "warmup": self._warmup}
        return {name: scheduler for name, scheduler in schedulers.items() if scheduler is not None}

    def state_dict(self) -> dict[str, Any]:
        states = {name: scheduler.state_dict() for name, scheduler in self._schedulers().items()}
        return {"epoch": self.epoch, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        If the run now has another number of epochs, its rates are those of a run of that number.
        """
        self.epoch = state["epoch"]
        # Loading a state overwrites `T_max`, the length of the cosine, so the new one is read before.
        cosine = self._by_epoch if isinstance(self._by_epoch, CosineAnnealingLR) else None
        cosine_epochs = 0 if cosine is None else cosine.T_max
        for name, scheduler in self._schedulers().items():
            scheduler.load_state_dict(state[name])
        if cosine is None or cosine.T_max == cosine_epochs:
            return

        cosine.T_max = cosine_epochs
        # At epoch 0 of the cosine, the rate is that of the warm-up.
        if cosine.last_epoch > 0:
            # Torch computes each rate from the one before. It would continue from the old cosine, or stay at
            # the floor after the old cosine's end. Set the rate that the new cosine has at this epoch:
            #     floor + (base_lr - floor) * (1 + cos(pi * epoch / cosine_epochs)) / 2
            share = (1 + math.cos(math.pi * min(cosine.last_epoch / cosine_epochs, 1))) / 2
            for group, base_lr in zip(self.optimizer.param_groups, cosine.base_lrs, strict=True):
                lr = float(self.floor + (base_lr - self.floor) * share)
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def step(self, value: float, *, evaluated: bool) -> None:
        """Set the rate after an epoch.

        value: the validation score, higher is better. Only the plateau schedule reads it, if `evaluated`.
        evaluated: whether an evaluation was due after this epoch.
        """
        self.epoch += 1
        if self._warmup is not None and self.epoch <= self.warmup:
            self._warmup.step()
        elif self._plateau is not None:
            if evaluated:
                self._plateau.step(value)
        elif self._by_epoch is not None:
            self._by_epoch.step()
            # StepLR has no floor of its own.
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].clamp_(min=self.floor)
                else:
                    group["lr"] = max(group["lr"], self.floor)
