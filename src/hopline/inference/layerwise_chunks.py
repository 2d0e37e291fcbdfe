"""Exact inference, one layer after the other over the whole graph: chunks prepared ahead, and written behind."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.row_handles import Readable, ReducedRows, Rows, as_tensor
from hopline.core.sampler import NeighborSampler, full_block, in_neighborhood, whole_block
from hopline.data.dataset import Dataset
from hopline.device import pinned
from hopline.device.meter import free_bytes, meter_of, numbered
from hopline.inference.cache import Kept, kept_of
from hopline.inference.resumable import LayerFiles
from hopline.nn.conv_adapter import SeesMore, way_of
from hopline.nn.gnn import GNN, State
from hopline.pipeline.stages import Pipeline, Stage
from hopline.shards.convs.messages import CannotSplit
from hopline.shards.convs.runner import ShardConvs
from hopline.shards.layout import slab_layout
from hopline.tables import TensorTable
from hopline.util import trace
from hopline.util.progress import Progress, progress

CHUNK_EDGES = 1 << 20
"""Edges of one chunk; on a GPU, where every chunk costs the host a while, up to"""
MOST_EDGES, BYTES_PER_EDGE = 1 << 24, 1 << 13
"""so many, by the bytes that it has; where no conv makes a row per edge up to"""
MOST_FUSED_EDGES, BYTES_PER_FUSED_EDGE = 1 << 26, 1 << 9
"""so many."""
WORTH_ALL = 0.5
"""The part of all nodes from which on a GPU computes a layer at all of them: that needs no block to be made."""
DEVICE_SHARE = 0.25
"""The part of the free device memory that a layer's hidden rows may take; larger ones are kept on the host."""
AHEAD, BEHIND = 2, 2
"""Chunks that are prepared before their turn, and chunks computed but not written yet."""
PROBED_NODES = 16
"""Nodes by which it is found what a chunk takes."""
MARGIN = 1.5
"""By how much a chunk may take more, for its edges, than those nodes did."""
CPU = torch.device("cpu")

KeepRows = Callable[[int, Tensor, Tensor], None]
"""(layer, node ids, their rows after it): what somebody does with hidden rows."""
Ahead = Rows | Tensor | None
"""Rows that were read ahead, or a handle where the layer or the GPU reads them; None where there are none."""


