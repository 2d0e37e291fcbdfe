"""Calls as in plain PyG, on a whole graph: of a model's convs (`PlainConvs`), and of a user's module.

A module takes (x, edge_index), a PyG `Data`, or (x, adjs) with the edges of every layer, as from PyG's old
`NeighborSampler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from hopline.core.batch import Block, ConvRunner
from hopline.core.row_handles import Handle, as_tensor
from hopline.nn.conv_adapter import edge_arguments, takes_x0
from hopline.nn.conv_facts import arguments_of


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


class Adj(NamedTuple):
    """The edges of one layer, for a module with forward(x, adjs)."""

    edge_index: Tensor
    e_id: Tensor | None
    size: tuple[int, int]
    """(sources, destinations). The destinations are the first of the sources."""


def takes_data(module: nn.Module) -> bool:
    """Whether a module's `forward` takes a PyG `Data`."""
    return "data" in arguments_of(type(module)) and "edge_index" not in arguments_of(type(module))


def takes_adjs(module: nn.Module) -> bool:
    """Whether a module's `forward` takes the edges of every layer apart."""
    return "adjs" in arguments_of(type(module))


def call_module(module: nn.Module, x: Any, edge_index: Any, arguments: Mapping[str, Any]) -> Any:
    """What a module returns for all nodes of a graph. arguments: edge arrays, by the names of `forward`'s arguments."""
    if takes_data(module):
        return module(Data(x=x, edge_index=edge_index, **arguments))
    if takes_adjs(module):
        num_layers = sum(isinstance(part, MessagePassing) for part in module.modules())
        return module(x, [Adj(edge_index, None, (x.size(0), x.size(0)))] * num_layers)
    return module(x, edge_index, **arguments)


def adjs_of(blocks: Sequence[Block]) -> list[Adj]:
    """The edges of every layer of a batch, from the features to the seeds."""
    return [Adj(block.edge_index, None, (block.num_src, block.num_dst)) for block in blocks]
