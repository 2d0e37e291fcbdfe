"""`open_dataset` (`hl.open`): a dataset by its name, folder or file.

`locate` decides, in this order, and opens nothing:

    1. a built-in graph                               generated; a large one once, under the data root
    2. a path, or a dataset in the current folder     opened; .npz and OGB's folders are converted in memory
    3. NAME[-OPTION=VALUE...] under the data root     opened: it was converted with these options
    4. NAME.npz under the data root                   converted in memory
    5. a name of PyG or OGB                           downloaded under `raw/`, converted once, opened

The name of a built-in graph is refused if a dataset has it too, because either could be meant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from hopline.data import download
from hopline.data.built_in import BUILT_IN, built_in
from hopline.data.paths import existing, is_dataset, is_ogb_folder
from hopline.util.config import nearest

if TYPE_CHECKING:  # finding a dataset needs no torch; opening one imports what it needs
    from hopline.data.dataset import Dataset

ALIASES = {"products": "ogbn-products", "arxiv": "ogbn-arxiv", "papers100m": "ogbn-papers100m"}
IN_MEMORY = ("demo", "planted")
"""Built-in graphs that are generated at each opening. Others are generated once, under the data root."""


class NameInfo(NamedTuple):
    """A dataset that can be opened by name: a line of `hopline datasets`."""

    name: str
    what: str
    where: str
    """Its path, "built in" or "download"."""


def default_data_root() -> Path:
    """The folder of datasets that are opened by name: $HOPLINE_DATA, else the user's cache folder."""
    if os.environ.get("HOPLINE_DATA"):
        return Path(os.environ["HOPLINE_DATA"]).expanduser()
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "hopline"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "hopline"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hopline"


class Location(NamedTuple):
    """Says where a dataset comes from. Exactly one of `path`, `built_in` and `source` is given."""

    path: Path | None = None
    """A folder, or an .npz file."""
    built_in: str | None = None
    source: download.Source | None = None
    is_converted: bool = False
    """Whether `path` is a dataset made with the options that were asked for: none is left to apply."""


