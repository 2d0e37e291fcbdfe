"""Which normalisation layers mean the same on a block as on the whole graph."""

from __future__ import annotations

from torch import Tensor, nn
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


def apply_norm(norm: nn.Module, h: Tensor) -> Tensor:
    """The norm's output; batch norm on a single row, which has no variance, goes by its running statistics."""
    lonely = h.size(0) == 1 and norm.training and any(isinstance(m, nn.BatchNorm1d) for m in norm.modules())
    if not lonely:
        return norm(h)
    norm.eval()
    try:
        return norm(h)
    finally:
        norm.train()
