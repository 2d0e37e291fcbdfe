"""Tables: rows by node id, wherever they live."""

from hopline.tables.base import Table
from hopline.tables.cache import CachedTable
from hopline.tables.memory import TensorTable
from hopline.tables.sparse import SparseTable

__all__ = ["CachedTable", "SparseTable", "Table", "TensorTable"]
