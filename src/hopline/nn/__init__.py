"""PyG models on blocks."""

from hopline.nn.gnn import GNN, State
from hopline.nn.whole_module import Whole, as_walkable

__all__ = ["GNN", "State", "Whole", "as_walkable"]
