"""Exact inference of a module that is not made of layers, on the hops around chunks of nodes.

A module that reads k hops around a node gives the same output on the *part* of the graph within k hops. If
it also reads degrees of the outermost nodes, the part must have k + 1 hops; `nn/whole_module_probe.py`
finds out which. Seeds are taken in chunks, each as large as a limit on the nodes and edges of its part
allows:

    seeds -> neighborhood(part_hops) -> features -> module -> rows of the seeds

Parts of different chunks overlap, so that many chunks together may cost more than the whole graph once.
Then `without_layers.whole_rows` runs the module on the whole graph instead, unless the graph is too large or
the user has set a limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hopline import ops
from hopline.budget.predictor import costs_of
from hopline.core.batch import Block
from hopline.core.neighborhood import neighborhood
from hopline.core.row_handles import Rows
from hopline.data.dataset import Dataset
from hopline.device.meter import meter_of, with_index
from hopline.inference.layerwise_chunks import CPU, MARGIN, WHOLE_GRAPH_FRACTION, default_chunk_edges
from hopline.nn.whole_module import Whole
from hopline.util.progress import progress


class LocalInference:
    """The outputs of some nodes, by forward passes over the hops around chunks of them.

    For one thread: every chunk changes `_id_map` and, with chunk_bytes, `limit`.

    chunk_edges: the most nodes and edges, together, of a chunk's part. By default a million, or more on a
    GPU. chunk_bytes: the most bytes of a chunk's forward pass, in place of `chunk_edges`. A node whose own part
    exceeds the limit is a chunk of its own.
    """

    def __init__(
        self,
        batch_model: Whole,
        data: Dataset,
        part_hops: int,
        device: torch.device,
        *,
        chunk_edges: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self.batch_model = batch_model
        self.data = data
        self.part_hops = part_hops
        self.device = with_index(device)
        self.chunk_bytes = chunk_bytes
        if chunk_bytes is not None:
            # A first limit, until a chunk is measured: by an upper bound on the bytes per node or edge, far above
            # the real ones.
            costs = costs_of(batch_model, data.x, num_blocks=1).forward_only()
            bound_per_size = max(costs.per_node[0], costs.per_edge[0])  # 0: the module's only block
            self.limit = max(1, int(chunk_bytes / bound_per_size))
        else:
            self.limit = chunk_edges or default_chunk_edges(self.device, data)
        graph = data.graph
        self._id_map = ops.new_id_map(graph.num_nodes, graph.device)
        self._max_bytes_per_size = 0.0
        """The bytes of a chunk, divided by the nodes and edges of its part: the most so far."""

    def is_dearer_than_whole(self, seeds: Tensor) -> bool:
        """Whether parts would cost more than the whole graph.

        The part of the first chunk stands for all. Parts count as dearer if they together have at least
        `WHOLE_GRAPH_FRACTION` of the whole graph's nodes and edges.
        """
        chunk, block = next(self._chunks(seeds))
        whole_size = self.data.num_nodes + self.data.num_edges
        return _size(block) * seeds.numel() / chunk.numel() >= WHOLE_GRAPH_FRACTION * whole_size

    def rows(self, seeds: Tensor, show: bool = False) -> Tensor:
        """The outputs of `seeds`, in their order: [n, ...] on the host.

        seeds: [n] int64, distinct, at least one.
        """
        rows: Tensor | None = None
        num_done = 0
        with progress("inference", seeds.numel(), "nodes", enabled=show, brief=True) as bar:
            for chunk, block in self._chunks(seeds):
                outputs = self._compute(block)[: chunk.numel()].to(CPU)  # seeds are the first nodes of a part
                if rows is None:
                    rows = torch.empty((seeds.numel(), *outputs.shape[1:]), dtype=outputs.dtype)
                rows[num_done : num_done + chunk.numel()] = outputs
                num_done += chunk.numel()
                bar.advance(chunk.numel())
        assert rows is not None
        return rows

    def _chunks(self, seeds: Tensor) -> Iterator[tuple[Tensor, Block]]:
        """Pairs of a chunk of seeds and the part around it, which is within the limit.

        A chunk whose part exceeds the limit is halved. After a part of at most half the limit, the next
        chunk has twice the seeds. The limit may change from one chunk to the next.
        """
        graph = self.data.graph
        # A first guess, as if a part were its seeds and their in-edges.
        mean_degree = graph.num_edges / max(1, graph.num_nodes)
        num_seeds = max(1, int(self.limit / (1 + mean_degree)))
        start = 0
        while start < seeds.numel():
            chunk = seeds[start : start + num_seeds]
            # A single seed cannot be halved, so its part may be of any size.
            limit = self.limit if chunk.numel() > 1 else None
            block = neighborhood(graph, chunk, self.part_hops, limit, self._id_map)
            if block is None:  # it would exceed the limit
                num_seeds = chunk.numel() // 2
                continue
            yield chunk, block
            start += chunk.numel()
            is_half_empty = 2 * _size(block) <= self.limit
            num_seeds = 2 * chunk.numel() if is_half_empty else chunk.numel()

    def _compute(self, block: Block) -> Tensor:
        """The outputs of a part's nodes.

        With `chunk_bytes` the memory of this call is measured, and sets the limit of later parts.
        """

        def run() -> Tensor:
            return self.batch_model.on_block(
                Rows(self.data.x, block.src_ids).read_on(self.device), block.to(self.device)
            )

        if self.chunk_bytes is None:
            return run()
        with meter_of(self.device) as meter:
            outputs = run()
        self._max_bytes_per_size = max(self._max_bytes_per_size, meter.peak_bytes / _size(block))
        safe_bytes_per_size = MARGIN * max(1.0, self._max_bytes_per_size)
        self.limit = max(1, int(self.chunk_bytes / safe_bytes_per_size))
        return outputs


def _size(block: Block) -> int:
    return block.num_src + block.num_edges
