"""Takes a user's `forward` apart into layers, by `torch.fx` with every conv as a leaf.

The tracer runs `forward` once, on a tiny graph. Each value is a proxy that records what is done with it, and also holds
the value on that graph. So a shape, or a number of dimensions, is known while tracing, and `if h.shape == x.shape`
takes its way. What depends on the numbers themselves (`if x.isnan().any()`) cannot be recorded: `NotTraceable` names
the line.

The depth of a value is the number of convs on its longest way from the features. All convs of one depth are a layer:

    stage 0         features, and what is computed of them before the first conv
    stage s         convs of depth s; `before`: what follows them | cut | `after`: dropout, and what follows it

A layer ends before dropout, at the cut. So tables hold rows without masks, and whoever reads them draws dropout from
the key of the step and the node. A value that is needed at a later stage alone is computed there, at fewer nodes.
Batch norms stay before the cut, since they must see the rows once.

Everything between convs must compute each node's row by itself. `traced_probe` tries that.
"""

from __future__ import annotations

import inspect
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import JumpingKnowledge, MessagePassing

from hopline.nn.conv_adapter import EDGE_ARGUMENTS
from hopline.nn.conv_facts import takes_x0
from hopline.nn.plain_call import call_module

DROPOUTS: tuple[Any, ...] = (functional.dropout, torch.dropout)
RELUS: tuple[Any, ...] = (functional.relu, torch.relu, torch.Tensor.relu)
GIVEN = ("x", "edge_index", *EDGE_ARGUMENTS)
"""The arguments of a traced `forward`, by the names of the placeholders."""
LEAF_PACKAGES = ("torch_geometric.nn.norm", "torch_geometric.nn.aggr", "torch_geometric.nn.dense")
"""Packages of PyG whose modules are leaves."""
OWN_HOOKS = ("hopline.nn.whole_module",)


class NotTraceable(Exception):
    """Raised for a `forward` that cannot be taken apart. The message is a clause with the module as "it"."""


def _refuse_count(count: int, *others: Any) -> Any:
    raise NotTraceable("it computes with, or decides by, the number of nodes or edges")


