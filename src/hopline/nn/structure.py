"""A fingerprint of what a model computes, apart from its weights: its modules, all that they read, and their code.

Whoever resumes a run, or an inference, from a folder compares fingerprints. So the text of a value must be equal in
all processes: it holds no addresses, and nothing that depends on the order of a set.

    parts_of(model) = {"convs.0.aggr": "'mean'", "act.temperature": "2.0", "Net.forward": "blake2b:1f...", ...}
    structure_of(model) = one hash of them

These enter it, wherever they are held:

    numbers, strings, containers     as they are written in Python
    tensors and NumPy arrays         by dtype, shape and a hash of their content
    functions                        by source, what they close over, defaults, and globals that their code names
    classes                          by their functions and class attributes, base classes included
    other objects                    by what `pickle` would store of them, value by value
    scripted modules and functions   by their graphs, constants and attributes

Classes and functions of installed packages enter it by name (`KNOWN`), those of a model's own modules by source too.
The version of PyG is part of it. An object that nobody can take apart, such as a lock, is `OPAQUE`: two of them cannot
be told apart, so whoever compares refuses.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch_geometric
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

KNOWN = ("torch", "torch_geometric", "hopline")
"""Packages whose classes and functions are identified by name.

All others are identified by name and source.
"""
OPAQUE = "cannot be compared: "
"""Begins the text of a value that has no comparable text. The name of its class follows."""
MAX_CHARACTERS = 60
"""Longer texts are replaced by their hash. A rule of thumb: messages quote a text."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.layout)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_CLASS_INTERNALS = frozenset(
    {
        *("__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__dict__", "__weakref__", "__slots__", "__firstlineno__", "__static_attributes__", "__orig_bases__"),
        *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__abstractmethods__", "_abc_impl"),
    }
)
"""Entries of a class that do not change what it computes, or repeat others."""


def structure_of(model: nn.Module) -> str:
    """The fingerprint of a model: 32 hexadecimal digits.

    Equal for two models that compute the same from the same weights, as far as their parts tell. `GraphSAGE`
    with another `aggr` has another fingerprint.
    """
    return hash_of_parts(parts_of(model))


def hash_of_parts(parts: Mapping[str, str]) -> str:
    """32 hexadecimal digits for what `parts_of` returned."""
    return _hash(repr(sorted(parts.items())).encode())


def parts_of(model: nn.Module, leave_out: Callable[[Any], bool] = lambda value: False) -> dict[str, str]:
    """Texts by name of all that a model's outputs depend on, apart from its parameters and persistent buffers.

    The names are those of modules and attributes, such as "convs.0.aggr", and of classes and functions.

    leave_out: whether the attributes of modules with this value are left out.
    """
    walk = _Walk(leave_out)
    walk.add("torch_geometric", torch_geometric.__version__)
    walk.add_modules("", model, with_weights=False)
    return walk.parts


def parts_of_function(name: str, function: Any, model: nn.Module) -> dict[str, str]:
    """Texts by name of all that a function computes with. The model that it may refer to is left out.

    name: begins the names of all parts.
    """
    walk = _Walk()
    for path, module in model.named_modules():
        walk.remember(module, f"model.{path}")
    walk.add(name, function)
    return {part if part.startswith(name) else f"{name}: {part}": text for part, text in walk.parts.items()}


def opaque_part(parts: Mapping[str, str]) -> str | None:
    """The first part that cannot be compared, as "NAME (CLASS)"; None if there is none."""
    return next((f"{name} ({t.removeprefix(OPAQUE)})" for name, t in parts.items() if t.startswith(OPAQUE)), None)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """All that a module's `forward` may read of the module itself, apart from what its `state_dict` has.

    These are its attributes, private ones too, and buffers that are not persistent. Left out are the private
    attributes of torch's and PyG's classes, which are caches, those that begin with `_cached`, and weights that
    torch computes from others (`weight_norm`, `spectral_norm`, pruning).
    """
    if isinstance(module, torch.jit.ScriptModule):
        return _scripted_attributes(module)
    if hasattr(module, "_orig_mod"):  # the wrapper of `torch.compile`, which computes what the module inside does
        return {}
    private_names = _private_names(type(module))
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name not in _MODULE_INTERNALS
        and name not in private_names
        and name != "inspector"  # of PyG: what it has read of the class so far
        and not name.startswith("_cached")
        and not {f"{name}_orig", f"{name}_g"} & module._parameters.keys()
        and not (isinstance(value, Tensor) and not value.is_leaf)
    }
    return attributes | {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}


