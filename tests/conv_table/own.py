"""Convs, norms and modules as users write them: right, or with results that depend on what else is in a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree

from tests.conv_table.graph import HIDDEN, NUM_CLASSES, NUM_FEATURES

# ---- convs


class WithoutForward(MessagePassing):
    """As little as a conv can be."""


class _Linear(MessagePassing):
    """A sum over in-neighbours, then a linear layer."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="sum")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Weighted(_Linear):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:  # type: ignore[override]
        return self.lin(self.propagate(edge_index, x=x, edge_attr=edge_attr))

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:  # type: ignore[override]
        return x_j * edge_attr.sum(dim=1, keepdim=True)


class ByHand(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        return self.lin(x + torch.zeros_like(x).index_add(0, dst, x[src]))


class Loops(_Linear):
    """Adds self-loops up to the largest node that has an edge."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, add_self_loops(edge_index)[0])


class CountedLoops(_Linear):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, add_self_loops(edge_index, num_nodes=x.size(0))[0])


class Centred(_Linear):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0), edge_index)


class CentredMessages(_Linear):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j - x_j.mean(dim=0)


class OutDegrees(_Linear):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        num_out = degree(edge_index[0], x.size(0), dtype=x.dtype).clamp(min=1)
        return super().forward(x / num_out[:, None], edge_index)


class PerNode(_Linear):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x / x.size(0), edge_index)


class FirstEdge(_Linear):
    """Goes by the order of edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        dst = edge_index[1]
        is_first = torch.cat([dst.new_ones(1, dtype=torch.bool), dst[1:] != dst[:-1]])[: dst.numel()]
        return super().forward(x, edge_index[:, is_first])


class Remembers(_Linear):
    """A cache of one's own, which nobody knows how to clear."""

    edges: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.edges is None:
            self.edges = edge_index
        return super().forward(x, self.edges)


class TwoHops(_Linear):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(self.propagate(edge_index, x=x), edge_index)


# ---- norms


class CentredNorm(nn.Module):
    """A norm that somebody wrote: rows less their mean over all nodes."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class ScaledNorm(nn.Module):
    """A norm that somebody wrote: each row by its own length."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.norm(dim=1, keepdim=True))


# ---- modules


class Module(nn.Module):
    """A module that somebody wrote, with `forward(x, edge_index)`."""

    def __init__(self, make_conv: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = make_conv(NUM_FEATURES, HIDDEN)
        self.conv2 = make_conv(HIDDEN, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class Pooling(Module):
    """The same, with the mean over all nodes added to each."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv1(x, edge_index).relu()
        return self.conv2(h + h.mean(dim=0), edge_index)


class Tuple(Module):
    """The same, with more than one output."""

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.conv1(x, edge_index).relu()
        return self.conv2(h, edge_index), h


class Argument(Module):
    """The same, with a further argument that must be given."""

    def forward(self, x: Tensor, edge_index: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return scale * super().forward(x, edge_index)


OWN_CONVS = (
    Weighted, ByHand, Loops, CountedLoops, Centred, CentredMessages, OutDegrees, PerNode, FirstEdge, Remembers, TwoHops
)  # fmt: skip
OWN_MODULES = (Module, Pooling, Tuple, Argument)
