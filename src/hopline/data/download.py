"""Datasets of PyG and OGB by name: downloaded by PyG's code, and converted once into a dataset folder.

`SOURCES` lists the short names. Any other dataset of PyG with one graph is "pyg:ClassName" or
"pyg:ClassName:name". Importing this file needs neither torch nor PyG, so that names can be listed quickly.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hopline.data.paths import is_ogb_folder
from hopline.util.config import nearest

if TYPE_CHECKING:
    from torch_geometric.data import Data

T = TypeVar("T")
_HETEROPHILOUS = "HeterophilousGraphDataset"
OGB_URL = "http://snap.stanford.edu/ogb/data/nodeproppred"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset that can be downloaded."""

    name: str
    """Name by which it is opened, and of its folder under the data root."""
    what: str
    kind: str
    """Class in `torch_geometric.datasets`, or the name of OGB's archive."""
    settings: dict[str, Any] = field(default_factory=dict)
    is_ogb: bool = False

    def fetch(self, raw: Path, target: Path, options: dict[str, Any]) -> None:
        """Download the files that are missing under `raw`, and convert them into the folder `target`.

        options: Arguments of the conversion, which take precedence over the source's own.
        """
        if self.is_ogb:
            self._fetch_ogb(raw, target, options)
        else:
            self._fetch_pyg(raw, target, options)

    def _fetch_pyg(self, raw: Path, target: Path, options: dict[str, Any]) -> None:
        from hopline.data.formats.pyg import from_pyg
        from hopline.data.nodes import KNOWN_TASKS, class_labels, per_class_split

        folder = raw / self.kind
        data = load_pyg(self.name, self.kind, folder, self.settings)
        task = KNOWN_TASKS.get(self.name)
        arguments: dict[str, Any] = {
            "name": self.name,
            "task": task,
            "meta": {"origin": f"torch_geometric.datasets.{self.kind}", **self.settings},
        }
        labels = class_labels(data.y, task)
        if labels is not None and "train_mask" not in data:
            arguments["splits"] = per_class_split(labels)
        from_pyg(data, **(arguments | options)).save(target)

    def _fetch_ogb(self, raw: Path, target: Path, options: dict[str, Any]) -> None:
        from hopline.data.formats.ogb import from_ogb_folder

        folder_name = f"ogbn_{self.kind.removesuffix('-bin')}"
        # OGB's folder may already be in the data root itself, next to `raw`.
        folder = raw.parent / folder_name
        if not is_ogb_folder(folder):
            folder = raw / folder_name
        if not is_ogb_folder(folder):
            _attempt(self.name, folder, lambda: _download_ogb(self.kind, folder))
        from_ogb_folder(folder, folder=target, **({"name": self.name} | options))


def _attempt(name: str, folder: Path, download: Callable[[], T]) -> T:
    """Run `download`. Whatever it raises becomes a `ValueError` of one sentence that says what to do."""
    try:
        return download()
    except Exception as error:  # the downloaders of many libraries raise many types
        lines = str(error).splitlines()
        first_line = lines[0] if lines else ""
        reason = first_line[:200] or type(error).__name__
        raise ValueError(
            f"Could not get {name!r} ({reason}): connect to the network and try again, "
            f"or put its files as the downloader would under {folder}."
        ) from error


def load_pyg(name: str, kind: str, folder: Path, settings: dict[str, Any]) -> Data:
    """The only graph of a PyG dataset. A dataset of several graphs is refused.

    An exception is PPI: its graphs become one graph, without edges between them.
    name: the dataset's, for messages. kind: its class. Nothing else of that module is called.
    """
    import torch_geometric.datasets as datasets

    if kind not in datasets.__all__:
        raise ValueError(
            f"torch_geometric.datasets has no {kind!r}: type pyg:CLASS or pyg:CLASS:NAME, such as pyg:Planetoid:Cora."
            f"{nearest(kind, datasets.__all__)}"
        )
    if kind == "PPI":
        return _attempt(name, folder, lambda: _load_ppi(folder))
    dataset_class = getattr(datasets, kind)
    try:
        inspect.signature(dataset_class).bind(root="", **settings)
    except TypeError as error:
        raise ValueError(
            f"PyG's {kind} cannot be made for {name!r} ({error}): type pyg:{kind}:NAME if it takes a name, "
            "or make it in Python and pass hl.from_pyg(dataset[0])."
        ) from error
    dataset = _attempt(name, folder, lambda: dataset_class(str(folder), **settings))
    if len(dataset) != 1:
        raise ValueError(
            f"{name!r} holds {len(dataset)} graphs, and hopline trains on one: "
            "make it in Python and pass hl.from_pyg(dataset[i])."
        )
    return dataset[0]


