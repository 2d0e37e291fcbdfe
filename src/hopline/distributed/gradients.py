"""Gradients over ranks: how they are combined (`Gradients`), by default summed by a flat all-reduce per bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from hopline.distributed.world import World


BUCKET_BYTES = 25 << 20
"""Gradients are exchanged in pieces of about this size: few enough to be fast, small enough to be held twice."""


class Gradients:
    """How ranks combine their gradients: `hl.Trainer(gradients=)`. This one, the default, sums them.

    A subclass overrides what it needs. A rank's gradient is its share of the mean loss over the examples of all ranks,
    so that the sum over the ranks is the gradient of that mean. In one optimizer step every rank calls

        combine      after the backward passes of the step's units; then gradients are clipped, and the optimizer steps
        after_step   after the optimizer's step

    and after_epoch after the last step of an epoch, before anything is evaluated: then all ranks must have the same
    weights, or the run is refused. Gradients and weights are changed in place, without autograd. `parameters` are
    those that require a gradient. `parameter.grad` is None where this rank has none, though others may have one.

    With one process the sum costs nothing, and a subclass is called as with several. Make the subclass a dataclass:
    its fields are compared when a run is resumed.

    Example:
        >>> class Signs(hl.extend.Gradients):
        ...     def combine(self, parameters, world):
        ...         super().combine(parameters, world)
        ...         for parameter in parameters:
        ...             parameter.grad.sign_()
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> trainer = hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, gradients=Signs(), epochs=1, show=False)
        >>> trainer.fit().finished, [p.grad.abs().max().item() for p in trainer.model.parameters()]
        (True, [1.0, 1.0, 1.0])
    """

    local: ClassVar[bool] = False
    """Whether ranks have weights and optimizer states of their own between exchanges, as in local SGD. A checkpoint
    then keeps those of every rank."""

    def begin(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Called before the first step of a run, and before the state of a checkpoint is loaded."""

    def combine(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Turn this rank's gradients into those that the optimizer steps by."""
        sum_over_ranks(parameters, world)

    def after_step(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Called after the optimizer's step: weights may be exchanged here."""

    def after_epoch(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Called after the last step of an epoch: ranks with weights of their own bring them together here."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers from step to step: tensors, numbers, strings, lists and dicts. Checkpoints keep that
        of every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank; tensors come on the CPU."""


CombineGradients = Callable[[Sequence[nn.Parameter], "World"], None]
"""(parameters, world) -> None: `Gradients.combine` as a function."""


class CombinedBy(Gradients):
    """Gradients combined by a function."""

    def __init__(self, function: CombineGradients) -> None:
        self.function = function

    def combine(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.function(parameters, world)


def have_same_bits(tensors: Iterable[Tensor], world: World) -> bool:
    """Whether all ranks have the same numbers in these tensors, by a sum of their bits."""
    integer_dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
    sums = [t.contiguous().view(integer_dtypes[t.element_size()]).sum(dtype=torch.int64) for t in real if t.numel()]
    if not sums or world.size == 1:
        return True
    # Ranks compare float64 numbers, in which whole ones are exact up to 2**53.
    checksums = [float(value % (1 << 52)) for value in torch.stack(sums).tolist()]
    largest = world.max(checksums)
    smallest = [-value for value in world.max([-value for value in checksums])]
    return largest == smallest


def sum_over_ranks(parameters: Iterable[Tensor], world: World) -> None:
    """Replace every gradient by its sum over the ranks; one that only some ranks have counts as zero elsewhere.

    Afterwards all ranks have the same gradients: one that no rank has stays None. Half-precision gradients are
    summed in float32. All ranks must call this with the same parameters.
    """
    if world.size == 1:
        return
    buckets = list(_make_buckets([p for p in parameters if p.requires_grad]))
    flats = [_flatten(bucket, world.device) for bucket in buckets]
    _all_reduce(flats, world)
    for bucket, flat in zip(buckets, flats, strict=True):
        _unflatten(bucket, flat)


def sum_tensors(tensors: Iterable[Tensor], world: World) -> None:
    """Replace every tensor by its sum over the ranks, in place: the same bits on every rank.

    Half-precision tensors are summed in float32. All ranks must call this with tensors of the same shapes and types.
    """
    if world.size == 1:
        return
    buckets = list(_make_buckets([tensor.detach() for tensor in tensors if tensor.numel()]))
    flats: list[Tensor] = []
    for bucket in buckets:
        flats.append(torch.cat([t.to(world.device, _sum_dtype(t.dtype)).reshape(-1) for t in bucket]))
    _all_reduce(flats, world)
    for bucket, flat in zip(buckets, flats, strict=True):
        parts = flat.split([t.numel() for t in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _all_reduce(flats: Sequence[Tensor], world: World) -> None:
    with world.exchange():
        works = [dist.all_reduce(flat, group=world.group, async_op=True) for flat in flats]
        for work in works:
            assert work is not None
            work.wait()


def split_by_bytes(num_bytes: int, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, in groups of about that size."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(t.nbytes for t in group) + tensor.nbytes > num_bytes:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _make_buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that are exchanged together: the same on every rank, whichever gradients it has."""
    for dtype in dict.fromkeys(_sum_dtype(p.dtype) for p in parameters):
        yield from split_by_bytes(BUCKET_BYTES, [p for p in parameters if _sum_dtype(p.dtype) == dtype])


def _flatten(bucket: Sequence[Tensor], device: torch.device) -> Tensor:
    """The gradients one after another, zeros for missing ones, then 1 for each that is there and 0 for others."""
    dtype = _sum_dtype(bucket[0].dtype)
    flat = torch.zeros(sum(p.numel() for p in bucket) + len(bucket), dtype=dtype, device=device)
    start = 0
    for flag_position, parameter in enumerate(bucket, start=-len(bucket)):
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                raise ValueError("a gradient is sparse, which ranks cannot sum: make the embedding with sparse=False")
            flat[start : start + parameter.numel()].copy_(parameter.grad.reshape(-1))
            flat[flag_position] = 1
        start += parameter.numel()
    return flat


def _unflatten(bucket: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat[: -len(bucket)].split([p.numel() for p in bucket])
    # Looked at only where a gradient is missing: on a GPU this waits for the exchange to end.
    ranks_with_gradient = [1.0] * len(bucket)
    if any(p.grad is None for p in bucket):
        ranks_with_gradient = flat[-len(bucket) :].tolist()
    for parameter, part, num_ranks in zip(bucket, parts, ranks_with_gradient, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(part.view_as(parameter))
        elif num_ranks:
            parameter.grad = part.view_as(parameter).to(parameter.device, parameter.dtype, copy=True)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
