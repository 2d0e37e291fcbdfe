"""Exact inference over shards in one process, for graphs larger than memory.

A node's *position* is its index when the rows of all shards stand one behind the other. Inference numbers
nodes by position. The nodes of a shard are then contiguous, and the chunks of a layer go through one shard
after the other:

    shard 0 (opened)  ->  chunks of its nodes  ->  rows into the layer's table
    shard 1 (opened)  ->  ...

Only one shard's edges are open at a time. Features are read from all shards. In memory are the embeddings
between two layers (with `folder` in mapped files), one chunk, and some 40 bytes per node.

Sources of a chunk may be in any shard. Their embeddings come from the layer's table, which holds all nodes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import PartialGraph
from hopline.core.row_handles import Rows
from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset
from hopline.device.snapshots import evaluating
from hopline.inference.exact_inference import check_node_ids, identity
from hopline.inference.layerwise_chunks import CPU, Chunks
from hopline.inference.resumable import LayerFiles
from hopline.inference.without_layers import ReadRows
from hopline.nn.layered import Layered
from hopline.nn.whole_module import as_batch_model
from hopline.shards.all_shards import AllShards
from hopline.shards.collective_sampler import weights_of_shard
from hopline.shards.shard import Shard
from hopline.util.config import parse_chunk_bytes


class _ByPosition(PartialGraph):
    """Degrees and weights of all nodes, by position, without edges. Edges are read shard by shard.

    A node's number is its position, so there is nothing to look up.
    """

    def _positions(self, ids: Tensor) -> Tensor:
        return ids.cpu()


def _graph_of(data: AllShards) -> _ByPosition:
    """The graph of a `ShardChunks`: degrees and sums of edge weights (`PartialGraph.weights`) of all nodes."""
    has_loops = False
    degrees = []
    for rank in range(data.num_shards):
        shard = data.shard(rank)
        own_part = shard.layout.parts[0]
        has_loops = has_loops or ops.self_loops(own_part.indptr, own_part.src_idx).numel() > 0
        degrees.append(shard.layout.degrees)
    weights = []
    if has_loops or "weight" in data.shard(0).edge:
        weights = [weights_of_shard(data.shard(rank)) for rank in range(data.num_shards)]
    return _ByPosition(
        torch.zeros(1, dtype=torch.int64).expand(data.num_nodes + 1),  # no edges, and one number in memory
        torch.zeros(0, dtype=torch.int64),
        {name: rows[:0] for name, rows in data.shard(0).edge.items()},
        ids=torch.zeros(0, dtype=torch.int64),
        degrees=torch.cat(degrees),
        has_loops=has_loops,
        weights=torch.cat(weights) if weights else None,
    )


class ShardChunks(Chunks):
    """Exact inference over shards. Nodes are numbered by position, and no chunk has nodes of two shards.

    Chunks in ascending order thus open each shard once per layer.
    """

    depends_on_graph_alone = False  # `data.graph` has no edges from which the nodes of a layer would follow
    has_all_edges = False

    def __init__(
        self,
        model: Layered,
        shards: AllShards,
        chunk_edges: int | None,
        device: torch.device,
        chunk_bytes: int | None,
        files: LayerFiles | None,
    ) -> None:
        self.shards = shards
        data = Dataset(name=shards.name, graph=_graph_of(shards))
        if shards.rows is not None:
            data.tables["x"] = shards.rows
        super().__init__(model, data, chunk_edges, device, chunk_bytes=chunk_bytes, files=files)
        self.id_map = ops.new_id_map(shards.num_nodes, CPU)

    def layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        if ids is None:
            return [torch.arange(self.data.num_nodes)] * (self.model.num_layers + 1)
        # From the output backwards: a layer reads its own nodes and their in-neighbours.
        layer_nodes = [ids.unique()]
        for _ in range(self.model.num_layers):
            nodes = layer_nodes[0]
            if nodes.numel() < self.data.num_nodes:
                nodes = self.with_sources(nodes)
            layer_nodes.insert(0, nodes)
        return layer_nodes

    def sources_of(self, nodes: Tensor) -> Tensor:
        _indptr, sources, _edge_arrays = self._edges(nodes)
        return sources

    def _shard_of(self, positions: Tensor) -> Shard:
        """The shard of these positions, which must all be of one shard."""
        rank = int(torch.searchsorted(self.shards.ptr, positions[0], right=True)) - 1
        return self.shards.shard(rank)

    def _edges(self, positions: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(indptr, positions of the sources, edge arrays) of the in-edges of nodes of one shard."""
        # `shard.edge_numbers` lists the numbers of the shard's edges by destination. `entries` are indices into it.
        shard = self._shard_of(positions)
        indptr, entries = ops.row_entries(shard.indptr, positions - shard.ptr[shard.rank])
        edges = ops.gather_rows(shard.edge_numbers, entries).long()
        edge_arrays = {name: ops.gather_rows(rows, edges) for name, rows in shard.edge.items()}
        return indptr, shard.sources(edges), edge_arrays

    def block(self, nodes: Tensor) -> Block:
        indptr, sources, edge = self._edges(nodes)
        try:
            self.id_map.add(nodes)
            src_idx = self.id_map.add(sources)
            src_ids = self.id_map.ids()
        finally:
            self.id_map.clear()
        return Block(src_ids, nodes.numel(), (Part(indptr, src_idx, edge),), self.data.graph)

    def _by_shard(self, nodes: Tensor) -> list[Tensor]:
        """Ascending positions, divided by shard. Shards without any of them are left out."""
        bounds = torch.searchsorted(nodes, self.shards.ptr)
        return [group for group in nodes.split(bounds.diff().tolist()) if group.numel()]

    def probe_nodes(self, nodes: Tensor) -> Tensor:
        """A few nodes of one shard, at which a layer's memory is measured."""
        largest_group = max(self._by_shard(nodes), key=len)
        probed = super().probe_nodes(largest_group)
        self._shard_of(probed)  # opened now, so that the probe does not measure the opening of a shard
        return probed

    def chunks(self, nodes: Tensor, chunk_edges: int) -> list[Tensor]:
        """Chunks of nodes as in `Chunks.chunks`, none of which has nodes of two shards."""
        chunks: list[Tensor] = []
        for group in self._by_shard(nodes):
            chunks += super().chunks(group, chunk_edges)
        return chunks


