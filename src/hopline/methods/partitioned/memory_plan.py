"""What parts of a graph take: the sizes of a batch of them, their edges, and tables of rows between layers."""

from __future__ import annotations

import math

from hopline.contract import Item, Method, Outline, Place
from hopline.core.graph import Graph
from hopline.core.sizes import Sizes
from hopline.device.row_mover import BUFFER_BYTES, NUM_BUFFERS
from hopline.nn.gnn import GNN

UNEVEN = 1.1
"""By how much a part may be larger than the mean."""


def layers_of(outline: Outline, method: Method) -> GNN:
    if not isinstance(outline.model, GNN):
        raise ValueError(
            f"{type(method).__name__} needs a model made of layers, and {type(outline.model.module).__name__} is not: "
            "use hl.nn.GNN, or a PyG model such as GCN"
        )
    return outline.model


def part_sizes(graph: Graph, share: float, num_layers: int) -> Sizes:
    """Of a batch with a share of all nodes and their in-edges, whose other sources are all different."""
    own, edges = math.ceil(share * graph.num_nodes), math.ceil(share * graph.num_edges)
    sources = min(own + edges, graph.num_nodes)
    return Sizes((*[sources] * num_layers, own), (edges,) * num_layers)


def block_bytes(graph: Graph, num_edges: int) -> int:
    """Of the edges of a batch: their sources, and rows of edge arrays."""
    arrays = sum(array[:0].element_size() * array.shape[1:].numel() for array in graph.edge.values())
    return num_edges * (12 + arrays) + 24 * min(graph.num_nodes, num_edges)


def table_items(name: str, folder: object, num_bytes: int, outline: Outline, requested: str) -> list[Item]:
    """Tables, and the buffers that a GPU's rows go through where it cannot read the tables itself."""
    place: Place = "disk" if folder is not None else "host"
    if outline.compute_place == "device" and requested == "device":
        place = "device"
    items = [Item(name, place, num_bytes)]
    # Tables that ranks share have no mover. Of tables=auto without a folder, `choose_where` decides when they are made.
    behind_buffers = requested == "host" or folder is not None
    if outline.compute_place == "device" and behind_buffers and outline.job.world.size == 1:
        items.append(Item("pinned buffers", "host", NUM_BUFFERS * BUFFER_BYTES))
    return items
