"""The learning rate over the epochs: a warm-up, then a schedule of torch, both stepped once per epoch.

`OwnScheduler` steps a scheduler of torch that a function of the user has made (`OwnSchedule`).

On a GPU the rate of a parameter group may be a tensor that a captured optimizer step reads. Such a tensor
is changed in place, and never read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, ReduceLROnPlateau, StepLR

from hopline.metrics import Mode
from hopline.training.optimizer import describe_call
from hopline.training.settings import EVERY, Schedule

MakeScheduler = Callable[[Optimizer], LRScheduler]
"""A function of the user, such as `lambda optimizer: StepLR(optimizer, 10)`."""


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
        schedulers = {"plateau": self._plateau, "by_epoch": self._by_epoch, "warmup": self._warmup}
        return {name: scheduler for name, scheduler in schedulers.items() if scheduler is not None}

    def state_dict(self) -> dict[str, Any]:
        states = {name: scheduler.state_dict() for name, scheduler in self._schedulers().items()}
        return {"epoch": self.epoch, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. With another number of epochs, rates are those of a run of that number."""
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

    def after_step(self) -> None:
        """Called after every step of the optimizer. The rate changes after epochs alone."""

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


class OwnSchedule:
    """The user's function that makes a scheduler of torch, and when to step that one: every "epoch" or "step"."""

    def __init__(self, make: MakeScheduler, every: Literal["epoch", "step"]) -> None:
        self.make = make
        self.every: Literal["epoch", "step"] = every
        self.name = describe_call(make)
        """Of the function until it has made a scheduler, then of that one's class."""

    def scheduler(self, optimizer: Optimizer, mode: Mode | None) -> OwnScheduler:
        """The scheduler of an optimizer. mode: as `OwnScheduler` takes it."""
        scheduler = OwnScheduler(self.make, optimizer, self.every, mode)
        self.name = type(scheduler.scheduler).__name__
        return scheduler


class OwnScheduler:
    """A scheduler of torch, made by a function of the user and stepped after every epoch or every step.

    mode: of the value that `step` will get, for ReduceLROnPlateau. None: not known.
    """

    def __init__(
        self, make: MakeScheduler, optimizer: Optimizer, every: Literal["epoch", "step"], mode: Mode | None
    ) -> None:
        scheduler = make(optimizer)
        if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not optimizer:
            raise ValueError(
                f"schedule= returned {scheduler!r:.60}: return a scheduler of the optimizer that it is given, as "
                "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
            )
        self.scheduler = scheduler
        self.every = every
        self.plateau = scheduler if isinstance(scheduler, ReduceLROnPlateau) else None
        if self.plateau is not None and every == "step":
            raise ValueError(
                "ReduceLROnPlateau goes by evaluations, which come after epochs: leave out schedule_every="
            )
        if self.plateau is not None and mode not in (None, self.plateau.mode):
            raise ValueError(
                f"ReduceLROnPlateau has mode={self.plateau.mode!r}, and what it goes by is best at its {mode}: make it "
                f"with mode={mode!r}"
            )

    def after_step(self) -> None:
        if self.every == "step":
            self.scheduler.step()

    def step(self, value: float, *, evaluated: bool) -> None:
        """As `Scheduler.step`. value: higher is better, so a scheduler of mode "min" gets it negated."""
        if self.plateau is not None:
            if evaluated:
                self.plateau.step(value if self.plateau.mode == "max" else -value)
        elif self.every == "epoch":
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)
