"""Exact inference, layer by layer: layer l is computed for all nodes that need it before layer l + 1 starts.

Every embedding is computed once. Mini-batches would compute a node again for each batch that needs it. The
price is memory for the embeddings between two layers, in `InferenceTables`.

A layer runs as a pipeline over chunks of nodes:

    prefetch (host thread)         compute (caller's thread)       write (host thread)
    block of all in-edges,    ->   state, then the layer      ->   new rows into the table
    rows of its sources            on the device                   that layer l + 1 reads

`Layers.forward` of `layerwise/engine.py` runs the pipeline. `Chunks` is the plan that it follows, `InferenceRows`
are the boundaries through which it reads and writes. Each of the two host threads may be absent: the caller's thread
prefetches if `Chunks.prefetch_pieces` is 0, and writes if `Chunks.write_queue_pieces` is 0.

In-edges and nodes decide what a layer costs, so `chunk_edges` limits the sum of both in a chunk. Only nodes
that the requested ids depend on are computed. A conv that needs more than a node's in-edges runs on the
whole graph at once. Such a conv needs the rows of all nodes in every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.contract import KeepRows
from hopline.core.batch import Block
from hopline.core.row_handles import Readable, ReducedRows, Rows, as_dtype
from hopline.core.sampler import NeighborSampler, full_block, in_neighborhood, whole_block
from hopline.data.dataset import Dataset
from hopline.device.meter import free_bytes, meter_of, with_index
from hopline.inference.cache import InferenceCache, get_inference_cache
from hopline.inference.resumable import LayerFiles
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece, layer_rows
from hopline.nn.conv_adapter import NeedsWholeGraph, calling_convention
from hopline.nn.layered import ENCODED, Layered
from hopline.shards.convs.messages import CannotSplit
from hopline.shards.convs.runner import ShardConvs
from hopline.shards.layout import contiguous_layout
from hopline.tables import TensorTable
from hopline.tables.allocators import Allocator, DeviceOrPinnedMemory
from hopline.tables.layers import At, LayerTables
from hopline.util.progress import progress

# ---- the size of a chunk: its "edges" are its in-edges plus its nodes. A GPU gets large chunks, because each
# one costs the host some time.

CHUNK_EDGES = 1 << 20
"""Edges per chunk on the CPU, and the fewest on a GPU by default."""
MAX_GPU_EDGES = 1 << 24
"""Most edges per chunk on a GPU if some conv builds a row per edge (GAT, for example)."""
GPU_BYTES_PER_EDGE = 8 << 10
"""Memory of the GPU that is reckoned per edge of such a conv: eight float32 rows of width 256."""
MAX_GPU_EDGES_FUSED = 1 << 26
"""Most edges per chunk on a GPU if all convs are fused and build no row per edge."""
GPU_BYTES_PER_EDGE_FUSED = 512
"""Memory of the GPU that is reckoned per edge of fused convs."""

# ---- what is computed, where rows are stored, how a chunk is measured

WHOLE_GRAPH_FRACTION = 0.5
"""A GPU computes a layer at all nodes if at least this fraction of them is needed, and all are a single chunk.
That needs no block."""
DEVICE_SHARE = 0.25
"""Fraction of the free device memory that one table of embeddings may take. Larger tables go to pinned host
memory."""
PREFETCH_CHUNKS = 2
"""Chunks that are prefetched before their turn."""
WRITE_QUEUE_CHUNKS = 2
"""Chunks that are computed and wait to be written, at most."""
SCANNED_EDGES = 1 << 22
"""Edges whose sources are looked up at once, where the nodes of a layer are found by chunks."""
PROBED_NODES = 16
"""Nodes, at most, in the probe that measures a layer's memory for `chunk_bytes`."""
MARGIN = 1.5
"""Safety factor: a chunk may take this many times the bytes per edge of the probe."""
CPU = torch.device("cpu")


