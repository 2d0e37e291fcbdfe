"""hopline trains any PyTorch Geometric model on a graph that does not fit into memory.

`hl.open` and `hl.from_*` make a `Dataset`. `hl.Trainer` trains a model on it with a method: `hl.Sampled`,
`hl.Historical` or `hl.FullBatch`.

| module | for |
|---|---|
| `hl.nn` | models as a list of layers |
| `hl.infer` | exact and sampled inference |
| `hl.metrics` | accuracy, F1, ROC-AUC, MRR |
| `hl.shards` | datasets partitioned into a shard per rank |
| `hl.interop` | samplers and tables for other frameworks |
| `hopline.pyg` | an import that lets PyG's own loaders run without pyg-lib |
| `hl.extend` | names for authors of methods, tables, convs and callbacks |

Names are imported on first use, so that `import hopline` costs nothing (`util/lazy.py`). Examples in
docstrings assume `import torch` and `import hopline as hl`.
"""

from typing import TYPE_CHECKING

from hopline.util.lazy import on_first_use

if TYPE_CHECKING:  # type checkers and editors need real imports; at run time `__getattr__` below imports
    from hopline import extend, interop, metrics, nn, shards
    from hopline import inference as infer
    from hopline.budget.plan import Budget
    from hopline.core.batch import Batch
    from hopline.core.graph import Graph
    from hopline.data.convert import from_edges
    from hopline.data.dataset import Dataset
    from hopline.data.formats.csv_parquet import from_csv
    from hopline.data.formats.npz import from_npz
    from hopline.data.formats.pyg import from_pyg, from_scipy
    from hopline.data.options import Columns
    from hopline.data.placement_settings import Placement
    from hopline.data.registry import open_dataset as open
    from hopline.data.splits import random_split
    from hopline.data.store import verify
    from hopline.distributed.world import World
    from hopline.methods.full_batch.loader import FullBatchLoader
    from hopline.methods.full_batch.settings import FullBatch
    from hopline.methods.historical.loader import HistoricalLoader
    from hopline.methods.historical.settings import ClusterGCN, Historical
    from hopline.methods.sampled.collective_loader import CollectiveLoader
    from hopline.methods.sampled.loader import Loader
    from hopline.methods.sampled.pyg_loader import NeighborLoader
    from hopline.methods.sampled.settings import Sampled
    from hopline.run.saved import SavedRun, load
    from hopline.tables import table
    from hopline.tasks.settings import Classification, Regression
    from hopline.training.callbacks import Callback, EarlyStop, Run
    from hopline.training.settings import Schedule
    from hopline.training.trainer import Trainer

__version__ = "0.1.0"

# module: the public names that it defines. "open=open_dataset" renames one. An empty tuple, or ".", makes the
# module itself a public name.
__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "hopline.extend": (),
        "hopline.inference": ("infer=.",),
        "hopline.interop": (),
        "hopline.metrics": (),
        "hopline.nn": (),
        "hopline.shards": (),
        "hopline.budget.plan": ("Budget",),
        "hopline.core.batch": ("Batch",),
        "hopline.core.graph": ("Graph",),
        "hopline.data.convert": ("from_edges",),
        "hopline.data.dataset": ("Dataset",),
        "hopline.data.formats.csv_parquet": ("from_csv",),
        "hopline.data.formats.npz": ("from_npz",),
        "hopline.data.formats.pyg": ("from_pyg", "from_scipy"),
        "hopline.data.options": ("Columns",),
        "hopline.data.placement_settings": ("Placement",),
        "hopline.data.registry": ("open=open_dataset",),
        "hopline.data.splits": ("random_split",),
        "hopline.data.store": ("verify",),
        "hopline.distributed.world": ("World",),
        "hopline.methods.full_batch.loader": ("FullBatchLoader",),
        "hopline.methods.full_batch.settings": ("FullBatch",),
        "hopline.methods.historical.loader": ("HistoricalLoader",),
        "hopline.methods.historical.settings": ("ClusterGCN", "Historical"),
        "hopline.methods.sampled.loader": ("Loader",),
        "hopline.methods.sampled.collective_loader": ("CollectiveLoader",),
        "hopline.methods.sampled.pyg_loader": ("NeighborLoader",),
        "hopline.methods.sampled.settings": ("Sampled",),
        "hopline.run.saved": ("SavedRun", "load"),
        "hopline.tables": ("table",),
        "hopline.tasks.settings": ("Classification", "Regression"),
        "hopline.training.callbacks": ("Callback", "EarlyStop", "Run"),
        "hopline.training.settings": ("Schedule",),
        "hopline.training.trainer": ("Trainer",),
    },
    elsewhere={"hl.extend": "hopline.extend", "hl.shards": "hopline.shards"},
    missing={
        **dict.fromkeys(
            ("LinkNeighborLoader", "LinkLoader"),
            "links are not supported yet: keep torch_geometric.loader.LinkNeighborLoader, with `import hopline.pyg`",
        ),
        **dict.fromkeys(
            ("HeteroData", "HGTLoader"),
            "typed graphs are not supported yet: make nodes of one type by hl.from_pyg(data.to_homogeneous())",
        ),
        "pyg": "it is a module of its own: write `import hopline.pyg`",
        "TemporalData": "graphs with time are not supported yet: keep torch_geometric.loader.TemporalDataLoader",
    },
)

__all__ = [
    "Batch",
    "Budget",
    "Callback",
    "Classification",
    "ClusterGCN",
    "CollectiveLoader",
    "Columns",
    "Dataset",
    "EarlyStop",
    "FullBatch",
    "FullBatchLoader",
    "Graph",
    "Historical",
    "HistoricalLoader",
    "Loader",
    "NeighborLoader",
    "Placement",
    "Regression",
    "Run",
    "Sampled",
    "SavedRun",
    "Schedule",
    "Trainer",
    "World",
    "extend",
    "from_csv",
    "from_edges",
    "from_npz",
    "from_pyg",
    "from_scipy",
    "infer",
    "interop",
    "load",
    "metrics",
    "nn",
    "open",
    "random_split",
    "shards",
    "table",
    "verify",
]
