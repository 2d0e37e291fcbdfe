"""hopline trains any PyTorch Geometric model on a graph that does not fit."""

from typing import TYPE_CHECKING

from hopline.util.lazy import on_first_use

if TYPE_CHECKING:  # for type checkers and editors; at run time names are imported when they are first used
    from hopline import inference as infer
    from hopline import interop, metrics, nn
    from hopline.contract import Job, Method, Unit
    from hopline.core.batch import Batch, Block, Part
    from hopline.core.graph import Graph
    from hopline.core.row_handles import Rows
    from hopline.core.sampler import NeighborSampler
    from hopline.data import (
        Columns,
        Dataset,
        from_csv,
        from_edges,
        from_npz,
        from_pyg,
        from_scipy,
        random_split,
        verify,
    )
    from hopline.data import open_dataset as open
    from hopline.data.placement_settings import Placement
    from hopline.methods.full_batch.settings import FullBatch
    from hopline.methods.historical.settings import Historical
    from hopline.methods.sampled.loader import Loader
    from hopline.methods.sampled.on_shards import CollectiveLoader
    from hopline.methods.sampled.pyg_loader import NeighborLoader
    from hopline.methods.sampled.settings import Sampled
    from hopline.shards.collective_sampler import CollectiveSampler
    from hopline.shards.data import ShardedData, open_sharded
    from hopline.shards.shard import Shard, open_shard
    from hopline.tables import CachedTable, SparseTable, Table, TensorTable, TieredTable, table
    from hopline.training.callbacks import Callback, EarlyStop, EpochEnd, Evaluation, Run, StepEnd
    from hopline.training.settings import Schedule, TrainSettings
    from hopline.training.trainer import Trainer
    from hopline.units.batch_unit import BatchUnit
    from hopline.util.trace import Counters, Timers

__version__ = "0.1.0"

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "hopline.inference": ("infer=.",),
        "hopline.interop": (),
        "hopline.metrics": (),
        "hopline.nn": (),
        "hopline.core.batch": ("Batch", "Block", "Part", "Rows"),
        "hopline.units.batch_unit": ("BatchUnit",),
        "hopline.training.callbacks": ("Callback", "EarlyStop", "EpochEnd", "Evaluation", "Run", "StepEnd"),
        "hopline.methods.sampled.on_shards": ("CollectiveLoader",),
        "hopline.shards.collective_sampler": ("CollectiveSampler",),
        "hopline.data": (
            "Columns",
            "Dataset",
            "from_csv",
            "from_edges",
            "from_npz",
            "from_pyg",
            "from_scipy",
            "open=open_dataset",
            "random_split",
            "verify",
        ),
        "hopline.methods.full_batch.settings": ("FullBatch",),
        "hopline.core.graph": ("Graph",),
        "hopline.methods.historical.settings": ("Historical",),
        "hopline.methods.sampled.loader": ("Loader",),
        "hopline.methods.sampled.settings": ("Sampled",),
        "hopline.data.placement_settings": ("Placement",),
        "hopline.methods.sampled.pyg_loader": ("NeighborLoader",),
        "hopline.core.sampler": ("NeighborSampler",),
        "hopline.training.settings": ("Schedule", "TrainSettings"),
        "hopline.shards.data": ("ShardedData", "open_sharded"),
        "hopline.shards.shard": ("Shard", "open_shard"),
        "hopline.tables": ("CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable", "table"),
        "hopline.util.trace": ("Counters", "Timers"),
        "hopline.training.trainer": ("Trainer",),
        "hopline.contract": ("Job", "Method", "Unit"),
    },
)

__all__ = [
    "Batch",
    "BatchUnit",
    "Block",
    "CachedTable",
    "Callback",
    "CollectiveLoader",
    "CollectiveSampler",
    "Columns",
    "Counters",
    "Dataset",
    "EarlyStop",
    "EpochEnd",
    "Evaluation",
    "FullBatch",
    "Graph",
    "Historical",
    "Job",
    "Loader",
    "Method",
    "NeighborLoader",
    "NeighborSampler",
    "Part",
    "Placement",
    "Rows",
    "Run",
    "Sampled",
    "Schedule",
    "Shard",
    "ShardedData",
    "SparseTable",
    "StepEnd",
    "Table",
    "TensorTable",
    "TieredTable",
    "Timers",
    "TrainSettings",
    "Trainer",
    "Unit",
    "from_csv",
    "from_edges",
    "from_npz",
    "from_pyg",
    "from_scipy",
    "infer",
    "interop",
    "metrics",
    "nn",
    "open",
    "open_shard",
    "open_sharded",
    "random_split",
    "table",
    "verify",
]
