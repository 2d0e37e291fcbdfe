"""Names of a package that are imported on first use, so that `import hopline` does not import torch.

A package sets `__getattr__, __dir__ = on_first_use(...)`. Python calls a module's `__getattr__` for a name
that the module does not have (PEP 562). The call imports the name's module and stores the value in the
package, so that it is made once per name.
"""

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
    missing: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    package: the name of the package, its `__name__`.
    names_of: module -> names that the package takes from it. "new=old" takes the module's `old` under the
        name `new`, and "new=." the module itself. A module without names is itself a public name, the last
        part of its path.
    elsewhere: text that users type ("hl.extend") -> a package whose names users look for in this one.
    missing: name that users of PyG look for -> why there is none, and what to do without it.
    """
    sources: dict[str, _Source] = {}
    for module, names in names_of.items():
        if not names:
            sources[module.rpartition(".")[2]] = _Source(module, None)
        for name in names:
            public, has_other_name, original = name.partition("=")
            if not has_other_name:
                original = public
            sources[public] = _Source(module, None if original == "." else original)

    def get(name: str) -> Any:
        if name not in sources:
            if name in missing:
                raise AttributeError(f"there is no hl.{name}, since {missing[name]}")
            raise _missing_name(package, name, sources, elsewhere)
        source = sources[name]
        module = importlib.import_module(source.module)
        value = module if source.name is None else getattr(module, source.name)
        # Stored in the package: Python calls `__getattr__` only for names that a module does not have.
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sources)


class _Source(NamedTuple):
    """The origin of a public name."""

    module: str
    name: str | None
    """The name in the module; None for the module itself."""


def _missing_name(package: str, name: str, names: Iterable[str], elsewhere: Mapping[str, str]) -> AttributeError:
    """An error for a name that a package does not have. It says where the name is, or which one is similar."""
    message = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python and its tools look for many such names: no advice for them
        return AttributeError(message)
    for typed, other_package in elsewhere.items():
        if name in importlib.import_module(other_package).__all__:
            return AttributeError(f"{message}: use {typed}.{name}")
    from hopline.util.config import nearest

    hint = nearest(name, names)
    return AttributeError(f"{message}.{hint}" if hint else message)
