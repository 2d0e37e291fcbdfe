"""Memory of training over parts, known before a partition exists: batch sizes, blocks and tables.

Historical and FullBatch build their plans of these. All are bounds by the graph's counts alone.
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
"""Largest part that a plan assumes, as a multiple of the mean size. A rule of thumb."""


def layers_of(outline: Outline, method: Method) -> GNN:
    """The model of a run, which must be made of layers.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(outline.model, GNN):
        raise ValueError(
            f"{type(method).__name__} needs a model made of layers, and {type(outline.model.module).__name__} is not: "
            "use hl.nn.GNN, or a PyG model such as GCN"
        )
    return outline.model


def part_sizes(graph: Graph, share: float, num_layers: int) -> Sizes:
    """The most that a batch can have of nodes and edges per layer, if it has a share of all nodes and of all edges.

    It is reached if no two edges have the same source.
    """
    num_own = math.ceil(share * graph.num_nodes)
    num_edges = math.ceil(share * graph.num_edges)
    num_src = min(num_own + num_edges, graph.num_nodes)
    return Sizes((*[num_src] * num_layers, num_own), (num_edges,) * num_layers)


def block_bytes(graph: Graph, num_edges: int) -> int:
    """The bytes of a batch's block: per edge 12 and its edge arrays, per source 24."""
    array_bytes = sum(array.element_size() * array.shape[1:].numel() for array in graph.edge.values())
    num_src = min(graph.num_nodes, num_edges)
    return num_edges * (12 + array_bytes) + 24 * num_src


def table_items(name: str, folder: Path | None, num_bytes: int, outline: Outline, requested: str) -> list[Item]:
    """The items of a plan for tables: the tables, and pinned buffers if a GPU cannot read the tables itself.

    requested: the setting `tables`. folder: where tables are mapped files; None for memory.
    """
    place: Place = "disk" if folder is not None else "host"
    if outline.compute_place == "device" and requested == "device":
        place = "device"
    items = [Item(name, place, num_bytes)]
    # Tables that ranks share have no mover, so no buffers. With tables=auto and no folder, `choose_where` decides
    # when the tables are made.
    needs_buffers = requested == "host" or folder is not None
    if outline.compute_place == "device" and needs_buffers and outline.job.world.size == 1:
        items.append(Item("pinned buffers", "host", NUM_BUFFERS * BUFFER_BYTES))
    return items