def exact_rows(
    model: nn.Module,
    data: AllShards,
    ids: NodeIds | str | None = None,
    *,
    chunk_edges: int | None = None,
    chunk_bytes: int | str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
    folder: Path | str | None = None,
) -> ReadRows:
    """Compute as `hopline.inference.exact_rows` does, over shards.

    Returns a function from node ids to output rows.

    In memory are the embeddings between two layers (with `folder` in mapped files instead), a chunk, and
    some 40 bytes per node. Features and edges are read from the shards.
    """
    ids = check_node_ids(data, ids)
    max_bytes = parse_chunk_bytes(chunk_bytes)
    batch_model = as_batch_model(model)
    if not isinstance(batch_model, Layered):
        raise ValueError(f"{type(model).__name__} has no layers to compute one by one: build it as hl.nn.GNN([...])")
    batch_model.check_blocks(data.num_features, data.shard(0).edge)
    files = None
    if folder is not None:
        contents = {"cut of the dataset": data.cut}
        files = LayerFiles(Path(folder), identity(model, contents, ids, chunk_edges, max_bytes))
    with evaluating(batch_model):
        work = ShardChunks(batch_model, data, chunk_edges, torch.device(device), chunk_bytes=max_bytes, files=files)
        outputs = work.outputs(None if ids is None else data.position[ids], show)
    return lambda node_ids: Rows(outputs, data.position[node_ids]).read_on(CPU)