def default_chunk_edges(device: torch.device, data: Dataset, *, fused: bool = False) -> int:
    """The default number of edges per chunk.

    On a GPU it follows from the total memory and not from the free memory: equal runs then have equal
    chunks, and so equal results. fused: whether no conv builds a row per edge.
    """
    if device.type != "cuda":
        return CHUNK_EDGES
    max_edges = MAX_GPU_EDGES_FUSED if fused else MAX_GPU_EDGES
    bytes_per_edge = GPU_BYTES_PER_EDGE_FUSED if fused else GPU_BYTES_PER_EDGE
    # At worst each edge has a source of its own, and needs 8 float32 rows of the features' width for it.
    width = math.prod(data.x.shape[1:]) if "x" in data.tables else 0
    bytes_per_edge = max(bytes_per_edge, 8 * width * 4)
    edges_that_fit = torch.cuda.get_device_properties(device).total_memory // bytes_per_edge
    return min(max(edges_that_fit, CHUNK_EDGES), max_edges)


class InferenceTables(LayerTables):
    """The tables of embeddings after the encoder and after each layer, by layer number.

    `complete(l)` drops the tables that no later layer reads. With `LayerFiles` as allocator the tables are
    mapped files, and those of an interrupted run are opened again.
    """

    def __init__(self, num_rows: int, allocator: Allocator, model: Layered, device: torch.device) -> None:
        super().__init__(num_rows, allocator)
        self.model = model
        self.device = device
        self.last = model.num_layers - 1
        self.files = allocator if isinstance(allocator, LayerFiles) else None
        if self.files is not None:
            self.tables = self.files.existing()

    def write(self, l: int, at: At, rows: Tensor, computed: Any = None) -> None:
        assert isinstance(at, Tensor)  # chunks are positions, never row ranges
        if l not in self.tables and rows.size(0) == self.num_rows and self.allocator.adopts(rows):
            self.tables[l] = rows  # rows of all nodes in their order become the table without a copy
        else:
            table = TensorTable(self.table(l, rows))
            # Rows on a GPU are written by the GPU where it can reach the table, else by the host.
            writer = rows.device if table.tiers(rows.device) is not None else CPU
            table.write(at.to(writer), rows.to(writer))
        if self.files is not None and l > ENCODED:
            self.files.mark_chunk()

    def complete(self, l: int) -> None:
        if self.device.type == "cuda" and any(not table.is_cuda for table in self.tables.values()):
            # The GPU writes tables in pinned host memory. The host may read them only after the GPU has finished.
            torch.cuda.current_stream(self.device).synchronize()
        earlier = [k for k in self.tables if k < l]
        read_later = {k for m in range(l + 1, self.last + 1) for k in self.model.reads(m).all}
        unneeded = [k for k in earlier if k not in read_later]
        if self.files is not None:
            self.files.mark_layer(unneeded)  # marks progress first, then removes the files
        for k in unneeded:
            self.drop(k)


@dataclass(frozen=True, eq=False)
class NodesToRead:
    """Nodes at which a chunk reads rows, in one layer or in several."""

    ids: Tensor
    """[n] int64."""
    are_all: bool
    """Whether they are all nodes, in their order."""
    prefetched: dict[int, Tensor] = field(default_factory=dict)
    """By layer, the rows that are on the host already. Each is taken out when it is read."""


