"""Tables: rows by node id, in any place: device, pinned or other host memory, disk, another host.

Read `base` first: the contract of a table (`read`, `write`, `tiers`). Features are in a `memory` table (a
dense tensor) or a `sparse` one (CSR). Over a slower table, `cache` has copies in RAM and `tiered` has
copies on the device. `build` has the one call that stacks them, and `hot_rows` decides which rows are hot.
Tables that are written, one per layer, are in `layers`, and `allocators` decides in which memory they lie.
`history` adds the age of every row and rows that are prefetched for a GPU; `history_ranks` has histories
that ranks share. `shareable` sends tables to other processes as handles. A table owns no thread and no
stream: rows of histories are moved by a `device.RowMover`, which the work owns. A table of your own
implements `base.Table`. It stands on `pipeline` and below.
"""

from hopline.tables.base import Table, Tiers
from hopline.tables.build import table
from hopline.tables.cache import CachedTable
from hopline.tables.memory import TensorTable
from hopline.tables.sparse import SparseTable
from hopline.tables.tiered import TieredTable

__all__ = ["CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable", "Tiers", "table"]
