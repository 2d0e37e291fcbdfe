"""The memory plan of `FullBatch`: tables of all nodes, and as few shards as fit.

More shards make a step smaller, and change no gradient beyond rounding. The plan counts the memory of a sweep: one
layer at one shard at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hopline.budget.micro_batches import find_fewest
from hopline.contract import Budget, Item, Outline, Plan
from hopline.core.sizes import Sizes
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.partitioned.memory_plan import (
    UNEVEN,
    block_bytes,
    layers_of,
    part_sizes,
    table_items,
)
from hopline.nn.gnn import GNN, row_widths
from hopline.units.loss_at_outputs import LOSS_COPIES

MAX_SHARDS = 1 << 14
"""Most shards that a plan tries. A rule of thumb."""


def plan(method: FullBatch, outline: Outline, budget: Budget) -> Plan:
    """The plan with as few shards as fit, and no fewer than the settings ask for.

    If no number of shards fits, it is the plan of the largest number tried, and `Plan.fits` is false.
    """
    model = layers_of(outline, method)
    data = outline.data
    widths = row_widths(model, data.num_features)
    # Tables hold the rows after all layers but the last, and their gradients.
    table_bytes = 2 * sum(widths[1:-1]) * data.num_nodes * outline.dtype.itemsize
    fixed_items = [
        *outline.resident_items(),
        *outline.data_on_host(),
        *table_items("rows and gradients", method.folder, table_bytes, outline, method.tables),
    ]
    # The usual loss is a mean over seeds, which a sweep computes part by part.
    loss_bytes = 0 if outline.job.usual_loss else LOSS_COPIES * _output_bytes(outline, model)
    limits = outline.limits(budget)

    def plan_with(num_shards: int) -> Plan:
        """The plan with this number of shards."""
        largest_share = min(1.0, UNEVEN / num_shards)
        sizes = part_sizes(data.graph, largest_share, model.num_layers)
        predictor = outline.predictor(model.num_layers)
        step_bytes = max(map(predictor.predict_peak, _sizes_by_layer(sizes))) + loss_bytes
        return Plan(
            method=replace(method, num_shards=num_shards),
            items=(*fixed_items, Item("prepared shard", "host", block_bytes(data.graph, sizes.edges[0]))),
            limits=limits,
            compute_place=outline.compute_place,
            async_evaluation=outline.async_evaluation,
            hidden_bytes=outline.hidden_bytes(),
            step_bytes=step_bytes,
            min_step_bytes=step_bytes,  # a step is not split any further
            steps=1,
            count=num_shards,
            covers="a graph in {} shard" if num_shards == 1 else "a graph in {} shards",
            num_blocks=model.num_layers,
        )

    def excess(plans: list[Plan]) -> float:
        """Infinity if the only plan of the list does not fit, else 0."""
        # `find_fewest` multiplies the shards by excess / limit, at most by 2. Part of a step's bytes does not shrink
        # with more shards, so the true ratio would be too small: infinity doubles them.
        return math.inf if plans[0].step_bytes > plans[0].limit_bytes else 0.0

    min_shards = min(method.num_shards, data.num_nodes)
    max_shards = max(min_shards, min(data.num_nodes, MAX_SHARDS))
    plans, _excess = find_fewest(
        lambda num_shards: [plan_with(num_shards)],
        excess,
        limit=1.0,
        first_number=min_shards,
        max_number=max_shards,
        max_growth=2,
    )
    return plans[0]


def _output_bytes(outline: Outline, model: GNN) -> int:
    """The bytes of the outputs of all training nodes, which a loss of the user's own needs at once.

    A row is taken to be as wide as there are classes, if the model's outputs are narrower.
    """
    width = max(row_widths(model, outline.data.num_features)[-1], outline.data.num_classes)
    return outline.train_ids.numel() * width * outline.dtype.itemsize


def _sizes_by_layer(sizes: Sizes) -> Iterator[Sizes]:
    """The sizes that a sweep has in memory at once, layer by layer: one layer's sources, destinations and edges."""
    num_layers = len(sizes.edges)
    for l in range(num_layers):
        nodes = [0] * (num_layers + 1)
        nodes[l] = sizes.nodes[l]
        nodes[l + 1] = sizes.nodes[l + 1]
        edges = [0] * num_layers
        edges[l] = sizes.edges[l]
        yield Sizes(tuple(nodes), tuple(edges))
