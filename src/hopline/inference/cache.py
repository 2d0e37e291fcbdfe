"""A cache for exact inference at the same nodes with changing weights, as evaluation after every epoch is.

Much of layer-wise inference needs no weight: which nodes each layer needs, their chunks, the blocks of
in-edges, and the first layer's aggregation of the features. `InferenceCache` stores these for one set of
nodes, up to a limit of bytes. Each graph has at most one cache, of its last inference.

The list of nodes is stored at the first inference. Blocks and sums are stored from the second inference at
the same nodes on, so that a single inference does not spend memory on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.graph import Graph, version_of
from hopline.core.row_handles import ReducedRows
from hopline.tables import Table
from hopline.util.host import host_memory

SHARE = 32
"""A cache may take 1 / SHARE of the memory of the device that computes."""
LAST_INFERENCE = "last inference"
"""The name under which a graph holds a dictionary with its cache."""


def max_cache_bytes(device: torch.device) -> int:
    """The most bytes that a cache may take on a device; on the host also at most a quarter of the free
    memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // SHARE
    memory = host_memory()
    return min(memory.total // SHARE, memory.available // 4)


@dataclass(eq=False)
class InferenceCache:
    """The results of exact inference at some nodes that do not depend on the weights.

    It holds the nodes of each layer, their chunks, the blocks of chunks and the first layer's sums. The
    caller's ids and features are referenced weakly: the cache does not keep them alive.

    Chunks, blocks and sums are looked up by `id()` of a node tensor. That is safe because `layer_nodes` and
    `chunks` hold these tensors as long as the cache lives: no other object can get the same id.

    Two threads may run inference with one cache at the same time: see `get_chunks` and `store`.
    """

    ids: weakref.ref[Tensor]
    """The nodes of the inference: the caller's tensor itself, compared by identity."""
    version: int
    """The version of `ids`, which torch increases at each change in place."""
    settings: Hashable
    """All else that the cached values depend on, such as the chunk size, the device and the number of
    layers."""
    x: weakref.ref[Table]
    """The table of features, compared by identity."""
    x_version: int | None
    """The version of the features. None: unknown, and then no sums are stored."""
    edge_versions: Mapping[str, int]
    """The versions of the graph's arrays by name. Blocks hold rows of these arrays."""
    layer_nodes: list[Tensor]
    """The nodes whose rows are needed before each layer, and as the last entry the output nodes."""
    free_bytes: int
    """The bytes that may still be stored."""
    num_uses: int = 1
    """The number of inferences at these nodes so far."""
    chunks: dict[int, list[Tensor]] = field(default_factory=dict)
    """The chunks of a layer's nodes. Key: `id()` of the nodes, a tensor of `layer_nodes`."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """The block of each chunk. Key: `id()` of the chunk. Stored without the graph, to not keep it alive."""
    sums: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """The first layer's reduced rows of each chunk, and how they were reduced. Key: `id()` of the chunk."""
    lock: Lock = field(default_factory=Lock)
    """Held while `store` compares `free_bytes` with what it needs and subtracts it."""

    def matches(self, graph: Graph, ids: Tensor, settings: Hashable, x: Table) -> bool:
        """Whether the cache is valid for an inference: the same objects, unchanged in place, and equal
        settings."""
        same = self.ids() is ids and self.version == version_of(ids) and self.settings == settings
        return same and self.x() is x and self.x_version == x.version and self.edge_versions == graph.versions

    def get_chunks(self, nodes: Tensor, split: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The chunks of `nodes`, made by `split()` the first time."""
        chunks = self.chunks.get(id(nodes))
        if chunks is None:
            # Two threads may make chunks at the same time. `setdefault` gives both the list that was stored
            # first. They must agree, because blocks are looked up by the identity of the chunk tensors.
            chunks = self.chunks.setdefault(id(nodes), split())
        return chunks

    def is_complete(self, num_layers: int) -> bool:
        """Whether the cache has the blocks of all layers, and each layer is a single chunk."""
        # The last `num_layers` entries are the nodes that each layer computes. A single chunk is the tensor of
        # the layer's nodes itself, so its block is found by that tensor's id.
        return all(id(nodes) in self.blocks for nodes in self.layer_nodes[-num_layers:])

    def has_sums(self, num_layers: int) -> bool:
        """Whether the first layer's sums are cached, so that features are not read again.

        False if the first layer has several chunks.
        """
        # Entry -num_layers: the nodes that the first layer computes.
        return id(self.layer_nodes[-num_layers]) in self.sums

    def block(self, chunk: Tensor, graph: Graph) -> Block | None:
        """The block of all in-edges of a chunk, with its graph; None if it is not cached."""
        block = self.blocks.get(id(chunk))
        return None if block is None else replace(block, graph=graph)

    def store(self, chunk: Tensor, block: Block, rows: ReducedRows | None) -> None:
        """Store the block of a chunk, and in the first layer its sums, if they fit in `free_bytes`.

        rows: the first layer's reduced rows; None for other layers, or where nothing was reduced.
        """
        # Nodes of a single inference are not worth the memory: nothing is stored before the second.
        if self.num_uses < 2 or id(chunk) in self.blocks:
            return
        sums = None if rows is None or self.x_version is None else (rows.reduced_and_own, rows.how)
        num_bytes = sum(tensor.nbytes for tensor in block.tensors() if tensor is not None)
        if sums is not None:
            reduced_rows, _how = sums
            num_bytes += reduced_rows.nbytes
        # Two threads may compute one chunk at the same time. The lock lets only the first store it and
        # count its bytes.
        with self.lock:
            if num_bytes > self.free_bytes or id(chunk) in self.blocks:
                return
            self.free_bytes -= num_bytes
            if sums is not None:
                self.sums[id(chunk)] = sums
            self.blocks[id(chunk)] = replace(block, graph=None)


def get_inference_cache(
    graph: Graph,
    x: Table,
    ids: Tensor,
    settings: Hashable,
    device: torch.device,
    find_layer_nodes: Callable[[], list[Tensor]],
) -> InferenceCache:
    """The cache of the last inference on a graph if only the weights have changed, else a new one that
    replaces it.

    find_layer_nodes: computes `InferenceCache.layer_nodes`. Called only for a new cache.
    """
    # The graph holds the cache, so that both are freed together, and drops it if its arrays change.
    last: dict[str, InferenceCache] = graph.get_cached(LAST_INFERENCE, dict)
    cache = last.get("cache")
    if cache is not None and cache.matches(graph, ids, settings, x):
        cache.num_uses += 1
    else:
        cache = InferenceCache(
            ids=weakref.ref(ids),
            version=version_of(ids),
            settings=settings,
            x=weakref.ref(x),
            x_version=x.version,
            edge_versions=graph.versions,
            layer_nodes=find_layer_nodes(),
            free_bytes=max_cache_bytes(device),
        )
        last["cache"] = cache
    return cache
