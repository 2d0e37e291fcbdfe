"""Historical training of a module with a `forward` of its own, which calls `push_and_pull` between its convs.

A batch is one call of the module. All else is as for models made of layers (`work`), but for the exact rows of a
refresh: no layer runs by itself, so they are computed call by call, each from the features on:

    for each call l, for each group of parts:   forward up to call l          ->  table of call l
                                                halo rows of the calls before  <-  their tables

It takes the memory of one group, and with L calls L (L + 1) / 2 times a conv at all nodes, where layers take L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from hopline.budget.plan import Plan
from hopline.contract import Guard, Job
from hopline.core.batch import Batch, Block
from hopline.device.snapshots import evaluating
from hopline.methods.historical.work import HistoricalWork
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph
from hopline.nn.push_and_pull_probe import INSTEAD, WithCalls, find_calls, rows_at_call
from hopline.nn.whole_module import Whole

if TYPE_CHECKING:
    from hopline.methods.historical.settings import Historical
    from hopline.nn.layered import Layered


class CallsGraph(PartitionedGraph):
    """A graph in parts whose tables hold the rows of calls of `push_and_pull`, each in place of a layer."""

    def layer_at(
        self, l: int, block: Block, inputs: Tensor | None = None, own: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Rows of a block's destinations at the first call, which reads no table. It is all that drift asks for."""
        assert l == 0
        batch = Batch(block.dst_ids, (block,), self.batches.inputs_of(block.src_ids), None)
        return rows_at_call(self._whole, 0, batch, _no_rows)

    def fill_tables(self) -> None:
        """Compute the rows of all calls exactly, each rank those that it keeps. Collective."""
        world = self.job.world
        histories = self.histories
        positions = self.swept_positions if world.size > 1 else None
        self.prepare()
        world.barrier()  # no rank still reads the rows that are about to be overwritten
        with evaluating(self._whole):
            for l in range(self._whole.num_layers - 1):
                reader = histories.begin_reading(range(l), positions)
                for group in self.parts.own_groups:
                    nodes = self.parts.nodes_of(group)
                    block = self.parts.block_of(group, nodes)
                    halo = self.batches.halo_positions(group, block)

                    def read(call: int, own_rows: Tensor, reader: Any = reader, halo: Tensor = halo) -> Tensor:
                        return reader.rows(call, halo).to(own_rows.device, own_rows.dtype)

                    batch = self.batches.batch_of(replace(block, graph=self.batches.graph), nodes, None)
                    histories.write(l, self.parts.row_ranges_of(group), rows_at_call(self._whole, l, batch, read))
                histories.complete(l)
        histories.stamp([self.own_row_range], histories.step)
        world.barrier()

    @property
    def _whole(self) -> WithCalls:
        return cast("WithCalls", self.model)


def _no_rows(call: int, own_rows: Tensor) -> Tensor:
    raise AssertionError("nothing is pulled before the first call")


class OwnForwardWork(HistoricalWork):
    """Historical training of a module that calls `push_and_pull`.

    Raises:
        ValueError: A trial shows that batches would be wrong, or a setting needs layers.
    """

    graph_class = CallsGraph

    def __init__(self, job: Job, model: Whole, method: Historical) -> None:
        name = type(model.module).__name__
        needs_layers = {
            "compensate": method.compensate,
            "lipschitz": method.lipschitz,
            "refresh_every=evaluation": method.refresh_every == "evaluation",
        }
        for setting, is_set in needs_layers.items():
            if is_set:
                raise ValueError(
                    f"{setting} needs a model made of layers, and {name} is not: leave it out"
                    f"{' (refresh_every=1 computes exact rows by itself)' if '=' in setting else ''}, or {INSTEAD}"
                )
        data = job.data
        shapes = find_calls(model, data.x, data.graph.edge, has_halo=method.halo != "drop")
        # What the graph in parts reads of a model: `num_layers`, parameters, and a call with a batch.
        super().__init__(job, cast("Layered", WithCalls(model, shapes)), method)

    def guarded(self, guard: Guard, plan: Plan) -> HistoricalWork:
        raise AssertionError("there is no plan without layers")

    def _fill_tables(self) -> None:
        cast("CallsGraph", self.partitioned).fill_tables()
