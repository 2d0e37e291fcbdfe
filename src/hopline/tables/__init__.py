"""Tables: rows by node id, wherever they live.

Read `base` for the contract (`read`, `write`, `tiers`), then `memory`, `sparse`, `cache` and `tiered` (device over
pinned or host memory over disk), `build` the one call that stacks them, `hot_rows` which rows are hot. `layers` has
the tables that are written, one per layer, and `allocators` where they lie. `history` adds the age of every row and
rows that are prefetched for a GPU, `history_ranks` tables that ranks share. A table owns no thread and no stream: rows
of histories move by a `device.RowMover` that the work owns. A table of one's own implements `base.Table`. It stands on
`pipeline` and below.
"""

from hopline.tables.base import Table, Tiers
from hopline.tables.build import table
from hopline.tables.cache import CachedTable
from hopline.tables.memory import TensorTable
from hopline.tables.sparse import SparseTable
from hopline.tables.tiered import TieredTable

__all__ = ["CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable", "Tiers", "table"]
