"""Freed memory is held back only while asked for, and the user's own malloc settings are left alone."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest

from hopline.util import host

TRIM = -1
MMAP = -3
ARENAS = -8
"""glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX."""
GLIBC = {TRIM: 64 << 20, MMAP: 32 << 20}
"""Where glibc's own thresholds end once blocks of 32 MB were freed."""
KEPT = {TRIM: 2**31 - 1, MMAP: 1 << 30}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The last value of each malloc setting. No call reaches the real glibc."""
    value_of: dict[int, int] = {}

    def mallopt(name: int, value: int) -> int:
        value_of[name] = value
        return 1

    library = SimpleNamespace(mallopt=mallopt, malloc_trim=lambda bytes_left: 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(host, "_heap", host._Heap())
    for name in [n for n in host.os.environ if n.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    return value_of


def test_freed_memory_is_kept_within_the_context(settings: dict[int, int]):
    with host.keep_freed_memory_within():
        assert settings == KEPT
    assert settings == GLIBC


def test_freed_memory_is_not_kept_after_an_error(settings: dict[int, int]):
    with pytest.raises(KeyboardInterrupt), host.keep_freed_memory_within():
        raise KeyboardInterrupt
    assert settings == GLIBC


def test_freed_memory_is_kept_until_the_last_context_ends(settings: dict[int, int]):
    with host.keep_freed_memory_within():
        with host.keep_freed_memory_within():
            pass
        assert settings == KEPT
    assert settings == GLIBC


def test_what_is_asked_for_the_whole_process_outlives_a_context(settings: dict[int, int]):
    assert host.keep_freed_memory()
    with host.keep_freed_memory_within():
        pass
    assert settings == KEPT | {ARENAS: 1}


def test_settings_of_the_user_are_left_alone(settings: dict[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not host.keep_freed_memory()
    with host.keep_freed_memory_within():
        pass
    assert settings == {}


def test_without_glibc_nothing_is_touched(settings: dict[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not host.keep_freed_memory()
    with host.keep_freed_memory_within():
        pass
    assert settings == {}


def test_the_c_library_takes_the_settings():
    """Of the real one, in which glibc answers 1 for what it knows."""
    library = host._glibc()
    if library is None:
        pytest.skip("not glibc, or MALLOC_ is set in the environment")
    with host.keep_freed_memory_within():
        assert library.mallopt(MMAP, KEPT[MMAP]) == 1
