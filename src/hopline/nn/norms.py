"""Norms by name, and contexts that change where a batch norm in training takes its mean and variance from.

    running_statistics    from its running statistics, for example if a batch is one row and has no variance
    ignore_empty_slots    from the rows of those slots of a tree that are not empty
    own_statistics        from the rows of a batch's own nodes, not of its halo
    OwnStatistics         from a given function, such as one that sums over ranks

The contexts reach batch norms inside convs as well. No module is replaced: `OwnStatistics` intercepts torch's
function `batch_norm`, so the norms stay torch's and PyG's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import norm as pyg_norm

from hopline.core.batch import Block


def make_norm(name: str, width: int) -> nn.Module:
    """PyG's BatchNorm for "batch", or its LayerNorm over each node's row for "layer".

    width: columns of the rows.
    """
    if name == "batch":
        return pyg_norm.BatchNorm(width)
    if name == "layer":
        return pyg_norm.LayerNorm(width, mode="node")
    raise ValueError(f"norm must be 'batch', 'layer', None or modules, not {name!r}")


@contextmanager
def running_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make batch norms in training use their running statistics while the context lasts.

    modules: those whose batch norms are meant, inner ones included.
    """
    norms = _training_norms(modules)
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def ignore_empty_slots(modules: Iterable[nn.Module], block: Block) -> AbstractContextManager[Any]:
    """While the context lasts, make batch norms in training leave out empty slots from their statistics.

    modules: those whose batch norms are meant, inner ones included. The context does nothing if they have
    none, or if the block is not in the tree layout.
    """
    # Blocks with parts have no empty slots, and most blocks have parts, so the modules need not be searched.
    present = None if block.parts or not _training_norms(modules) else block.present
    return nullcontext() if present is None else OwnStatistics(partial(_statistics_of_present, present))


def own_statistics(module: nn.Module, block: Block) -> AbstractContextManager[Any]:
    """While the context lasts, batch norms of a module in training leave out the halo from their statistics.

    A single own node has no variance, so running statistics take their place. The context does nothing in evaluation,
    or without a halo.

    block: own nodes as destinations, with the halo behind them as sources.
    """
    if not any(m.training for m in module.modules()) or block.num_src == block.num_dst > 1:
        return nullcontext()
    if block.num_dst <= 1:
        return running_statistics([module])
    # Also if no module is a batch norm: a `forward` may call torch's function itself.
    return OwnStatistics(partial(_statistics_of_own, block))


def _training_norms(modules: Iterable[nn.Module]) -> list[nn.BatchNorm1d]:
    """The batch norms in training mode among modules and the modules inside them."""
    return [m for module in modules for m in module.modules() if isinstance(m, nn.BatchNorm1d) and m.training]


Statistics = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Function of rows [n, columns] -> (mean [columns], biased variance [columns], number of rows [] or [1])."""


class OwnStatistics(TorchFunctionMode):
    """A context in which `batch_norm` in training takes mean and variance from a given function of the rows.

    As torch does, it normalises by the biased variance and updates the running variance by the unbiased
    one. In evaluation torch's own `batch_norm` runs. Statistics are computed in float32 or better.
    """

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.statistics = statistics

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return torch.batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, False)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var, count = self.statistics(exact)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                unbiased_var = var * count / (count - 1).clamp(min=1)
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(unbiased_var.to(running_var.dtype), momentum)
        out = (exact - mean) * (var + eps).rsqrt()
        if weight is not None:
            out = out * weight
        if bias is not None:
            out = out + bias
        return out.to(x.dtype)


def _statistics_of_own(block: Block, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, variance, number) of the rows of own nodes. Other rows than one per source, such as edges', all count."""
    if rows.dim() != 2:
        raise ValueError(
            f"a batch norm over rows of shape {list(rows.shape[1:])} cannot leave out nodes outside the batch: give it "
            "rows [num_nodes, columns]"
        )
    own_rows = rows[: block.num_dst] if rows.size(0) == block.num_src else rows
    return own_rows.mean(0), own_rows.var(0, unbiased=False), rows.new_tensor(own_rows.size(0))


def _statistics_of_present(present: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, variance, number) of the rows of slots that are not empty.

    Rows are multiplied by 0 or 1 and not selected, so shapes stay fixed, and nothing synchronises.

    present: bool, by source: which slots are not empty. rows: [n, columns] of the first n sources: of all, or of
    the destinations after a conv.
    """
    mask = present[: rows.size(0), None].to(rows.dtype)
    count = mask.sum().clamp(min=1)
    mean = (rows * mask).sum(0) / count
    var = ((rows - mean).square() * mask).sum(0) / count
    return mean, var, count
