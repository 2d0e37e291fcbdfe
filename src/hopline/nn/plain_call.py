"""`PlainConvs`: convs called as in plain PyG, conv(h, edge_index), for `model(x, edge_index)` on a whole graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hopline.core.batch import Block, ConvRunner
from hopline.core.row_handles import Handle, as_tensor
from hopline.nn.conv_adapter import edge_arguments, takes_x0


class PlainConvs(ConvRunner):
    """Runs convs on the edges of a whole graph, in the order in which they were given.

    edge_index: [2, num_edges] int64, sources first. edge: edge arrays by name, such as "weight".
    """

    def __init__(self, edge_index: Tensor, edge: Mapping[str, Tensor]) -> None:
        self.edge_index = edge_index
        self.edge = edge

    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        rows = as_tensor(h)
        initial = (x0,) if takes_x0(conv) else ()
        return conv(rows, *initial, self.edge_index, **edge_arguments(conv, self.edge, rows.dtype))

    def block_to(self, block: Block, device: torch.device) -> Block:
        raise AssertionError("the block of a plain call stays where it is")


def plain_block(num_nodes: int, edge_index: Tensor, edge: Mapping[str, Tensor]) -> Block:
    """The block of all nodes of a graph whose convs run as in plain PyG."""
    nodes = torch.arange(num_nodes, device=edge_index.device)
    return Block(nodes, num_nodes, (), None, key=None, convs=PlainConvs(edge_index, edge))
