"""Code of the user that a setting names: `package.module:Name` or `file.py:Name`.

`model=my_models.py:make` names a function, `method=my_package.methods:MyMethod` a class of settings.
Importing a module runs it. A run folder may come from somebody else, so the names in it are imported only
if the user agrees (`load_trusted` and `load_config` of `run/settings.py`). Every failure is a ValueError
that repeats the setting as typed.

In all functions, `key` is the setting ("model", "method") and `name` its value.
"""

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

MAX_REASON_CHARACTERS = 300
"""Characters of another library's error message that a message of ours quotes."""


def import_own(key: str, name: str) -> Any:
    """Import and return the object that `key=package.module:Name` or `key=file.py:Name` names.

    Raises:
        ValueError: The module, the file or the name does not exist, or the module raises an error.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ValueError(f"{key}={name} names no code: type {key}=package.module:Name, or path/to/file.py:Name")
    if source.endswith(".py"):
        module = _import_file(key, name, Path(source))
    else:
        module = _import_module(key, name, source)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public_names = [public for public in vars(module) if not public.startswith("_")]
        close = get_close_matches(attribute, public_names, n=1)
        hint = f" Did you mean {key}={source}:{close[0]}?" if close else ""
        raise ValueError(f"{key}={name}: there is no {attribute!r} in {source}.{hint}") from None


def whole_name(name: str) -> str:
    """Return a name with the absolute path of its file, so that it means the same in every folder.

    A name in a package is returned as it is.
    """
    source, _, attribute = name.rpartition(":")
    if not source.endswith(".py"):
        return name
    return f"{Path(source).expanduser().resolve()}:{attribute}"


def name_of_class(cls: type) -> str:
    """Return the name by which `import_own` finds a class again."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _import_module(key: str, name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except Exception as error:
        # Whether `source`, or a package that it is in, is missing. If `source` exists and imports a module
        # that is missing, the mistake is inside `source`.
        is_missing = isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}.")
        if is_missing:
            attribute = name.rpartition(":")[2]
            raise ValueError(
                f"{key}={name}: there is no module {source!r} here: install it, type the command in the folder that "
                f"it is in, or type {key}=path/to/file.py:{attribute}"
            ) from error
        raise _import_error(key, name, source, error) from error


def _import_file(key: str, name: str, typed_path: Path) -> ModuleType:
    """The module of a file, imported once per process.

    Its name in `sys.modules` is the absolute path of the file. So `__module__` of a class in it is the path
    too, and `name_of_class` gives a name that can be imported again.
    """
    path = typed_path.expanduser().resolve()
    if str(path) in sys.modules:
        return sys.modules[str(path)]
    if not path.is_file():
        raise ValueError(f"{key}={name}: there is no file {typed_path}: check the path")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        # The file may import modules of its folder, as a script may.
        sys.path.append(str(path.parent))
    # Before the module runs: its dataclasses look up the types of their fields in `sys.modules`.
    sys.modules[str(path)] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[str(path)]
        raise _import_error(key, name, str(typed_path), error) from error
    return module


def _import_error(key: str, name: str, source: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
    return ValueError(
        f"{key}={name} cannot be used, since {source} fails when it is imported ({type(error).__name__}: {reason}). "
        "Mend it. --debug shows the traceback."
    )


def own_settings(key: str, name: str, base: type) -> type:
    """Import and return the settings class that `key=name` names: a dataclass derived from `base`.

    base: has an attribute `OWN`, the name by which messages call it.

    Raises:
        ValueError: The class cannot be imported, is not derived from `base`, is abstract or is not a
            dataclass, or a setting of it could not be typed or stored.
    """
    cls = import_own(key, name)
    class_name = name.rpartition(":")[2]
    base_name = vars(base)["OWN"]
    if not isinstance(cls, type):
        raise ValueError(
            f"{key}={name} is a {type(cls).__name__}: name a class of settings, `class {class_name}({base_name})`"
        )
    if not issubclass(cls, base):
        raise ValueError(
            f"{key}={name} is a class that is not derived from {base_name}: name a class of settings, "
            f"`class {class_name}({base_name})`"
        )
    abstract_methods = sorted(getattr(cls, "__abstractmethods__", ()))
    if abstract_methods:
        raise ValueError(
            f"{key}={name} has no {abstract_methods[0]}: define it in the class {class_name}, or name another class"
        )
    # A class derived from a dataclass counts as one, even without @dataclass. Then the fields that it
    # declares itself would be no settings. Names with an underscore need not be settings.
    declares_fields = any(not field_name.startswith("_") for field_name in inspect.get_annotations(cls))
    is_decorated = "__dataclass_fields__" in vars(cls)
    if not dataclasses.is_dataclass(cls) or (declares_fields and not is_decorated):
        raise ValueError(
            f"{key}={name} is not a dataclass, so that its settings cannot be typed: put @dataclass(frozen=True) "
            f"before `class {class_name}`, with a field and its type for each setting"
        )
    _check_fields(key, name, cls)
    return cls


def _check_fields(key: str, name: str, cls: type) -> None:
    """Raise ValueError for settings that a command cannot read or config.json cannot hold."""
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
        # config.json stores a path as its text.
        if not field.init or default is dataclasses.MISSING or isinstance(default, Path):
            continue
        try:
            plain = dataclasses.asdict(default) if dataclasses.is_dataclass(default) else default  # type: ignore[arg-type]
            json.dumps(plain)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{key}={name}: the default of its setting {field.name} is {default!r}, which config.json cannot hold: "
                "make it a number, text, true or false, or a tuple of these"
            ) from error
