"""When memory runs out in the middle of a step: what the step had changed is put back, and its memory given back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hopline.device.snapshots import RandomState

WORDS = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What libraries say, in errors that have no type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def free_memory(device: torch.device) -> None:
    gc.collect(1)  # what the step made is young, and looking at all objects takes long
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(before: StepSnapshot, run: Callable[[], Tensor | None]) -> tuple[Tensor | None, bool]:
    """(what `run` returns, whether memory ran out in it); without a result, all is as it was before."""
    result, ran_out = None, False
    try:
        result = run()
    except BaseException as error:
        ran_out = is_out_of_memory(error)
        if not ran_out:
            before.restore()
            raise
    if result is not None:
        before.accept()
    else:
        before.restore()
    if ran_out:  # only here the error is gone, which held on to all that the step had made
        free_memory(before.device)
    return result, ran_out


class StepSnapshot:
    """The state of a model before a step, of which `accept` makes a step that was done and `restore` one that never
    was.

    Gradients from before are set aside, so that those of the step come alone and a failed one leaves no trace in them.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self._gradients = [(p, p.grad) for p in module.parameters()]
        for p, _ in self._gradients:
            p.grad = None
        self._buffers = [(b, b.clone()) for b in buffers_of(module)]
        self._draws = RandomState.of(device)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients set aside."""
        return sum(_num_bytes(grad) for _, grad in self._gradients if grad is not None)

    def accept(self) -> None:
        """The step is done: its gradients are added to those from before."""
        for p, before in self._gradients:
            if before is not None:
                p.grad = before if p.grad is None else _sum(before, p.grad)

    def restore(self) -> None:
        """The step never was: gradients, buffers and random numbers are what they were."""
        for p, before in self._gradients:
            p.grad = before
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._draws.restore()


def buffers_of(module: nn.Module) -> list[Tensor]:
    return [b for b in module.buffers() if not is_lazy(b)]


def gradient_bytes(module: nn.Module) -> int:
    """Of the gradients that are there."""
    return sum(_num_bytes(p.grad) for p in module.parameters() if p.grad is not None)


def state_bytes(module: nn.Module) -> tuple[int, int]:
    """(gradients, buffers): what `StepSnapshot` holds at most beside a step."""
    weights = [p for p in module.parameters() if p.requires_grad and not is_lazy(p)]
    return sum(map(_num_bytes, weights)), sum(map(_num_bytes, buffers_of(module)))


def _num_bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return sum(map(_num_bytes, (tensor._indices(), tensor._values())))
    return tensor.numel() * tensor.element_size()


@torch.no_grad()
def _sum(before: Tensor, new: Tensor) -> Tensor:
    """In place; a sparse gradient can be added to a dense one, not the other way round."""
    if before.is_sparse and not new.is_sparse:
        return new.add_(before)
    return before.add_(new)
