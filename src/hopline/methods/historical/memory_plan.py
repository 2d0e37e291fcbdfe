"""The memory plan of `Historical`: tables of all nodes, and steps of a batch, whole or in micro-batches.

The largest batch has the largest parts: their nodes, halo and in-edges are counted. The smallest step is a micro-batch
of one node, the one with most in-edges, on top of the rows that the whole batch keeps. It is predicted by layers
measured at that node.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hopline.budget.micro_batches import can_split
from hopline.budget.plan import Budget, Item, Outline, Plan, Price
from hopline.core.batch_sizes import Sizes
from hopline.device.out_of_memory import state_bytes
from hopline.methods.historical.settings import Historical
from hopline.methods.partitioned.layer_bytes import FORWARD_SHARE, measured_layers
from hopline.methods.partitioned.memory_plan import (
    ENOUGH_NODES,
    MAP_BYTES_PER_NODE,
    PARTITION_BYTES,
    block_bytes,
    layers_of,
    sizes_of_parts,
    sum_of_largest,
    table_items,
)
from hopline.methods.partitioned.partitioned_graph import partition_together
from hopline.nn.layered import row_widths
from hopline.nn.push_and_pull_probe import INSTEAD
from hopline.nn.whole_module import Whole
from hopline.tables.history import DTYPES
from hopline.units.loss_at_outputs import LOSS_COPIES
from hopline.util.config import plural

MARGIN = 2.0
"""Margin of the smallest micro-batch, since a run measures and predicts it anew."""
EDGES_BYTES = 64
"""Bytes per source that building the edges of a micro-batch takes."""


def plan(method: Historical, outline: Outline, budget: Budget) -> Plan:
    """The plan with the parts that the settings ask for. Only the number of micro-batches adapts to the budget."""
    if isinstance(outline.model, Whole):
        raise ValueError(
            f"{type(outline.model.module).__name__} is not made of layers, so a batch of it cannot be split, nor its "
            f"memory be planned: leave out budget=, or {INSTEAD}"
        )
    model = layers_of(outline, method)
    data = outline.data
    widths = row_widths(model, data.num_features)

    # Numbers per node: rows after all layers but the last, and gradients after every layer.
    width = sum(widths[1:-1]) + (sum(widths[1:]) if method.compensate else 0)
    storage = DTYPES[method.storage] or outline.dtype
    table_bytes = width * data.num_nodes * storage.itemsize
    tables = table_items("history", method.folder, table_bytes, outline, method.tables)

    partition = partition_together(
        data, method.num_parts, method.partition, seed=outline.job.seed, world=outline.job.world
    )
    largest = sum_of_largest(sizes_of_parts(data.graph, partition), method.parts_per_batch)
    num_src = min(largest.nodes[0], data.num_nodes)
    num_own = largest.nodes[1]
    nodes = [num_src] * model.num_layers + [num_own]
    edges = [largest.edges[0]] * model.num_layers
    # The blocks of fixed groups are cached, so in the end all edges are.
    num_edges = data.graph.num_edges if method.groups == "fixed" else edges[0]
    prepared = Item("prepared batch", "host", block_bytes(data.graph, num_edges))
    if method.compensate:  # which computes all layers but the first at out-neighbours too, at most at all nodes
        for l in range(1, model.num_layers):
            nodes[l] += data.num_nodes
            edges[l] += data.num_edges
        nodes[-1] += data.num_nodes

    sizes = Sizes(tuple(nodes), tuple(edges))
    predictor = outline.predictor(model.num_layers)
    step_bytes = predictor.predict_peak(sizes)
    min_step_bytes = step_bytes
    if budget.over_budget == "split" and can_split(model):
        # Kept by a split batch during its step, as `MicroBatches` counts it: own rows and gradients after layers.
        hidden_width = sum(widths[1:-1])
        own_width = 2 * hidden_width
        if method.compensate:
            own_width += widths[-1] + 2 * max(widths[1:-1], default=0)
        if not outline.job.task.is_mean:
            own_width += LOSS_COPIES * widths[-1]
        resident_bytes = num_own * own_width * outline.dtype.itemsize + MAP_BYTES_PER_NODE * num_src
        degree = int(data.graph.in_degrees().max()) if data.num_nodes else 0
        one_node = Sizes((1 + degree, 1), (degree,))
        # Before its first split, a run measures its layers at some nodes (`Probe`), which takes memory too.
        num_probed = min(ENOUGH_NODES, num_own)
        num_edges = math.ceil(num_probed * edges[0] / max(1, num_own))
        probed = Sizes((min(num_probed + num_edges, num_src), num_probed), (num_edges,))
        layers = measured_layers(outline, partition, max_bytes=0)
        piece_bytes = MARGIN * max(layers.largest(one_node), layers.largest(probed))
        piece_bytes += EDGES_BYTES * max(one_node.nodes[0], probed.nodes[0])
        min_step_bytes = sum(state_bytes(model)) + resident_bytes + piece_bytes
    plan = outline.make_plan(
        method,
        budget,
        items=[Item("partition", "host", PARTITION_BYTES * data.num_nodes), prepared, *tables],
        step_bytes=step_bytes,
        min_step_bytes=min_step_bytes,
        steps=-(-method.num_parts // method.parts_per_batch),
        count=method.parts_per_batch,
        covers=f"batches of {{}} of {method.num_parts} {plural(method.num_parts, 'part')}",
        num_blocks=model.num_layers,
    )
    free_step_s = predictor.expected_s(sizes)
    if plan.num_micro_batches == 1 or math.isnan(free_step_s):
        return plan
    micro_batch_s = predictor.expected_s(_divide(sizes, plan.num_micro_batches))
    # All layers but the last are computed twice, which is counted as if they all were.
    step_s = (1 + FORWARD_SHARE) * plan.num_micro_batches * micro_batch_s
    return replace(plan, price=Price(step_s=step_s, free_step_s=free_step_s, free_step_bytes=step_bytes))


def _divide(sizes: Sizes, num_micro_batches: int) -> Sizes:
    """The sizes of a micro-batch, with a source of its own for each in-edge, or all of the batch's."""
    edges = tuple(math.ceil(num_edges / num_micro_batches) for num_edges in sizes.edges)
    num_own = math.ceil(sizes.nodes[-1] / num_micro_batches)
    nodes = tuple(min(num_src, num_own + edges[0]) for num_src in sizes.nodes[:-1])
    return Sizes((*nodes, num_own), edges)
