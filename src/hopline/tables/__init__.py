"""Tables: rows by node id, wherever they live."""

from hopline.tables.base import Table, Tiers
from hopline.tables.build import table
from hopline.tables.cache import CachedTable
from hopline.tables.memory import TensorTable
from hopline.tables.sparse import SparseTable
from hopline.tables.tiered import TieredTable

__all__ = ["CachedTable", "SparseTable", "Table", "TensorTable", "TieredTable", "Tiers", "table"]
