"""The optimizer's step: clipping and the update, on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.device.cuda_graph import CapturedCall
from hopline.util import trace

WARM_UP_STEPS = 2
"""Steps before any is captured: they set the optimizer up."""
MAX_CAPTURES = 3
"""Graphs of one optimizer: gradients that keep moving about in memory are not worth another."""
MAX_SEEN_KEYS = 64
"""Places of gradients that are remembered."""


Decays = Sequence[tuple[Sequence[nn.Parameter], float]]
"""Lists of parameters, each with its weight decay."""


def make_optimizer(kind: str, decays: Decays, lr: float) -> torch.optim.Optimizer:
    """The optimizer of that name; on a GPU its learning rate and counters are there too, so that it can be captured.

    Those are float32, which float64 parameters would show: they are trained as on the CPU.
    """
    groups: list[dict[str, Any]] = [
        {"params": list(parameters), "weight_decay": decay} for parameters, decay in decays if len(parameters)
    ]
    first = groups[0]["params"][0]
    device = first.device
    optimizer_class = ops.optimizer_class({"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[kind], device)
    if device.type != "cuda" or first.dtype == torch.float64:
        return optimizer_class(groups, lr=lr)  # type: ignore[call-arg]

    options: dict[str, Any] = {"fused": True} if kind == "sgd" else {"fused": True, "capturable": True}
    for group in groups:  # a rate of its own each, since schedules change them in place, one after the other
        group["lr"] = torch.tensor(lr, dtype=torch.float32, device=device)
    return optimizer_class(groups, lr=groups[0]["lr"], **options)  # type: ignore[call-arg]


def split_decay(module: nn.Module, rest: Iterable[nn.Parameter], decay: float, decay_rest: float | None) -> Decays:
    """The parameters of a module with one weight decay, or with another for the rest."""
    parameters = list(module.parameters())
    if decay_rest is None:
        return [(parameters, decay)]
    rest_ids = {id(p) for p in rest}
    return [
        ([p for p in parameters if id(p) not in rest_ids], decay),
        ([p for p in parameters if id(p) in rest_ids], decay_rest),
    ]


class Update:
    """One optimizer step on the gradients that are there."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None, say: Callable[[str], None]
    ) -> None:
        self.parameters = list(module.parameters())
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.say = say
        self._check_parameters()
        self.device = self.parameters[0].device
        self.captured: dict[Hashable, CapturedCall[None]] = {}
        """By all that a graph takes down: where gradients and settings were before, captured or not."""
        self.steps = 0
        lr = optimizer.param_groups[0]["lr"]
        has_lr_on_gpu = isinstance(lr, Tensor) and lr.device.type == "cuda"
        self.can_capture = self.device.type == "cuda" and has_lr_on_gpu

    def _check_parameters(self) -> None:
        """Neither checkpoints nor the weights that are kept have a parameter that is not the model's."""
        model_ids = {id(p) for p in self.parameters}
        for parameter in self._trained_parameters():
            if id(parameter) not in model_ids:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's, so no "
                    "checkpoint would hold it: make it one of the model's (model.temperature = torch.nn.Parameter(...))"
                )

    def _trained_parameters(self) -> list[Tensor]:
        """What the optimizer steps by now: a callback may have added to it."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def clear(self) -> None:
        """No gradients, of parameters either that the optimizer does not step: backward fills them too."""
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self) -> None:
        with trace.span("optimizer", self.device):
            self.steps += 1
            if not self.can_capture:
                self._run()
                return
            captured = self._captured_call(self._key())
            is_warm = self.steps > WARM_UP_STEPS
            if captured.is_due and is_warm and self.num_graphs < MAX_CAPTURES:
                self._capture(captured)
            if captured.graph is not None:
                captured.replay()
            else:
                captured.runs += 1
                self._run()

    @property
    def num_graphs(self) -> int:
        return sum(captured.graph is not None for captured in self.captured.values())

    def _run(self) -> None:
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trained_parameters(), self.clip_norm)
        self.optimizer.step()

    def _key(self) -> Hashable:
        """What a graph takes down: where gradients are, and settings such as weight decay, which callbacks change."""
        groups = self.optimizer.param_groups
        gradients = [0 if p.grad is None else p.grad.data_ptr() for group in groups for p in group["params"]]
        settings = [value for group in groups for name, value in group.items() if name != "params"]
        return *gradients, *(value.data_ptr() if isinstance(value, Tensor) else value for value in settings)

    def _captured_call(self, key: Hashable) -> CapturedCall[None]:
        """The step with gradients and settings at that place; a new one where they were never before."""
        if key not in self.captured:
            if len(self.captured) >= MAX_SEEN_KEYS:
                self.captured = {other: call for other, call in self.captured.items() if call.graph is not None}
            # Run once before it is captured: gradients that were never there before may move each time.
            self.captured[key] = CapturedCall(
                self.device, purpose="updates", subject="the optimizer's step is", say=self.say, warm_up=1
            )
        return self.captured[key]

    def _capture(self, captured: CapturedCall[None]) -> None:
        prepare = getattr(self.optimizer, "prepare", None)  # of our own kernels
        if prepare is not None:
            prepare()
        # It can be captured at any later step: it waits for no evaluation that has the lock.
        is_captured = captured.capture(nullcontext(self._run), wait=False)
        if captured.is_settled and not is_captured:
            self.can_capture = False
            self.captured = {}
