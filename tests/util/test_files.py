"""Files are replaced whole: an error, a full disk or a kill leaves the old one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hopline.util.files import CheckedFile, remove_unfinished, replacing


def write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def test_readers_see_the_old_content_or_the_new(tmp_path: Path):
    path = tmp_path / "a"
    write(path, b"old")
    with path.open("rb") as reader:
        with replacing(path) as file:
            file.write(b"new")
            file.flush()
            assert path.read_bytes() == b"old"
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def synced(handle: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def replaced(old: Path, new: Path) -> None:
        order.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write(tmp_path / "a", b"new")
    assert order == ["file", "name", "folder"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_where_writing_fails_the_old_file_stays_alone(error: BaseException, tmp_path: Path):
    write(tmp_path / "a", b"old")

    def fail() -> None:
        with replacing(tmp_path / "a") as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path):
    write(tmp_path / "a", b"old")
    killed = replacing(tmp_path / "a")
    killed.__enter__().write(b"half")
    assert len(os.listdir(tmp_path)) == 2
    assert (tmp_path / "a").read_bytes() == b"old"
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["a"]


def test_a_symbolic_link_stays_and_what_is_no_file_is_written_directly(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"
    with pytest.raises(OSError, match="No space left"):
        write(Path("/dev/full"), b"new")
    assert Path("/dev/full").is_char_device()


# ---- files with a checksum beside them


def write_checked(file: CheckedFile, content: bytes) -> None:
    with file.replacing() as unfinished:
        unfinished.write(content[:2])
        unfinished.write(content[2:])


def test_content_is_compared_with_the_checksum_beside_it(tmp_path: Path):
    file = CheckedFile(tmp_path / "a")
    for content in (b"first", b"second"):
        write_checked(file, content)
        assert CheckedFile(tmp_path / "a").read() == content
    for other in (b"Second", b"secon", b"second\0", b""):
        (tmp_path / "a").write_bytes(other)
        with pytest.raises(ValueError, match=r"a\.sha256 has another checksum"):
            CheckedFile(tmp_path / "a").read()
    assert len((tmp_path / "a.sha256").read_text().split()) == 2, "old checksums do not pile up"


def test_kills_between_the_checksum_and_the_file_leave_a_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_checked(CheckedFile(tmp_path / "a"), b"first")
    replace = os.replace

    def replaced(old: Path, new: Path) -> None:
        if new.name == "a":
            raise KeyboardInterrupt
        replace(old, new)

    for content in (b"second", b"third", b"fourth"):  # each by a new process
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replaced)
            with pytest.raises(KeyboardInterrupt):
                write_checked(CheckedFile(tmp_path / "a"), content)
        assert CheckedFile(tmp_path / "a").read() == b"first"
    write_checked(CheckedFile(tmp_path / "a"), b"fifth")
    assert CheckedFile(tmp_path / "a").read() == b"fifth"
