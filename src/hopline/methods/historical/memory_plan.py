"""The memory plan of `Historical`: tables of all nodes, and steps of a batch, whole or in micro-batches.

It bounds a step before any batch exists: a batch has its share of nodes and edges, times `UNEVEN`, and all its other
sources are different nodes. The smallest step is a micro-batch of one node, the one with most in-edges, on top of the
rows that the whole batch keeps.
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
    model, data = layers_of(outline, method), outline.data
    storage, widths = DTYPES[method.storage] or outline.dtype, row_widths(model, data.num_features)
    # Numbers per node: rows after all layers but the last, and gradients after every layer.
    rows = sum(widths[1:-1]) + (sum(widths[1:]) if method.compensate else 0)
    limits = outline.limits(budget)
    share = min(1.0, UNEVEN * method.parts_per_batch / method.num_parts)
    sizes = part_sizes(data.graph, share, model.num_layers)
    own, hub = sizes.nodes[-1], int(data.graph.in_degrees().max()) if data.num_nodes else 0
    # Kept by a split batch during its step: own rows and gradients after every layer.
    between = 2 * own * sum(widths[1:]) * outline.dtype.itemsize
    # The smallest micro-batch in the worst case: one node with as many in-edges as any node has.
    one = Sizes((*[1 + hub] * model.num_layers, 1), (hub,) * model.num_layers)
    prepared = block_bytes(data.graph, data.graph.num_edges if method.groups == "fixed" else sizes.edges[0])
    fixed = [*outline.resident_items(), *outline.data_on_host(), Item("prepared batch", "host", prepared)]
    num_bytes = rows * data.num_nodes * storage.itemsize
    tables = table_items("history", method.folder, num_bytes, outline, method.tables)
    cuts = budget.over_budget == "split" and can_split(model)
    predictor = outline.predictor(model.num_layers)
    return Plan(
        method=method,
        items=(*fixed, *tables),
        limits=limits,
        compute_place=outline.compute_place,
        async_evaluation=outline.async_evaluation,
        hidden_bytes=outline.hidden_bytes(),
        step_bytes=predictor.predict_peak(sizes),
        min_step_bytes=predictor.predict_peak(one) + between if cuts else predictor.predict_peak(sizes),
        steps=-(-method.num_parts // method.parts_per_batch),
        count=method.parts_per_batch,
        covers=f"batches of {{}} of {method.num_parts} parts",
        num_blocks=model.num_layers,
    )
