"""Exact inference, layer by layer: layer l is computed for all nodes that need it before layer l + 1 starts.

Every embedding is computed once. Mini-batches would compute a node again for each batch that needs it. The
price is memory for the embeddings between two layers, in `InferenceTables`.

A layer runs as a pipeline over chunks of nodes:

    prefetch (host thread)         compute (caller's thread)       write (host thread)
    block of all in-edges,    ->   state, then the layer      ->   new rows into the table
    rows of its sources            on the device                   that layer l + 1 reads

`Layers.forward` of `layerwise/engine.py` runs the pipeline; `Chunks` is the plan that it follows. Each of
the two host threads may be absent: the caller's thread prefetches if `Chunks.prefetch_pieces` is 0, and writes if
`Chunks.write_queue_pieces` is 0.

In-edges and nodes decide what a layer costs, so `chunk_edges` limits the sum of both in a chunk. Only nodes
that the requested ids depend on are computed. A conv that needs more than a node's in-edges runs on the
whole graph at once. Such a conv needs the rows of all nodes in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hopline.contract import KeepRows
from hopline.core.batch import Block
from hopline.core.row_handles import Readable, ReducedRows, Rows, as_tensor
from hopline.core.sampler import NeighborSampler, full_block, in_neighborhood, whole_block
from hopline.data.dataset import Dataset
from hopline.device.meter import free_bytes, meter_of, with_index
from hopline.inference.cache import InferenceCache, get_inference_cache
from hopline.inference.resumable import LayerFiles
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece, layer_rows
from hopline.nn.conv_adapter import NeedsWholeGraph, calling_convention
from hopline.nn.gnn import GNN, State
from hopline.shards.convs.messages import CannotSplit
from hopline.shards.convs.runner import ShardConvs
from hopline.shards.layout import contiguous_layout
from hopline.tables import TensorTable
from hopline.tables.allocators import Allocator, DeviceOrPinnedMemory
from hopline.tables.layers import LayerTables
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
PROBED_NODES = 16
"""Nodes, at most, in the probe that measures a layer's memory for `chunk_bytes`."""
MARGIN = 1.5
"""Safety factor: a chunk may take this many times the bytes per edge of the probe."""
ENCODED = -1
"""The layer number of rows after the encoder."""
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class LayerInput:
    """The rows that a layer reads at a chunk.

    A tensor: rows that the prefetching thread has read. A handle (`Rows`): rows that the layer or the GPU
    will read.
    """

    h: Rows | Tensor
    """[num_src, width]: the embeddings of all sources of the chunk's block."""
    x0: Rows | Tensor | None
    """[num_dst, width]: the encoded rows of the destinations, for models whose layers read them again."""
    jk: Sequence[Rows | Tensor]
    """[num_dst, width] per earlier layer: embeddings of the destinations, for jumping knowledge in the last
    layer."""


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

    def __init__(self, num_rows: int, allocator: Allocator, model: GNN, device: torch.device) -> None:
        super().__init__(num_rows, allocator)
        self.model = model
        self.device = device
        self.last = model.num_layers - 1
        self.files = allocator if isinstance(allocator, LayerFiles) else None
        if self.files is not None:
            self.tables = self.files.existing()

    def _write_at(self, l: int, positions: Tensor, rows: Tensor) -> None:
        if l not in self.tables and rows.size(0) == self.num_rows and self.allocator.adopts(rows):
            self.tables[l] = rows  # rows of all nodes in their order become the table without a copy
        else:
            table = TensorTable(self.table(l, rows))
            # Rows on a GPU are written by the GPU where it can reach the table, else by the host.
            writer = rows.device if table.tiers(rows.device) is not None else CPU
            table.write(positions.to(writer), rows.to(writer))
        if self.files is not None and l > ENCODED:
            self.files.mark_chunk()

    def complete(self, l: int) -> None:
        if self.device.type == "cuda" and any(not table.is_cuda for table in self.tables.values()):
            # The GPU writes tables in pinned host memory. The host may read them only after the GPU has
            # finished.
            torch.cuda.current_stream(self.device).synchronize()
        earlier = [k for k in self.tables if k < l]
        unneeded = earlier if l == self.last else [k for k in earlier if not self._is_read_later(k)]
        if self.files is not None:
            self.files.mark_layer(unneeded)  # marks progress first, then removes the files
        for k in unneeded:
            self.drop(k)

    def _is_read_later(self, k: int) -> bool:
        """Whether layers after layer `k + 1` also read table `k`, the rows after layer `k`."""
        return self.model.keeps_jk or (k == ENCODED and self.model.keeps_x0)


