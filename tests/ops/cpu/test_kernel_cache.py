"""Compiled kernels on the disk: damaged, stale, swapped or unwritable files cost a compilation, never a run."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopline.ops.cpu import kernel_cache
from hopline.ops.cpu.kernel_cache import _KernelFiles

SOURCE = "from hopline.ops.cpu.runtime import kernel\n\n@kernel\ndef add(a, b):\n    return a + b\n"
KEY = (("int64", "int64"), ("x86_64", "znver5", "+avx2"), ("hash of the code", "hash of the closure"))


@pytest.fixture(autouse=True)
def _warns_again() -> Iterator[None]:
    kernel_cache._warn_once.cache_clear()
    yield
    kernel_cache._warn_once.cache_clear()


def load_add(folder: Path, source: str = SOURCE) -> Any:
    """The kernel `add` of a module in `folder`, as a new process gets it: with nothing compiled."""
    path = folder / "adding.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("adding", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.add


def num_hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def only_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.nbc")
    return path


def damaged(content: bytes, draws: random.Random) -> bytes:
    """Content that is cut, has a flipped bit, zeros in a block, or more at its end."""
    kind = draws.randrange(5)
    position = draws.randrange(len(content))
    if kind == 0:
        return b""
    if kind == 1:
        return content[:position]
    if kind == 2:
        flipped = content[position] ^ (1 << draws.randrange(8))
        return content[:position] + bytes([flipped]) + content[position + 1 :]
    if kind == 3:
        return bytes(len(content))
    return content + b"\0"


def test_a_kernel_is_compiled_once_and_again_when_its_source_changes(tmp_path: Path):
    add = load_add(tmp_path)
    assert (add(2, 3), num_hits(add)) == (5, 0)
    again = load_add(tmp_path)
    assert (again(2, 3), num_hits(again)) == (5, 1)
    changed = load_add(tmp_path, SOURCE.replace("a + b", "a - b"))
    assert (changed(2, 3), num_hits(changed)) == (-1, 0)
    only_file(tmp_path)  # replaced
    other_type = load_add(tmp_path, SOURCE.replace("a + b", "a - b"))
    assert (other_type(2.5, 3.0), num_hits(other_type)) == (-0.5, 0)
    assert len(list(tmp_path.rglob("*.nbc"))) == 2


def test_a_kernel_is_compiled_again_when_what_it_inlines_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert load_add(tmp_path)(1, 2) == 3
    again = load_add(tmp_path)
    assert (again(1, 2), num_hits(again)) == (3, 1)
    monkeypatch.setattr(kernel_cache, "_inlined_source", lambda: "another runtime.py")
    after_upgrade = load_add(tmp_path)
    assert (after_upgrade(1, 2), num_hits(after_upgrade)) == (3, 0)


def test_a_damaged_kernel_is_compiled_anew_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    load_add(tmp_path)(2, 3)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-100] + bytes(100)):
        path.write_bytes(content)
        add = load_add(tmp_path)
        assert (add(2, 3), num_hits(add)) == (5, 0)
        again = load_add(tmp_path)
        assert (again(2, 3), num_hits(again)) == (5, 1)
    assert [record.message for record in caplog.records] == [f"{path.parent} has damaged kernels: compiled anew"]


def test_no_damage_is_believed(tmp_path: Path):
    files = _KernelFiles(str(tmp_path), "adding.add-3.py311", b"source")
    files.save(KEY, {"machine code": bytes(range(256)) * 20})
    whole = only_file(tmp_path).read_bytes()
    draws = random.Random(5)
    for _ in range(100):
        only_file(tmp_path).write_bytes(damaged(whole, draws))
        assert files.load(KEY) is None
    files.save(KEY, 7)
    assert files.load(KEY) == 7


def test_a_file_of_another_source_version_or_signature_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = _KernelFiles(str(tmp_path), "adding.add-3.py311", b"source")
    files.save(KEY, 7)
    assert _KernelFiles(str(tmp_path), "adding.add-3.py311", b"other").load(KEY) is None
    assert files.load((*KEY[:2], ("another hash", ""))) is None
    # As after two processes that chose one name for two signatures.
    other = (("float64", "float64"), *KEY[1:])
    only_file(tmp_path).rename(tmp_path / files._name(other))
    assert files.load(other) is None
    monkeypatch.setattr("numba.__version__", "0.1")
    files.save(KEY, 8)
    assert _KernelFiles(str(tmp_path), "adding.add-3.py311", b"source").load(KEY) is None


def test_a_kernel_that_cannot_be_loaded_is_compiled_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def gone(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'gone'")

    load_add(tmp_path)(2, 3)
    monkeypatch.setattr(_KernelFiles, "_load_data", gone)
    add = load_add(tmp_path)
    assert (add(2, 3), num_hits(add)) == (5, 0)
    assert "No module named 'gone'" in caplog.text


def test_on_a_full_disk_a_kernel_stays_in_memory_with_one_line(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    add = load_add(small_disk)
    (small_disk / "full").write_bytes(bytes(64 * 1024 - 2 * 4096))
    assert add(2, 3) == 5
    assert add(2.5, 3.0) == 5.5
    (line,) = [record.message for record in caplog.records]
    assert "NUMBA_CACHE_DIR" in line
    assert not [path for path in small_disk.rglob("*") if ".tmp." in path.name]


def test_without_any_folder_to_write_to_kernels_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    add = load_add(tmp_path)
    assert add(2, 3) == 5
    assert add.stats.cache_path is None
    assert "set NUMBA_CACHE_DIR" in caplog.text