def _load_ppi(folder: Path) -> Data:
    """All graphs of PPI as one. PPI's split is by graph, so the masks are those of the graphs' nodes."""
    import torch
    from torch_geometric.data import Batch, Data
    from torch_geometric.datasets import PPI

    split_names = ("train", "val", "test")
    graphs = []
    num_nodes = []
    for split in split_names:
        split_graphs = [*PPI(str(folder), split=split)]
        graphs += split_graphs
        num_nodes.append(sum(int(graph.num_nodes or 0) for graph in split_graphs))

    joined = Batch.from_data_list(graphs)
    data = Data(x=joined["x"], y=joined["y"], edge_index=joined["edge_index"])
    split_of_node = torch.repeat_interleave(torch.arange(3), torch.tensor(num_nodes))
    for i, split in enumerate(split_names):
        data[f"{split}_mask"] = split_of_node == i
    return data


def _download_ogb(archive: str, folder: Path) -> None:
    from torch_geometric.data import download_url, extract_zip

    folder.parent.mkdir(parents=True, exist_ok=True)
    path = download_url(f"{OGB_URL}/{archive}.zip", str(folder.parent))
    extract_zip(path, str(folder.parent))
    Path(path).unlink()
    # What the folder holds is not a whole OGB dataset, or nothing would be downloaded.
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / archive).rename(folder)


def _pyg(name: str, what: str, kind: str, variant: str = "") -> Source:
    """A dataset of PyG. variant: the argument `name` of its class, if it takes one."""
    return Source(name=name, what=what, kind=kind, settings={"name": variant} if variant else {})


def _ogb(name: str, what: str, archive: str) -> Source:
    return Source(name=name, what=what, kind=archive, is_ogb=True)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        _pyg("cora", "citations, 2,708 nodes", "Planetoid", "Cora"),
        _pyg("citeseer", "citations, 3,327 nodes", "Planetoid", "CiteSeer"),
        _pyg("pubmed", "citations, 19,717 nodes", "Planetoid", "PubMed"),
        _pyg("citation-dblp", "citations, 17,716 nodes", "CitationFull", "DBLP"),
        _pyg("amazon-computers", "co-purchases, 13,752 nodes", "Amazon", "Computers"),
        _pyg("amazon-photo", "co-purchases, 7,650 nodes", "Amazon", "Photo"),
        _pyg("coauthor-cs", "co-authors, 18,333 nodes", "Coauthor", "CS"),
        _pyg("coauthor-physics", "co-authors, 34,493 nodes", "Coauthor", "Physics"),
        _pyg("reddit", "posts, 232,965 nodes", "Reddit"),
        _pyg("reddit2", "posts with fewer edges, 232,965 nodes", "Reddit2"),
        _pyg("flickr", "images, 89,250 nodes", "Flickr"),
        _pyg("yelp", "reviewers, multi-label, 716,847 nodes", "Yelp"),
        _pyg("amazon-products", "products, multi-label, 1,569,960 nodes", "AmazonProducts"),
        _pyg("ppi", "proteins, multi-label, 24 graphs side by side", "PPI"),
        _pyg("wikics", "articles, 11,701 nodes, 20 splits", "WikiCS"),
        _pyg("nell", "knowledge graph, 65,755 nodes", "NELL"),
        _pyg("github", "developers, 37,700 nodes", "GitHub"),
        _pyg("roman-empire", "words, 22,662 nodes, 10 splits", _HETEROPHILOUS, "Roman-empire"),
        _pyg("amazon-ratings", "products, 24,492 nodes, 10 splits", _HETEROPHILOUS, "Amazon-ratings"),
        _pyg("minesweeper", "a grid, 10,000 nodes, 10 splits", _HETEROPHILOUS, "Minesweeper"),
        _pyg("tolokers", "crowd workers, 11,758 nodes, 10 splits", _HETEROPHILOUS, "Tolokers"),
        _pyg("questions", "users, 48,921 nodes, 10 splits", _HETEROPHILOUS, "Questions"),
        _ogb("ogbn-arxiv", "citations, 169,343 nodes", "arxiv"),
        _ogb("ogbn-products", "co-purchases, 2,449,029 nodes", "products"),
        _ogb("ogbn-proteins", "proteins, multi-label, 132,534 nodes", "proteins"),
        _ogb("ogbn-papers100m", "citations, 111,059,956 nodes", "papers100M-bin"),
    )
}


def find(name: str) -> Source | None:
    """The source of a name: a short one, "pyg:ClassName" or "pyg:ClassName:name". None if there is none."""
    if not name.startswith("pyg:"):
        return SOURCES.get(name.lower().replace("_", "-"))
    kind, _, variant = name.removeprefix("pyg:").partition(":")
    short = "-".join(part.lower() for part in ("pyg", kind, variant) if part)
    return _pyg(short, kind, kind, variant)
