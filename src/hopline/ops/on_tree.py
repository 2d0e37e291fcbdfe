"""What a tree's kernels on a GPU offer to models; Triton is imported when the first of them is used."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from hopline.ops.tree_slots import Slots

MOST_DEPTH = 512
"""The widest [reduced | own] rows that `hidden_then_reduce` takes."""


def _kernels(name: str) -> Any:
    return importlib.import_module(f"hopline.ops.gpu.{name}")


def start_epoch(state: Tensor, ahead: Tensor, num_seeds: int, key: int, step: int, position: int) -> Tensor:
    """A place in an epoch, and draws for its seeds: see `gpu_tree.start_epoch`."""
    return _kernels("tree").start_epoch(state, ahead, num_seeds, key, step, position)


def next_step(state: Tensor, order: Tensor, batch_size: int, first: int, seeds_per_step: int) -> tuple[Tensor, Tensor]:
    """Seeds and keys of the next step: see `gpu_tree.next_step`."""
    return _kernels("tree").next_step(state, order, batch_size, first, seeds_per_step)


def dense_rows(nodes: Tensor, parents: Tensor) -> Any:
    """Rows for the slots that hold a node only: `gpu_tree.RowMap`."""
    return _kernels("tree").dense_rows(nodes, parents)


def rows_by_slot(nodes: Tensor, parents: Tensor) -> Any:
    """Rows for all slots as they are: `gpu_tree.RowMap`."""
    return _kernels("tree").rows_by_slot(nodes, parents)


def reduce_tree(
    x: Tensor, slots: Slots, hop: int, nodes: Tensor, counts: Tensor, how: str, weight: Tensor | None, own: bool
) -> Tensor:
    """Rows of a tree's slots reduced to their parents', differentiable: see `gpu_tree_reduce.reduce_tree`."""
    return _kernels("tree_reduce").reduce_tree(x, slots, hop, nodes, counts, how, weight, own)


def reduce_table(
    x: Tensor, slots: Slots, hop: int, nodes: Tensor, how: str, weight: Tensor | None, own: bool, dtype: torch.dtype,
    tiers: tuple[Tensor, Tensor, Tensor] | None, dense_out: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same with rows read straight from a table: see `gpu_tree_reduce.reduce_rows`."""
    return _kernels("tree_reduce").reduce_rows(
        x, slots, hop, nodes, how, weight, own, dtype, table=True, tiers=tiers, dense_out=dense_out
    )


def hidden_then_reduce(
    a: Tensor, left: Tensor, right: Tensor, bias: Tensor, slots: Slots, hop: int, nodes: Tensor, counts: Tensor,
    rows: Any, how: str, p: float, key: Tensor | None,
) -> Tensor:  # fmt: skip
    """A hidden layer and the next one's aggregation in one: see `gpu_dense.hidden_then_reduce`."""
    return _kernels("dense").hidden_then_reduce(a, left, right, bias, slots, hop, nodes, counts, rows, how, p, key)


def beside_linear(a: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    """A linear layer of [reduced | own] rows: see `gpu_dense.beside_linear`."""
    return _kernels("dense").beside_linear(a, left, right, bias)
