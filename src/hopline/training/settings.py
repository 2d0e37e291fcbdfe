"""Settings of training, apart from the method: plain data, so that reading them needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hopline.util.config import RemovedSetting, check_fields, settings

EVERY = {"step": 10, "plateau": 5}
"""`Schedule.every` by default."""
SAME_DEVICE = "set evaluate=async or evaluate=blocking, which evaluate on the device that trains"
"""What replaces evaluation by a process on the CPU."""


@settings
class Schedule:
    """How the learning rate changes over the epochs: `Trainer(schedule=hl.Schedule(...))`.

    Raises:
        ValueError: A field has a value that is not allowed. The message says which are.

    Example:
        >>> schedule = hl.Schedule(name="cosine", warmup=5)
        >>> schedule.floor
        0.0
    """

    REMOVED: ClassVar = {"patience": RemovedSetting(5, "set schedule.every= with schedule.name=plateau")}
    name: Literal["constant", "cosine", "plateau", "step"] = "constant"
    """Constant; a cosine that reaches `floor` after the last epoch; lower on a plateau; or lower every few epochs.
    A run that is resumed with another number of epochs goes on with the rates of a run of that many."""
    warmup: int = 0
    """Epochs over which the rate first rises linearly to `lr`."""
    factor: float = 0.5
    """What `plateau` and `step` multiply the rate by."""
    every: int | None = None
    """Epochs from one `step` to the next, 10 by default; evaluations without a better validation metric (or loss,
    without a validation split) that `plateau` lets pass, 5 by default."""
    floor: float = 0.0
    """The lowest rate."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.floor >= 0:
            raise ValueError(f"schedule.floor must be at least 0, not {self.floor}")
        if not 0 < self.factor < 1:
            raise ValueError(f"schedule.factor must be between 0 and 1, not {self.factor}")
        min_every = 0 if self.name == "plateau" else 1
        if self.every is not None and self.every < min_every:
            raise ValueError(f"schedule.every of {self.name} must be at least {min_every}, not {self.every}")
        if self.warmup < 0:
            raise ValueError(f"schedule.warmup must be at least 0, not {self.warmup}")


def upgrade_schedule(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored schedule as this version has it: `every` and `patience` were two settings, and are one."""
    if "patience" not in stored:
        return dict(stored)
    name = stored.get("name")
    every = stored["patience"] if name == "plateau" else stored.get("every")
    is_default = name not in EVERY or every == EVERY[name]
    upgraded = {key: value for key, value in stored.items() if key != "patience"}
    return upgraded | {"every": None if is_default else every}


@settings
class TrainSettings:
    """How to train, apart from the method: the fields are keyword arguments of `Trainer`.

    Raises:
        ValueError: A field has a value that is not allowed. The message says which are.

    Example:
        >>> hl.extend.TrainSettings(epochs=3, lr=0.01).optimizer
        'adam'
    """

    REMOVED: ClassVar = {
        "evaluate_on": RemovedSetting("device", SAME_DEVICE),
        "evaluate=async_cpu": RemovedSetting(None, SAME_DEVICE),
    }
    epochs: int = 10
    """Epochs to train: exactly so many, unless training stops early."""
    lr: float = 0.003
    """Learning rate."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    weight_decay_rest: float | None = None
    """Weight decay of the last conv, or of encoder and head where there are any; as `weight_decay` by default."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer."""
    schedule: Schedule = Schedule()
    """How the learning rate changes over the epochs."""
    clip_norm: float | None = None
    """Largest norm of the gradient; larger ones are scaled down."""
    accumulate: int = 1
    """Units whose gradients make one optimizer step, weighted by their seeds."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 runs the forward pass under bfloat16 autocast; parameters stay float32."""
    evaluate_every: int = 1
    """Epochs from one evaluation to the next; the last epoch is always evaluated."""
    evaluate: Literal["blocking", "async"] = "blocking"
    """Training waits for each evaluation (blocking), or goes on while a thread evaluates on the same device (async), on
    a GPU in a stream of its own. The run is the same."""
    patience: int | None = None
    """Evaluations without a better validation metric before training stops early."""
    inference: Literal["exact", "sampled"] = "exact"
    """Validate over every edge, or over sampled ones with the method's fan-outs; the final test is exact either way."""
    seed: int = 0
    """Seed of every random draw of the run; model weights are the caller's."""
    device: str = "cpu"
    """Where the model trains."""
    resume: bool = False
    """Go on from the checkpoint in the run folder (without out=, that of the newest run with these settings), as if
    nothing had happened; begin where there is none."""
    checkpoint_s: float = 60.0
    """Seconds from one checkpoint to the next, or 50 times what writing one takes where that is more; one is written at
    the end of training too. 0: after every step."""
    show: bool = True
    """Show progress."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("epochs", "accumulate", "evaluate_every"):
            count = getattr(self, name)
            if count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
        for name in ("weight_decay", "weight_decay_rest"):
            decay = getattr(self, name)
            if decay is not None and not decay >= 0:
                raise ValueError(f"{name} must be at least 0, not {decay}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {self.seed}")
        if not self.checkpoint_s >= 0:
            raise ValueError(f"checkpoint_s must be at least 0 seconds, not {self.checkpoint_s}")
        if self.evaluate != "blocking" and self.schedule.name == "plateau":
            raise ValueError(
                "schedule.name=plateau needs each evaluation before the next epoch: set evaluate=blocking, or "
                "schedule.name=cosine"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0 or none, not {self.clip_norm}")
