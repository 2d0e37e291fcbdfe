"""What exact inference at the same nodes needs again after every epoch, kept as far as there is room."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import psutil
import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.graph import Graph
from hopline.core.row_handles import ReducedRows
from hopline.tables import Table

SHARE = 32
"""What may be kept is 1 / so many of the memory of the device that computes."""


def max_cache_bytes(device: torch.device) -> int:
    """Bytes that may be kept there."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // SHARE
    memory = psutil.virtual_memory()
    return min(memory.total // SHARE, memory.available // 4)


@dataclass(eq=False)
class InferenceCache:
    """Of inference at some nodes: the nodes of each layer in chunks, their blocks, and the first layer's sums.

    These need no parameter, so they are the same whatever the weights are. Nodes that are asked for only once leave
    nothing but the list of those that they need.
    """

    ids: weakref.ref[Tensor]
    version: int
    settings: Hashable
    """What else the rest depends on."""
    x: weakref.ref[Table]
    x_version: int | None
    edge_versions: Mapping[str, int]
    """Of the graph's arrays, whose rows are in the blocks."""
    layer_nodes: list[Tensor]
    """Nodes whose rows are needed before each layer, and at the end."""
    free_bytes: int
    num_uses: int = 1
    """How often the nodes were asked for."""
    chunks: dict[int, list[Tensor]] = field(default_factory=dict)
    """By the identity of the nodes, which are among `layer_nodes`."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """By the identity of the chunk; without their graph, which would live as long as they do."""
    sums: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """Of chunks in the first layer: what `ReducedRows` need beside the table."""

    def matches(self, graph: Graph, ids: Tensor, settings: Hashable, x: Table) -> bool:
        same = self.ids() is ids and self.version == ids._version and self.settings == settings
        return same and self.x() is x and self.x_version == x.version and self.edge_versions == graph.versions

    def get_chunks(self, nodes: Tensor, cut: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The nodes as they were cut before, or are cut now."""
        known = self.chunks.get(id(nodes))
        # Of two threads that cut at once both take the first one's: the rest goes by what the chunks are.
        return self.chunks.setdefault(id(nodes), cut()) if known is None else known

    def is_complete(self, num_layers: int) -> bool:
        """Whether it has the blocks of all layers, none of which is cut into chunks."""
        return all(id(nodes) in self.blocks for nodes in self.layer_nodes[-num_layers:])

    def has_sums(self, num_layers: int) -> bool:
        """Whether the features are not read again."""
        return id(self.layer_nodes[-num_layers]) in self.sums

    def block(self, chunk: Tensor, graph: Graph) -> Block | None:
        """All in-edges of a chunk, if they are known."""
        block = self.blocks.get(id(chunk))
        return None if block is None else replace(block, graph=graph)

    def store(self, chunk: Tensor, block: Block, rows: ReducedRows | None) -> None:
        """For the next time, if there is room: the block of a chunk, and in the first layer its sums."""
        if self.num_uses < 2 or id(chunk) in self.blocks:
            return
        sums = None if rows is None or self.x_version is None else (rows.reduced_and_own, rows.how)
        taken = sum(tensor.nbytes for tensor in block.tensors() if tensor is not None)
        taken += 0 if sums is None else sums[0].nbytes
        if taken > self.free_bytes:
            return
        self.free_bytes -= taken
        if sums is not None:
            self.sums[id(chunk)] = sums
        self.blocks[id(chunk)] = replace(block, graph=None)


@dataclass(eq=False)
class LastInference:
    """What the last inference on a graph has kept. The graph owns it, so that it goes with the graph."""

    cache: InferenceCache | None = None

    @classmethod
    def on(cls, graph: Graph) -> LastInference:
        """The one of a graph; a new one where the graph's arrays have changed."""
        return graph.get_cached("last inference", cls)


def get_inference_cache(
    graph: Graph,
    x: Table,
    ids: Tensor,
    settings: Hashable,
    device: torch.device,
    layer_nodes: Callable[[], list[Tensor]],
) -> InferenceCache:
    """What was kept of the last inference on a graph, if that was the same but for the weights; else a new one."""
    last = LastInference.on(graph)
    cache = last.cache
    if cache is not None and cache.matches(graph, ids, settings, x):
        cache.num_uses += 1
    else:
        cache = InferenceCache(
            weakref.ref(ids),
            ids._version,
            settings,
            weakref.ref(x),
            x.version,
            graph.versions,
            layer_nodes(),
            max_cache_bytes(device),
        )
        last.cache = cache
    return cache
