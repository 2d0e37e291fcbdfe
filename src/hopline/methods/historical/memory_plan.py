"""The memory plan of `Historical`: tables of all nodes, and steps of a batch, whole or in micro-batches.

It bounds a step before any batch exists. A batch has its share of nodes and edges, times `UNEVEN`, and every edge may
come from a halo node of its own. The smallest step is a micro-batch of one node, the one with most in-edges, on top of
the rows that the whole batch keeps.
"""

from __future__ import annotations

from hopline.budget.micro_batches import can_split
from hopline.contract import Budget, Item, Outline, Plan
from hopline.core.sizes import Sizes
from hopline.methods.historical.settings import Historical
from hopline.methods.partitioned.memory_plan import (
    UNEVEN,
    block_bytes,
    layers_of,
    part_sizes,
    table_items,
)
from hopline.nn.gnn import row_widths
from hopline.tables.history import DTYPES


def plan(method: Historical, outline: Outline, budget: Budget) -> Plan:
    """The plan with the parts that the settings ask for. Only the number of micro-batches adapts to the budget."""
    model = layers_of(outline, method)
    data = outline.data
    widths = row_widths(model, data.num_features)

    # Numbers per node: rows after all layers but the last, and gradients after every layer.
    width = sum(widths[1:-1]) + (sum(widths[1:]) if method.compensate else 0)
    storage = DTYPES[method.storage] or outline.dtype
    table_bytes = width * data.num_nodes * storage.itemsize
    tables = table_items("history", method.folder, table_bytes, outline, method.tables)

    share = min(1.0, UNEVEN * method.parts_per_batch / method.num_parts)
    sizes = part_sizes(data.graph, share, model.num_layers)
    # The blocks of fixed groups are cached, so in the end all edges are.
    num_edges = data.graph.num_edges if method.groups == "fixed" else sizes.edges[0]
    prepared = Item("prepared batch", "host", block_bytes(data.graph, num_edges))

    predictor = outline.predictor(model.num_layers)
    step_bytes = predictor.predict_peak(sizes)
    min_step_bytes = step_bytes
    if budget.over_budget == "split" and can_split(model):
        # The smallest micro-batch in the worst case: one node with as many in-edges as any node has.
        degree = int(data.graph.in_degrees().max()) if data.num_nodes else 0
        num_src = 1 + degree
        one_node = Sizes(nodes=(num_src,) * model.num_layers + (1,), edges=(degree,) * model.num_layers)
        # Kept by a split batch during its step: own rows and gradients after every layer.
        num_own = sizes.nodes[-1]
        resident_bytes = 2 * num_own * sum(widths[1:]) * outline.dtype.itemsize
        min_step_bytes = predictor.predict_peak(one_node) + resident_bytes
    return Plan(
        method=method,
        items=(*outline.resident_items(), *outline.data_on_host(), prepared, *tables),
        limits=outline.limits(budget),
        compute_place=outline.compute_place,
        async_evaluation=outline.async_evaluation,
        hidden_bytes=outline.hidden_bytes(),
        step_bytes=step_bytes,
        min_step_bytes=min_step_bytes,
        steps=-(-method.num_parts // method.parts_per_batch),
        count=method.parts_per_batch,
        covers=f"batches of {{}} of {method.num_parts} parts",
        num_blocks=model.num_layers,
    )
