"""Snapshots of a model's weights, of the modes of its modules, and of torch's random generators.

Code that changes one of these for a while takes a snapshot first and restores it, also after an error. The contexts
here do both:

    with eval_mode(model): ...            every module is in evaluation mode; afterwards each is in its own mode
    with evaluating(model): ...           the same, and autograd records nothing
    with preserve_modes(model): ...       modes may be changed; afterwards each module is in its own mode
    with preserve_weights(model): ...     other weights may be loaded; afterwards the model has its own
    with preserve_rng(device): ...        random numbers may be drawn; afterwards the generators are as before
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# ---- weights


def copy_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors of a `state_dict`, on their devices. Extra states of modules need be no tensors."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in weights.items()
    }


@contextmanager
def preserve_weights(module: nn.Module) -> Iterator[None]:
    """A context after which the module has the weights and buffers that it had before."""
    before = copy_weights(module.state_dict())
    try:
        yield
    finally:
        module.load_state_dict(before)


# ---- modes


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """A context after which each module is in the mode, training or evaluation, that it was in before."""
    # Module by module: a part that a user has put into evaluation mode for good stays in it.
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """A context in which all of the module is in evaluation mode. Afterwards each submodule is in its own mode."""
    with preserve_modes(module):
        module.eval()
        yield


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A context in which all of the module is in evaluation mode, and autograd records nothing."""
    with eval_mode(module), torch.no_grad():
        yield


# ---- random states


@dataclass(frozen=True)
class RandomState:
    """The states of the random generators that a model on one device draws from."""

    device: torch.device
    host: Tensor
    """The state of the host's generator. Models on a GPU may draw from it too."""
    gpu: Tensor | None
    """The state of the device's generator if the device is a GPU; None otherwise."""

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        """The states at this moment."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), gpu)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


def preserve_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the generators of the host and of the device are in the states from before."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def preserve_all_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the generators of host and GPUs are in the states from before. It never starts CUDA."""
    # Without this condition, a process that trains on the CPU would start CUDA here.
    uses_cuda = device.type == "cuda" or torch.cuda.is_initialized()
    return torch.random.fork_rng(range(torch.cuda.device_count()) if uses_cuda else ())


def random_states() -> dict[str, Tensor | list[Tensor]]:
    """The states of all generators of this process, as tensors to be saved in a checkpoint."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if _has_cuda_started() else []}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set all generators to what `random_states` returned. GPUs are left alone if their number is another one now."""
    torch.set_rng_state(states["cpu"])
    if _has_cuda_started() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _has_cuda_started() -> bool:
    """Whether this process has started CUDA. If not, no GPU has drawn anything, and reading a state would start it."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()
