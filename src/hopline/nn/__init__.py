"""PyG models on blocks.

Read `gnn` first: encode, layers, decode. `conv_adapter` runs any PyG conv on a block, and `probe` finds out how, by
comparing with plain PyG on a tiny ugly graph. `fused`, `tree_layers` and `attention` are the fast ways, `gcn_norm`
makes GCN's norm right on samples, `norms` and `row_wise` are about what stands between convs, `whole_module` runs
modules without layers, `structure` names what a model computes. Where a conv would differ from plain PyG it is
refused by name: keep that. It stands on `tables` and below.

State of the process: `probe.findings` owns what was found out about each module, and forgets it with the module.
"""

from hopline.nn.conv_adapter import convolve
from hopline.nn.gnn import GNN, State
from hopline.nn.whole_module import Whole, as_walkable

__all__ = ["GNN", "State", "Whole", "as_walkable", "convolve"]
