"""Memory of training over parts, before it begins.

The memory plans of `Historical` and `FullBatch` are built from these:

    sizes_of_parts  nodes, halo and edges of every part, from which the memory of a step is predicted
    block_bytes     the block of a batch on the host: its edges, with their sources and destinations
    table_items     the tables, which hold rows of all nodes after each layer, and gradients at them
"""

from __future__ import annotations

from pathlib import Path

import torch

from hopline.budget.plan import Item, Outline, Place
from hopline.contract import Method
from hopline.core.batch_sizes import Sizes
from hopline.core.graph import Graph
from hopline.core.partition import Partition, halo_sizes
from hopline.device.row_mover import BUFFER_BYTES, NUM_BUFFERS
from hopline.nn.layered import Layered
from hopline.nn.whole_module import why_whole

PARTITION_BYTES = 45
"""Bytes per node of a partition and of the tables' steps: the part (int32), order, position, the positions that a sweep
reads and the last write to the tables of both kinds (int64), and whether a node trains."""


ENOUGH_NODES = 64
"""Nodes at which the layers are measured in any case, before a historical batch is split."""
MAP_BYTES_PER_NODE = 16
"""Bytes that building a micro-batch takes per source of the batch's block, for maps to local ids."""


def layers_of(outline: Outline, method: Method) -> Layered:
    """The model of a run, which must be made of layers."""
    if not isinstance(outline.model, Layered):
        raise ValueError(
            f"{type(method).__name__} needs a model made of layers, and {type(outline.model.module).__name__} is not"
            f"{why_whole(outline.model)}: use hl.nn.GNN, or a PyG model such as GCN"
        )
    return outline.model


def sizes_of_parts(graph: Graph, partition: Partition) -> list[Sizes]:
    """The sizes of the block of every part: its nodes and their halo, its nodes, its in-edges."""
    degrees = graph.in_degrees().cpu()
    num_edges = torch.zeros(partition.num_parts, dtype=torch.int64).index_add_(0, partition.part_of.long(), degrees)
    num_src = partition.sizes + halo_sizes(graph, partition)
    rows = zip(num_src.tolist(), partition.sizes.tolist(), num_edges.tolist(), strict=True)
    return [Sizes((src, dst), (edges,)) for src, dst, edges in rows]


def sum_of_largest(sizes: list[Sizes], count: int) -> Sizes:
    """The sizes that a batch of `count` parts has at most: the sums of the largest sources, nodes and edges."""
    table = torch.tensor([[*part.nodes, *part.edges] for part in sizes])
    num_src, num_dst, num_edges = table.sort(0, descending=True).values[:count].sum(0).tolist()
    return Sizes((num_src, num_dst), (num_edges,))


def block_bytes(graph: Graph, num_edges: int) -> int:
    """The bytes of a batch's block on the host, an estimate.

    Per edge: 12 bytes, for its source (int32) and its edge id (int64), and its rows of the edge arrays. Per source:
    24 bytes, three int64 numbers. Both are rules of thumb. The number of sources is not known: it is taken to be that
    of the edges, and no more than all nodes.
    """
    array_bytes = sum(array.element_size() * array.shape[1:].numel() for array in graph.edge.values())
    num_src = min(graph.num_nodes, num_edges)
    return num_edges * (12 + array_bytes) + 24 * num_src


def table_items(name: str, folder: Path | None, num_bytes: int, outline: Outline, requested: str) -> list[Item]:
    """The items of a plan for tables: the tables, and pinned buffers if a GPU cannot read the tables itself.

    name: of the tables in the plan.
    folder: the folder of tables that are mapped files; None for tables in memory.
    num_bytes: of all tables.
    requested: the setting `tables` of the method. It counts on a GPU only.
    """
    # Only a single process has tables of its GPU: several ranks share tables on the host (`PartitionedGraph`).
    has_gpu_tables = outline.compute_place == "device" and outline.job.world.size == 1
    place: Place = "disk" if folder is not None else "host"
    if has_gpu_tables and requested == "device":
        place = "device"
    if has_gpu_tables and requested == "pinned":  # also with a folder, which pinned tables do not use
        place = "host"
    items = [Item(name, place, num_bytes)]
    # The pinned buffers belong to a `RowMover`, which copies rows between the host and the GPU.
    # With tables=auto and no folder, `choose_where` picks the memory only when the tables are allocated. The plan then
    # counts the tables as host memory, without buffers.
    is_behind_buffers = requested == "host" or (requested == "auto" and folder is not None)
    if has_gpu_tables and is_behind_buffers:
        items.append(Item("pinned buffers", "host", NUM_BUFFERS * BUFFER_BYTES))
    return items