@functools.lru_cache(maxsize=256)
def _private_names(cls: type) -> frozenset[str]:
    """Names with an underscore that the code of torch's and PyG's classes among the base classes of `cls` has."""
    codes = [
        function.__code__
        for base in cls.__mro__
        if _package_of(base) in KNOWN
        for function in vars(base).values()
        if isinstance(function, FunctionType)
    ]
    names = {name for code in codes for name in _names_in(code)}
    return frozenset(name for name in names if name.startswith("_") and not name.startswith("__"))


def _hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks of a module that change what it computes, by the kind. Those of hopline only raise errors."""
    for kind, hooks in vars(module).items():
        if not kind.endswith("_hooks") or "state_dict" in kind or not isinstance(hooks, dict):
            continue
        for i, hook in enumerate(hooks.values()):
            if _package_of(hook) != "hopline":
                yield f"{kind.strip('_')}[{i}]", hook


def _scripted_attributes(module: torch.jit.ScriptModule) -> dict[str, Any]:
    """The attributes of a scripted module that are neither weights nor modules, and the graphs of its methods."""
    script: Any = module._c
    head = script.dump_to_str(False, True, False).partition("\n  methods {")[0]  # methods, attributes, parameters
    ours = {name for name, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_children())}
    names = [name for name in re.findall(r"^    (\w+) = ", head, re.MULTILINE) if name not in ours | {"training"}]
    attributes = {name: script.getattr(name) for name in names if script.hasattr(name)}
    return attributes | {f"{name}()": script._get_method(name) for name in script._method_names()}


class _Walk:
    """Collects the texts of values, each object once. `parts` are complete after each `add`."""

    def __init__(self, leave_out: Callable[[Any], bool] = lambda value: False) -> None:
        self.parts: dict[str, str] = {}
        self._leave_out = leave_out
        self._paths: dict[int, str] = {}
        """By the id of an object: the path at which it was met first. Also ends cycles."""
        self._met: list[Any] = []
        """The objects of `_paths` and `_named`, so that their ids are not given to others."""
        self._weights: dict[int, str] = {}
        """By the address of their memory: names of weights that are left out."""
        self._named: set[tuple[int, str]] = set()
        """Attributes that `_add_named` has added: the id of their owner, and their name."""

    def remember(self, value: Any, path: str) -> None:
        """Let further references to an object be written as its path alone."""
        self._paths[id(value)] = path
        self._met.append(value)

    def _put(self, path: str, text: str) -> None:
        text = text if len(text) <= MAX_CHARACTERS else f"blake2b:{_hash(text.encode())}"
        if self.parts.setdefault(path, text) != text:  # two classes may have one name
            self._put(f"{path}'", text)

    def add_modules(self, path: str, model: nn.Module, *, with_weights: bool) -> None:
        """Add a module and all in it. with_weights: whether with its parameters and buffers."""
        for name, module in model.named_modules(prefix=path):
            self.remember(module, name or "model")
        if not with_weights:  # a list of them, or a view of one, is no other model with other weights
            for name, weight in model.state_dict(keep_vars=True).items():
                if isinstance(weight, Tensor):
                    self._weights[_storage_of(weight)] = name
        for name, module in model.named_modules(prefix=path):
            self._put(name or "model", self._class(type(module)))
            prefix = f"{name}." if name else ""
            for key, value in (*sorted(attributes_of(module).items()), *_hooks_of(module)):
                if not self._leave_out(value):
                    self.add(f"{prefix}{key}", value)
        if with_weights:
            for name, tensor in (*model.named_parameters(prefix=path), *model.named_buffers(prefix=path)):
                self._put(name, _tensor_text(tensor))

    def add(self, path: str, value: Any) -> None:
        """Add a value and all that it consists of."""
        text = _plain_text(value)
        if text is not None:
            self._put(path, text)
        elif isinstance(value, torch.device | RemovableHandle):
            self._put(path, type(value).__qualname__)  # where it runs; a number that differs in every process
        elif id(value) in self._paths:
            self._put(path, f"= {self._paths[id(value)]}")
        elif isinstance(value, type):
            self._put(path, self._class(value))
        else:
            self.remember(value, path)
            self._add_object(path, value)

    def _add_object(self, path: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            weight = self._weights.get(_storage_of(value))
            self._put(path, _tensor_text(value) if weight is None else f"of {weight}")
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._put(path, f"{value.dtype} {value.shape} {_hash(np.ascontiguousarray(value).tobytes())}")
        elif isinstance(value, nn.Module):
            self.add_modules(path, value, with_weights=True)
        elif type(value) in (list, tuple, torch.Size):
            self._put(path, f"{type(value).__name__} of {len(value)}")
            self._add_all(path, enumerate(value))
        elif type(value) is dict:
            self.add(f"{path}.keys", list(value))  # their order may matter
            self._add_all(path, enumerate(value.values()))
        elif isinstance(value, set | frozenset):
            self._put(path, f"{type(value).__name__} of {sorted(map(hash_of, value))}")
        elif hasattr(value, "inlined_graph"):  # a scripted function or method
            graph = value.inlined_graph
            # Torch numbers classes that have one name, in the order in which it has met them in this process.
            self._put(path, re.sub(r"\b___torch_mangle_\d+\.", "", graph.str(False)))
            # Tensors among the constants have no text in the graph.
            constants = [node for node in graph.findAllNodes("prim::Constant") if node.hasAttribute("value")]
            self.add(f"{path}.constants", [node.t("value") for node in constants if node.kindOf("value") == "t"])
        elif hasattr(value, "_torchdynamo_orig_callable"):  # by `torch.compile`
            self.add(path, value._torchdynamo_orig_callable)
        elif isinstance(value, functools.partial):
            self._put(path, "partial")
            self._add_all(path, (("func", value.func), ("args", value.args), ("keywords", value.keywords)))
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            functions = [getattr(value, name, None) for name in ("fget", "fset", "__func__", "func")]
            self._add_all(path, enumerate(function for function in functions if function is not None))
        elif inspect.isroutine(value) or hasattr(value, "__wrapped__"):
            self._add_routine(path, value)
        elif _package_of(type(value)) == "hopline":
            self._put(path, type(value).__qualname__)  # datasets and tables are compared by their content elsewhere
        else:
            self._add_reduced(path, value)

    def _add_all(self, path: str, items: Any) -> None:
        for key, value in items:
            self.add(f"{path}.{key if isinstance(key, str | int) else hash_of(key)}", value)

    def _add_reduced(self, path: str, value: Any) -> None:
        """Add an object by its class and state, as `pickle` and `copy.deepcopy` would take it apart."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # whatever a class of others raises
            self._put(path, f"{OPAQUE}{type(value).__qualname__}")
            return
        self._put(path, self._class(type(value)))
        if isinstance(reduced, str):  # the name of a global
            self._put(f"{path}.name", reduced)
            return
        constructor, arguments, state, items, pairs, *_ = (*reduced, None, None, None)
        if constructor not in (type(value), copyreg.__newobj__):  # type: ignore[attr-defined]
            self.add(f"{path}.by", constructor)
        self._add_all(path, ((i, argument) for i, argument in enumerate(arguments) if argument is not type(value)))
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self._add_all(path, part.items())
            elif part is not None:
                self.add(f"{path}.state", part)
        self._add_all(path, enumerate(items or ()))
        self._add_all(path, pairs or ())

    def _add_routine(self, path: str, routine: Any) -> None:
        """Add a function or method, also a built-in one."""
        owner = getattr(routine, "__self__", None)
        function = getattr(routine, "__func__", None) or getattr(routine, "__wrapped__", routine)
        self._put(path, _name_of(routine))
        if isinstance(function, FunctionType):
            self._add_function(path, function)
        elif function is not routine:
            self.add(f"{path}.of", function)
        if isinstance(owner, nn.Module | Tensor | type):
            self.add(f"{path}.self", owner)
        elif isinstance(routine, MethodType):  # of an object such as an experiment: what the method reads of it
            self._add_named(path, owner, set(_names_in(function.__code__)))

    def _add_function(self, path: str, function: FunctionType) -> None:
        """Add the source of a function, what it closes over, its defaults and its globals."""
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and cell != CellType():  # the class itself, and a name that has no value yet
                self.add(f"{path}.{name}", cell.cell_contents)
        if not _has_source(function):
            return
        self._put(f"{path} source", _source(code, code.co_filename))
        self._add_all(f"{path} default", enumerate(function.__defaults__ or ()))
        self._add_all(f"{path} default", (function.__kwdefaults__ or {}).items())
        if code.co_name == "__init__":  # what it has made of its globals is in the attributes
            return
        for name in sorted(_globals_in(code) & function.__globals__.keys()):
            self._add_global(f"{path} global {name}", function.__globals__[name], set(_names_in(code)))

    def _add_global(self, path: str, value: Any, names: set[str]) -> None:
        """Add a value that code refers to by name. names: all names in that code.

        Of a module, or of an object that is more than a value, only what the code names too is added: the rest,
        such as other arguments of a script, need not be the same.
        """
        is_value = isinstance(value, nn.Module | Tensor | np.ndarray | list | tuple | dict | set | functools.partial)
        if is_value or _plain_text(value) is not None:
            self.add(path, value)
        elif isinstance(value, type | FunctionType):
            if _is_own(value):
                self.add(path, value)
        elif not isinstance(value, ModuleType) or _is_own(value):
            self._add_named(path, value, {*names, "__call__"})

    def _add_named(self, path: str, owner: Any, names: set[str]) -> None:
        """Add the attributes and methods of an object or module that code names, and what these methods name."""
        if id(owner) in self._paths or _package_of(type(owner)) == "hopline":
            return
        attributes = getattr(owner, "__dict__", {})
        self._met.append(owner)
        remaining = sorted(names)
        while remaining:
            name = remaining.pop()
            if (id(owner), name) in self._named:
                continue
            self._named.add((id(owner), name))
            member = None if isinstance(owner, ModuleType) else inspect.getattr_static(type(owner), name, None)
            function = getattr(member, "fget", None) or getattr(member, "func", None) or member
            if isinstance(function, FunctionType) and _is_own(function):
                self.add(f"{path}.{name}", function)
                remaining += sorted(_names_in(function.__code__))
            elif name in attributes:
                self._add_global(f"{path}.{name}", attributes[name], names)

    def _class(self, cls: type) -> str:
        """The name of a class. Its code, and that of its base classes, is added when it is met first."""
        for base in cls.__mro__:
            if id(base) in self._paths or not (_is_own(base) or (issubclass(base, nn.Module) and _has_source(base))):
                continue
            self.remember(base, base.__qualname__)
            for name, value in vars(base).items():
                # PyG writes functions that it has generated for a class into the class.
                is_generated = str(getattr(value, "__module__", "")).startswith(f"{base.__module__}_{base.__name__}_")
                is_descriptor = inspect.ismemberdescriptor(value) or inspect.isgetsetdescriptor(value)
                if name not in _CLASS_INTERNALS | _private_names(base) and not is_generated and not is_descriptor:
                    self.add(f"{base.__qualname__}.{name}", value)
        return _name_of(cls)


