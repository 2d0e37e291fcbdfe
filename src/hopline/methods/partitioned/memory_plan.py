"""Memory of training over parts, estimated before a partition exists.

The memory plans of `Historical` and `FullBatch` are built from these estimates:

    part_sizes      nodes and edges of a batch, from which its step's memory is predicted
    block_bytes     the block of a batch on the host: its edges, with their sources and destinations
    table_items     the tables, which hold rows of all nodes after each layer, and gradients at them

The graph's numbers of nodes and edges stand for the parts, which do not exist yet. How uneven the parts will be is
assumed (`UNEVEN`).
"""

from __future__ import annotations

import math
from pathlib import Path

from hopline.contract import Item, Method, Outline, Place
from hopline.core.graph import Graph
from hopline.core.sizes import Sizes
from hopline.device.row_mover import BUFFER_BYTES, NUM_BUFFERS
from hopline.nn.gnn import GNN

UNEVEN = 1.1
"""Largest part that a plan assumes, as a multiple of the mean size. A rule of thumb.

The plans of both methods multiply the `share` that they give to `part_sizes` by it.
"""


def layers_of(outline: Outline, method: Method) -> GNN:
    """The model of a run, which must be made of layers.

    Raises:
        ValueError: The model is a `Whole`, the wrapper of a module that hopline cannot take apart into layers.
    """
    if not isinstance(outline.model, GNN):
        raise ValueError(
            f"{type(method).__name__} needs a model made of layers, and {type(outline.model.module).__name__} is not: "
            "use hl.nn.GNN, or a PyG model such as GCN"
        )
    return outline.model


def part_sizes(graph: Graph, share: float, num_layers: int) -> Sizes:
    """The largest numbers of nodes and edges of a batch, layer by layer.

    They are reached if every edge has a source of its own outside the batch.

    share: the batch's share of all nodes, and of all edges by their destinations. 0 to 1.
    """
    num_own = math.ceil(share * graph.num_nodes)
    num_edges = math.ceil(share * graph.num_edges)
    num_src = min(num_own + num_edges, graph.num_nodes)
    return Sizes((*[num_src] * num_layers, num_own), (num_edges,) * num_layers)


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
    # Only a single process has tables of its GPU: several ranks share tables on the host (`PartsWork`).
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
