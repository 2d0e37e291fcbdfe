"""hopline trains any PyTorch Geometric model on a graph that does not fit."""

from typing import TYPE_CHECKING

from hopline.lazy import on_first_use

if TYPE_CHECKING:  # for type checkers and editors; at run time names are imported when they are first used
    from hopline import infer, interop, metrics, nn
    from hopline.batch import Batch, Block, Part, Rows
    from hopline.batch_unit import BatchUnit
    from hopline.callbacks import Callback, EarlyStop, EpochEnd, Evaluation, Run, StepEnd
    from hopline.collective import CollectiveLoader, CollectiveSampler
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
    from hopline.full_batch import FullBatch
    from hopline.graph import Graph
    from hopline.historical import Historical
    from hopline.loader import Loader
    from hopline.methods import Sampled
    from hopline.placement_settings import Placement
    from hopline.pyg_loader import NeighborLoader
    from hopline.sampling import NeighborSampler
    from hopline.settings import Schedule, TrainSettings
    from hopline.shard_data import ShardedData, open_sharded
    from hopline.shards import Shard, open_shard
    from hopline.tables import CachedTable, SparseTable, Table, TensorTable, TieredTable, table
    from hopline.trace import Counters, Timers
    from hopline.trainer import Trainer
    from hopline.work import Job, Method, Unit

__version__ = "0.1.0"

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "hopline.infer": (),
        "hopline.interop": (),
        "hopline.metrics": (),
        "hopline.nn": (),
        "hopline.batch": ("Batch", "Block", "Part", "Rows"),
        "hopline.batch_unit": ("BatchUnit",),
        "hopline.callbacks": ("Callback", "EarlyStop", "EpochEnd", "Evaluation", "Run", "StepEnd"),
        "hopline.collective": ("CollectiveLoader", "CollectiveSampler"),
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
        "hopline.full_batch": ("FullBatch",),
        "hopline.graph": ("Graph",),
        "hopline.historical": ("Historical",),
        "hopline.loader": ("Loader",),
        "hopline.methods": ("Sampled",),
        "hopline.placement_settings": ("Placement",),
        "hopline.pyg_loader": ("NeighborLoader",),
        "hopline.sampling": ("NeighborSampler",),
        "hopline.settings": ("Schedule", "TrainSettings"),
        "hopline.shard_data": ("ShardedData", "open_sharded"),
        "hopline.shards": ("Shard", "open_shard"),
        "hopline.tables": ("CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable", "table"),
        "hopline.trace": ("Counters", "Timers"),
        "hopline.trainer": ("Trainer",),
        "hopline.work": ("Job", "Method", "Unit"),
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
