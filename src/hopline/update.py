"""The optimizer's step: clipping and the update, on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops, recording, trace

WARM_UP_STEPS = 2
MOST_CAPTURES = 3
MOST_SEEN = 64
"""Gradients that keep moving about in memory are not worth another graph, nor is every place to be remembered."""


Decays = Sequence[tuple[Sequence[nn.Parameter], float]]
"""Lists of parameters, each with its weight decay."""


def make_optimizer(kind: str, decays: Decays, lr: float) -> torch.optim.Optimizer:
    """The optimizer of that name; on a GPU its learning rate and counters are there too, so that it can be captured.

    Those are float32, which float64 parameters would show: they are trained as on the CPU.
    """
    groups: list[dict[str, Any]] = [{"params": list(ps), "weight_decay": decay} for ps, decay in decays if len(ps)]
    device, dtype = groups[0]["params"][0].device, groups[0]["params"][0].dtype
    made = ops.optimizer_class({"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[kind], device)
    if device.type != "cuda" or dtype == torch.float64:
        return made(groups, lr=lr)  # type: ignore[call-arg]
    options: dict[str, Any] = {"fused": True} if kind == "sgd" else {"fused": True, "capturable": True}
    for group in groups:  # a rate of its own each, since schedules change them in place, one after the other
        group["lr"] = torch.tensor(lr, dtype=torch.float32, device=device)
    return made(groups, lr=groups[0]["lr"], **options)  # type: ignore[call-arg]


def split_decay(module: nn.Module, rest: Iterable[nn.Parameter], decay: float, decay_rest: float | None) -> Decays:
    """The parameters of a module with one weight decay, or with another for the rest."""
    parameters = list(module.parameters())
    if decay_rest is None:
        return [(parameters, decay)]
    apart = {id(p) for p in rest}
    return [
        ([p for p in parameters if id(p) not in apart], decay),
        ([p for p in parameters if id(p) in apart], decay_rest),
    ]


class Update:
    """One optimizer step on the gradients that are there."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None, say: Callable[[str], None]
    ) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer, self.clip_norm, self.say = optimizer, clip_norm, say
        self.device = self.parameters[0].device
        self.graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}  # by where they read the gradients
        self.seen: set[tuple[int, ...]] = set()  # where gradients were before
        self.steps = 0
        rate = optimizer.param_groups[0]["lr"]
        self.can_capture = self.device.type == "cuda" and isinstance(rate, Tensor) and rate.device.type == "cuda"

    def __call__(self) -> None:
        with trace.span("optimizer", self.device):
            self.steps += 1
            addresses = tuple(0 if p.grad is None else p.grad.data_ptr() for p in self.parameters)
            known, new = self.graphs.get(addresses), addresses not in self.seen
            if known is not None:
                known.replay()
            # The first steps set the optimizer up; gradients that were never there before may move each time.
            elif not self.can_capture or self.steps <= WARM_UP_STEPS or new or len(self.graphs) == MOST_CAPTURES:
                self._remember(addresses)
                self._run()
            else:
                self._capture(addresses)

    def _run(self) -> None:
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()

    def _remember(self, addresses: tuple[int, ...]) -> None:
        if len(self.seen) == MOST_SEEN:
            self.seen.clear()
        self.seen.add(addresses)

    def _capture(self, addresses: tuple[int, ...]) -> None:
        graph, stream = torch.cuda.CUDAGraph(), recording.stream_to_record("updates", self.device)
        try:
            with recording.at_once() as free:
                if not free:
                    self._run()
                    return
                prepare = getattr(self.optimizer, "prepare", None)  # of our own kernels
                if prepare is not None:
                    prepare()
                stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(stream), recording.recorded(graph, stream):
                    self._run()
        except Exception as error:
            self.can_capture, self.graphs = False, {}
            self.say(f"the optimizer's step is not captured in a CUDA graph: {' '.join(str(error).split())[:200]}")
            self._run()
            return
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.graphs[addresses] = graph
        graph.replay()
