"""Which normalisation layers mean the same on a block as on the whole graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch_geometric.nn import norm as pyg_norm

_OVER_NODES = (
    pyg_norm.GraphNorm,
    pyg_norm.PairNorm,
    pyg_norm.InstanceNorm,
    pyg_norm.GraphSizeNorm,
    pyg_norm.MeanSubtractionNorm,
)


def check_norm(norm: nn.Module) -> None:
    """Refuse a norm whose result for a node depends on which other nodes are present."""
    over_nodes = isinstance(norm, _OVER_NODES)
    if isinstance(norm, pyg_norm.LayerNorm) and norm.mode == "graph":
        raise ValueError(
            "LayerNorm(mode='graph') averages over all nodes, and a batch has only some: "
            "use LayerNorm(..., mode='node')"
        )
    if over_nodes:
        raise ValueError(
            f"{type(norm).__name__} averages over all nodes, and a batch has only some: use BatchNorm or "
            "LayerNorm(..., mode='node')"
        )


def make_norm(name: str, width: int) -> nn.Module:
    """'batch' or 'layer', under the parameter names of PyG's own."""
    if name == "batch":
        return pyg_norm.BatchNorm(width)
    if name == "layer":
        return pyg_norm.LayerNorm(width, mode="node")
    raise ValueError(f"norm must be 'batch', 'layer', None or modules, not {name!r}")


@contextmanager
def running_statistics(modules: Iterable[nn.Module], *, only_if: bool) -> Iterator[None]:
    """Batch norms go by their running statistics while this lasts: a single row has no variance to go by."""
    norms = [m for module in modules for m in module.modules() if isinstance(m, nn.BatchNorm1d) and m.training]
    if not only_if:
        norms = []
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()