class InferenceRows(Boundaries):
    """The rows that chunks read and write: the tables, and before the first layer the features.

    A table that the device can read itself is read at the chunk's turn. Other tables are read on the host, where
    `prefetch` may do so in a thread.

    cache: holds the first layer's sums, at the second inference at the same nodes. None: nothing is cached.
    """

    has_encoded = True

    def __init__(self, data: Dataset, tables: InferenceTables, cache: InferenceCache | None) -> None:
        self.model = tables.model
        self.data = data
        self.cache = cache
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        super().__init__(tables, device=tables.device, dtype=dtype)

    def table(self, l: int) -> Readable:
        return self.data.x if l == ENCODED and not self.model.encodes else self.tables.of(l)

    def cached_sums(self, l: int, chunk: Tensor) -> tuple[Tensor, str] | None:
        """The cached sums of a chunk, in place of the features. None if there are none."""
        # For `id()` as the key see `InferenceCache`.
        return self.cache.sums.get(id(chunk)) if self.cache is not None and l == ENCODED else None

    def prefetch(self, l: int, nodes: NodesToRead) -> None:
        """Read rows after layer `l` on the host, unless a GPU can read them itself. May run in a thread."""
        rows = Rows(self.table(l), nodes.ids)
        if self.device.type == "cpu" or not rows.is_near(self.device):
            nodes.prefetched[l] = _read_on(CPU, rows, nodes.are_all)

    def handle(self, l: int, piece: Piece) -> Rows | Tensor:
        """The sources' rows after layer `l`. Stores the piece's block and sums in the cache.

        Features are aggregated already if the first conv can do so without its parameters (`Layered.reduced_input`).
        """
        h = self._sources(l, piece)
        if self.cache is not None:
            self.cache.store(piece.chunk, piece.block, h if isinstance(h, ReducedRows) else None)
        return h

    def _sources(self, l: int, piece: Piece) -> Rows | Tensor:
        sums = self.cached_sums(l, piece.chunk)
        if sums is not None:
            return ReducedRows(self.data.x, piece.block.src_ids, *sums)
        # On the CPU a layer may read the table itself.
        h = Rows(self.table(l), piece.src.ids) if self.device.type == "cpu" else self._take(l, piece.src)
        reduced = self.model.reduced_input(h, piece.block) if l == ENCODED else None
        return h if reduced is None else ReducedRows(self.data.x, piece.block.src_ids, *reduced)

    def read(self, l: int, at: NodesToRead) -> Tensor:
        rows = self._take(l, at)
        # Features may have another precision than the model. Embeddings stay in that of their table, as under autocast.
        return as_dtype(rows, self.dtype) if l == ENCODED else rows

    def _take(self, l: int, nodes: NodesToRead) -> Tensor:
        prefetched = nodes.prefetched.pop(l, None)
        if prefetched is not None:
            return prefetched.to(self.device)
        return _read_on(self.device, Rows(self.table(l), nodes.ids), nodes.are_all)

    def write(self, l: int, piece: Piece, rows: Tensor) -> None:
        # The ids of the block are on the device: where a GPU can reach the table, it writes the rows.
        self.tables.write(l, piece.block.dst_ids, rows)


def _read_on(device: torch.device, rows: Rows, are_all: bool) -> Tensor:
    """Rows on a device. are_all: they are all rows in order, so that a table on that device needs no copy."""
    storage = rows.table.storage() if are_all else None
    if storage is not None and storage.device == device:
        return storage
    return rows.read_on(device)


