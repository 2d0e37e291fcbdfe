"""The optimizer's step: clipping and the update, on a GPU as a CUDA graph.

On a GPU, `Update` captures clipping and update once as a CUDA graph. In later steps the host launches that
graph instead of each kernel. A graph reads gradients at fixed addresses, and settings such as the weight
decay are part of it. `Update` keeps one graph for each combination that it meets, up to `MAX_CAPTURES`. The
learning rate is a tensor on the GPU, so that schedules change it without a new capture.

An optimizer of the user (`OwnOptimizer`) has a number as its rate, and steps kernel by kernel.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.contract import Job
from hopline.device.cuda_graph import CapturedCall
from hopline.nn.layered import Layered
from hopline.training.settings import TrainSettings
from hopline.util import trace

WARM_UP_STEPS = 2
"""Steps of a run before any is captured: in these the optimizer creates its state."""
MAX_CAPTURES = 3
"""Most graphs of one optimizer. If gradients keep changing their addresses, another graph gains nothing."""
MAX_SEEN_KEYS = 64
"""Most keys that are remembered. Beyond that, keys without a graph are forgotten."""


Decays = Sequence[tuple[Sequence[nn.Parameter], float]]


def make_optimizer(kind: str, decays: Decays, lr: float) -> torch.optim.Optimizer:
    """The optimizer of that name: "adam", "adamw" or "sgd".

    On a GPU its learning rate and step counters are tensors on the GPU, so that a step can be captured.
    They are float32, which is too coarse for float64 parameters. So these are trained as on a CPU, without
    a capture.
    """
    groups: list[dict[str, Any]] = [
        {"params": list(parameters), "weight_decay": decay} for parameters, decay in decays if len(parameters)
    ]
    first_parameter = groups[0]["params"][0]
    device = first_parameter.device
    optimizer_class = ops.optimizer_class({"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[kind], device)
    if device.type != "cuda" or first_parameter.dtype == torch.float64:
        return optimizer_class(groups, lr=lr)  # type: ignore[call-arg]

    options: dict[str, Any] = {"fused": True} if kind == "sgd" else {"fused": True, "capturable": True}
    # A tensor for each group: schedules change the rates in place, group by group.
    for group in groups:
        group["lr"] = torch.tensor(lr, dtype=torch.float32, device=device)
    return optimizer_class(groups, lr=groups[0]["lr"], **options)  # type: ignore[call-arg]


MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""A class of torch.optim, a `functools.partial` of one, or a function of (parameter groups, lr=)."""


class OwnOptimizer:
    """An optimizer that the user gave: an object over the model's parameters, or what makes one.

    An object begins every `fit` with the state that it was given with.
    """

    def __init__(self, given: torch.optim.Optimizer | MakeOptimizer) -> None:
        self.given = given
        if isinstance(given, torch.optim.Optimizer):
            self.name = type(given).__name__
            self._state = copy.deepcopy(given.state_dict())
        else:
            self.name = describe_call(given)

    def make(self, decays: Decays, lr: float) -> torch.optim.Optimizer:
        """The optimizer of a run. decays, lr: for one that is made here. An object has its own."""
        if isinstance(self.given, torch.optim.Optimizer):
            self.given.load_state_dict(copy.deepcopy(self._state))
            optimizer = self.given
        else:
            arguments = inspect.signature(self.given).parameters
            if "lr" not in arguments:
                raise ValueError(
                    f"{self.name} takes no lr: write optimizer=lambda groups, lr: torch.optim.RMSprop(groups, lr=lr)"
                )
            has_decay = "weight_decay" in arguments
            if not has_decay and any(decay for _, decay in decays):
                raise ValueError(f"{self.name} takes no weight_decay: leave out weight_decay= of the Trainer")
            groups = [
                {"params": list(parameters)} | ({"weight_decay": decay} if has_decay else {})
                for parameters, decay in decays
                if len(parameters)
            ]
            optimizer = self.given(groups, lr=lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"{self.name} made a {type(optimizer).__name__}: let optimizer= return a torch.optim.Optimizer over "
                "the parameter groups that it is given"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{type(optimizer).__name__} computes the loss several times a step, which the Trainer does not: "
                "choose another optimizer=, such as torch.optim.RMSprop"
            )
        return optimizer

    def parts(self, model: nn.Module) -> Any:
        """What a checkpoint compares: what was given. Of an object its class, and the settings of its groups."""
        if not isinstance(self.given, torch.optim.Optimizer):
            return self.given
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [
            group | {"params": [names.get(id(parameter)) for parameter in group["params"]]}
            for group in self.given.param_groups
        ]
        return [type(self.given), groups]


