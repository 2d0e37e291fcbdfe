"""Names of a package that are imported on first use, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


def on_first_use(
    package: str,
    names_of: Mapping[str, Sequence[str]],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    moved: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` (PEP 562).

    names_of: module -> names that the package takes from it. A module without names is itself a public name: the last
    part of its path. "new=old" takes the module's `old` under the name `new`, and "new=." the module itself.
    elsewhere: as users type it -> a package whose names were once this one's: asked for here, such a name says where it
    is. moved: names that have another name there.
    """
    home: dict[str, tuple[str, str | None]] = {}
    for module, names in names_of.items():
        if not names:
            home[module.rpartition(".")[2]] = (module, None)
        for name in names:
            public, _, original = name.partition("=")
            home[public] = (module, original or public)

    def get(name: str) -> Any:
        if name not in home and not name.startswith("_"):
            found = [f"{public}.{name}" for public, other in elsewhere.items() if name in _names_of(other)]
            if name in moved or found:
                raise AttributeError(f"hl.{name} has moved: use {moved.get(name) or found[0]}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_meant(name, home)}")
        path, original = home[name]
        module = importlib.import_module(path)
        value = module if original in (None, ".") else getattr(module, original)
        # Kept in the package's namespace: Python asks `__getattr__` only for names that are not there.
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(home)


def _names_of(package: str) -> Sequence[str]:
    return importlib.import_module(package).__all__


def _meant(name: str, names: Iterable[str]) -> str:
    """A hint for a misspelt name; none for the many that Python and its tools look for, which begin with "_"."""
    if name.startswith("_"):
        return ""
    from hopline.util.config import nearest

    hint = nearest(name, names)
    return f".{hint}" if hint else ""
