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

if TYPE_CHECKING:  # for type checkers and editors; at run time names are imported when they are first used
    from hopline.data.built_in import PlantedPartition
    from hopline.data.convert import convert_edges, from_edges
    from hopline.data.dataset import Dataset
    from hopline.data.formats.csv_parquet import from_csv, from_parquet
    from hopline.data.formats.npz import from_npz
    from hopline.data.formats.ogb import from_ogb_folder
    from hopline.data.formats.pyg import from_pyg, from_scipy
    from hopline.data.ids import original_ids
    from hopline.data.options import Columns, EdgeOptions
    from hopline.data.registry import NameInfo, default_data_root, open_dataset
    from hopline.data.registry import open_dataset as open
    from hopline.data.splits import random_split
    from hopline.data.store import open_folder, save, verify
    from hopline.data.synthetic import planted_partition

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "hopline.data.built_in": ("PlantedPartition",),
        "hopline.data.convert": ("convert_edges", "from_edges"),
        "hopline.data.dataset": ("Dataset",),
        "hopline.data.ids": ("original_ids",),
        "hopline.data.registry": ("NameInfo", "default_data_root", "open=open_dataset", "open_dataset"),
        "hopline.data.formats.npz": ("from_npz",),
        "hopline.data.formats.ogb": ("from_ogb_folder",),
        "hopline.data.options": ("Columns", "EdgeOptions"),
        "hopline.data.formats.pyg": ("from_pyg", "from_scipy"),
        "hopline.data.splits": ("random_split",),
        "hopline.data.store": ("open_folder", "save", "verify"),
        "hopline.data.synthetic": ("planted_partition",),
        "hopline.data.formats.csv_parquet": ("from_csv", "from_parquet"),
    },
)

__all__ = [
    "Columns",
    "Dataset",
    "EdgeOptions",
    "NameInfo",
    "PlantedPartition",
    "convert_edges",
    "default_data_root",
    "from_csv",
    "from_edges",
    "from_npz",
    "from_ogb_folder",
    "from_parquet",
    "from_pyg",
    "from_scipy",
    "open",
    "open_dataset",
    "open_folder",
    "original_ids",
    "planted_partition",
    "random_split",
    "save",
    "verify",
]
