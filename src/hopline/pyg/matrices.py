"""pyg-lib's operators on rows, by torch: `segment_matmul`, `grouped_matmul` and `index_sort`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hopline import ops

GROUP_BYTES = 16
"""What torch's `grouped_mm` asks of a row: a multiple of this many bytes."""
COUNTED = 1 << 17
"""Values from which on `index_sort` counts. A rule of thumb: torch sorts fewer as fast."""


def segment_matmul(input: Tensor, ptr: Tensor, other: Tensor) -> Tensor:
    """[N, M]: rows ptr[i] .. ptr[i + 1] - 1 of `input` [N, K], each times the matrix other[i] [K, M]. Differentiable.

    ptr: [B + 1], best on the CPU. Raises ValueError if it does not ascend from 0 to N.
    """
    ends = ptr.tolist()
    if not ends or ends[0] != 0 or ends[-1] != input.size(0) or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"ptr must ascend from 0 to the number of rows, {input.size(0)}, not {ends[:8]}")
    if len(ends) - 1 != other.size(0):
        raise ValueError(f"ptr has {len(ends) - 1} segments and other has {other.size(0)} matrices: give one for each")
    if _has_grouped_mm(input, other):
        offsets = ptr[1:].to(input.device, torch.int32)
        return torch.nn.functional.grouped_mm(input, other, offs=offsets)
    sizes = [b - a for a, b in pairwise(ends)]
    return torch.cat([input.new_empty(0, other.size(2)), *map(torch.matmul, input.split(sizes), other.unbind())])


def _has_grouped_mm(input: Tensor, other: Tensor) -> bool:
    """Whether torch multiplies all segments in one kernel. On a CPU its kernel is a loop too."""
    return (
        input.is_cuda
        and input.dtype == other.dtype
        and input.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and hasattr(torch.nn.functional, "grouped_mm")
        and all(width * input.element_size() % GROUP_BYTES == 0 for width in other.shape[1:])
    )


def grouped_matmul(input: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """input[i] [N_i, K_i] times other[i] [K_i, M_i], for each i. Differentiable."""
    if len(input) != len(other):
        raise ValueError(f"there are {len(input)} left and {len(other)} right matrices: give as many of each")
    return [left @ right for left, right in zip(input, other, strict=True)]


def index_sort(indices: Tensor, max: int | None = None) -> tuple[Tensor, Tensor]:
    """(sorted values, their positions) of non-negative integers. Equal values keep their order.

    max: At least the largest value. Not needed here.
    """
    if indices.dim() != 1:
        raise ValueError(f"Input should be 1-dimensional, not {list(indices.shape)}")
    if indices.device.type == "cpu" and indices.dtype in (torch.int32, torch.int64) and indices.numel() >= COUNTED:
        least, most = (int(value) for value in indices.aminmax())
        if least >= 0 and most < indices.numel():  # an array of counts that is not longer than the values
            values = indices.contiguous()
            _, order = ops.group_by_key(values, most + 1)
            return ops.gather_rows(values, order), order
    values, order = torch.sort(indices, stable=True)
    return values, order