def _plain_text(value: Any, depth: int = 0) -> str | None:
    """The text of a number, a string, or a container of them; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"cpu|(cuda|mps|xpu)(:\d+)?", value):
        return "a device"  # as `torch.device`: a model may be resumed, and ranks may train, on another one
    if type(value) in _PLAIN:
        return repr(value)
    if depth > 20 or type(value) not in (list, tuple, set, frozenset, dict):  # a list may contain itself
        return None
    elements = [element for pair in value.items() for element in pair] if type(value) is dict else value
    texts = []
    for element in elements:
        text = _plain_text(element, depth + 1)
        if text is None:
            return None
        texts.append(text)
    if type(value) in (set, frozenset):
        texts.sort()
    return f"{type(value).__name__}({', '.join(texts)})"


def hash_of(value: Any) -> str:
    """32 hexadecimal digits for any value, such as the extra state of a module."""
    walk = _Walk()
    walk.add("", value)
    return _hash(repr(walk.parts).encode())


def _tensor_text(tensor: Tensor) -> str:
    """The dtype, shape and hash of a tensor's content. Lazy parameters have no content yet."""
    if is_lazy(tensor):
        return "lazy"
    try:
        content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    except (RuntimeError, NotImplementedError):  # without memory that can be read, as on the device "meta"
        return f"{OPAQUE}{type(tensor).__qualname__} on {tensor.device}"
    return f"{tensor.dtype} {list(tensor.shape)} {_hash(content.data)}"


