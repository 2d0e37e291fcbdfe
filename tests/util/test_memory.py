"""Freed memory is kept where the C library can be told to, and a user's own settings are left alone."""

from __future__ import annotations

import sys

import pytest

from hopline.util import host as memory


def test_settings_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert memory.reuse_freed_memory.__wrapped__() is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_on_linux_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch):
    for name in [n for n in memory.os.environ if n.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert memory.reuse_freed_memory.__wrapped__() is True


def test_elsewhere_nothing_is_touched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.reuse_freed_memory.__wrapped__() is False
