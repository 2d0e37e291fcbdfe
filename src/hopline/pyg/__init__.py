"""PyG's loaders without pyg-lib: `import hopline.pyg`, and `NeighborLoader` and `LinkNeighborLoader` of PyG sample.

PyG's loaders call operators of pyg-lib, which is not on PyPI. This import defines them, by Numba kernels:

    torch.ops.pyg.neighbor_sample, hetero_neighbor_sample    NeighborLoader, LinkNeighborLoader, RelBench
    torch.ops.pyg.random_walk                                Node2Vec, dropout_path
    torch.ops.pyg.metis                                      ClusterData
    torch.ops.pyg.index_sort, segment_matmul, grouped_matmul

and tells PyG that they are there. An installed pyg-lib is left alone. Nothing else of a script changes.

    door         what is defined, and which of PyG's flags are set
    operators    the two sampling operators
    walks        random walks and METIS
    matrices     products of groups of rows, and sorting

The semantics are pyg-lib's, and users' results rely on them. The folder imports from `core` and `ops`.
"""

from __future__ import annotations

from hopline.pyg.door import info, reset, use

__all__ = ["info", "reset", "use"]
