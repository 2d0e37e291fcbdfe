"""Tables: rows by node id, in any place: device, pinned or other host memory, disk, another host.

Read `base` first: the contract of a table (`read`, `write`, `tiers`). A table of your own implements
`base.Table`. The other modules:

    memory          rows in a dense tensor
    sparse          rows in CSR form
    stacked         rows of several tables, such as those of all shards
    ram_cache       copies in RAM of some rows of a slower table
    gpu_cache       copies on the device of some rows of a slower table
    hot_rows        decides which rows are worth a copy
    build           `table`, the one call that stacks these tables
    layers          tables that training and inference write, one per layer
    allocators      decides in which memory the tables of layers lie
    history         adds the age of every row, and rows that are prefetched for a GPU
    shareable       sends tables to other processes as handles

A table owns no thread and no stream. A `device.RowMover` moves the rows of histories, and belongs to the
training method that uses them. The package may import `pipeline` and the folders below it.
"""

from hopline.tables.base import Table, Tiers
from hopline.tables.build import table
from hopline.tables.gpu_cache import TieredTable
from hopline.tables.memory import TensorTable
from hopline.tables.ram_cache import CachedTable
from hopline.tables.sparse import SparseTable

__all__ = ["CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable", "Tiers", "table"]