def _storage_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; one that no other tensor has if it has no memory."""
    has_memory = tensor.layout == torch.strided and not is_lazy(tensor) and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if has_memory else id(tensor)


def _hash(content: Any) -> str:
    """32 hexadecimal digits for bytes or an array of bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@functools.lru_cache(maxsize=4096)
def _source(code: CodeType, _file: str) -> str:
    """The source of a function. Without source, and for a lambda, which shares its lines with others: the bytecode.

    _file: of the code. Code objects of two files may be equal.
    """
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):  # typed into a shell, or compiled
        source = ""
    return source if source and code.co_name != "<lambda>" else f"{source} {_bytecode(code)}"


def _bytecode(code: CodeType) -> str:
    """The instructions of a function, its constants and the names that it uses."""
    constants = [_bytecode(c) if isinstance(c, CodeType) else _plain_text(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code, and in functions inside of it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names_in(constant)]
    return (*code.co_names, *inner)


@functools.lru_cache(maxsize=4096)
def _globals_in(code: CodeType) -> frozenset[str]:
    """The names of globals alone. `co_names` has those of attributes too, which a global may share."""
    loads = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _globals_in(constant)]
    return frozenset((*loads, *inner))


def _name_of(what: Any) -> str:
    """The name of a class or function. Of the user's own, without the module, which may be a path or `__main__`."""
    name = getattr(what, "__qualname__", type(what).__qualname__)
    return name if _has_source(what) else f"{_module_of(what)}.{name}"


