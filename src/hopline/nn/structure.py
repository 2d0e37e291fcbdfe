"""A fingerprint of what a model computes, apart from its weights: its modules, their settings and their code.

Whoever resumes a run, or an inference, from a folder compares fingerprints. So the text that is hashed must
be equal in all processes, and holds no addresses. Classes and functions of the packages in `KNOWN` enter it
by name. All others enter it by name and source. The version of PyG is part of it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch_geometric
from torch import nn

KNOWN = ("torch", "torch_geometric", "hopline")
"""Packages whose classes and functions are identified by name.

All others are identified by name and source.
"""


def structure_of(model: nn.Module) -> str:
    """The fingerprint of a model: 32 hexadecimal digits.

    Equal for two models that have the same modules, settings and code, whatever their weights. `GraphSAGE`
    with another `aggr` has another fingerprint.
    """
    lines = [f"torch_geometric {torch_geometric.__version__}"]
    for name, module in model.named_modules():
        lines.append(f"{name}: {_code(type(module))}")
        # Attributes that begin with _ are not settings. Caches are among them, and change while a model runs.
        settings = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        lines += [f"  {key}={_text(value)}" for key, value in sorted(settings.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    """A setting's value as text that is the same in every process: unlike `repr`, without addresses.

    Numbers, strings, containers, functions and classes are written out. Any other object, such as a tensor, is
    only named by its type.
    """
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())}}}"
    if inspect.isroutine(value) or isinstance(value, type):
        return _code(value)
    return type(value).__qualname__


def _code(what: type | Callable[..., Any]) -> str:
    """The name of a class or function, and its source if it is not from a package in `KNOWN`."""
    module = getattr(what, "__module__", None) or ""
    name = f"{module}.{getattr(what, '__qualname__', type(what).__qualname__)}"
    if module.partition(".")[0] in KNOWN:
        return name
    try:
        return f"{name} {inspect.getsource(what)}"
    except (OSError, TypeError):  # no source: typed into a shell, or compiled. A Python function still has bytecode.
        return f"{name} {what.__code__.co_code.hex()}" if isinstance(what, FunctionType) else name