class Chunks(LayerPlan[Tensor]):
    """Exact inference of one model on one dataset: the plan of nodes, chunks and rows for each layer.

    The caller owns the model and the dataset, the graph owns the cache, and each inference gets new tables.
    One thread calls `run` or `outputs`. `piece` may run in the prefetching thread of the engine.

    chunk_bytes: the most bytes that chunks may take besides the tables of embeddings, in place of
    `chunk_edges`.
    files: holds the tables and the progress in a folder, from which a killed run resumes.
    """

    span = "infer.layer"
    depends_on_graph_alone = True
    """Whether the nodes of each layer follow from the graph alone, so that a cache of the last inference is
    valid."""
    has_all_edges = True
    """Whether `data.graph` is the whole graph, so that a conv can be run on all of it at once."""

    def __init__(
        self,
        model: Layered,
        data: Dataset,
        chunk_edges: int | None,
        device: torch.device,
        keep: KeepRows | None = None,
        *,
        chunk_bytes: int | None = None,
        files: LayerFiles | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.device = with_index(device)
        self.keep = keep
        self.chunk_edges = chunk_edges or default_chunk_edges(device, data, fused=model.is_fused)
        self.chunk_bytes = chunk_bytes
        self.files = files
        self.last = model.num_layers - 1
        # With the graph on a GPU the same thread launches all kernels, so nothing is prefetched.
        self.prefetch_pieces = PREFETCH_CHUNKS if data.graph.device.type == "cpu" else 0
        # On the CPU without files a write is a copy within memory, which is not worth a thread.
        self.write_queue_pieces = WRITE_QUEUE_CHUNKS if files is not None or device.type != "cpu" else 0
        self.sampler = NeighborSampler(data.graph, (-1,))
        self.cache: InferenceCache | None = None
        self.everywhere = False
        """Whether every layer is computed at all nodes."""
        self._whole: Block | None = None
        """The block of all nodes on the device, made once and used by every layer."""
        self._over_graph: Block | None = None
        """The whole graph as one block while a layer's conv needs more than a node's in-edges, else None."""

    def run(self, ids: Tensor | None, show: bool) -> Tensor:
        """The output rows of `ids`, or of all nodes if None: [n, num_outputs] on the host."""
        ids_or_all = torch.arange(self.data.num_nodes) if ids is None else ids
        return Rows(self.outputs(ids, show), ids_or_all).read_on(CPU)

    def outputs(self, ids: Tensor | None, show: bool) -> Readable:
        """The table of output rows, by node id. Rows of nodes that are not in `ids` are undefined."""
        self.everywhere = ids is None
        try:
            return self._outputs(self._cached_layer_nodes(ids), show)
        except NeedsWholeGraph:
            # Raised once the width of a layer's input is known. Start again with all nodes in every layer. Files
            # rule that out: the layers in them may lack rows of some nodes.
            if self.everywhere or not self.has_all_edges or self.files is not None:
                raise
        self.everywhere = True
        self.cache = None
        return self._outputs(self.layer_nodes(None), show)

    def _outputs(self, layer_nodes: list[Tensor], show: bool) -> Readable:
        """`outputs` with the nodes of each layer. Resumes after the layers that `files` holds already."""
        first = 0 if self.files is None else self.files.layer
        # New tables for each inference: `inference/captured_forward.py` runs this function and then captures
        # it as a CUDA graph. The captured inference must not find the tables of an earlier one.
        self.tables = InferenceTables(self.data.num_nodes, self._allocator, self.model, self.device)
        self.rows = InferenceRows(self.data, self.tables, self.cache)
        self.needed_at = layer_nodes
        keep = self.keep
        keep_piece = None if keep is None else lambda l, piece, rows: keep(l, piece.chunk, rows)
        layers = Layers(self.model, self, self.rows, keep=keep_piece)
        total = sum(nodes.numel() for nodes in layer_nodes[1:])
        with progress("inference", total, "rows", enabled=show, brief=True) as self.bar:
            self.bar.advance(sum(nodes.numel() for nodes in layer_nodes[1 : first + 1]))
            if not first and self.model.encodes:
                self._encode(layer_nodes[0])
            for l in range(first, self.model.num_layers):
                self._over_graph = self._graph_block() if self._needs_whole_graph(l) else None
                try:
                    layers.forward([l])
                except CannotSplit:
                    # This conv's aggregation cannot be combined from chunks of messages: all messages at once.
                    self._over_graph = self._graph_block(mode="one_shot")
                    layers.forward([l])
        return self.tables.of(self.last)

    @cached_property
    def _allocator(self) -> Allocator:
        """The allocator of the tables: files, or a GPU's free memory and then pinned host memory.

        With `chunk_bytes` tables stay off the GPU, since the memory that chunks leave free belongs to others.
        """
        if self.files is not None:
            return self.files
        may_use_gpu = self.chunk_bytes is None and self.device.type == "cuda"
        max_table_bytes = int(DEVICE_SHARE * free_bytes(self.device)) if may_use_gpu else 0
        return DeviceOrPinnedMemory(self.device, max_table_bytes)

    def layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        """The nodes whose rows are needed before each layer, and as the last entry the output nodes.

        Entry l holds the nodes whose rows layer l reads. Entry 0 is used only where an encoder computes
        these rows.
        """
        num_layers = self.model.num_layers
        graph_device = self.data.graph.indptr.device
        all_nodes = torch.arange(self.data.num_nodes, device=graph_device)
        if ids is None:
            return [all_nodes] * (num_layers + 1)
        output_nodes = torch.unique(ids.to(graph_device))
        if self.keep is not None:
            return [all_nodes] * num_layers + [output_nodes]  # `keep` is called with rows of all nodes
        # From half of all nodes on, a GPU computes all of them if they are one chunk: that needs no block.
        prefers_all = self.device.type == "cuda" and self._is_single_chunk(self.chunk_edges)
        enough = (WHOLE_GRAPH_FRACTION if prefers_all else 1) * all_nodes.numel()
        # From the output backwards: a layer reads its nodes and their in-neighbours. Without an encoder the
        # first layer reads features, which need not be computed, so that one hop less is followed.
        layer_nodes = [output_nodes]
        num_hops = num_layers if self.model.encodes else num_layers - 1
        for _ in range(num_hops):
            nodes = layer_nodes[0]
            if nodes.numel() < all_nodes.numel():
                nodes = in_neighborhood(self.data.graph, nodes)
            layer_nodes.insert(0, nodes if nodes.numel() < enough else all_nodes)
        return layer_nodes if self.model.encodes else [all_nodes, *layer_nodes]

    def _cached_layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        """`layer_nodes(ids)`, from the cache if the last inference was at the same ids. Sets `self.cache`."""
        if ids is None or self.files is not None or self.chunk_bytes is not None or not self.depends_on_graph_alone:
            return self.layer_nodes(ids)
        model = self.model
        # All that chunks, blocks and first-layer sums depend on, other than the graph, the features and the ids.
        settings = (
            model.num_layers,
            model.encodes,
            model.input_reduction,
            self.keep is None,
            self.chunk_edges,
            self.device,
        )
        self.cache = get_inference_cache(
            self.data.graph, self.data.x, ids, settings, self.device, lambda: self.layer_nodes(ids)
        )
        return self.cache.layer_nodes

    @property
    def is_cached(self) -> bool:
        """Whether the cache has a block for every layer, each layer being a single chunk."""
        return self.cache is not None and self.cache.is_complete(self.model.num_layers)

    def block(self, nodes: Tensor) -> Block:
        """The block of all in-edges of `nodes`, from the cache if it has it."""
        cached = None if self.cache is None else self.cache.block(nodes, self.data.graph)
        if cached is not None:
            return cached
        if nodes.numel() == self.data.num_nodes:
            return whole_block(self.data.graph)
        return full_block(self.sampler, nodes)

    def _block_to_device(self, block: Block) -> Block:
        """The block on the device. A block of all nodes is copied once and serves all layers."""
        if not self._is_whole(block):
            return block.to(self.device)
        self._whole = self._whole or block.to(self.device)
        return self._whole

    def _is_single_chunk(self, chunk_edges: int) -> bool:
        return self.data.num_edges + self.data.num_nodes <= chunk_edges

    def probe_nodes(self, nodes: Tensor) -> Tensor:
        """A few of the nodes, evenly spaced, at which a layer's memory is measured."""
        step = -(-nodes.numel() // PROBED_NODES)  # rounded up, so that the probe has no more nodes than that
        return nodes[::step].contiguous()

    # ---- a conv that must see the whole graph

    def _needs_whole_graph(self, l: int) -> bool:
        """Whether layer l's conv must run on the whole graph.

        Raises `NeedsWholeGraph` if it must, but not all nodes are computed or `data.graph` lacks edges.
        """
        try:
            for conv, width, _, initial_width in self.model.conv_sizes(l, lambda k: self.rows.table(k).shape[1]):
                calling_convention(conv, width, self.data.graph.edge, initial_width=initial_width)
        except NeedsWholeGraph:
            if not self.everywhere or not self.has_all_edges:
                raise
            return True
        return False

    def _graph_block(self, **options: Any) -> Block:
        """The whole graph as a block of full-batch training.

        Messages are computed in chunks, or all at once with mode="one_shot".
        """
        graph = self.data.graph.to("cpu")
        layout = contiguous_layout(graph, torch.tensor([0, graph.num_nodes]))
        return ShardConvs.of(layout, **options).to(self.device).block()

    # ---- the plan

    def chunks_of(self, l: int) -> list[Tensor]:
        # Layer l computes the rows that layer l + 1 reads: entry l + 1. The last entry is the output nodes.
        nodes = self.needed_at[l + 1]
        # A resumed layer keeps the chunk size that it was begun with, since only the number of its finished
        # chunks is known. 0: the layer has not begun, or there are no files, so the size is free.
        chunk_edges = 0 if self.files is None else self.files.chunk_edges
        if self._over_graph is not None:
            chunk_edges = chunk_edges or self.chunk_edges
            chunks = [nodes]
        else:
            chunk_edges = chunk_edges or self._edges_of_a_chunk(l, nodes)
            split = partial(self.chunks, nodes, chunk_edges)
            chunks = split() if self.cache is None else self.cache.get_chunks(nodes, split)
        num_done = 0 if self.files is None else self.files.begin(l, chunk_edges)
        self.bar.advance(sum(chunk.numel() for chunk in chunks[:num_done]))
        return chunks[num_done:]

    def piece(self, l: int, chunk: Tensor) -> Piece:
        """The piece of a chunk. Rows of tables that the device cannot read itself are read here."""
        block = self.block(chunk) if self._over_graph is None else self._over_graph
        are_all = self._is_whole(block)
        src = NodesToRead(block.src_ids, are_all)
        dst = NodesToRead(block.dst_ids, are_all)
        reads = self.model.reads(l)
        for k in reads.own:
            self.rows.prefetch(k, dst)
        # On the CPU the layer may read the sources' rows itself.
        for k in reads.sources if self.device.type != "cpu" else ():
            if self.rows.cached_sums(k, chunk) is None:
                self.rows.prefetch(k, src)
        return Piece(block=block, src=src, dst=dst, chunk=chunk)

    def to_device(self, piece: Piece) -> None:
        if self._over_graph is None:  # else it is there
            piece.block = self._block_to_device(piece.block)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        rows = Rows(self.data.x, ids)
        return rows if self.device.type == "cpu" else rows.read_on(self.device)

    def on_piece_written(self, l: int, piece: Piece) -> None:
        self.bar.advance(piece.block.num_dst)

    def _is_whole(self, block: Block) -> bool:
        # The number of sources would not tell: a block may have all nodes as sources in another order.
        return block.num_dst == self.data.num_nodes

    def _encode(self, nodes: Tensor) -> None:
        """Write the rows after the encoder into their table, chunk by chunk.

        In evaluation the same rows serve as input of the first layer, as initial rows and for jumping
        knowledge.
        """
        # An encoder reads no edges, so its chunks are limited by nodes.
        for chunk in nodes.split(max(1, self.chunk_edges // 16)):
            rows = self.model.encoded_rows(self.model.encode(self.inputs_of(chunk), chunk, None))
            self.tables.write(ENCODED, chunk, rows)
        # As in `InferenceTables.complete`: the host may read a table only after the GPU has written it.
        if self.device.type == "cuda" and not self.tables.tables[ENCODED].is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def _edges_of_a_chunk(self, l: int, nodes: Tensor) -> int:
        """Edges per chunk of layer l: `chunk_edges`, or as many as a probe finds to fit in `chunk_bytes`."""
        if self.chunk_bytes is None:
            return self.chunk_edges
        nodes = self.probe_nodes(nodes)
        with meter_of(self.device) as preparing:
            piece = self.piece(l, nodes)
        with meter_of(self.device) as computing:
            self.to_device(piece)
            rows = layer_rows(self.model, l, Layers(self.model, self, self.rows).state(l, piece), piece)
        # In memory at once: the chunk in use and those prefetched, one computation, and outputs not written yet.
        prepared_bytes = (1 + PREFETCH_CHUNKS) * preparing.peak_bytes
        probe_bytes = prepared_bytes + computing.peak_bytes + WRITE_QUEUE_CHUNKS * rows.nbytes
        num_edges_and_nodes = int(self.data.graph.in_degrees(nodes).sum()) + nodes.numel()
        return max(1, int(self.chunk_bytes * num_edges_and_nodes / (MARGIN * max(1, probe_bytes))))

    def with_sources(self, nodes: Tensor) -> Tensor:
        """[n] int64, ascending: some nodes and all their in-neighbours. Reads about `SCANNED_EDGES` at a time."""
        is_source = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        is_source[nodes] = True
        for chunk in self.chunks(nodes, SCANNED_EDGES):
            is_source[self.sources_of(chunk)] = True
        return is_source.nonzero().view(-1)

    def sources_of(self, nodes: Tensor) -> Tensor:
        """[num_edges] int64: the sources of all in-edges of a chunk's nodes."""
        graph = self.data.graph
        _, edges = ops.row_entries(graph.indptr, nodes)
        return graph.indices[edges].long()

    def chunks(self, nodes: Tensor, chunk_edges: int) -> list[Tensor]:
        """Contiguous slices of `nodes`, each with at most `chunk_edges` in-edges and nodes together.

        A node with more in-edges than that is a chunk of its own.
        """
        if self._is_single_chunk(chunk_edges):
            return [nodes]
        # cost[i]: in-edges and nodes of the first i + 1 nodes together.
        cost = (self.data.graph.in_degrees(nodes) + 1).cumsum(0)
        chunks = []
        start = 0
        while start < nodes.numel():
            cost_before = int(cost[start - 1]) if start else 0
            stop = int(torch.searchsorted(cost, cost_before + chunk_edges, right=True))
            stop = max(stop, start + 1)
            chunks.append(nodes[start:stop])
            start = stop
        return chunks
