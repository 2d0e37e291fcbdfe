"""Out of memory in the middle of a step: undo the step and free its memory, so that a smaller one can run.

    before = StepSnapshot(model, device)          gradients set aside, buffers and random states copied
    loss, ran_out = attempt(before, step)         accepts the step, or restores the snapshot
    if ran_out: ...                               the caller makes the step smaller and tries again

A step is a forward and a backward pass here. It does not change parameters, so they are not in the snapshot. A
snapshot costs a copy of the buffers, and for the time of the step a second set of gradients (`state_bytes`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hopline.device.snapshots import RandomState

WORDS = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of the messages by which libraries report a failed allocation as a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on the host or on a GPU."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def free_memory(device: torch.device) -> None:
    """Free what a failed step has left in reference cycles, and give torch's cached blocks back to the GPU."""
    # Only the young generations: a step's objects are young, and a full collection visits all objects.
    gc.collect(1)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(before: StepSnapshot, run: Callable[[], Tensor | None]) -> tuple[Tensor | None, bool]:
    """Run a step, and undo it unless it returns a tensor. Returns (the result of `run`, whether memory ran out).

    `run` may also return None: then the step is undone, although memory did not run out. After any other error the
    snapshot is restored and the error raised again.
    """
    result = None
    ran_out = False
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
    # Not in the `except` clause: there the error is alive, and its traceback holds every tensor of the step.
    if ran_out:
        free_memory(before.device)
    return result, ran_out


class StepSnapshot:
    """The state of a model before a step. After the step, call either `accept` or `restore`, once.

    The snapshot takes the gradients of earlier micro-batches away from the parameters and holds them. So the step
    writes gradients of its own, and a step that fails half-way cannot spoil the earlier ones.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self._gradients = [(p, p.grad) for p in module.parameters()]
        for p, _ in self._gradients:
            p.grad = None
        self._buffers = [(b, b.clone()) for b in buffers_of(module)]
        self._random_state = RandomState.of(device)

    @property
    def gradient_bytes(self) -> int:
        return sum(_num_bytes(grad) for _, grad in self._gradients if grad is not None)

    def accept(self) -> None:
        """Keep the step: add its gradients to those from before."""
        for p, before in self._gradients:
            if before is not None:
                p.grad = before if p.grad is None else _sum(before, p.grad)

    def restore(self) -> None:
        """Undo the step: put gradients, buffers and the states of the random generators back."""
        for p, before in self._gradients:
            p.grad = before
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._random_state.restore()


def buffers_of(module: nn.Module) -> list[Tensor]:
    """The buffers of a module that have memory: those of lazy modules have none until their first call."""
    return [b for b in module.buffers() if not is_lazy(b)]


def gradient_bytes(module: nn.Module) -> int:
    return sum(_num_bytes(p.grad) for p in module.parameters() if p.grad is not None)


def state_bytes(module: nn.Module) -> tuple[int, int]:
    """(bytes of gradients, bytes of buffers) that a `StepSnapshot` of the module holds at most during a step."""
    weights = [p for p in module.parameters() if p.requires_grad and not is_lazy(p)]
    return sum(map(_num_bytes, weights)), sum(map(_num_bytes, buffers_of(module)))


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a sparse one those of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return sum(map(_num_bytes, (tensor._indices(), tensor._values())))
    return tensor.numel() * tensor.element_size()


@torch.no_grad()
def _sum(before: Tensor, new: Tensor) -> Tensor:
    """The sum of two gradients, in place: a sparse one can be added to a dense one, not the other way round."""
    if before.is_sparse and not new.is_sparse:
        return new.add_(before)
    return before.add_(new)
