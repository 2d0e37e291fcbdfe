"""Gradients over ranks: `Gradients` says how they are combined, and `sum_over_ranks` is the default.

    gradients of a bucket of parameters --> one flat tensor --> all-reduce --> back into the gradients

Parameters go in buckets of `BUCKET_BYTES`, so that there are few collective calls and little memory for the
copies. All buckets are reduced at once, and then written back.

A rank may have no gradient for a parameter that others have one for. So a flat tensor ends with one number
per parameter, which is the number of ranks with a gradient for it. Half-precision gradients are summed in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from hopline.distributed.world import World


BUCKET_BYTES = 25 << 20
"""Bytes of gradients per all-reduce. DDP has the same default.

Larger buckets need fewer calls. Each bucket has a copy of its gradients.
"""


class Gradients:
    """How ranks combine their gradients: `hl.Trainer(gradients=)`. This one, the default, sums them.

    The loss is the mean over the examples of all ranks. A rank's gradient is the share of its own examples
    in the gradient of that mean, so the gradients are added. Every rank calls

        begin         before the first step of a run
        combine       after the backward passes of a step; then gradients are clipped, the optimizer steps
        after_step    after the optimizer's step
        after_epoch   after the last step of an epoch, before anything is evaluated

    After `after_epoch` all ranks must have the same weights, or the run is refused. A subclass overrides
    the methods that it needs, and changes gradients and weights in place, without autograd. `parameters`
    are those that require a gradient. `parameter.grad` is None if this rank has none, though others may
    have one.

    With one process a subclass is called in the same way. Make the subclass a dataclass: its fields are
    compared when a run is resumed.

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
    """Whether ranks have different weights and optimizer states within an epoch, as in local SGD.

    A checkpoint then holds those of every rank.
    """

    def begin(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Called before the first step of a run, and before the state of a checkpoint is loaded."""

    def combine(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Turn this rank's gradients into those that the optimizer steps by."""
        sum_over_ranks(parameters, world)

    def after_step(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Called after the optimizer's step. A subclass may average weights over the ranks."""

    def after_epoch(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Called after the last step of an epoch. Ranks with different weights make them the same."""

    def state_dict(self) -> dict[str, Any]:
        """State of this rank for checkpoints: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Tensors are on the CPU."""


CombineGradients = Callable[[Sequence[nn.Parameter], "World"], None]
"""(parameters, world) -> None: `Gradients.combine` as a function."""


class CombinedBy(Gradients):
    """`Gradients` whose `combine` is a function."""

    def __init__(self, function: CombineGradients) -> None:
        self.function = function

    def combine(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.function(parameters, world)


def have_same_bits(tensors: Iterable[Tensor], world: World) -> bool:
    """Whether all ranks have the same numbers in these tensors, by one checksum per tensor.

    A checksum is the sum of the numbers' bit patterns, read as integers. All ranks must call this with
    tensors of the same shapes and types.
    """
    dtype_by_bytes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            bit_patterns = real.contiguous().view(dtype_by_bytes[real.element_size()])
            sums.append(bit_patterns.sum(dtype=torch.int64))
    if not sums or world.size == 1:
        return True
    # `World.max` reduces float64 numbers, which hold integers below 2**52 exactly.
    checksums = [float(value % (1 << 52)) for value in torch.stack(sums).tolist()]
    largest = world.max(checksums)
    smallest = [-value for value in world.max([-value for value in checksums])]
    return largest == smallest


def sum_over_ranks(parameters: Iterable[Tensor], world: World) -> None:
    """Replace every gradient by its sum over the ranks, in place.

    A missing gradient counts as zero if another rank has one, and stays None if no rank has one. So
    afterwards all ranks have the same gradients. Half-precision gradients are summed in float32. All ranks
    must call this with the same parameters.
    """
    if world.size == 1:
        return
    buckets = list(_make_buckets([p for p in parameters if p.requires_grad]))
    flats = [_flatten(bucket, world.device) for bucket in buckets]
    _all_reduce(flats, world)
    for bucket, flat in zip(buckets, flats, strict=True):
        _unflatten(bucket, flat)


def sum_tensors(tensors: Iterable[Tensor], world: World) -> None:
    """Replace every tensor by its sum over the ranks, in place. All ranks get the same bits.

    Half-precision tensors are summed in float32. All ranks must call this with tensors of the same shapes
    and types.
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
    """Sum each tensor over the ranks, in place. All calls begin before the first one is waited for."""
    with world.collective_call():
        works = [dist.all_reduce(flat, group=world.group, async_op=True) for flat in flats]
        for work in works:
            assert work is not None
            work.wait()


def split_by_bytes(num_bytes: int, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in their order, in groups of at most `num_bytes`. A larger tensor is a group alone."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(t.nbytes for t in group) + tensor.nbytes > num_bytes:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _make_buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of parameters that one all-reduce sums: of one dtype, and of about `BUCKET_BYTES`.

    The groups depend on the parameters alone, not on which gradients exist. So they are the same on every
    rank.
    """
    for dtype in dict.fromkeys(_sum_dtype(p.dtype) for p in parameters):
        yield from split_by_bytes(BUCKET_BYTES, [p for p in parameters if _sum_dtype(p.dtype) == dtype])


def _flatten(bucket: Sequence[Tensor], device: torch.device) -> Tensor:
    """[sum of numel + len(bucket)] on the device: all gradients of a bucket, then one flag per parameter.

    A missing gradient is zeros. A flag is 1 if this rank has the gradient, else 0.
    """
    dtype = _sum_dtype(bucket[0].dtype)
    flat = torch.zeros(sum(p.numel() for p in bucket) + len(bucket), dtype=dtype, device=device)
    start = 0
    # The flags are last in `flat`, so their positions are negative: -len(bucket) .. -1.
    for flag_position, parameter in enumerate(bucket, start=-len(bucket)):
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                raise ValueError("a gradient is sparse, which ranks cannot sum: make the embedding with sparse=False")
            flat[start : start + parameter.numel()].copy_(parameter.grad.reshape(-1))
            flat[flag_position] = 1
        start += parameter.numel()
    return flat


def _unflatten(bucket: Sequence[Tensor], flat: Tensor) -> None:
    """Write the sums of a flat tensor into the gradients of its bucket. flat: as `_flatten` made it, reduced."""
    parts = flat[: -len(bucket)].split([p.numel() for p in bucket])
    # `tolist` synchronises with a GPU. So the flags are read only if this rank misses a gradient.
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