class Chunks(LayerPlan[Tensor]):
    """Exact inference of one model on one dataset: the plan of nodes, chunks and rows for each layer.

    The caller owns the model and the dataset, the graph owns the cache, and each inference gets new tables.
    One thread calls `run` or `outputs`. `piece` and `read_ahead` may run in the prefetching thread of the
    engine.

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
        model: GNN,
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
        self.needed_at = layer_nodes
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        layers = Layers(
            self.model,
            self,
            Boundaries(self.tables, device=self.device, dtype=dtype),
            keep=None if self.keep is None else self._keep_rows,
        )
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
                    # This conv's aggregation cannot be combined from chunks of messages: all messages at
                    # once.
                    self._over_graph = self._graph_block(mode="one_shot")
                    layers.forward([l])
        return self.tables.of(self.last)

    def _keep_rows(self, l: int, piece: Piece, rows: Tensor) -> None:
        """Calls `keep` with the nodes of a piece, of which the engine knows only the positions."""
        assert self.keep is not None
        self.keep(l, piece.chunk, rows)

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
        # All that chunks, blocks and first-layer sums depend on, other than the graph, the features and the
        # ids.
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
        """Whether a layer over all nodes is a single chunk."""
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
        initial_width = self.tables.of(ENCODED).shape[1] if self.model.keeps_x0 else None
        try:
            calling_convention(
                self.model.convs[l], self._source(l).shape[1], self.data.graph.edge, initial_width=initial_width
            )
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
        block = self.block(chunk) if self._over_graph is None else self._over_graph
        return Piece(block=block, src=block.src_ids, dst=chunk, chunk=chunk)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        rows = Rows(self.data.x, ids)
        return rows if self.device.type == "cpu" else rows.read_on(self.device)

    def read_ahead(self, l: int, piece: Piece, rows: Boundaries | None = None) -> None:
        """Set `piece.ahead` to the rows that layer l reads at a piece. May run in the prefetching thread.

        rows: Not used, since this plan reads its own tables. `LayerPlan.read_ahead` has the parameter.

        Rows that the GPU can reach remain handles, which the GPU reads later. Other rows are read here. On the CPU
        the sources' rows remain a handle too, since a layer may read them itself.
        """
        if l == 0 and self.cache is not None:
            # For `id()` as the key see `InferenceCache`.
            sums = self.cache.sums.get(id(piece.chunk))
            if sums is not None:  # the first layer's aggregation is cached: no features are read
                piece.ahead = ReducedRows(self.data.x, piece.block.src_ids, *sums)
                return
        block = piece.block
        whole = self._is_whole(block)
        on_cpu = self.device.type == "cpu"

        def read(rows: Rows) -> Rows | Tensor:
            return rows if not on_cpu and rows.is_near(self.device) else self._read(rows, CPU, whole)

        h = Rows(self._source(l), block.src_ids)
        x0 = read(Rows(self.tables.of(ENCODED), block.dst_ids)) if self.model.keeps_x0 else None
        jumping_layers = range(0)
        if l == self.last and self.model.keeps_jk:
            jumping_layers = range(ENCODED if self.model.jk_encoder else 0, l)
        jk = [read(Rows(self.tables.of(k), block.dst_ids)) for k in jumping_layers]
        piece.ahead = LayerInput(h=h if on_cpu else read(h), x0=x0, jk=jk)

    def _source(self, l: int) -> Readable:
        """The table of the rows that layer `l` reads at its sources."""
        return self.data.x if l == 0 and not self.model.encodes else self.tables.of(l - 1)

    def state(self, l: int, piece: Piece) -> State:
        """The input of layer l on the device.

        In the first layer it is already aggregated, if the conv can aggregate features without its parameters
        (`GNN.reduced_input`).

        Moves the piece's block to the device, and stores the block and the sums in the cache.
        """
        if self._over_graph is not None:
            return self._state(piece.ahead, whole=True)
        block = self._block_to_device(piece.block)
        piece.block = block
        if isinstance(piece.ahead, ReducedRows):
            state = State(piece.ahead)
        else:
            state = self._state(piece.ahead, self._is_whole(block))
        if l == 0 and not isinstance(state.h, ReducedRows):
            reduced = self.model.reduced_input(state.h, block)
            if reduced is not None:
                state = State(ReducedRows(self.data.x, block.src_ids, *reduced))
        if self.cache is not None:
            self.cache.store(piece.chunk, block, state.h if isinstance(state.h, ReducedRows) else None)
        if self.device.type == "cuda":
            piece.dst = block.dst_ids  # on the GPU, which writes the rows
        piece.ahead = None
        return state

    def on_piece_written(self, l: int, piece: Piece) -> None:
        self.bar.advance(piece.block.num_dst)

    def _state(self, layer_input: LayerInput, whole: bool) -> State:
        """The rows of a layer's input on the device.

        Handles are read, except `h` on the CPU: a layer may read the sources' rows itself.
        """

        def on_device(rows: Rows | Tensor) -> Tensor:
            return self._read(rows, self.device, whole) if isinstance(rows, Rows) else rows.to(self.device)

        h = layer_input.h if self.device.type == "cpu" else on_device(layer_input.h)
        x0 = None if layer_input.x0 is None else on_device(layer_input.x0)
        jk = [on_device(rows) for rows in layer_input.jk]
        return State(h, x0, torch.cat(jk, dim=1) if jk else None)

    def _is_whole(self, block: Block) -> bool:
        """Whether the destinations are all nodes, in their order.

        The number of sources would not tell: a block may have all nodes as sources in another order.
        """
        return block.num_dst == self.data.num_nodes

    def _read(self, rows: Rows, device: torch.device, whole: bool) -> Tensor:
        """The rows on a device. whole: all rows in order, so that a table on that device needs no copy."""
        storage = rows.table.storage() if whole else None
        if storage is not None and storage.device == device:
            return storage
        return rows.read_on(device)

    def _encode(self, nodes: Tensor) -> None:
        """Write the rows after the encoder into their table, chunk by chunk.

        In evaluation the same rows serve as input of the first layer, as initial rows and for jumping
        knowledge.
        """
        # An encoder reads no edges, so its chunks are limited by nodes: 1 / 16 of `chunk_edges`. A rule of
        # thumb.
        for chunk in nodes.split(max(1, self.chunk_edges // 16)):
            rows = as_tensor(self.model.encode(self.inputs_of(chunk), chunk, None).h)
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
            self.read_ahead(l, piece)
        with meter_of(self.device) as computing:
            rows = layer_rows(self.model, l, self.state(l, piece), piece)
        # In memory at once: the chunk in use and those prefetched, one computation, and outputs not written
        # yet.
        prepared_bytes = (1 + PREFETCH_CHUNKS) * preparing.peak_bytes
        probe_bytes = prepared_bytes + computing.peak_bytes + WRITE_QUEUE_CHUNKS * rows.nbytes
        num_edges_and_nodes = int(self.data.graph.in_degrees(nodes).sum()) + nodes.numel()
        return max(1, int(self.chunk_bytes * num_edges_and_nodes / (MARGIN * max(1, probe_bytes))))

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
