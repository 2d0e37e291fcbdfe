"""Snapshots: weights of a model, modes of its modules, and the states of torch's random generators.

Whoever changes one of these for a while takes a snapshot first and restores it, also after an error. The contexts
here do both:

    with eval_mode(model): ...            every module in evaluation mode, each in its own mode afterwards
    with weights_restored(model): ...     the weights may be loaded over, and are what they were afterwards
    with draws_restored(device): ...      random numbers drawn within are drawn again afterwards
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# ---- weights


def copy_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors of a `state_dict`, where they are, which training does not change."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


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
    """A context in which all of the module is in evaluation mode; afterwards each part is in its own again."""
    with preserve_modes(module):
        module.eval()
        yield


# ---- random states


@dataclass(frozen=True)
class RandomState:
    """The states of the generators that a model on one device draws from."""

    device: torch.device
    host: Tensor
    gpu: Tensor | None
    """Of the device, where it is a GPU."""

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), gpu)

    def restore(self) -> None:
        """Have the generators go on from here."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


def preserve_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context after which random numbers, of the host and of the device, go on as if it had drawn none."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def preserve_all_rng(device: torch.device) -> AbstractContextManager[None]:
    """The same for all GPUs that this process draws on, or is about to."""
    uses_cuda = device.type == "cuda" or torch.cuda.is_initialized()
    return torch.random.fork_rng(range(torch.cuda.device_count()) if uses_cuda else ())


def random_states() -> dict[str, Tensor | list[Tensor]]:
    """The states of all generators of this process, as plain values for a file."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if _draws_on_gpus() else []}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Go on from what `random_states` returned. GPUs are left out where there are more or fewer of them now."""
    torch.set_rng_state(states["cpu"])
    if _draws_on_gpus() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _draws_on_gpus() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