class NumEdges(int):
    """The number of edges. A batch has another one, so nothing may be computed from it."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        # As in `h.shape == x.shape`: all values have the same number of rows.
        return int.__eq__(self, other) if type(other) is type(self) else _refuse_count(self)

    def __ne__(self, other: object) -> bool:
        return not self == other


for _name in ("lt", "le", "gt", "ge", "bool", "neg", "abs", "float", "int", "round"):
    setattr(NumEdges, f"__{_name}__", _refuse_count)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"):
    setattr(NumEdges, f"__{_name}__", _refuse_count)
    setattr(NumEdges, f"__r{_name}__", _refuse_count)


class NumRows(NumEdges):
    """The number of rows of a value. As an argument of a function it stands for the rows at hand."""


def num_rows(x: Tensor) -> int:
    """The number of rows. A program computes it anew wherever it is used."""
    return x.size(0)


# ---- the tracer


class _Value(fx.Proxy):
    """A proxy that knows its value on the tiny graph."""

    @property
    def example(self) -> Any:
        return self.tracer.examples[self.node]  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        example = self.example
        if not isinstance(example, Tensor):
            return super().__getattr__(name)
        if name == "shape":
            return self._sizes()
        if name == "size":
            return lambda dim=None: self._sizes() if dim is None else self._sizes()[dim]
        if name == "ndim":
            return example.dim()
        if name in ("dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous"):
            return getattr(example, name)
        if name in ("is_sparse", "is_cuda", "layout"):
            return getattr(example, name)
        return super().__getattr__(name)

    def _sizes(self) -> tuple[int, ...]:
        sizes = tuple(self.example.shape)
        tracer: Any = self.tracer
        if sizes and self.node in tracer.row_nodes:
            return (NumRows(sizes[0]), *sizes[1:])
        if self.node in tracer.edge_nodes:
            return tuple(NumEdges(size) if size == tracer.num_edges else size for size in sizes)
        return sizes

    def __iter__(self) -> Any:
        if isinstance(self.example, list | tuple):
            proxy: Any = self
            return iter([proxy[i] for i in range(len(self.example))])
        return super().__iter__()

    def __len__(self) -> int:
        tracer: Any = self.tracer
        if self.node in tracer.edge_nodes or (self.node in tracer.row_nodes and isinstance(self.example, Tensor)):
            _refuse_count(0)  # len() would make a plain number of it
        return len(self.example)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise NotTraceable("it writes into rows in place")


class _Tracer(fx.Tracer):
    """Records a `forward`, and computes every value on the tiny graph as it goes.

    It replaces `forward` of the leaves of a copy. `fx.Tracer.trace` would replace that of all modules of the process,
    also of those that other threads run.

    module: the copy, which is of no use afterwards. inputs: by name, the arguments on the tiny graph.
    """

    def __init__(self, module: nn.Module, inputs: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self.root = module
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {}
        self.inputs = inputs
        self.examples: dict[fx.Node, Any] = {}
        self.row_nodes: set[fx.Node] = set()
        self.edge_nodes: set[fx.Node] = set()
        self.lines: dict[fx.Node, str] = {}
        x = inputs["x"]
        assert x is not None
        self.num_nodes = x.size(0)
        edge_index = inputs["edge_index"]
        assert edge_index is not None
        self.num_edges = edge_index.size(1)
        self._forwards: dict[str, Callable[..., Any]] = {}
        """By name: the own `forward` of each leaf."""
        self._tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._containers: list[tuple[str, nn.Module]] = []
        """All modules but the leaves, and what is in them."""
        self._replace_forwards(module, "", set())

    def _replace_forwards(self, module: nn.Module, name: str, done: set[nn.Module]) -> None:
        if module in done:
            return
        done.add(module)
        if not is_leaf(module):
            self._containers.append((name, module))
            for child_name, child in module.named_children():
                self._replace_forwards(child, f"{name}.{child_name}" if name else child_name, done)
            return
        own_forward = self._forwards[name] = module.forward
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()  # of the copy: the module's own run with it

        def record(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(value, fx.Proxy) for value in _flat((args, kwargs))):
                return own_forward(*args, **kwargs)  # within another leaf
            return self.create_proxy("call_module", name, args, kwargs)

        vars(module)["forward"] = record

    def record(self, arguments: Iterable[str]) -> fx.Graph:
        """The graph of the module's `forward`, given these edge arguments besides x and edge_index."""
        proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in GIVEN}
        for name, container in self._containers:
            # What `forward` computes of a parameter is recorded too.
            for tensors in (container._parameters, container._buffers):
                for tensor_name in [key for key, tensor in tensors.items() if tensor is not None]:
                    path = f"{name}.{tensor_name}" if name else tensor_name
                    tensors[tensor_name] = self.create_proxy("get_attr", path, (), {})
        given = {name: proxies[name] for name in arguments}
        before = [_attributes(container) for _, container in self._containers]
        out = call_module(self.root, proxies["x"], proxies["edge_index"], given)
        for (_, container), attributes in zip(self._containers, before, strict=True):
            changed = _first_change(attributes, _attributes(container))
            if changed is not None:
                raise NotTraceable(f"{type(container).__name__}.forward changes self.{changed}")
        self.create_node("output", "output", (self.create_arg(out),), {})
        return self.graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if type(a) is NumEdges:
            _refuse_count(a)
        if isinstance(a, NumRows):
            (x, *_) = self.graph.nodes
            return self.create_proxy("call_function", num_rows, (fx.Proxy(x, self),), {}).node
        return super().create_arg(a)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        node = proxy.node
        self.lines[node] = _line_of(traceback.extract_stack())
        if kind == "placeholder":
            self.examples[node] = self.inputs[str(target)]
            (self.row_nodes if target == "x" else self.edge_nodes).add(node)
        elif kind != "get_attr":
            self._compute(node)
        return proxy

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if kind == "get_attr":  # most of these have no proxy
            self.lines[node] = _line_of(traceback.extract_stack())
            self._compute(node)
        return node

    def _compute(self, node: fx.Node) -> None:
        """Compute the value of a node on the tiny graph."""
        try:
            with torch.no_grad():
                example = self.examples[node] = self._value_of(node)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise NotTraceable(
                f"it fails on a tiny graph at {self.lines[node]} ({type(error).__name__}: {text})"
            ) from error
        if any(n in self.edge_nodes for n in node.all_input_nodes) and node.op != "call_module":
            self.edge_nodes.add(node)
        if any(n in self.row_nodes for n in node.all_input_nodes) and node.target is not num_rows:
            self._refuse_row_ranges(node)
            is_rows = isinstance(example, Tensor) and example.dim() and example.size(0) == self.num_nodes
            if is_rows or isinstance(example, list | tuple):
                self.row_nodes.add(node)

    def _refuse_row_ranges(self, node: fx.Node) -> None:
        """Refuse some rows of all, such as h[:256] or h.split(256). On the tiny graph they may be all rows."""
        rows = node.args[0] if node.args else None
        if not isinstance(rows, fx.Node) or rows not in self.row_nodes or not isinstance(self.examples[rows], Tensor):
            return
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in ("split", "chunk", "tensor_split", "split_with_sizes", "unbind"):
            position = 1 if name == "unbind" else 2
            dim: Any = node.kwargs.get("dim", node.args[position] if len(node.args) > position else 0)
            is_range = dim % self.examples[rows].dim() == 0
        elif node.target is operator.getitem:
            index = node.args[1]
            first = index[0] if isinstance(index, tuple) and index else index
            bounds = (first.start, first.stop, first.step) if isinstance(first, slice) else ()
            is_range = any(b is not None and getattr(b, "target", None) is not num_rows for b in bounds)
        else:
            return
        if is_range:
            raise NotTraceable(f"it takes a range of nodes at {self.lines[node]}")

    def _value_of(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, lambda n: self.examples[n])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: self.examples[n])
        target: Any = node.target
        if node.op == "call_module":
            return self._forwards[target](*args, **kwargs)
        if node.op == "call_function":
            return target(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        assert node.op == "get_attr", node.op
        return self._tensors[target] if target in self._tensors else operator.attrgetter(target)(self.root)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one operation of a program: a conv, a norm, a module of torch."""
    name = type(module).__module__
    if isinstance(module, MessagePassing | JumpingKnowledge) or name.startswith(LEAF_PACKAGES):
        return True
    return name.startswith("torch.nn.") and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def check_hooks(module: nn.Module) -> None:
    """Raise `NotTraceable` if a module, or one in it that is no leaf, has hooks."""
    if is_leaf(module):
        return
    if _has_foreign_hooks(module):
        raise NotTraceable(f"{type(module).__name__} has hooks, which see what its own forward computes")
    for child in module.children():
        check_hooks(child)


def _flat(value: Any) -> Iterator[Any]:
    """All that is in nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _has_foreign_hooks(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return any(getattr(hook, "__module__", "") not in OWN_HOOKS for hook in hooks)


def _attributes(module: nn.Module) -> dict[str, list[Any]]:
    """By name, the attributes of a module: the object, and what is in it if it is a container."""
    found: dict[str, list[Any]] = {}
    for name, value in vars(module).items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | set) else ()
        found[name] = [value, *items]
    return found


def _first_change(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> str | None:
    """The name of an attribute that is another object, or has other objects in it."""
    for name, objects in after.items():
        known = before.get(name, [])
        if name.startswith("_tensor_constant"):  # written by torch.fx
            continue
        if len(objects) != len(known) or any(a is not b for a, b in zip(objects, known, strict=True)):
            return name
    return None


def _line_of(stack: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's, nor PyG's, nor hopline's: "line 12, `x = conv(x)`"."""
    ours = Path(__file__).parents[1]
    library = (Path(torch.__file__).parent, Path(torch_geometric.__file__).parent, ours)
    for frame in reversed(list(stack)):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in library):
            text = f", `{frame.line.strip()}`" if frame.line else ""
            return f"line {frame.lineno} of {Path(frame.filename).name}{text}"
    return "a line that is not known"


# ---- the program


@dataclass(frozen=True, eq=False)
class Op:
    """One operation between convs."""

    name: str
    """The name of its value."""
    inputs: tuple[str, ...]
    """Names of the values that it reads and that have rows."""
    run: Callable[[nn.Module, Mapping[str, Any], int], Any]
    """(module, values by name, number of rows) -> the value."""
    module: str | None = None
    """The name of the module that it calls."""
    function: Any = None
    """The function that it calls."""
    dropout: Dropout | None = None
    relu_input: str | None = None
    """The input, if it is a ReLU without hooks."""


@dataclass(frozen=True)
class Dropout:
    """A dropout of rows."""

    number: int
    """Its number among the keys of a step."""
    p: float | None
    """None: that of the module."""
    training: bool = True


@dataclass(frozen=True, eq=False)
class ConvOp:
    """A call of a conv."""

    name: str
    module: str
    x: str
    x0: str | None
    arguments: frozenset[str]
    """Names of the edge arguments that it is given."""
    number: int
    in_width: int
    initial_width: int | None


@dataclass(eq=False)
class Stage:
    """The convs of one depth, and what is computed between them and the next."""

    convs: list[ConvOp] = field(default_factory=list)
    before: list[Op] = field(default_factory=list)
    """Before the cut, in order."""
    after: list[Op] = field(default_factory=list)
    """After the cut: dropout, and what follows it."""
    rows: list[str] = field(default_factory=list)
    """The values at the cut that anybody reads afterwards. Side by side they are the rows of a table."""
    alive: list[str] = field(default_factory=list)
    """Values of this stage and of earlier ones that later stages read."""
    needs: list[str] = field(default_factory=list)
    """Values of earlier stages that its operations read."""
    relu_inputs: dict[str, str] = field(default_factory=dict)
    """By each ReLU before the cut that a dropout alone reads: its input. One kernel may compute both."""


@dataclass(frozen=True, eq=False)
class TablePlan:
    """What a layer reads, if the rows after earlier layers are in tables, and what it computes of them first."""

    source_tables: tuple[int, ...]
    """The layers whose rows it reads at its sources."""
    own_tables: tuple[int, ...]
    """The layers whose rows it reads at its destinations alone."""
    source_ops: tuple[Op, ...]
    """Dropout of these rows, and what follows it: at the sources."""
    own_ops: tuple[Op, ...]
    """The same at the destinations."""

    @property
    def own_inputs(self) -> set[str]:
        """The values that `own_ops` read."""
        return {name for op in self.own_ops for name in op.inputs}


@dataclass(eq=False)
class Program:
    """A `forward` in stages."""

    stages: list[Stage]
    stage_of: dict[str, int]
    """By value: its stage."""
    op_of: dict[str, Op]
    output: str
    shapes: dict[str, torch.Size]
    """By value: the shape of its row."""
    edge_arguments: frozenset[str]
    """The edge arguments that `forward` was given."""
    x_readers: list[Op | ConvOp]
    """What reads the features."""
    plans: list[TablePlan] = field(default_factory=list)
    """By layer."""

    def __post_init__(self) -> None:
        self.plans = [self._plan_of(stage) for stage in self.stages[1:]]

    def _plan_of(self, stage: Stage) -> TablePlan:
        source_tables, source_ops = self._origins(conv.x for conv in stage.convs)
        own = [*(conv.x0 for conv in stage.convs if conv.x0 is not None), *stage.needs]
        own_tables, own_ops = self._origins(own)
        # The destinations are the first of the sources.
        return TablePlan(
            source_tables=tuple(sorted(source_tables)),
            own_tables=tuple(sorted(own_tables - source_tables)),
            source_ops=tuple(source_ops),
            own_ops=tuple(op for op in own_ops if op not in source_ops),
        )

    def _origins(self, names: Iterable[str]) -> tuple[set[int], list[Op]]:
        """(the layers whose rows some values are made of, the operations that make them, in order)."""
        tables: set[int] = set()
        needed: set[str] = set()
        remaining = list(names)
        while remaining:
            name = remaining.pop()
            s = self.stage_of[name]
            if s == 0 or name in self.stages[s].rows:  # an encoded state has its values after dropout
                tables.add(s - 1)
            elif name not in needed:
                needed.add(name)
                remaining += self.op_of[name].inputs
        return tables, [op for op in self.op_of.values() if op.name in needed]

    @property
    def num_layers(self) -> int:
        return len(self.stages) - 1

    def width(self, names: Iterable[str]) -> int:
        return sum(self.shapes[name].numel() for name in names)

    @property
    def layout(self) -> list[list[tuple[str, torch.Size]]]:
        """By layer: the values of a row of its table."""
        return [[(name, self.shapes[name]) for name in stage.rows] for stage in self.stages[1:]]


def trace(module: nn.Module, arguments: Iterable[str], inputs: Mapping[str, Tensor | None]) -> Program:
    """The program of a module's `forward`.

    module: a copy for this trial, in the modes in which it will run. It is of no use afterwards.
    arguments: the edge arguments that `forward` is given.
    inputs: by name, the arguments on a tiny graph.

    Raises:
        NotTraceable: Its layers cannot be found.
    """
    arguments = frozenset(arguments)
    graph, tracer = _record(module, arguments, inputs)
    return _Builder(graph, tracer, arguments).build()


def recorded_steps(module: nn.Module, arguments: Iterable[str], inputs: Mapping[str, Tensor | None]) -> list[str]:
    """What `trace` records, step by step, with all numbers. Arguments and errors are those of `trace`."""
    graph, _ = _record(module, frozenset(arguments), inputs)
    return [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]


def _record(
    module: nn.Module, arguments: frozenset[str], inputs: Mapping[str, Tensor | None]
) -> tuple[fx.Graph, _Tracer]:
    tracer = _Tracer(module, inputs)
    try:
        return tracer.record(arguments), tracer
    except NotTraceable:
        raise
    except Exception as error:
        line = _line_of(traceback.extract_tb(error.__traceback__))
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(error, fx.proxy.TraceError):
            text = "what it does next depends on the numbers in rows"
        raise NotTraceable(f"it cannot be recorded at {line} ({text})") from error


class _Builder:
    """Makes a `Program` of a recorded graph."""

    def __init__(self, graph: fx.Graph, tracer: _Tracer, arguments: frozenset[str]) -> None:
        graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        self.graph = graph
        self.root = tracer.root
        self.arguments = arguments
        self.examples = tracer.examples
        self.row_nodes = tracer.row_nodes
        self.lines = tracer.lines
        self.given = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
        self.edges = {node for name, node in self.given.items() if name != "x"}
        self.depth: dict[fx.Node, int] = {}
        self.free: set[fx.Node] = set()
        """Nodes that depend on no argument: parameters and what is computed of them."""

    def build(self) -> Program:
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        result = output.args[0]
        if not isinstance(result, fx.Node) or not self._is_rows(result):
            raise NotTraceable("it does not return one tensor with a row per node")
        self._find_depths()
        num_layers = self.depth[result]
        if not num_layers:
            raise NotTraceable("no conv is between its features and its output")
        self._sink(result)
        after = self._after_cut()
        ops = [node for node in self.graph.nodes if node in self.depth and node not in self.edges]
        ops = [node for node in ops if node.op not in ("placeholder", "output")]
        stages = [Stage() for _ in range(num_layers + 1)]
        op_of: dict[str, Op] = {}
        conv_of: dict[str, ConvOp] = {}
        num_dropouts = 0
        for node in ops:
            stage = stages[self.depth[node]]
            if self._is_conv(node):
                conv_of[node.name] = self._conv_op(node, len(conv_of))
                stage.convs.append(conv_of[node.name])
                continue
            op = self._op(node, num_dropouts)
            num_dropouts += op.dropout is not None
            op_of[node.name] = op
            (stage.after if node in after else stage.before).append(op)
        x = self.given["x"]
        nodes = [x, *ops]
        for s, stage in enumerate(stages):
            here = [node for node in nodes if self.depth[node] == s]
            for node in here:
                later = any(self.depth.get(user, s) > s for user in node.users) or node is result
                if node not in after and (later or any(user in after for user in node.users)):
                    stage.rows.append(node.name)
            for node in nodes:
                later = any(self.depth.get(user, -1) > s for user in node.users)
                if self.depth[node] <= s and (later or (node is result and s == num_layers)):
                    stage.alive.append(node.name)
            readers = [node for node in here if not self._is_conv(node)]
            inputs = {n.name for node in readers for n in self._row_inputs(node) if self.depth[n] < s}
            stage.needs = sorted(inputs)
            for node in here:
                relu = op_of.get(node.name)
                users = list(node.users)
                if relu is not None and relu.relu_input is not None and len(users) == 1 and node not in after:
                    reader = op_of.get(users[0].name)
                    if reader is not None and reader.dropout is not None and self.depth[users[0]] == s:
                        stage.relu_inputs[node.name] = relu.relu_input
        self._check_rows(stages)
        readers = [op_of.get(user.name) or conv_of[user.name] for user in x.users if user in self.depth]
        return Program(
            stages=stages,
            stage_of={node.name: self.depth[node] for node in nodes},
            op_of=op_of,
            output=result.name,
            shapes={n.name: self.examples[n].shape[1:] for n in nodes if isinstance(self.examples[n], Tensor)},
            edge_arguments=self.arguments,
            x_readers=[reader for reader in readers if reader is not None],
        )

    # ---- nodes

    def _is_conv(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self._module(node), MessagePassing)

    def _module(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))

    def _is_rows(self, node: fx.Node) -> bool:
        example = self.examples.get(node)
        return node in self.row_nodes and isinstance(example, Tensor)

    def _row_inputs(self, node: fx.Node) -> list[fx.Node]:
        """The inputs that have rows. A number of rows is computed where it is used."""
        return [n for n in node.all_input_nodes if n in self.depth and n.target is not num_rows and n not in self.edges]

    def _find_depths(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if node not in self.edges:
                    self.depth[node] = 0
                continue
            if node.op == "output" or node.target is num_rows:
                continue
            inputs = node.all_input_nodes
            rows = [n for n in inputs if n in self.depth]
            edges = [n for n in inputs if n in self.edges]
            if self._is_conv(node):
                self.depth[node] = 1 + max((self.depth[n] for n in rows), default=0)
                continue
            if edges:
                name = edges[0].name
                raise NotTraceable(
                    f"it changes {name} before a conv gets it, at {self.lines[node]}: give every conv the edges as "
                    "forward got them"
                )
            if not rows:
                self.free.add(node)
                self._check_free(node)
                continue
            if node not in self.row_nodes:
                raise NotTraceable(
                    f"it computes something else than a row per node at {self.lines[node]} (pooling, or a number that "
                    "all rows share)"
                )
            self.depth[node] = max(self.depth[n] for n in rows)

    def _check_free(self, node: fx.Node) -> None:
        if node.op in ("call_function", "call_method") and getattr(node.target, "__module__", "") == "torch.random":
            raise NotTraceable(f"it draws random numbers at {self.lines[node]}")

    def _is_stateful(self, node: fx.Node) -> bool:
        """Whether a node must run once, on all rows: it has buffers, as batch norms do."""
        if node.op != "call_module":
            return node.target is functional.batch_norm or node.target is functional.instance_norm
        module = self._module(node)
        norms = any(isinstance(m, _BatchNorm) for m in module.modules())
        return norms or next(module.buffers(), None) is not None

    def _sink(self, result: fx.Node) -> None:
        """Compute what only later stages read there, where nodes are fewer."""
        for node in reversed(list(self.graph.nodes)):
            if node not in self.depth or node.op == "placeholder" or self._is_conv(node) or self._is_stateful(node):
                continue
            uses = [self.depth[u] - (1 if self._is_conv(u) else 0) for u in node.users if u in self.depth]
            if node is result:
                uses.append(self.depth[node])
            earliest = min(uses, default=self.depth[node])
            if len(self._row_inputs(node)) == 1 and earliest > self.depth[node]:
                self.depth[node] = earliest

    def _after_cut(self) -> set[fx.Node]:
        """Dropouts, and what follows them in their stage, but for what a batch norm of the stage reads."""
        after: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node not in self.depth or node.op == "placeholder" or self._is_conv(node):
                continue
            follows = any(n in after and self.depth[n] == self.depth[node] for n in self._row_inputs(node))
            if self._dropout_of(node) is not None or follows:
                after.add(node)
        for node in reversed(list(self.graph.nodes)):
            if node in after:
                users = [u for u in node.users if u in self.depth and self.depth[u] == self.depth[node]]
                feeds_norm = any(not self._is_conv(u) and u not in after for u in users)
                if self._is_stateful(node) or feeds_norm:
                    after.discard(node)
        return after

    # ---- operations

    def _dropout_of(self, node: fx.Node) -> tuple[float | None, bool, Any] | None:
        """(p or None for that of the module, whether it drops, the input) of a dropout; None for other nodes."""
        if node.op == "call_module" and type(self._module(node)) is nn.Dropout:
            return None, True, node.args[0] if node.args else node.kwargs["input"]
        if node.op != "call_function" or node.target not in DROPOUTS:
            return None
        # torch.dropout takes (input, p, train), all of them by position.
        names = ("input", "p", "training", "inplace")
        bound = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        training = bound.get("training", bound.get("train", True))
        p = bound.get("p", 0.5)
        if not isinstance(training, bool | int) or not isinstance(p, int | float):
            raise NotTraceable(f"its dropout at {self.lines[node]} does not depend on numbers of the module alone")
        return float(p), bool(training), bound["input"]

    def _op(self, node: fx.Node, num_dropouts: int) -> Op:
        inputs = tuple(n.name for n in self._row_inputs(node))
        dropout = self._dropout_of(node)
        name = None
        function = None
        if node.op == "call_module":
            name = str(node.target)
        elif node.op == "call_function":
            function = node.target
        is_relu = node.target in RELUS or (node.op == "call_method" and node.target == "relu")
        if node.op == "call_module":
            is_relu = type(self._module(node)) is nn.ReLU
        return Op(
            name=node.name,
            inputs=inputs,
            run=self._runner(node, name),
            module=name,
            function=function,
            dropout=None if dropout is None else Dropout(num_dropouts, dropout[0], dropout[1]),
            relu_input=inputs[0] if is_relu and len(inputs) == 1 else None,
        )

    def _runner(self, node: fx.Node, module_name: str | None) -> Callable[[nn.Module, Mapping[str, Any], int], Any]:
        """The function that computes a node."""
        resolve_args = self._resolver(node.args)
        resolve_kwargs = self._resolver(dict(node.kwargs))
        target: Any = node.target
        if module_name is not None:
            get = operator.attrgetter(module_name)
            return lambda module, values, rows: get(module)(
                *resolve_args(module, values, rows), **resolve_kwargs(module, values, rows)
            )
        if node.op == "call_function":
            return lambda module, values, rows: target(
                *resolve_args(module, values, rows), **resolve_kwargs(module, values, rows)
            )

        def call_method(module: nn.Module, values: Mapping[str, Any], rows: int) -> Any:
            owner, *arguments = resolve_args(module, values, rows)
            return getattr(owner, target)(*arguments, **resolve_kwargs(module, values, rows))

        return call_method

    def _resolver(self, argument: Any) -> Callable[[nn.Module, Mapping[str, Any], int], Any]:
        """A function (module, values, rows) -> the argument with its nodes replaced by their values."""
        if isinstance(argument, fx.Node):
            if argument.target is num_rows:
                return lambda module, values, rows: rows
            if argument in self.free:
                return self._free_resolver(argument)
            name = argument.name
            return lambda module, values, rows: values[name]
        if isinstance(argument, list | tuple):
            parts = [self._resolver(part) for part in argument]
            kind = list if isinstance(argument, list) else tuple
            return lambda module, values, rows: kind(part(module, values, rows) for part in parts)
        if isinstance(argument, dict):
            items = {key: self._resolver(value) for key, value in argument.items()}
            return lambda module, values, rows: {key: get(module, values, rows) for key, get in items.items()}
        if isinstance(argument, slice):
            resolve = self._resolver((argument.start, argument.stop, argument.step))
            return lambda module, values, rows: slice(*resolve(module, values, rows))
        return lambda module, values, rows: argument

    def _free_resolver(self, node: fx.Node) -> Callable[[nn.Module, Mapping[str, Any], int], Any]:
        if node.op == "get_attr":
            target = str(node.target)
            if target.startswith("_tensor_constant"):
                raise NotTraceable(f"it makes a tensor at {self.lines[node]}: make it a buffer, or a number")
            get = operator.attrgetter(target)
            return lambda module, values, rows: get(module)
        return self._runner(node, str(node.target) if node.op == "call_module" else None)

    def _conv_op(self, node: fx.Node, number: int) -> ConvOp:
        conv = self._module(node)
        line = self.lines[node]
        bound = inspect.signature(type(conv).forward).bind(conv, *node.args, **node.kwargs).arguments
        values = {name: value for name, value in list(bound.items())[1:] if value is not None}
        x = values.pop(next(iter(values)))
        x0 = values.pop("x_0", None) if takes_x0(conv) else None
        edge_index = values.pop("edge_index", None)
        if not isinstance(x, fx.Node) or not self._is_rows(x):
            raise NotTraceable(f"it calls {type(conv).__name__} with something else than rows, at {line}")
        if edge_index is not self.given["edge_index"]:
            raise NotTraceable(f"it calls {type(conv).__name__} with other edges than it is given, at {line}")
        arguments = set()
        for name, value in values.items():
            if name in EDGE_ARGUMENTS and value is self.given[name] and name in self.arguments:
                arguments.add(name)
            elif value != inspect.signature(type(conv).forward).parameters[name].default:
                raise NotTraceable(f"it gives {type(conv).__name__} {name}= of its own, at {line}")
        return ConvOp(
            name=node.name,
            module=str(node.target),
            x=x.name,
            x0=None if x0 is None else x0.name,
            arguments=frozenset(arguments),
            number=number,
            in_width=self.examples[x].shape[1:].numel(),
            initial_width=None if x0 is None else self.examples[x0].shape[1:].numel(),
        )

    def _check_rows(self, stages: list[Stage]) -> None:
        """Refuse what cannot be stored between two layers."""
        by_name = {node.name: node for node in self.graph.nodes}
        for s, stage in enumerate(stages):
            for name in {*stage.rows, *stage.alive}:
                node = by_name[name]
                if name == "x" and s == 0:
                    continue
                example = self.examples[node]
                if not isinstance(example, Tensor) or not example.is_floating_point():
                    raise NotTraceable(f"it keeps something else than rows between two convs, from {self.lines[node]}")
