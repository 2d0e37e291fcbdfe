"""Names for authors of methods, tables, convs, callbacks and training loops.

- Methods. `Method.bind(job)` returns a `Work`, which yields `Unit`s, and `BatchUnit` is the unit of one
  batch. `Method.plan` returns a memory `Plan` from an `Outline` of the run, and `Work.guarded` a work that
  keeps to it.
- Tasks. `Task` says what is learnt: the loss of a batch, the metric of outputs, and what predictions look like.
  `Examples` are the terms of its loss, where nodes are repeated or have labels of their own.
- Tables. A table implements `Table`, and `Rows` is a handle to some of its rows.
- Convs. A conv gets a `Block`, or its `Part`s, in place of `edge_index`.
- Layer-wise computation. A `LayerPlan` divides the nodes into `Piece`s. `Layers` computes each layer of a
  model at all pieces before the next layer. `Boundaries` read and write the rows between layers.
- Samplers. A `BlockSampler` samples the blocks of a batch, `block_of_edges` makes one, and `SamplerSettings` names a
  sampler on the command line.
- Draws. `derive_key` makes keys of a run's seed, an epoch and a step. `random_numbers` draws by key and node.
- Ranks. `World` has the collective calls, and `Gradients` says how ranks combine their gradients.
- Callbacks. Hooks get a `StepEnd`, an `EpochEnd` or an `Evaluation`. `Timers` and `Counters` listen to a
  run.
- Loops. `own_threads` and `keep_freed_memory` make a training loop of your own as fast as `Trainer.fit`.

Names are imported on first use (`util/lazy.py`).
"""

from typing import TYPE_CHECKING

from hopline.util.lazy import on_first_use

if TYPE_CHECKING:
    from hopline.budget.plan import Item, Outline, Plan
    from hopline.contract import BlockSampler, Guard, Job, Method, SamplerSettings, Unit, Work, WorkDescription
    from hopline.core.batch import Block, Part, block_of_edges
    from hopline.core.examples import Examples
    from hopline.core.row_handles import Rows
    from hopline.core.sampler import NeighborSampler
    from hopline.distributed.gradients import Gradients
    from hopline.distributed.world import World
    from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
    from hopline.ops.random import derive_key, random_numbers
    from hopline.tables import CachedTable, SparseTable, Table, TensorTable, TieredTable
    from hopline.tables.layers import LayerTables
    from hopline.tasks.task import Task
    from hopline.training.callbacks import EpochEnd, Evaluation, StepEnd
    from hopline.training.settings import TrainSettings
    from hopline.units.batch_unit import BatchUnit
    from hopline.units.measured_unit import MeasuredUnit
    from hopline.units.own_threads import own_threads_for as own_threads
    from hopline.util.host import keep_freed_memory
    from hopline.util.trace import Counters, Timers

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "hopline.budget.plan": ("Item", "Outline", "Plan"),
        "hopline.contract": (
            "BlockSampler",
            "Guard",
            "Job",
            "Method",
            "SamplerSettings",
            "Unit",
            "Work",
            "WorkDescription",
        ),
        "hopline.core.batch": ("Block", "Part", "block_of_edges"),
        "hopline.core.examples": ("Examples",),
        "hopline.core.row_handles": ("Rows",),
        "hopline.core.sampler": ("NeighborSampler",),
        "hopline.distributed.gradients": ("Gradients",),
        "hopline.distributed.world": ("World",),
        "hopline.layerwise.engine": ("Boundaries", "LayerPlan", "Layers", "Piece"),
        "hopline.ops.random": ("derive_key", "random_numbers"),
        "hopline.tables": ("CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable"),
        "hopline.tables.layers": ("LayerTables",),
        "hopline.tasks.task": ("Task",),
        "hopline.training.callbacks": ("EpochEnd", "Evaluation", "StepEnd"),
        "hopline.training.settings": ("TrainSettings",),
        "hopline.units.batch_unit": ("BatchUnit",),
        "hopline.units.own_threads": ("own_threads=own_threads_for",),
        "hopline.units.measured_unit": ("MeasuredUnit",),
        "hopline.util.host": ("keep_freed_memory",),
        "hopline.util.trace": ("Counters", "Timers"),
    },
)

__all__ = [
    "BatchUnit",
    "Block",
    "BlockSampler",
    "Boundaries",
    "CachedTable",
    "Counters",
    "EpochEnd",
    "Evaluation",
    "Examples",
    "Gradients",
    "Guard",
    "Item",
    "Job",
    "LayerPlan",
    "LayerTables",
    "Layers",
    "MeasuredUnit",
    "Method",
    "NeighborSampler",
    "Outline",
    "Part",
    "Piece",
    "Plan",
    "Rows",
    "SamplerSettings",
    "SparseTable",
    "StepEnd",
    "Table",
    "Task",
    "TensorTable",
    "TieredTable",
    "Timers",
    "TrainSettings",
    "Unit",
    "Work",
    "WorkDescription",
    "World",
    "block_of_edges",
    "derive_key",
    "keep_freed_memory",
    "own_threads",
    "random_numbers",
]
