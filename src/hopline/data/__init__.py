"""Datasets: a graph with its tables, labels and splits; opened, saved, converted, checked and generated.

Read `dataset` first, then `registry` (the names that `hl.open` takes) and `store` (a folder of arrays).

    dataset, splits, checks        `Dataset`, random splits, and the conditions that its numbers must meet
    registry, download, built_in   a dataset by name: a folder, a download, or a generated graph
    synthetic                      generates the built-in graphs
    store, writer, manifest,       a dataset as a folder of `.npy` files and a manifest
    arrays, paths
    convert, edges, nodes, ids     edge lists and node files of any size, read in chunks
    options                        settings of the conversion
    formats/                       one file per format that is read
    placement, placement_settings  decide whether graph and features lie on a GPU or on the host
    host_copy                      one copy in memory for all ranks of a host
    fingerprint                    tells whether two datasets hold the same numbers

Files on disk are a contract: each has the number of its format (`tests/test_formats.py`). This folder imports
from `nn` and the layers below it.

State of the process: `fingerprint` owns a cache of checksums, by tensor. An entry lives as long as its
tensor. `writer` lists the locks that this process holds.
"""

from typing import TYPE_CHECKING

from hopline.util.lazy import on_first_use

if TYPE_CHECKING:
    from hopline.data.ids import original_ids

__getattr__, __dir__ = on_first_use(__name__, {"hopline.data.ids": ("original_ids",)})

__all__ = ["original_ids"]
