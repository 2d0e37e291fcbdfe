"""Datasets: a graph with its tables, labels and splits; opened, saved, converted, checked and made."""

from hopline.data.convert import convert_edges, from_edges
from hopline.data.dataset import Dataset
from hopline.data.edges import EdgeOptions
from hopline.data.names import NameInfo, default_data_root, names, open_dataset
from hopline.data.npz import from_npz
from hopline.data.ogb import from_ogb_folder
from hopline.data.pyg import from_pyg, from_scipy
from hopline.data.store import open_folder, save, verify
from hopline.data.synthetic import Planted, planted
from hopline.data.tabular import Columns, from_csv, from_parquet, original_ids

open = open_dataset

__all__ = [
    "Columns",
    "Dataset",
    "EdgeOptions",
    "NameInfo",
    "Planted",
    "convert_edges",
    "default_data_root",
    "from_csv",
    "from_edges",
    "from_npz",
    "from_ogb_folder",
    "from_parquet",
    "from_pyg",
    "from_scipy",
    "names",
    "open",
    "open_dataset",
    "open_folder",
    "original_ids",
    "planted",
    "save",
    "verify",
]
