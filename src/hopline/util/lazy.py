"""Names of a package that are imported on first use, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


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
    sources: dict[str, _Source] = {}
    for module, names in names_of.items():
        if not names:
            sources[module.rpartition(".")[2]] = _Source(module, None)
        for name in names:
            public, _, original = name.partition("=")
            sources[public] = _Source(module, None if original == "." else original or public)

    def get(name: str) -> Any:
        if name not in sources:
            raise _missing_name(package, name, sources, elsewhere, moved)
        source = sources[name]
        module = importlib.import_module(source.module)
        value = module if source.name is None else getattr(module, source.name)
        # Kept in the package's namespace: Python asks `__getattr__` only for names that are not there.
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sources)


class _Source(NamedTuple):
    """Where a public name comes from."""

    module: str
    """The module's whole path."""
    name: str | None
    """The name in that module; None: the module itself."""


def _missing_name(
    package: str, name: str, names: Iterable[str], elsewhere: Mapping[str, str], moved: Mapping[str, str]
) -> AttributeError:
    """An error for a name that a package does not have: it says where the name is now, or which one is similar."""
    message = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python and its tools look for many of these, and expect no advice
        return AttributeError(message)
    if name in moved:
        return AttributeError(f"hl.{name} has moved: use {moved[name]}")
    for public, other in elsewhere.items():
        if name in importlib.import_module(other).__all__:
            return AttributeError(f"hl.{name} has moved: use {public}.{name}")
    from hopline.util.config import nearest

    hint = nearest(name, names)
    return AttributeError(f"{message}.{hint}" if hint else message)