def describe_call(function: Callable[..., Any]) -> str:
    """A name for a class, a function or a partial of one, such as "RMSprop(alpha=0.9)"."""
    if isinstance(function, partial):
        arguments = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{describe_call(function.func)}({', '.join(arguments)})"
    return getattr(function, "__qualname__", type(function).__qualname__)


def split_decay(module: nn.Module, rest: Iterable[nn.Parameter], decay: float, decay_rest: float | None) -> Decays:
    """The parameters of a module, with their weight decay.

    rest: parameters that get `decay_rest` instead of `decay`. decay_rest: None if all have the same decay.
    """
    parameters = list(module.parameters())
    if decay_rest is None:
        return [(parameters, decay)]
    rest_ids = {id(p) for p in rest}
    return [
        ([p for p in parameters if id(p) not in rest_ids], decay),
        ([p for p in parameters if id(p) in rest_ids], decay_rest),
    ]


def optimizer_of(job: Job, settings: TrainSettings, own: OwnOptimizer | None) -> torch.optim.Optimizer:
    """The optimizer that the settings ask for, over a job's model. own: the user's, in place of a name."""
    rest_parameters = []
    if settings.weight_decay_rest is not None:
        if not isinstance(job.model, Layered):
            raise ValueError(
                f"weight_decay_rest= is for the last layer, and {type(job.module).__name__} is not made of layers: "
                "leave it out, or use hl.nn.GNN or a PyG model such as GCN"
            )
        rest_parameters = job.model.rest_parameters()
    decays = split_decay(job.module, rest_parameters, settings.weight_decay, settings.weight_decay_rest)
    if own is not None:
        return own.make(decays, settings.lr)
    return make_optimizer(settings.optimizer, decays, settings.lr)


class Update:
    """Clips the gradients and steps the optimizer; on a GPU by a CUDA graph where possible.

    The trainer makes one per `fit`. Only the thread that trains calls it.

    clip_norm: the largest norm of the gradient. None: no limit. say: prints a line for the user.
    """

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
        """By `_key`: the steps that were met, whether they are captured yet or not."""
        self.steps = 0
        lr = optimizer.param_groups[0]["lr"]
        has_lr_on_gpu = isinstance(lr, Tensor) and lr.device.type == "cuda"
        self.can_capture = self.device.type == "cuda" and has_lr_on_gpu

    def _check_parameters(self) -> None:
        """Refuse parameters that are not the model's: no checkpoint would hold them."""
        model_ids = {id(p) for p in self.parameters}
        for parameter in self._trained_parameters():
            if id(parameter) not in model_ids:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's, so no "
                    "checkpoint would hold it: make it one of the model's (model.temperature = torch.nn.Parameter(...))"
                )

    def _trained_parameters(self) -> list[Tensor]:
        """The parameters that the optimizer steps. Asked each time, since a callback may have added some."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def clear(self) -> None:
        """Drop the gradients of all parameters of the model, of which the optimizer may step only some."""
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self) -> None:
        """Make one step: by the graph of these gradients if there is one, else kernel by kernel."""
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
        """All that becomes part of a graph: addresses of gradients, and settings, which callbacks may change.

        A setting that is a tensor counts by its address, since a graph reads its current value.
        """
        groups = self.optimizer.param_groups
        gradients = [0 if p.grad is None else p.grad.data_ptr() for group in groups for p in group["params"]]
        key: list[Hashable] = [*gradients]
        for group in groups:
            for name, value in group.items():
                if name != "params":
                    key.append(value.data_ptr() if isinstance(value, Tensor) else value)
        return tuple(key)

    def _captured_call(self, key: Hashable) -> CapturedCall[None]:
        """The step with this key, captured or not. A new one if the key was not met before."""
        if key not in self.captured:
            if len(self.captured) >= MAX_SEEN_KEYS:
                self.captured = {other: call for other, call in self.captured.items() if call.graph is not None}
            # warm_up=1: a key is captured only when it comes a second time. Gradients that get new
            # addresses in every step would be captured for nothing.
            self.captured[key] = CapturedCall(
                self.device, purpose="updates", subject="the optimizer's step is", say=self.say, warm_up=1
            )
        return self.captured[key]

    def _capture(self, captured: CapturedCall[None]) -> None:
        """Capture a step as a CUDA graph, unless the lock of captures is taken.

        If a capture fails, no other is tried: all later steps run kernel by kernel.
        """
        # hopline's own optimizers make tables of addresses, which they cannot do during a capture.
        prepare = getattr(self.optimizer, "prepare", None)
        if prepare is not None:
            prepare()
        # wait=False: if an evaluation has the lock, a later step can be captured just as well.
        # nullcontext: there is nothing to prepare before the capture, nor to restore after it.
        is_captured = captured.capture(nullcontext(self._run), wait=False)
        # Settled without a graph: the capture was tried and failed.
        if captured.is_settled and not is_captured:
            self.can_capture = False
            self.captured = {}