def _module_of(what: Any) -> str:
    """The name of the module that defines a class, a function or the class of an object; of a module, its own name."""
    if isinstance(what, ModuleType):
        return what.__name__
    function = getattr(what, "__func__", what)
    if isinstance(function, FunctionType):  # not `__module__`, which `functools.wraps` copies from another function
        return function.__globals__.get("__name__", "")
    return getattr(what, "__module__", None) or ""


def _package_of(what: Any) -> str:
    return _module_of(what).partition(".")[0]


def _has_source(what: Any) -> bool:
    """Whether a class or function is identified by its source too, rather than by its name alone."""
    return _origin_of(_package_of(what)) in ("own", "installed")


def _is_own(what: Any) -> bool:
    """Whether a class, function or module is the user's own: no package that was installed has it."""
    return _origin_of(_package_of(what)) == "own"


@functools.lru_cache(maxsize=1024)
def _origin_of(package: str) -> str:
    """Where a package is from: "known" (`KNOWN`), "python" (the standard library), "installed" or "own"."""
    if package in KNOWN:
        return "known"
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if file is None:  # built into Python, or typed into a shell
        return "python" if package in sys.stdlib_module_names else "own"
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        return "installed"
    return "python" if Path(file).is_relative_to(sysconfig.get_path("stdlib")) else "own"
