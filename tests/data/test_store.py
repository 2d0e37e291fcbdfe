"""Dataset folders: equal after saving and opening, and damage found at opening or by `verify`."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data import store
from hopline.data.arrays import HEADER_BYTES
from hopline.data.dataset import Dataset
from hopline.tables import SparseTable, Table, TensorTable
from tests.support import warm


def arrays_of(dataset: Dataset) -> dict[str, Tensor]:
    everyone = torch.arange(dataset.num_nodes)
    arrays = {"indptr": dataset.graph.indptr, "indices": dataset.graph.indices, **dataset.graph.edge}
    arrays |= {name: table.read(everyone) for name, table in dataset.tables.items()}
    arrays |= {f"{k}.{n}": ids for k, splits in enumerate(dataset.all_splits) for n, ids in splits.items()}
    return arrays | ({} if dataset.y is None else {"y": dataset.y})


def assert_same(a: Dataset, b: Dataset) -> None:
    assert (a.name, a.task, a.num_classes, a.meta) == (b.name, b.task, b.num_classes, b.meta)
    ours = arrays_of(a)
    theirs = arrays_of(b)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        assert torch.equal(array, theirs[name]), name


def test_a_dataset_survives_the_folder(tiny: Dataset, tmp_path: Path) -> None:
    tiny.save(tmp_path / "a")
    again = store.open_folder(tmp_path / "a")
    assert_same(tiny, again)
    assert isinstance(again.tables["words"], SparseTable)
    assert again.tables["half"].dtype == torch.bfloat16
    again.save(tmp_path / "a")  # onto the very files it is mapped from
    assert_same(tiny, store.open_folder(tmp_path / "a"))
    assert store.open_folder(tmp_path / "a", split=1).splits["train"][0] == 10
    with pytest.raises(TypeError, match="read-only"):
        again.x.write(torch.tensor([0]), torch.zeros(1, 5))


def test_labels_and_splits_are_private_copies(tiny: Dataset, tmp_path: Path) -> None:
    tiny.save(tmp_path / "a")
    dataset = store.open_folder(tmp_path / "a")
    dataset.labels[0] = 2
    store.verify(tmp_path / "a")


def test_a_table_without_storage_is_written_in_pieces(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(Table):
        @property
        def shape(self) -> tuple[int, ...]:
            return (40, 5)

        @property
        def dtype(self) -> torch.dtype:
            return torch.float32

        def read(self, ids: Tensor) -> Tensor:
            assert ids.numel() <= 3
            return tiny.tables["x"].read(ids) * 2

    monkeypatch.setattr(store, "BYTES_AT_ONCE", 60)
    expected = tiny.x.read(torch.arange(40)) * 2
    Dataset(name="d", graph=tiny.graph, tables={"x": Doubled()}).save(tmp_path / "a")
    assert torch.equal(store.open_folder(tmp_path / "a").x.read(torch.arange(40)), expected)


def measure_opening(folder: Path, small_folder: Path) -> int:
    """Open a dataset; return by how many bytes this process grew. A small one is opened before, for imports."""
    store.open_folder(small_folder)
    before = psutil.Process().memory_info().rss
    dataset = store.open_folder(folder)
    assert dataset.num_edges == 20_000_000
    return psutil.Process().memory_info().rss - before


def test_opening_does_not_read_the_data(tiny: Dataset, tmp_path: Path) -> None:
    tiny.save(tmp_path / "small")
    graph = Graph(torch.arange(1_000_001) * 20, torch.zeros(20_000_000, dtype=torch.int32))
    Dataset(name="large", graph=graph).save(tmp_path / "large")
    # Pages that are read become resident: all of them would be 88 MB.
    assert warm.call(measure_opening, tmp_path / "large", tmp_path / "small") < 20_000_000


def test_verify_says_what_it_did(tiny: Dataset, tmp_path: Path) -> None:
    tiny.save(tmp_path / "a")
    messages = store.verify(tmp_path / "a")
    assert messages[:2] == ["15 arrays have their sizes and headers", "15 arrays have their checksums"]
    assert "labels are classes" in messages


@pytest.fixture
def folder(tiny: Dataset, tmp_path: Path) -> Path:
    tiny.save(tmp_path / "a")
    return tmp_path / "a"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_missing_file_or_entry_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: check the path"):
        store.open_folder(folder / "nowhere")
    (folder / "y.npy").unlink()
    with pytest.raises(ValueError, match=r"y\.npy is missing"):
        store.open_folder(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        store.open_folder(folder)


def test_a_file_of_the_wrong_size_is_named_at_once(folder: Path) -> None:
    path = folder / "indices.npy"
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"\0", b""):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"indices\.npy has \d+ bytes instead of 928"):
            store.open_folder(folder)


def test_a_wrong_header_is_noticed_at_opening(folder: Path) -> None:
    path = folder / "table.x.npy"
    header = path.read_bytes()[:HEADER_BYTES]
    for wrong in (
        header.replace(b"False", b"True "),
        header.replace(b"<f4", b">f4"),
        header.replace(b"40", b"41"),
    ):
        overwrite(path, 0, wrong)
        with pytest.raises(ValueError, match=r"table\.x\.npy is damaged \(its header"):
            store.open_folder(folder)


def test_a_flipped_bit_is_found_by_verify(folder: Path) -> None:
    for name in ("indices.npy", "table.x.npy", "y.npy", "edge.weight.npy", "split.1.train.npy"):
        path = folder / name
        data = path.read_bytes()
        overwrite(path, len(data) - 2, bytes([data[-2] ^ 1]))
        with pytest.raises(ValueError, match=rf"{name} is damaged \(its checksum"):
            store.verify(folder)
        path.write_bytes(data)
    assert store.verify(folder)


def test_bad_numbers_are_found_by_verify_even_with_right_checksums(tiny: Dataset, tmp_path: Path) -> None:
    rows = tiny.x.read(torch.arange(40))
    rows[7, 1] = float("nan")
    tiny.tables["x"] = TensorTable(rows)
    tiny.save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"a/table\.x\.npy holds nan in row 7"):
        store.verify(tmp_path / "a")


def test_arrays_that_do_not_fit_together_are_refused(tiny: Dataset, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"name": "a", "num_nodes": 40, "num_edges": 200, "meta": {}}
    fields |= {"task": "single", "num_classes": 2, "num_splits": 0}
    with store.FolderWriter(tmp_path / "a") as out:
        out.add("indptr", tiny.graph.indptr)
        out.add("indices", tiny.graph.indices)
        out.add("table.x", torch.zeros(39, 2))
        out.commit(**fields, tables={"x": -1})
    with pytest.raises(ValueError, match="'x' has 39 rows for 40"):
        store.open_folder(tmp_path / "a")
    with store.FolderWriter(tmp_path / "a") as out:
        out.add("indptr", tiny.graph.indptr)
        out.commit(**fields, tables={})
    with pytest.raises(ValueError, match="array 'indices' is missing"):
        store.open_folder(tmp_path / "a")


def damage_one_file(folder: Path, rng: random.Random) -> str:
    """Damage one file of a folder, or swap two, in one of six ways."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    way = rng.choice(["flip", "truncate", "append", "delete", "swap", "zero"])
    if way == "flip":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    elif way == "truncate":
        del data[rng.randrange(len(data)) :]
    elif way == "append":
        data += rng.randbytes(rng.randint(1, 200))
    elif way == "zero":
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.randint(1, 300))
        data[start:stop] = bytes(stop - start)
    elif way == "swap":
        other = rng.choice(sorted(folder.iterdir()))
        mine = bytes(data)
        theirs = other.read_bytes()
        other.write_bytes(mine)
        data = bytearray(theirs)
    if way == "delete":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{way} {path.name}"


def test_a_thousand_random_alterations_give_an_error_or_a_correct_read(tiny: Dataset, tmp_path: Path) -> None:
    tiny.save(tmp_path / "good")
    rng = random.Random(2024)
    refused = 0
    for number in range(1000):
        damaged = tmp_path / "damaged"
        shutil.copytree(tmp_path / "good", damaged)
        what = damage_one_file(damaged, rng)
        with suppress(ValueError):
            store.open_folder(damaged)
        try:
            store.verify(damaged)
        except ValueError:
            refused += 1
        else:
            print(number, what)
            assert_same(tiny, store.open_folder(damaged))
        shutil.rmtree(damaged)
    assert refused > 800
