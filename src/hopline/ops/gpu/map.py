"""Global node ids to consecutive local ones on a GPU, without a hash table.

One int64 per node of the graph holds the step in which it was last seen and, below, how early: `atomic_max` keeps the
newest step, and within it the first occurrence. So nothing is ever cleared, and the order is that of the ids whatever
the order in which threads run.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops.gpu.errors import INDEX_ERROR, error_flags, read_with_errors, report
from hopline.ops.gpu.runtime import launching
from hopline.ops.sorted_map import SortedIdMap

DENSE_MAP_BYTES = 1 << 31
"""Up to this size a map has a stamp for every node; beyond, ids are sorted."""

LAST_STEP = (1 << 31) - 1
LATEST = tl.constexpr((1 << 31) - 1)
"""The last place there can be. A stamp holds LATEST - place, so that the earliest place is the largest."""

BLOCK = 1024


@triton.jit(do_not_specialize=["num", "num_nodes", "size", "step"])
def _stamp_kernel(stamps, nodes, flags, num, num_nodes, size, step, BLOCK: tl.constexpr):
    """Every node gets this step and the earliest of: its local id, or `size` + its place among `nodes`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(nodes + i, mask=i < num, other=0).to(tl.int64)
    inside = (node >= 0) & (node < num_nodes)
    report(flags, INDEX_ERROR, inside == 0)
    stamp = (step.to(tl.int64) << 32) | (LATEST - (size.to(tl.int64) + i))
    tl.atomic_max(stamps + node, stamp, mask=(i < num) & inside, sem="relaxed")


@triton.jit(do_not_specialize=["num", "num_nodes", "size"])
def _first_kernel(stamps, nodes, places, is_first, num, num_nodes, size, BLOCK: tl.constexpr):
    """Where each node was first seen, and whether that is here."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(nodes + i, mask=i < num, other=0).to(tl.int64)
    known = (i < num) & (node >= 0) & (node < num_nodes)
    place = LATEST - (tl.load(stamps + node, mask=known, other=LATEST) & LATEST)
    tl.store(places + i, place.to(tl.int32), mask=i < num)
    tl.store(is_first + i, (known & (place == size + i)).to(tl.int32), mask=i < num)


@triton.jit(do_not_specialize=["num", "size", "step"])
def _number_kernel(stamps, nodes, places, firsts, ids, idx, num, size, step, BLOCK: tl.constexpr):
    """Local ids: known ones stay, new ones follow in the order of first occurrence and go into their stamps."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + i, mask=i < num, other=0)
    is_new = (i < num) & (place >= size)
    # firsts: how many first occurrences there are up to each place.
    local = tl.where(is_new, size - 1 + tl.load(firsts + place - size, mask=is_new, other=0), place)
    tl.store(idx + i, local, mask=i < num)
    is_first = is_new & (place == size + i)
    node = tl.load(nodes + i, mask=is_first, other=0).to(tl.int64)
    tl.store(ids + local, node, mask=is_first)
    stamp = (step.to(tl.int64) << 32) | (LATEST - local.to(tl.int64))
    tl.store(stamps + node, stamp, mask=is_first)


class DeviceIdMap(SortedIdMap):
    """The twin of `cpu.IdMap` for node ids on a GPU. One thread at a time may use it, on one stream.

    dense: whether every node has a stamp (8 bytes each); by default if that fits into DENSE_MAP_BYTES.
    """

    def __init__(self, num_nodes: int, device: torch.device, dense: bool | None = None) -> None:
        super().__init__(num_nodes, device)
        self.dense = num_nodes * 8 <= DENSE_MAP_BYTES if dense is None else dense
        self._stamps = torch.zeros(num_nodes if self.dense else 0, dtype=torch.int64, device=device)
        self._step = 1

    def add(self, nodes: Tensor) -> Tensor:
        if self.size + nodes.numel() >= LAST_STEP:
            raise ValueError("a batch may reach at most 2**31 nodes: make batch_size or the fan-outs smaller")
        if not self.dense:
            return super().add(nodes)
        nodes, num = nodes.contiguous(), nodes.numel()
        idx = torch.empty(num, dtype=torch.int32, device=self.device)
        if num == 0:
            return idx
        places, is_first = torch.empty_like(idx), torch.empty_like(idx)
        self._reserve(self.size + num)
        grid = (triton.cdiv(num, BLOCK),)
        with launching(self.device):
            _stamp_kernel[grid](
                *(self._stamps, nodes, error_flags(self.device), num, self.num_nodes, self.size, self._step),
                BLOCK=BLOCK,
            )
            _first_kernel[grid](self._stamps, nodes, places, is_first, num, self.num_nodes, self.size, BLOCK=BLOCK)
            firsts = is_first.cumsum(0, dtype=torch.int32)
            _number_kernel[grid](
                *(self._stamps, nodes, places, firsts, self._ids, idx, num, self.size, self._step),
                BLOCK=BLOCK,
            )
        self.size += read_with_errors(firsts[-1:])
        return idx

    def ids(self) -> Tensor:
        return super().ids().clone()

    def clear(self) -> None:
        super().clear()
        self._step += 1
        if self._step > LAST_STEP:  # the steps begin again, and so must the stamps
            self._stamps.zero_()
            self._step = 1

    def _reserve(self, size: int) -> None:
        if size > self._ids.numel():
            larger = torch.empty(1 << size.bit_length(), dtype=torch.int64, device=self.device)
            larger[: self.size] = self._ids[: self.size]
            self._ids = larger
