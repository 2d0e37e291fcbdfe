"""hopline trains any PyTorch Geometric model on a graph that does not fit."""

from hopline import infer, interop, metrics, nn
from hopline.batch import Batch, Block, Part, Rows
from hopline.callbacks import Callback, EarlyStop, EpochEnd, Evaluation, Run, StepEnd
from hopline.collective import CollectiveLoader, CollectiveSampler
from hopline.data import Dataset, from_edges, from_npz, from_pyg, from_scipy, verify
from hopline.data import open_dataset as open
from hopline.full_batch import FullBatch
from hopline.graph import Graph
from hopline.historical import Historical
from hopline.loader import Loader
from hopline.methods import Method, Sampled
from hopline.placement import Placement
from hopline.sampling import NeighborSampler
from hopline.schedule import Schedule
from hopline.settings import TrainSettings
from hopline.shard_data import ShardedData, open_sharded
from hopline.shards import Shard, open_shard
from hopline.tables import CachedTable, SparseTable, Table, TensorTable, TieredTable, table
from hopline.trace import Counters, Timers
from hopline.trainer import Trainer
from hopline.work import BatchUnit, Job, Unit

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BatchUnit",
    "Block",
    "CachedTable",
    "Callback",
    "CollectiveLoader",
    "CollectiveSampler",
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
    "table",
    "verify",
]
