"""Tables: rows by node id, wherever they live.

Read `base` for the contract (`read`, `write`, `tiers`), then `memory`, `sparse`, `cache` and `tiered` (device over
pinned or host memory over disk), `build` the one call that stacks them, `hot_rows` which rows are hot, `views` tables
seen otherwise. `history`, `history_gpu` and `history_ranks` hold the embeddings that Historical stores. A table owns
no thread. A table of one's own implements `base.Table`. It stands on `pipeline` and below.
"""

from hopline.tables.base import Table, Tiers
from hopline.tables.build import table
from hopline.tables.cache import CachedTable
from hopline.tables.memory import TensorTable
from hopline.tables.sparse import SparseTable
from hopline.tables.tiered import TieredTable

__all__ = ["CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable", "Tiers", "table"]
