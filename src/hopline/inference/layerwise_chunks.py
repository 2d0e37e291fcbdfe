"""Exact inference, one layer after the other over the whole graph: chunks prepared ahead, and written behind."""

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

CHUNK_EDGES = 1 << 20
"""Edges of one chunk; on a GPU, where every chunk costs the host a while, up to"""
MAX_GPU_EDGES, BYTES_PER_EDGE = 1 << 24, 1 << 13
"""so many, by the bytes that it has; where no conv makes a row per edge up to"""
MAX_GPU_EDGES_FUSED, BYTES_PER_FUSED_EDGE = 1 << 26, 1 << 9
"""so many."""
WHOLE_GRAPH_FRACTION = 0.5
"""The part of all nodes from which on a GPU computes a layer at all of them: that needs no block to be made."""
DEVICE_SHARE = 0.25
"""The part of the free device memory that a layer's hidden rows may take; larger ones are kept on the host."""
AHEAD, BEHIND = 2, 2
"""Chunks that are prepared before their turn, and chunks computed but not written yet."""
PROBED_NODES = 16
"""Nodes by which it is found what a chunk takes."""
MARGIN = 1.5
"""By how much a chunk may take more, for its edges, than those nodes did."""
ENCODED = -1
"""The layer number of rows after the encoder."""
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class LayerInput:
    """What a layer reads at a chunk: rows that a thread has read, or handles where the layer or the GPU reads them."""

    h: Rows | Tensor
    """Of all sources."""
    x0: Rows | Tensor | None
    """Encoded rows of the destinations, for models whose layers use them again."""
    jk: Sequence[Rows | Tensor]
    """Of the destinations, after each layer before the last one, for jumping knowledge."""


