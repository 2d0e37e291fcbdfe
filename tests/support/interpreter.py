"""Triton's interpreter, without a search through its language at every call of a kernel's function."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def search_language_once() -> None:
    """Let the interpreter find the built-in functions of `triton.language` once and not at every call.

    An interpreted function begins by replacing these functions by interpreted ones. To find them Triton lists all
    members of five packages and classes, which takes nearly half of the time of a small kernel. What is built in does
    not change while the tests run, so their names are listed once. What is replaced, and by what, stays the same.

    Nothing happens with a version of Triton in which the search is made in another way.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    search = getattr(interpreter, "_patch_builtin", None)
    patch_attr = getattr(interpreter, "_patch_attr", None)
    if search is None or patch_attr is None or search.__code__.co_varnames[:3] != ("pkg", "builder", "scope"):
        return
    is_builtin = interpreter.tl.core.is_builtin
    builtin_names: dict[Any, list[str]] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in builtin_names:
            builtin_names[pkg] = [name for name in dir(pkg) if is_builtin(getattr(pkg, name, None))]
        for name in builtin_names[pkg]:
            member = getattr(pkg, name)
            if is_builtin(member):  # not replaced yet by a function that called this one
                patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
