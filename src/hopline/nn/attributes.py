"""Attributes of a model that may change while it trains, such as a temperature that a callback lowers.

A snapshot of a model is its weights (`state_dict`) and these. Numbers, strings, containers of them, tensors and
buffers that are not persistent are copied. All else, such as an object with a temperature or a closure, is only
compared: `fixed_parts_of` has other texts once it has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hopline.device.snapshots import preserve_weights
from hopline.nn.structure import attributes_of, parts_of


def copy_attributes(model: nn.Module) -> dict[str, Any]:
    """Copies of the attributes that a snapshot holds, by the name of the module and the attribute."""
    return {name: _copy(value) for name, value in _copied(model).items()}


def changes_since(parts: Mapping[str, str], model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """(copies of attributes that have changed, names of all else that has) since `parts_of` returned `parts`."""
    now = parts_of(model)
    changed = [name for name in {**parts, **now} if parts.get(name) != now.get(name)]
    copied = _copied(model)
    return {name: _copy(copied[name]) for name in changed if name in copied}, [n for n in changed if n not in copied]


def set_attributes(model: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Give a model values that `copy_attributes` returned. The values stay the caller's.

    Tensors are written in place where their shapes allow it, since others may refer to them.
    """
    current = _copied(model)
    for name, value in attributes.items():
        path, _, attribute = name.rpartition(".")
        now = current.get(name)
        if isinstance(now, Tensor) and isinstance(value, Tensor) and _can_hold(now, value):
            with torch.no_grad():
                now.copy_(value)
        elif isinstance(value, Tensor) or repr(now) != repr(value) or name not in current:
            setattr(model.get_submodule(path), attribute, _copy(value))


def _can_hold(tensor: Tensor, value: Tensor) -> bool:
    """Whether a value can be written into a tensor in place. Not into one that was expanded, for example."""
    same = tensor.shape == value.shape and tensor.dtype == value.dtype
    return same and tensor.is_contiguous() and not tensor.is_inference()


def fixed_parts_of(model: nn.Module) -> dict[str, str]:
    """`parts_of`, without the attributes that a snapshot holds."""
    return parts_of(model, leave_out=_is_copied)


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """A context after which the model has the weights and attributes that it had before."""
    attributes = copy_attributes(model)
    with preserve_weights(model):
        try:
            yield
        finally:
            set_attributes(model, attributes)


def _copied(model: nn.Module) -> dict[str, Any]:
    """The attributes that a snapshot holds, in the order of their names. That of `vars` differs in a copy."""
    attributes = {
        f"{path}.{attribute}" if path else attribute: value
        for path, module in model.named_modules()
        for attribute, value in attributes_of(module).items()
        if _is_copied(value)
    }
    return dict(sorted(attributes.items(), key=lambda item: item[0]))


def _is_copied(value: Any) -> bool:
    """Whether a snapshot holds a value. A checkpoint can hold it too."""
    if isinstance(value, Tensor):
        return value.layout == torch.strided
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, type(None))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