def default_chunk_edges(device: torch.device, data: Dataset, *, fused: bool = False) -> int:
    """Edges of a chunk, where nobody says: by what a GPU has and not by what is free, so that results stay the same.

    fused: no conv makes a row per edge.
    """
    if device.type != "cuda":
        return CHUNK_EDGES
    most, per_edge = (MAX_GPU_EDGES_FUSED, BYTES_PER_FUSED_EDGE) if fused else (MAX_GPU_EDGES, BYTES_PER_EDGE)
    numbers = math.prod(data.x.shape[1:]) if "x" in data.tables else 0
    per_edge = max(per_edge, 8 * numbers * 4)  # a source of its own, a few times, at worst
    return min(max(torch.cuda.get_device_properties(device).total_memory // per_edge, CHUNK_EDGES), most)


class InferenceTables(LayerTables):
    """The rows of inference after the encoder and after each layer. Rows that no later layer reads are forgotten."""

    def __init__(self, num_rows: int, allocator: Allocator, model: GNN, device: torch.device) -> None:
        super().__init__(num_rows, allocator)
        self.model, self.device, self.last = model, device, model.num_layers - 1
        self.files = allocator if isinstance(allocator, LayerFiles) else None
        if self.files is not None:
            self.tables = self.files.existing()

    def _write_at(self, l: int, positions: Tensor, rows: Tensor) -> None:
        if l not in self.tables and rows.size(0) == self.num_rows and self.allocator.adopts(rows):
            self.tables[l] = rows  # of all nodes in their order: nothing is copied
        else:
            table = TensorTable(self.table(l, rows))
            writer = rows.device if table.tiers(rows.device) is not None else CPU
            table.write(positions.to(writer), rows.to(writer))
        if self.files is not None and l > ENCODED:
            self.files.chunk_done()

    def complete(self, l: int) -> None:
        if self.device.type == "cuda" and any(not table.is_cuda for table in self.tables.values()):
            torch.cuda.current_stream(self.device).synchronize()  # what the GPU wrote is in host memory now
        gone = [k for k in self.tables if k < l and (l == self.last or not self._is_read_later(k))]
        if self.files is not None:
            self.files.layer_done(gone)
        for k in gone:
            self.drop(k)

    def _is_read_later(self, l: int) -> bool:
        """Whether more than the next layer reads the rows after layer `l`."""
        return self.model.keeps_jk or (l == ENCODED and self.model.keeps_x0)


class Chunks(LayerPlan[Tensor]):
    """One layer after the other, over chunks of the nodes it is needed at.

    chunk_bytes: what chunks may take beside the tables of hidden rows, instead of `chunk_edges`. files: where finished
    chunks are kept, so that a run that is killed goes on from there.
    """

    span = "infer.layer"
    by_graph_alone = True
    """Whether what nodes need depends on the graph alone, and so can be known from the last time."""
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
        self.model, self.data, self.device, self.keep = model, data, with_index(device), keep
        self.chunk_edges = chunk_edges or default_chunk_edges(device, data, fused=model.is_fused)
        self.chunk_bytes, self.files, self.last = chunk_bytes, files, model.num_layers - 1
        self.ahead = AHEAD if data.graph.device.type == "cpu" else 0  # a GPU's kernels are asked for by one thread
        self.behind = BEHIND if files is not None or device.type != "cpu" else 0  # else it is a copy within memory
        self.sampler = NeighborSampler(data.graph, (-1,))
        self.cache: InferenceCache | None = None
        self.everywhere = False
        """Whether every layer is computed at all nodes."""
        self._whole: Block | None = None
        self._over_graph: Block | None = None
        """The whole graph, for a conv that looks further than a node's in-edges; None for all others."""

    def run(self, ids: Tensor | None, show: bool) -> Tensor:
        """The output rows of `ids`, or of all nodes."""
        ids_or_all = torch.arange(self.data.num_nodes) if ids is None else ids
        return Rows(self.outputs(ids, show), ids_or_all).read_on(CPU)

    def outputs(self, ids: Tensor | None, show: bool) -> Readable:
        """The output rows by node id, as they were kept; those of nodes that were not asked for are undefined."""
        self.everywhere = ids is None
        try:
            return self._outputs(self._cached_layer_nodes(ids), show)
        except NeedsWholeGraph:  # found out when the width of its rows was known
            if self.everywhere or not self.has_all_edges or self.files is not None:
                raise
        self.everywhere, self.cache = True, None
        return self._outputs(self.layer_nodes(None), show)

    def _outputs(self, layer_nodes: list[Tensor], show: bool) -> Readable:
        first = 0 if self.files is None else self.files.layer
        # Made anew for each inference: a CUDA graph that records one must not find the tables of another.
        self.needed_at, self.tables = (
            layer_nodes,
            InferenceTables(self.data.num_nodes, self._allocator, self.model, self.device),
        )
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
                    # Its aggregation cannot be put together from chunks of messages.
                    self._over_graph = self._graph_block(mode="one_shot")
                    layers.forward([l])
        return self.tables.of(self.last)

    def _keep_rows(self, l: int, piece: Piece, rows: Tensor) -> None:
        assert self.keep is not None
        self.keep(l, piece.chunk, rows)

    @cached_property
    def _allocator(self) -> Allocator:
        """With bytes for chunks alone, what is left of a GPU is not for hidden rows."""
        if self.files is not None:
            return self.files
        has_room = self.chunk_bytes is None and self.device.type == "cuda"
        return DeviceOrPinnedMemory(self.device, int(DEVICE_SHARE * free_bytes(self.device)) if has_room else 0)

    def layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        """Nodes whose rows are needed before each layer, and at the end; before the first, where they are encoded."""
        home = self.data.graph.indptr.device
        everything = torch.arange(self.data.num_nodes, device=home)
        if ids is None:
            return [everything] * (self.model.num_layers + 1)
        layer_nodes = [torch.unique(ids.to(home))]
        if self.keep is not None:
            return [everything] * self.model.num_layers + layer_nodes
        many = WHOLE_GRAPH_FRACTION if self.device.type == "cuda" and self._is_single_chunk(self.chunk_edges) else 1
        for _ in range(self.model.num_layers - (not self.model.encodes)):
            grown = layer_nodes[0]
            if grown.numel() < everything.numel():
                grown = in_neighborhood(self.data.graph, grown)
            layer_nodes.insert(0, everything if grown.numel() >= many * everything.numel() else grown)
        return layer_nodes if self.model.encodes else [everything, *layer_nodes]

    def _cached_layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        """The same; what the last inference at these nodes found out is known."""
        if ids is None or self.files is not None or self.chunk_bytes is not None or not self.by_graph_alone:
            return self.layer_nodes(ids)
        model = self.model
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
        """Whether the next inference finds all blocks made, each of a whole layer."""
        return self.cache is not None and self.cache.is_complete(self.model.num_layers)

    def block(self, nodes: Tensor) -> Block:
        """All in-edges of some nodes."""
        known = None if self.cache is None else self.cache.block(nodes, self.data.graph)
        if known is not None:
            return known
        everything = nodes.numel() == self.data.num_nodes
        return whole_block(self.data.graph) if everything else full_block(self.sampler, nodes)

    def _moved(self, block: Block) -> Block:
        """On the device: a block of all nodes once for all layers."""
        if not self._is_whole(block):
            return block.to(self.device)
        self._whole = self._whole or block.to(self.device)
        return self._whole

    def _is_single_chunk(self, chunk_edges: int) -> bool:
        """Whether a layer over all nodes is a single chunk."""
        return self.data.num_edges + self.data.num_nodes <= chunk_edges

    def probe_nodes(self, nodes: Tensor) -> Tensor:
        """A few of the nodes, by which it is found what a chunk takes."""
        return nodes[:: -(-nodes.numel() // PROBED_NODES)].contiguous()

    # ---- a conv that must see the whole graph

    def _needs_whole_graph(self, l: int) -> bool:
        """Whether a layer's conv must be run on the whole graph; refused where some rows were not computed."""
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
        """All edges as in full batch: messages in chunks, or of mode "one_shot" all at once."""
        graph = self.data.graph.to("cpu")
        layout = contiguous_layout(graph, torch.tensor([0, graph.num_nodes]))
        return ShardConvs.of(layout, **options).to(self.device).block()

    # ---- the plan

    def chunks_of(self, l: int) -> list[Tensor]:
        nodes = self.needed_at[l + 1]
        edges = 0 if self.files is None else self.files.chunk_edges
        if self._over_graph is not None:
            edges, chunks = edges or self.chunk_edges, [nodes]
        else:
            edges = edges or self._edges_of_a_chunk(l, nodes)
            cut = partial(self.chunks, nodes, edges)
            chunks = cut() if self.cache is None else self.cache.get_chunks(nodes, cut)
        done = 0 if self.files is None else self.files.begin(l, edges)
        self.bar.advance(sum(chunk.numel() for chunk in chunks[:done]))
        return chunks[done:]

    def piece(self, l: int, chunk: Tensor) -> Piece:
        block = self.block(chunk) if self._over_graph is None else self._over_graph
        return Piece(block, block.src_ids, chunk, chunk=chunk)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        rows = Rows(self.data.x, ids)
        return rows if self.device.type == "cpu" else rows.read_on(self.device)

    def read_ahead(self, l: int, piece: Piece, rows: Boundaries | None = None) -> None:
        """What a layer needs, as far as a thread of the host can read it: the hidden rows of all sources, and other
        rows of the destinations. On the CPU a layer may read the first itself."""
        sums = None if self.cache is None or l else self.cache.sums.get(id(piece.chunk))
        if sums is not None:
            piece.ahead = ReducedRows(self.data.x, piece.block.src_ids, *sums)
            return
        block = piece.block
        whole = self._is_whole(block)
        on_cpu = self.device.type == "cpu"

        def read(rows: Rows) -> Rows | Tensor:
            return rows if not on_cpu and rows.is_near(self.device) else self._read(rows, CPU, whole)

        h = Rows(self._source(l), block.src_ids)
        x0 = Rows(self.tables.of(ENCODED), block.dst_ids) if self.model.keeps_x0 else None
        jumped = range(-1 if self.model.jk_encoder else 0, l) if l == self.last and self.model.keeps_jk else range(0)
        piece.ahead = LayerInput(
            h if on_cpu else read(h),
            None if x0 is None else read(x0),
            [read(Rows(self.tables.of(k), block.dst_ids)) for k in jumped],
        )

    def _source(self, l: int) -> Readable:
        """The table of the rows that layer `l` reads at its sources."""
        return self.data.x if l == 0 and not self.model.encodes else self.tables.of(l - 1)

    def state(self, l: int, piece: Piece) -> State:
        """What was read ahead, on the device. What of the first layer needs no parameter is done."""
        if self._over_graph is not None:
            return self._state(piece.ahead, whole=True)
        piece.block = block = self._moved(piece.block)
        ahead = piece.ahead
        state = State(ahead) if isinstance(ahead, ReducedRows) else self._state(ahead, self._is_whole(block))
        if l == 0 and not isinstance(state.h, ReducedRows):
            reduced = self.model.reduced_input(state.h, block)
            if reduced is not None:
                state = State(ReducedRows(self.data.x, block.src_ids, *reduced))
        if self.cache is not None:
            self.cache.store(piece.chunk, block, state.h if isinstance(state.h, ReducedRows) else None)
        if self.device.type == "cuda":
            piece.dst = block.dst_ids  # the GPU writes them
        piece.ahead = None
        return state

    def written(self, l: int, piece: Piece) -> None:
        self.bar.advance(piece.block.num_dst)

    def _state(self, read: LayerInput, whole: bool) -> State:
        """What was read ahead, on the device."""

        def on_device(rows: Rows | Tensor) -> Tensor:
            return self._read(rows, self.device, whole) if isinstance(rows, Rows) else rows.to(self.device)

        h = read.h if self.device.type == "cpu" else on_device(read.h)
        jk = [on_device(rows) for rows in read.jk]
        return State(h, None if read.x0 is None else on_device(read.x0), torch.cat(jk, dim=1) if jk else None)

    def _is_whole(self, block: Block) -> bool:
        """Whether its rows are those of all nodes in their order; as sources all may also come in another."""
        return block.num_dst == self.data.num_nodes

    def _read(self, rows: Rows, device: torch.device, whole: bool) -> Tensor:
        """On a device; where the whole table lies there, it is not copied."""
        stored = rows.table.storage() if whole else None
        return stored if stored is not None and stored.device == device else rows.read_on(device)

    def _encode(self, nodes: Tensor) -> None:
        """Rows after the encoder: in evaluation they are also the initial rows, and those that jump ahead."""
        for chunk in nodes.split(max(1, self.chunk_edges // 16)):
            rows = as_tensor(self.model.encode(self.inputs_of(chunk), chunk, None).h)
            self.tables.write(ENCODED, chunk, rows)
        if self.device.type == "cuda" and not self.tables.tables[ENCODED].is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def _edges_of_a_chunk(self, l: int, nodes: Tensor) -> int:
        """As many as fit the bytes given, by what a few nodes take."""
        if self.chunk_bytes is None:
            return self.chunk_edges
        few = self.probe_nodes(nodes)
        with meter_of(self.device) as preparing:
            piece = self.piece(l, few)
            self.read_ahead(l, piece)
        with meter_of(self.device) as computing:
            rows = layer_rows(self.model, l, self.state(l, piece), piece)
        most = (1 + AHEAD) * preparing.peak_bytes + computing.peak_bytes + BEHIND * rows.nbytes
        cost = int(self.data.graph.in_degrees(few).sum()) + few.numel()
        return max(1, int(self.chunk_bytes * cost / (MARGIN * max(1, most))))

    def chunks(self, nodes: Tensor, chunk_edges: int) -> list[Tensor]:
        """Runs of nodes with about `chunk_edges` in-edges; a node with more is a chunk of its own."""
        if self._is_single_chunk(chunk_edges):
            return [nodes]
        cost = (self.data.graph.in_degrees(nodes) + 1).cumsum(0)
        chunks, start = [], 0
        while start < nodes.numel():
            spent = int(cost[start - 1]) if start else 0
            stop = int(torch.searchsorted(cost, spent + chunk_edges, right=True))
            stop = max(stop, start + 1)
            chunks.append(nodes[start:stop])
            start = stop
        return chunks