def _edges_at_once(model: GNN, device: torch.device, data: Dataset) -> int:
    """Of a chunk, where nobody says: by what a GPU has and not by what is free, so that results stay the same."""
    if device.type != "cuda":
        return CHUNK_EDGES
    most, per_edge = (MOST_FUSED_EDGES, BYTES_PER_FUSED_EDGE) if model.is_fused else (MOST_EDGES, BYTES_PER_EDGE)
    per_edge = max(per_edge, 8 * data.num_features * 4)  # a source of its own, a few times, at worst
    return min(max(torch.cuda.get_device_properties(device).total_memory // per_edge, CHUNK_EDGES), most)


def read_on(device: torch.device, table: Readable, ids: Tensor) -> Tensor:
    """Rows on a device, read where the table's memory can be read from."""
    storage = table.storage()
    if storage is not None and storage.device.type != "cpu":
        return table.read(ids.to(storage.device)).to(device)
    if device.type != "cpu" and table.tiers(device) is not None:
        return table.read(ids.to(device))
    return table.read(ids.cpu()).to(device)


@dataclass
class Tables:
    """The state of all nodes between two layers."""

    h: Readable
    x0: TensorTable | None = None
    jk: TensorTable | None = None


class Layerwise:
    """One layer after the other, over chunks of the nodes it is needed at.

    chunk_bytes: what chunks may take beside the tables of hidden rows, instead of `chunk_edges`. files: where finished
    chunks are kept, so that a run that is killed goes on from there.
    """

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
        self.model, self.data, self.device, self.keep = model, data, numbered(device), keep
        self.chunk_edges = chunk_edges or _edges_at_once(model, device, data)
        self.chunk_bytes, self.files = chunk_bytes, files
        self.sampler = NeighborSampler(data.graph, (-1,))
        self.kept: Kept | None = None
        self.everywhere = False
        """Whether every layer is computed at all nodes."""
        self._whole: Block | None = None

    def run(self, ids: Tensor | None, show: bool) -> Tensor:
        """The output rows of `ids`, or of all nodes."""
        return read_on(CPU, self.outputs(ids, show), torch.arange(self.data.num_nodes) if ids is None else ids)

    def outputs(self, ids: Tensor | None, show: bool) -> Readable:
        """The output rows by node id, as they were kept; those of nodes that were not asked for are undefined."""
        self.everywhere = ids is None
        try:
            return self._outputs(self._needed_again(ids), show)
        except SeesMore:  # found out when the width of its rows was known
            if self.everywhere or not self.has_all_edges or self.files is not None:
                raise
        self.everywhere, self.kept = True, None
        return self._outputs(self.needed(None), show)

    def _outputs(self, needed: list[Tensor], show: bool) -> Readable:
        total = sum(nodes.numel() for nodes in needed[1:])
        first = 0 if self.files is None else self.files.layer
        with progress("inference", total, "rows", enabled=show, brief=True) as bar:
            if first:
                assert self.files is not None
                tables = Tables(**self.files.tables(first - 1))
                bar.advance(sum(nodes.numel() for nodes in needed[1 : first + 1]))
            else:
                tables = self._encode(needed[0])
            for l in range(first, self.model.num_layers):
                tables = self._layer(l, needed[l + 1], tables, bar)
                if l < self.model.num_layers - 1:
                    tables = self.completed(tables)
        return tables.h

    def completed(self, tables: Tables) -> Tables:
        """The rows between two layers; where others compute some of them, these are added."""
        return tables

    def needed(self, ids: Tensor | None) -> list[Tensor]:
        """Nodes whose rows are needed before each layer, and at the end; before the first, where they are encoded."""
        home = self.data.graph.indptr.device
        everything = torch.arange(self.data.num_nodes, device=home)
        if ids is None:
            return [everything] * (self.model.num_layers + 1)
        needed = [torch.unique(ids.to(home))]
        if self.keep is not None:
            return [everything] * self.model.num_layers + needed
        many = WORTH_ALL if self.device.type == "cuda" and self._at_once(self.chunk_edges) else 1
        for _ in range(self.model.num_layers - (not self.model.encodes)):
            grown = needed[0]
            if grown.numel() < everything.numel():
                grown = in_neighborhood(self.data.graph, grown)
            needed.insert(0, everything if grown.numel() >= many * everything.numel() else grown)
        return needed if self.model.encodes else [everything, *needed]

    def _needed_again(self, ids: Tensor | None) -> list[Tensor]:
        """The same; what the last inference at these nodes found out is known."""
        if ids is None or self.files is not None or self.chunk_bytes is not None or not self.by_graph_alone:
            return self.needed(ids)
        model = self.model
        about = (
            model.num_layers,
            model.encodes,
            model.input_reduction,
            self.keep is None,
            self.chunk_edges,
            self.device,
        )
        self.kept = kept_of(self.data.graph, self.data.x, ids, about, self.device, lambda: self.needed(ids))
        return self.kept.needed

    @property
    def is_known(self) -> bool:
        """Whether the next inference finds all blocks made, each of a whole layer."""
        return self.kept is not None and self.kept.is_complete(self.model.num_layers)

    def block(self, nodes: Tensor) -> Block:
        """All in-edges of some nodes."""
        known = None if self.kept is None else self.kept.block(nodes, self.data.graph)
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

    def _at_once(self, chunk_edges: int) -> bool:
        """Whether a layer over all nodes is a single chunk."""
        return self.data.num_edges + self.data.num_nodes <= chunk_edges

    def probed(self, nodes: Tensor) -> Tensor:
        """A few of the nodes, by which it is found what a chunk takes."""
        return nodes[:: -(-nodes.numel() // PROBED_NODES)].contiguous()

    def _layer(self, l: int, nodes: Tensor, tables: Tables, bar: Progress) -> Tables:
        """The tables after a layer: blocks are made ahead, and rows written behind where that takes a while."""
        sees_more = self._sees_more(l, tables)
        edges = None if self.files is None else self.files.chunk_edges
        edges = edges or (self.chunk_edges if sees_more else self._edges_of_a_chunk(l, nodes, tables))
        cut = partial(self.chunks, nodes, edges)
        chunks = [nodes] if sees_more else cut() if self.kept is None else self.kept.in_chunks(nodes, cut)
        new = self._new_tables(l)
        done = 0 if self.files is None else self.files.begin(l, edges)
        bar.advance(sum(chunk.numel() for chunk in chunks[:done]))

        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def write(computed: tuple[Tensor, State]) -> int:
            with torch.cuda.stream(stream):  # that of who computes, whichever thread writes
                new.write(*computed)
            if self.files is not None:
                self.files.chunk_done()
            return computed[0].numel()

        far = self.files is not None or self.device.type != "cpu"  # else writing is a copy within memory
        behind = Pipeline([Stage("infer.write", write)], workers=int(far and len(chunks) > 1), look_ahead=BEHIND)
        with (
            closing((self._over_shards if sees_more else self._computed)(l, chunks[done:], tables)) as states,
            closing(behind.run(states)) as written,
        ):
            for count in written:
                bar.advance(count)
        if self.files is not None:
            self.files.layer_done()
        return new.finished()

    def _sees_more(self, l: int, tables: Tables) -> bool:
        """Whether a layer's conv must be run on the whole graph; refused where some rows were not computed."""
        initial_width = None if tables.x0 is None else tables.x0.shape[1]
        conv = self.model.convs[l]
        try:
            way_of(conv, tables.h.shape[1], self.data.graph.edge, initial_width=initial_width)
        except SeesMore:
            if not self.everywhere or not self.has_all_edges:
                raise
            return True
        return False

    def _over_shards(self, l: int, chunks: list[Tensor], tables: Tables) -> Generator[tuple[Tensor, State], None, None]:
        """All nodes and their rows after a layer whose conv looks further than a node's in-edges.

        It runs as in full batch: with messages in chunks where its aggregation can be put together from these.
        """
        graph = self.data.graph.to("cpu")
        layout = slab_layout(graph, torch.tensor([0, graph.num_nodes]))
        for nodes in chunks:
            found = [
                None if table is None else read_on(self.device, table, nodes)
                for table in (tables.h, tables.x0, tables.jk)
            ]
            state = State(*found)  # type: ignore[arg-type]
            with trace.span("infer.layer", self.device):
                try:
                    after = self.model.layer(l, state, ShardConvs.of(layout).to(self.device).block())
                except CannotSplit:
                    convs = ShardConvs.of(layout, mode="one_shot")
                    after = self.model.layer(l, state, convs.to(self.device).block())
                if l == self.model.num_layers - 1:
                    after = State(self.model.decode(after))
            if self.keep is not None and l < self.model.num_layers - 1:
                self.keep(l, nodes, as_tensor(after.h))
            yield nodes, after

    def _computed(self, l: int, chunks: list[Tensor], tables: Tables) -> Generator[tuple[Tensor, State], None, None]:
        """Each chunk and its rows after the layer."""
        last = l == self.model.num_layers - 1

        def prepare(chunk: Tensor) -> tuple[Tensor, Block, list[Ahead]]:
            block = self.block(chunk)
            sums = None if self.kept is None or l else self.kept.sums.get(id(chunk))
            if sums is not None:
                return chunk, block, [ReducedRows(self.data.x, block.src_ids, *sums)]
            return chunk, block, self._read_ahead(tables, block)

        on_host = self.data.graph.device.type == "cpu"  # a GPU's kernels are asked for by one thread
        workers = int(on_host and len(chunks) > 1)
        idle = self.device.type != "cpu"  # the host, but for what it prepares
        ahead = Pipeline([Stage("infer.prepare", prepare)], workers=workers, look_ahead=AHEAD, all_cores=idle)
        with closing(ahead.run(chunks)) as prepared:
            for chunk, block, rows in prepared:
                with trace.span("infer.layer", self.device):
                    block = self._moved(block)
                    state = self._before(l, rows, block)
                    if self.kept is not None:
                        self.kept.keep(chunk, block, state.h if isinstance(state.h, ReducedRows) else None)
                    state = self.model.layer(l, state, block)
                    # Rows that were put off are computed here, not where they are written.
                    state = State(self.model.decode(state)) if last else replace(state, h=as_tensor(state.h))
                if self.keep is not None and not last:
                    self.keep(l, chunk, as_tensor(state.h))
                yield (block.dst_ids if self.device.type == "cuda" else chunk), state

    def _encode(self, nodes: Tensor) -> Tables:
        if not self.model.encodes:
            return Tables(self.data.x)
        new = self._new_tables()
        for chunk in nodes.split(max(1, self.chunk_edges // 16)):
            rows = Rows(self.data.x, chunk) if self.device.type == "cpu" else read_on(self.device, self.data.x, chunk)
            new.write(chunk, self.model.encode(rows, chunk, None))
        return new.finished()

    def _new_tables(self, l: int | None = None) -> _NewTables:
        """With bytes for chunks alone, what is left of a GPU is not for hidden rows."""
        room = self._room if self.chunk_bytes is None and self.device.type == "cuda" else 0
        return _NewTables(self.data.num_nodes, self.device, room, l, self.files)

    @cached_property
    def _room(self) -> int:
        """Bytes that one of the tables may take on the GPU."""
        return int(DEVICE_SHARE * free_bytes(self.device))

    def _read_ahead(self, tables: Tables, block: Block) -> list[Ahead]:
        """What a layer needs, as far as it can be read by a thread of the host: all sources' hidden rows, the
        destinations' own other rows. On the CPU a layer may read the first itself."""
        handles = [Rows(tables.h, block.src_ids)]
        handles += [None if table is None else Rows(table, block.dst_ids) for table in (tables.x0, tables.jk)]
        if self.device.type == "cpu":
            return [handles[0], *(None if rows is None else rows.read() for rows in handles[1:])]
        whole = self._is_whole(block)
        return [rows if rows is None or self._is_near(rows.table) else self._read(rows, CPU, whole) for rows in handles]

    def _is_near(self, table: Readable) -> bool:
        """Whether the GPU reads the table itself."""
        storage = table.storage()
        return (storage is not None and storage.device.type != "cpu") or table.tiers(self.device) is not None

    def _before(self, l: int, ahead: list[Ahead], block: Block) -> State:
        """What a layer makes its rows of; of the first, what needs no parameter is done."""
        if isinstance(ahead[0], ReducedRows):
            return State(ahead[0])
        state = self._state(ahead, self._is_whole(block))
        reduced = self.model.reduced_input(state.h, block) if l == 0 else None
        return state if reduced is None else State(ReducedRows(self.data.x, block.src_ids, *reduced))

    def _state(self, ahead: list[Ahead], whole: bool) -> State:
        """What was read ahead, on the device."""
        if self.device.type == "cpu":
            return State(*ahead)  # type: ignore[arg-type]
        rows = [self._read(rows, self.device, whole) if isinstance(rows, Rows) else rows for rows in ahead]
        return State(*(None if one is None else one.to(self.device) for one in rows))  # type: ignore[arg-type]

    def _is_whole(self, block: Block) -> bool:
        """Whether its rows are those of all nodes in their order; as sources all may also come in another."""
        return block.num_dst == self.data.num_nodes

    def _read(self, rows: Rows, device: torch.device, whole: bool) -> Tensor:
        """On a device; where the whole table lies there, it is not copied."""
        stored = rows.table.storage() if whole else None
        return stored if stored is not None and stored.device == device else read_on(device, rows.table, rows.ids)

    def _edges_of_a_chunk(self, l: int, nodes: Tensor, tables: Tables) -> int:
        """As many as fit the bytes given, by what a few nodes take."""
        if self.chunk_bytes is None:
            return self.chunk_edges
        few = self.probed(nodes)
        with meter_of(self.device) as preparing:
            block = self.block(few)
            rows = self._read_ahead(tables, block)
        with meter_of(self.device) as computing:
            block = block.to(self.device)
            state = self.model.layer(l, self._before(l, rows, block), block)
            after = [as_tensor(one) for one in (state.h, state.x0, state.jk) if one is not None]
        most = (1 + AHEAD) * preparing.peak_bytes + computing.peak_bytes + BEHIND * sum(one.nbytes for one in after)
        cost = int(self.data.graph.in_degrees(few).sum()) + few.numel()
        return max(1, int(self.chunk_bytes * cost / (MARGIN * max(1, most))))

    def chunks(self, nodes: Tensor, chunk_edges: int) -> list[Tensor]:
        """Runs of nodes with about `chunk_edges` in-edges; a node with more is a chunk of its own."""
        if self._at_once(chunk_edges):
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


class _NewTables:
    """Tables over all nodes that are made when the width of their rows is known: on the device where there is room,
    else in memory of the host that a GPU reads and writes itself, if the system lets it."""

    def __init__(
        self,
        num_nodes: int,
        device: torch.device,
        room: int,
        layer: int | None = None,
        files: LayerFiles | None = None,
    ) -> None:
        self.num_nodes, self.device, self.room = num_nodes, device, room
        self.files = None if layer is None else files
        self.made: dict[str, TensorTable] = {}
        if self.files is not None and layer is not None:
            self.made = self.files.tables(layer)

    def write(self, ids: Tensor, state: State) -> None:
        for name in ("h", "x0", "jk"):
            rows = getattr(state, name)
            if rows is None:
                continue
            rows = as_tensor(rows)
            if name not in self.made:
                self.made[name] = self._new(name, rows)
            table = self.made[name]
            if table.rows is not rows:
                writer = rows.device if table.tiers(rows.device) is not None else CPU
                table.write(ids.to(writer), rows.to(writer))

    def finished(self) -> Tables:
        """All rows are where the host finds them too."""
        if self.device.type == "cuda" and any(not table.rows.is_cuda for table in self.made.values()):
            torch.cuda.current_stream(self.device).synchronize()
        return Tables(**self.made)

    def _new(self, name: str, rows: Tensor) -> TensorTable:
        """For such rows; where they are those of all nodes, they are the table."""
        shape = (self.num_nodes, *rows.shape[1:])
        if self.files is not None:
            return self.files.new_table(name, rows.dtype, shape)
        on_gpu, needed = self.device.type == "cuda", torch.Size(shape).numel() * rows.element_size()
        home = self.device if on_gpu and needed < self.room else CPU
        if rows.shape == shape and rows.device == home:
            return TensorTable(rows)
        table = torch.empty(shape, dtype=rows.dtype, device=home)
        if on_gpu and home == CPU:
            pinned.register(table)  # where that is refused, the host reads and writes it
        return TensorTable(table)
