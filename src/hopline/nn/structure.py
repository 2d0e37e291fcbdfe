"""What a model computes, apart from its weights, as a short text: its modules, their settings and their code."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch_geometric
from torch import nn

KNOWN = ("torch", "torch_geometric", "hopline")
"""Whose code goes by a version; of all other classes and functions the source is looked at."""


def structure_of(model: nn.Module) -> str:
    """The same for models that compute the same with the same weights: `GraphSAGE` with another `aggr` has another."""
    lines = [f"torch_geometric {torch_geometric.__version__}"]
    for name, module in model.named_modules():
        lines.append(f"{name}: {_code(type(module))}")
        # What begins with _ is the module's own business, such as what it has cached.
        settings = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        lines += [f"  {key}={_text(value)}" for key, value in sorted(settings.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    """A value in words that are the same in every process: without an address."""
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
    """The name of a class or function; of one that is not of a library that we know, its source too."""
    module = getattr(what, "__module__", None) or ""
    name = f"{module}.{getattr(what, '__qualname__', type(what).__qualname__)}"
    if module.partition(".")[0] in KNOWN:
        return name
    try:
        return f"{name} {inspect.getsource(what)}"
    except (OSError, TypeError):  # typed into a shell, or compiled
        return f"{name} {what.__code__.co_code.hex()}" if isinstance(what, FunctionType) else name
