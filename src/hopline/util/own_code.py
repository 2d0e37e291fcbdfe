"""Code of the user's own that a setting names: `package.module:Name`, or `file.py:Name`. Importing a module runs it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
import typing
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

PLACES = "package.module:{0}, or path/to/file.py:{0}"


def import_own(key: str, name: str) -> Any:
    """What `key=package.module:Name` or `key=file.py:Name` names.

    Raises:
        ValueError: There is no such module, file or name in it, or the module raises an error.
    """
    place, _, wanted = name.rpartition(":")
    if not place or not wanted:
        raise ValueError(f"{key}={name} names no code: type {key}={PLACES.format('Name')}")
    module = _file_module(key, name, Path(place)) if place.endswith(".py") else _named_module(key, name, place)
    try:
        return getattr(module, wanted)
    except AttributeError:
        names = [one for one in vars(module) if not one.startswith("_")]
        close = get_close_matches(wanted, names, n=1)
        hint = f" Did you mean {key}={place}:{close[0]}?" if close else ""
        raise ValueError(f"{key}={name}: there is no {wanted!r} in {place}.{hint}") from None


def whole_name(name: str) -> str:
    """The same name with the whole path of its file, so that it means the same in every folder."""
    place, _, wanted = name.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{wanted}" if place.endswith(".py") else name


def name_of_class(cls: type) -> str:
    """The name by which `import_own` finds a class again."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _named_module(key: str, name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        # A module that it imports itself may be missing too, which is another mistake.
        is_missing = isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}.")
        if is_missing:
            wanted = name.rpartition(":")[2]
            raise ValueError(
                f"{key}={name}: there is no module {place!r} here: install it, type the command in the folder that it "
                f"is in, or type {key}=path/to/file.py:{wanted}"
            ) from error
        raise _failed(key, name, place, error) from error


def _file_module(key: str, name: str, given: Path) -> ModuleType:
    """The module of a file. It is known by its whole path, from which a class in it tells where it came from."""
    path = given.expanduser().resolve()
    if str(path) in sys.modules:
        return sys.modules[str(path)]
    if not path.is_file():
        raise ValueError(f"{key}={name}: there is no file {given}: check the path")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it finds the modules beside it, as a script does
    sys.modules[str(path)] = module  # before it runs: its dataclasses look for the names of their types there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[str(path)]
        raise _failed(key, name, str(given), error) from error
    return module


def _failed(key: str, name: str, place: str, error: Exception) -> ValueError:
    said = " ".join(str(error).split())[:300]
    return ValueError(
        f"{key}={name} cannot be used, since {place} fails when it is imported ({type(error).__name__}: {said}): mend "
        "it; --debug shows where"
    )


def own_settings(key: str, name: str, base: type) -> type:
    """The class of settings that `key=name` names: a dataclass derived from `base` whose settings can be typed.

    base: has its name for users as `OWN`.

    Raises:
        ValueError: It cannot be imported, or is no such class.
    """
    found = import_own(key, name)
    wanted = name.rpartition(":")[2]
    kind = vars(base)["OWN"]
    if not (isinstance(found, type) and issubclass(found, base)):
        what = f"a class that is not derived from {kind}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ValueError(f"{key}={name} is {what}: name a class of settings, `class {wanted}({kind})`")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"{key}={name} has no {missing[0]}: define it in the class {wanted}, or name another class")
    added = [one for one in inspect.get_annotations(found) if not one.startswith("_")]
    if not dataclasses.is_dataclass(found) or (added and "__dataclass_fields__" not in vars(found)):
        raise ValueError(
            f"{key}={name} is not a dataclass, so that its settings cannot be typed: put @dataclass(frozen=True) "
            f"before `class {wanted}`, with a field and its type for each setting"
        )
    _check_fields(key, name, found)
    return found


def _check_fields(key: str, name: str, cls: type) -> None:
    """Refuse settings that neither a command nor config.json could hold."""
    try:
        typing.get_type_hints(cls)
    except Exception as error:
        raise ValueError(
            f"{key}={name}: the types of its settings cannot be read ({error}): import what they name at the top of "
            "its module, not under TYPE_CHECKING"
        ) from error
    for field in dataclasses.fields(cls):
        if field.name == "kind":
            raise ValueError(f"{key}={name} has a setting called 'kind', which config.json needs: call it otherwise")
        default = field.default
        if not field.init or default is dataclasses.MISSING or isinstance(default, Path):
            continue
        try:
            json.dumps(dataclasses.asdict(default) if dataclasses.is_dataclass(default) else default)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{key}={name}: the default of its setting {field.name} is {default!r}, which config.json cannot hold: "
                "make it a number, text, true or false, or a tuple of these"
            ) from error
