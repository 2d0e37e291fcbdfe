"""Settings of training, apart from those of the method.

They are plain data, and reading them needs no torch. `hopline train --keys` prints the text below each
field as its description.
"""

from __future__ import annotations

from typing import Literal

from hopline.util.config import check_fields, settings

EVERY = {"step": 10, "plateau": 5}
"""Default of `Schedule.every`, by the name of the schedule: epochs of `step`, evaluations of `plateau`."""


@settings
class Schedule:
    """How the learning rate changes over the epochs: `Trainer(schedule=hl.Schedule(...))`.

    A run may be resumed with another number of epochs. From there on, its rates are those of a run that had
    this number from the start.

    Raises:
        ValueError: A field has a value that is not allowed. The message says which are.

    Example:
        >>> schedule = hl.Schedule(name="cosine", warmup=5)
        >>> schedule.floor
        0.0
    """

    name: Literal["constant", "cosine", "plateau", "step"] = "constant"
    """Learning rate over the epochs: `constant`, `cosine` down to `floor` after the last epoch, `plateau`
    (lower when the validation metric stalls) or `step` (lower every few epochs)."""
    warmup: int = 0
    """Length of the warm-up, in epochs, over which the rate rises linearly to `lr`."""
    factor: float = 0.5
    """Factor by which `plateau` and `step` lower the rate."""
    every: int | None = None
    """Interval of `step`, in epochs, or patience of `plateau`, in evaluations without a better validation
    metric (training loss without a validation split). Default: 10 epochs or 5 evaluations."""
    floor: float = 0.0
    """Lowest learning rate."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor < 0:
            raise ValueError(f"schedule.floor must be at least 0, not {self.floor}")
        if not 0 < self.factor < 1:
            raise ValueError(f"schedule.factor must be between 0 and 1, not {self.factor}")
        min_every = 0 if self.name == "plateau" else 1
        if self.every is not None and self.every < min_every:
            raise ValueError(f"schedule.every of {self.name} must be at least {min_every}, not {self.every}")
        if self.warmup < 0:
            raise ValueError(f"schedule.warmup must be at least 0, not {self.warmup}")


@settings
class TrainSettings:
    """How to train, apart from the method: the fields are keyword arguments of `Trainer`.

    Raises:
        ValueError: A field has a value that is not allowed. The message says which are.

    Example:
        >>> hl.extend.TrainSettings(epochs=3, lr=0.01).optimizer
        'adam'
    """

    epochs: int = 10
    """Number of epochs to train, unless training stops early."""
    lr: float = 0.003
    """Learning rate."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    weight_decay_rest: float | None = None
    """Weight decay of encoder and head, or of the last conv in a model without them. If no conv has
    parameters: of the last layer that has some. Default: `weight_decay`, as of all other parameters."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer: `adam`, `adamw` or `sgd`."""
    schedule: Schedule = Schedule()
    """Learning rate over the epochs: a `Schedule`."""
    clip_norm: float | None = None
    """Largest norm of the gradient. A larger gradient is scaled down to it. Default: no limit."""
    accumulate: int = 1
    """Number of batches, or other units of work that the method yields, per optimizer step. The gradient is
    that of the mean loss over all their training examples."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of the forward pass: `bf16` runs it under bfloat16 autocast, and parameters stay
    float32."""
    evaluate_every: int = 1
    """Interval between evaluations, in epochs. The last epoch is always evaluated."""
    evaluate: Literal["blocking", "async"] = "blocking"
    """Mode of evaluation: `blocking` (training waits) or `async` (training continues while a thread
    evaluates a snapshot of the weights on the same device). The results are the same."""
    patience: int | None = None
    """Patience of early stopping, in evaluations without a better validation metric. Default: no early
    stopping."""
    inference: Literal["exact", "sampled"] = "exact"
    """Edges of validation: `exact` uses every edge, `sampled` the method's fan-outs. The final test is
    always exact."""
    seed: int = 0
    """Seed of all random draws of the run. In Python, the model's initial weights are not among them: the
    caller has drawn them before."""
    device: str = "cpu"
    """Device that trains, such as cuda or cuda:1."""
    resume: bool = False
    """Whether to resume from the checkpoint in the run folder, if there is one. Without out=: in the folder
    of the newest run with these settings."""
    overwrite: bool = False
    """Permission to replace a run in the folder out=, once the new one has made its first step."""
    checkpoint_s: float = 60.0
    """Interval between checkpoints, in seconds. It is at least 50 times as long as writing one takes, except
    with 0: then every step writes one. The end of training always writes one."""
    show: bool = True
    """Whether to show progress."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("epochs", "accumulate", "evaluate_every"):
            count = getattr(self, name)
            if count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
        for name in ("weight_decay", "weight_decay_rest"):
            decay = getattr(self, name)
            if decay is not None and decay < 0:
                raise ValueError(f"{name} must be at least 0, not {decay}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {self.seed}")
        if self.checkpoint_s < 0:
            raise ValueError(f"checkpoint_s must be at least 0 seconds, not {self.checkpoint_s}")
        if self.evaluate != "blocking" and self.schedule.name == "plateau":
            raise ValueError(
                "schedule.name=plateau needs each evaluation before the next epoch: set evaluate=blocking, or "
                "schedule.name=cosine"
            )
        if self.resume and self.overwrite:
            raise ValueError("resume= continues the run that overwrite= would replace: set one of them")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be above 0 or none, not {self.clip_norm}")