def locate(
    name_or_folder: str | os.PathLike[str],
    *,
    data_root: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Location:
    """Find a dataset without opening it. A name or a path that does not exist is refused.

    options: Of the conversion. They are part of the names of folders under the data root.
    """
    root = _data_root(data_root)
    text = os.fspath(name_or_folder)
    path = Path(text).expanduser()
    # The text decides, not the `Path`: "./demo" is a path, but pathlib shortens it to "demo".
    has_folders = os.path.basename(text) != text
    is_path = isinstance(name_or_folder, Path) or has_folders or path.suffix == ".npz"
    name = ALIASES.get(text.lower(), text)
    if not is_path and name in BUILT_IN:
        _check_unambiguous(name, path, root)
        return Location(built_in=name)
    if is_path or is_dataset(path):
        _check_exists(path)
        return Location(path=path)

    if path.is_file():
        _check_exists(path)  # says what the file may be
    source = download.find(name)
    candidates = (name, source.name) if source else (name,)
    with_options = _find_first(root, [_folder_name(candidate, options) for candidate in candidates])
    if with_options is not None:
        # Without options it may be an .npz file, which is not converted yet.
        return Location(path=with_options, is_converted=is_dataset(with_options))
    # A dataset folder cannot be converted again. If the name is that of a download, the download is converted
    # with these options instead. If not, opening the folder refuses them.
    without_options = _find_first(root, candidates)
    if without_options is not None and (source is None or not is_dataset(without_options)):
        return Location(path=without_options)
    if source is not None:
        return Location(source=source)

    all_names = sorted({info.name for info in names(data_root=root)} | set(ALIASES))
    raise ValueError(
        f"There is no dataset {text!r} built in, under {root} or known to PyG and OGB: "
        f"see `hopline datasets`, or give a folder.{nearest(text, all_names)}"
    )


def open_dataset(
    name_or_folder: str | os.PathLike[str],
    *,
    data_root: str | os.PathLike[str] | None = None,
    split: int = 0,
    verify: bool = False,
    **options: Any,
) -> Dataset:
    """Open a dataset: a folder, an `.npz` file, a built-in graph, or a name of the data root, PyG or OGB.

    A download and a large built-in graph are written once, to a folder under the data root.

    Args:
        name_or_folder: For example "ogbn-products", "demo", "folder/of/mine" or "cora.npz".
            `hopline datasets` lists names.
        data_root: Folder of datasets that are opened by name. Default: $HOPLINE_DATA, else the user's cache
            folder.
        split: Which published split is the current one, for datasets that have several.
        verify: Read and check every value first.
        options: Of the built-in graph (seed=, scale=, ...) or of the conversion (symmetrize=, ...). With
            device="cuda" a built-in graph is made in the GPU's memory, and nothing is written.

    Returns:
        The dataset, memory-mapped if it lies in a folder.

    Raises:
        ValueError: The name, path, split or an option does not exist, or the files are damaged.

    Example:
        >>> data = hl.open("demo")
        >>> data.num_features, data.metric, sorted(data.splits)
        (64, 'accuracy', ['test', 'train', 'valid'])
    """
    root = _data_root(data_root)
    location = locate(name_or_folder, data_root=root, options=options)
    if location.built_in is not None:
        return _open_built_in(location.built_in, root, split, verify, options)
    if location.source is not None:
        target = root / _folder_name(location.source.name, options)
        _write_once(target, lambda source=location.source: source.fetch(root / "raw", target, options))
        return _open_path(target, split, verify, {})
    assert location.path is not None
    return _open_path(location.path, split, verify, {} if location.is_converted else options)


def _data_root(data_root: str | os.PathLike[str] | None) -> Path:
    return default_data_root() if data_root is None else Path(data_root).expanduser()


def _check_unambiguous(name: str, folder: Path, root: Path) -> None:
    """Refuse the name of a built-in graph if a dataset in the current folder or the data root has it too."""
    # What the user would type for each dataset of that name -> its folder.
    typed_folders = {os.path.join(".", name): folder}
    if name in IN_MEMORY:  # the other built-in graphs are themselves kept under the root
        typed_folders[str(root / name)] = root / name
    for typed, other in typed_folders.items():
        if is_dataset(other):
            raise ValueError(
                f"{name!r} is a built-in graph, and {typed} is a dataset of the same name: type {typed} for the "
                "dataset, or rename its folder to have the built-in graph."
            )


def _check_exists(path: Path) -> None:
    """Refuse a path that is neither an .npz file nor a folder."""
    if path.suffix == ".npz" and not path.exists():
        raise ValueError(f"There is no file {path}: check the path.")
    if path.suffix != ".npz" and path.is_file():
        raise ValueError(
            f"{path} is a file, and no dataset: a list of edges becomes one by hopline convert {path} FOLDER, or in "
            "Python by hl.from_csv"
        )
    if path.suffix != ".npz" and not existing(path).is_dir():
        raise ValueError(f"There is no dataset folder {path}: check the path, or make it with save().")


def _open_path(path: Path, split: int, check: bool, options: dict[str, Any]) -> Dataset:
    """Open a dataset folder, or convert an .npz file or an OGB folder in memory with these options."""
    from hopline.data.formats.npz import from_npz
    from hopline.data.store import open_folder, verify

    if path.suffix == ".npz" and not path.is_dir():
        return _validate_if(check, from_npz(path, split=split, **options))
    if not is_dataset(path) and is_ogb_folder(path):
        from hopline.data.formats.ogb import from_ogb_folder  # imports pyarrow

        return _validate_if(check, from_ogb_folder(path, split=split, **options))
    if options:
        raise ValueError(f"{path} is already converted: leave out {', '.join(options)}, or convert it anew with them.")
    if check:
        verify(path)
    return open_folder(path, split=split)


def _validate_if(check: bool, dataset: Dataset) -> Dataset:
    if check:
        dataset.validate()
    return dataset


def _open_built_in(name: str, root: Path, split: int, check: bool, options: dict[str, Any]) -> Dataset:
    """Generate a built-in graph, or open it if the data root has it with these options already."""
    from hopline.data import synthetic

    device = options.pop("device", "cpu")
    settings = built_in(name, options)
    if name in IN_MEMORY or device != "cpu":
        dataset = synthetic.planted_partition(settings, name=name, device=device)
        return _validate_if(check, dataset).with_split(split)
    target = root / _folder_name(name, options)
    _write_once(target, lambda: synthetic.planted_partition(settings, name=name, folder=target))
    return _open_path(target, split, check, {})


def _write_once(target: Path, write: Callable[[], object]) -> None:
    """Write a dataset under the data root, unless it is there. Of several processes one writes and the others wait."""
    from hopline.data.writer import locked

    if is_dataset(target):
        return
    with locked(target, wait=True):
        if not is_dataset(target):
            write()


def _folder_name(name: str, options: Mapping[str, Any]) -> str:
    return "-".join([name, *(f"{key}={value}" for key, value in sorted(options.items()))])


def _find_first(root: Path, candidates: Iterable[str]) -> Path | None:
    paths = (_find_under(root, name) for name in candidates)
    return next((path for path in paths if path is not None), None)


def _find_under(root: Path, name: str) -> Path | None:
    """The dataset folder or .npz file of a name under the data root. Capitals, and "-" for "_", do not matter."""
    lower = name.lower()
    for candidate in (name, lower, lower.replace("-", "_"), lower.replace("_", "-")):
        if is_dataset(root / candidate):
            return root / candidate
        if (root / f"{candidate}.npz").is_file():
            return root / f"{candidate}.npz"
    return None


def names(data_root: str | os.PathLike[str] | None = None) -> list[NameInfo]:
    """All datasets that can be opened by name: built in, under the data root, and downloads."""
    root = _data_root(data_root)
    listed = {name: NameInfo(name, what, "built in") for name, (_, what) in BUILT_IN.items()}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith("."):
            continue
        if path.suffix == ".npz":
            listed.setdefault(path.stem, NameInfo(path.stem, "arrays in one file", str(path)))
        elif is_dataset(path):
            listed.setdefault(path.name, NameInfo(path.name, "converted dataset", str(path)))
    for source in download.SOURCES.values():
        listed.setdefault(source.name, NameInfo(source.name, source.what, "download"))
    return list(listed.values())
