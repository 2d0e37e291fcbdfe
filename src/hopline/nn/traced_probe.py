"""Finds the program of a module's `forward`, and shows on a tiny graph that it computes the same.

The program is recorded on the tiny graph of `probe`, and compared with plain PyG on the same graph with more nodes: a
number of rows that `forward` has turned into a plain number would differ. Copies run in float64:

    in evaluation    on the whole graph at once, on batches that differ in what else is in them, and from tables
    in training      outputs, gradients and buffers without dropout, and with the same keyed masks in the module's own
                     dropouts. What draws other random numbers is refused.

Convs themselves are in evaluation mode here, since they draw by torch's generator: `conv_adapter` tries them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MessagePassing

from hopline import ops
from hopline.core.batch import Batch, Block, LayerHooks
from hopline.core.graph import Graph
from hopline.core.row_handles import Handle
from hopline.nn.conv_adapter import EDGE_ARGUMENTS
from hopline.nn.conv_facts import arguments_of
from hopline.nn.layered import ENCODED, State
from hopline.nn.norms import OwnStatistics
from hopline.nn.plain_call import call_module, takes_adjs
from hopline.nn.probe import (
    BATCHES,
    PLAIN_TYPES,
    block_of,
    findings,
    is_close,
    probe_graph,
    random_rows,
    trial_of,
    without_caches,
)
from hopline.nn.row_wise import NoDropout, constant_statistics
from hopline.nn.structure import hash_of
from hopline.nn.traced_model import ProgramModel
from hopline.nn.traced_program import DROPOUTS, NotTraceable, Program, check_hooks, is_leaf, recorded_steps, trace

MAX_BYTES = 256 << 20
"""Most bytes of a module's parameters for a trial, as of a module that runs as a whole. A rule of thumb."""
KEY = 1
"""The key of the masks in a trial."""


def find_program(module: nn.Module, arrays: Iterable[str], training: bool | None = None) -> Program:
    """The program of a module, which a trial has shown to be right. Stored for its present settings.

    Before a dataset is known (`check_traced`), widths are guessed from the module.

    arrays: names of the graph's edge arrays. training: the mode; None: that in which it is.

    Raises:
        NotTraceable: There is none.
    """
    arrays = frozenset(arrays)
    arguments = frozenset(arguments_for(module, arrays))
    modes, settings = _settings(module, training)
    question = ("program", arguments, modes)
    found: Program | NotTraceable | None = findings.get(module, question, settings)
    if found is None:
        found = _try(module, arguments, training, None, None)
        findings.put(module, question, settings, found)
    if isinstance(found, NotTraceable):
        raise NotTraceable(str(found))
    return found


def arguments_for(module: nn.Module, arrays: Iterable[str]) -> list[str]:
    """Names of the edge arguments that `forward` is given on a graph with some edge arrays: all that it takes."""
    takes = arguments_of(type(module))
    arrays = frozenset(arrays)
    return [name for name, array in EDGE_ARGUMENTS.items() if name in takes and array in arrays]


def _settings(module: nn.Module, training: bool | None) -> tuple[tuple[bool, ...], list[Any]]:
    """(modes, settings): what tracing reads of a module and writes down.

    Settings are plain attributes of the module and its parts, but not of convs and other leaves, which programs call.
    """
    modes: list[bool] = []
    settings: list[Any] = []
    remaining = [module]
    seen: set[int] = set()
    while remaining:
        part = remaining.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        attributes = vars(part)
        modes.append(part.training if training is None else training)
        settings.append(type(part))
        for name, value in attributes.items():
            kind = type(value)
            if kind in PLAIN_TYPES:
                if name != "training":
                    settings += (name, value)
            elif kind in (list, tuple) and all(type(element) in PLAIN_TYPES for element in value):
                settings += (name, tuple(value))
            elif name not in _MODULE_INTERNALS and not isinstance(value, Tensor):
                settings += (name, hash_of(value))  # an object, whose attributes `forward` may read
        settings += (len(part._forward_hooks), len(part._forward_pre_hooks), "forward" in attributes)
        for name, child in part._modules.items():
            settings += (name, type(child))
            if child is not None and not is_leaf(child):
                remaining.append(child)
    return tuple(modes), settings


_MODULE_INTERNALS = frozenset(vars(nn.Module()))

# ---- the trial


def _try(
    module: nn.Module,
    arguments: frozenset[str],
    training: bool | None,
    num_features: int | None,
    edge: Mapping[str, Tensor] | None,
) -> Program | NotTraceable:
    """The program, or why there is none."""
    num_threads = torch.get_num_threads()
    try:
        # The generator is restored afterwards: a trial must not change what training draws.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.set_num_threads(1)  # of this thread only: on a dozen rows, threads would wait for each other
            return _find(module, arguments, training, num_features, edge)
    except NotTraceable as error:
        return error
    finally:
        torch.set_num_threads(num_threads)


def _find(
    module: nn.Module,
    arguments: frozenset[str],
    training: bool | None,
    num_features: int | None,
    edge: Mapping[str, Tensor] | None,
) -> Program:
    if sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p)) > MAX_BYTES:
        raise NotTraceable("it is too large to be tried out on a small graph")
    if takes_adjs(module):
        raise NotTraceable("it is given the edges of every layer of a batch")
    if "forward" in vars(module):
        raise NotTraceable("its forward was replaced in this one object")
    if any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise NotTraceable("it has a SyncBatchNorm, which waits for ranks that may have no rows")
    check_hooks(module)  # before the trial, which would call them
    modes = {name: part.training if training is None else training for name, part in module.named_modules()}

    def copy() -> nn.Module:
        """A copy in float64, in the modes asked for. Its convs are in evaluation mode."""
        try:
            trial = trial_of(module)
        except Exception as error:
            raise NotTraceable(f"it cannot be copied ({type(error).__name__}: {error})") from error
        for name, part in trial.named_modules():
            part.training = modes[name]
        for part in trial.modules():
            if isinstance(part, MessagePassing):
                part.eval()
        return trial

    graph = _edges_like(probe_graph(edge or {}), module, arguments, edge is None)
    x = _features(copy, graph, arguments, num_features)
    tiny_x = x[: graph.num_nodes]
    inputs = {"x": tiny_x, "edge_index": graph.edge_index(), **dict.fromkeys(EDGE_ARGUMENTS)}
    inputs |= _arguments_of(graph, arguments)
    program = trace(_started(copy(), tiny_x, graph, arguments), arguments, inputs)
    _check_recorded_numbers(lambda: _started(copy(), tiny_x, graph, arguments), arguments, inputs)
    more_nodes = torch.cat([graph.indptr, graph.indptr[-1:].repeat(x.size(0) - graph.num_nodes)])
    _Comparison(copy, program, graph.with_arrays(more_nodes, graph.indices, dict(graph.edge)), arguments, x).check(
        modes[""]
    )
    return program


def _check_recorded_numbers(
    copy: Callable[[], nn.Module], arguments: frozenset[str], inputs: Mapping[str, Tensor | None]
) -> None:
    """Refuse numbers of weights, such as norm().item(): a program would keep those of the copy.

    What is recorded must be the same for weights of any size.
    """
    steps: list[list[str]] = []
    for factor in (1.0, 100.0, 0.01):
        module = copy()
        with torch.no_grad():
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if tensor.is_floating_point():
                    tensor.mul_(factor)
        steps.append(recorded_steps(module, arguments, inputs))
    if any(other != steps[0] for other in steps[1:]):
        raise NotTraceable("it computes with, or decides by, numbers of its weights, as .item() gives them")


def _features(
    copy: Callable[[], nn.Module], graph: Graph, arguments: frozenset[str], num_features: int | None
) -> Tensor:
    """Random features for a module, with three rows more than the graph has nodes."""
    widths = [num_features] if num_features is not None else _input_widths(copy())
    error: Exception | None = None
    for width in widths:
        x = random_rows(graph.num_nodes + 3, width)
        try:
            with torch.no_grad(), without_caches(module := copy()):
                call_module(module, x[: graph.num_nodes], graph.edge_index(), _arguments_of(graph, arguments))
            return x
        except Exception as raised:
            error = raised
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200] if error else "no module tells its width"
    raise NotTraceable(f"it fails on a small graph ({text})")


def _input_widths(module: nn.Module) -> list[int]:
    """The widths of input that parts of a module name, each once."""
    widths: list[int] = []
    for part in module.modules():
        for name in ("in_channels", "in_features", "num_features", "embedding_dim"):
            value = getattr(part, name, None)
            first = value[0] if isinstance(value, tuple) and value else value
            if type(first) is int:
                widths.append(first if first > 0 else 4)  # any width will do for a lazy layer
    return list(dict.fromkeys(widths))


def _edges_like(graph: Graph, module: nn.Module, arguments: frozenset[str], guess: bool) -> Graph:
    """The tiny graph with the edge arrays that `forward` is given. guess: without a dataset to tell what they hold."""
    arrays = {EDGE_ARGUMENTS[name] for name in arguments}
    if not guess or not arrays:
        return graph
    dims = [getattr(part, "edge_dim", None) or getattr(part, "in_edge_channels", None) for part in module.modules()]
    edge_dim = next((dim for dim in dims if isinstance(dim, int)), 1)
    weight = 0.1 + random_rows(graph.num_edges).abs()
    guesses = {
        "weight": weight,
        "attr": random_rows(graph.num_edges, edge_dim),
        "type": torch.zeros(graph.num_edges, dtype=torch.int64),
    }
    return graph.with_arrays(graph.indptr, graph.indices, {name: guesses[name] for name in arrays})


def _arguments_of(graph: Graph, arguments: frozenset[str]) -> dict[str, Tensor]:
    arrays = {name: graph.edge[EDGE_ARGUMENTS[name]] for name in arguments}
    return {
        name: rows.double() if rows.is_floating_point() or name == "edge_weight" else rows.long()
        for name, rows in arrays.items()
    }


def _started(module: nn.Module, x: Tensor, graph: Graph, arguments: frozenset[str]) -> nn.Module:
    """A module whose lazy layers have their parameters."""
    if any(is_lazy(p) for p in module.parameters()):
        with torch.no_grad():
            call_module(module, x, graph.edge_index(), _arguments_of(graph, arguments))
    return module


class _Trial(ProgramModel):
    """A program on a copy of its module."""

    def __init__(self, module: nn.Module, program: Program, arrays: frozenset[str]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.program = program
        self._arrays = arrays

    def arrays(self) -> frozenset[str]:
        return self._arrays


class _Comparison:
    """Compares a program with plain PyG on a graph.

    copy: makes a copy of the module. Two are made, with equal weights, and serve all comparisons.
    """

    def __init__(
        self,
        copy: Callable[[], nn.Module],
        program: Program,
        graph: Graph,
        arguments: frozenset[str],
        x: Tensor,
    ) -> None:
        self.graph = graph
        self.arguments = arguments
        self.x = x
        self.plain = _started(copy(), x, graph, arguments)
        module = _started(copy(), x, graph, arguments)
        self.weights = {name: value.clone() for name, value in self.plain.state_dict().items()}
        module.load_state_dict(self.weights)
        self.model = _Trial(module, program, frozenset(graph.edge))
        self.nodes = torch.arange(graph.num_nodes)
        self.whole = block_of(graph, self.nodes.tolist())

    def check(self, training: bool) -> None:
        if not training:
            self._compare_evaluation()
            self._compare_gradients(None)
            return
        before = torch.get_rng_state()
        with NoDropout(), torch.no_grad():
            self._expected(self.x)
        if not torch.equal(before, torch.get_rng_state()):
            raise NotTraceable("it draws random numbers in training, other than by dropout")
        keys = (None, KEY) if any(op.dropout for op in self.model.program.op_of.values()) else (None,)
        for key in keys:
            for module in (self.plain, self.model.module):
                module.load_state_dict(self.weights)
                module.zero_grad(set_to_none=True)
            self._compare_gradients(key)
        if not torch.equal(before, torch.get_rng_state()):
            raise NotTraceable("it draws random numbers in training, other than by dropout")

    def _expected(self, x: Tensor) -> Tensor:
        with without_caches(self.plain):
            return call_module(self.plain, x, self.graph.edge_index(), _arguments_of(self.graph, self.arguments))

    # ---- evaluation

    def _compare_evaluation(self) -> None:
        model = self.model
        with torch.no_grad():
            expected = self._expected(self.x)
            if not expected.isfinite().all():
                raise NotTraceable("its outputs on a small graph are not finite, which shows nothing")
            for batch in (self.nodes.tolist(), *BATCHES):
                nodes = list(batch)
                try:
                    outputs = model(self._batch(nodes))
                except Exception as error:
                    text = " ".join(str(error).split())[:300]
                    raise NotTraceable(f"it fails on a batch of {len(nodes)} nodes ({text})") from error
                if outputs.shape != expected[nodes].shape or not is_close(outputs, expected[nodes]):
                    raise NotTraceable(_NOT_EQUAL)
            if not is_close(self._by_tables(model), expected):
                raise NotTraceable(_NOT_EQUAL)

    def _batch(self, nodes: list[int]) -> Batch:
        """A batch of nodes with all their neighbours."""
        blocks: list[Block] = []
        for _ in range(self.model.num_layers):
            blocks.insert(0, block_of(self.graph, blocks[0].src_ids.tolist() if blocks else nodes))
        return Batch(torch.tensor(nodes), tuple(blocks), self.x[blocks[0].src_ids], None)

    def _by_tables(self, model: _Trial) -> Tensor:
        """Outputs at all nodes, with the rows after each layer put into tables."""
        state = model.encode(self.x, self.nodes, None)
        tables: dict[int, Handle | Tensor] = {ENCODED: model.encoded_rows(state) if model.encodes else self.x}
        out: State = state
        for l in range(model.num_layers):
            reads = model.reads(l)
            sources = {k: tables[k] for k in reads.sources}
            own: Any = {k: tables[k] for k in reads.own}
            given = model.state_of(l, sources, own, None, self.whole)
            hooks = _Rows()
            out = model.layer(l, given, replace(self.whole, layer_hooks=hooks))
            assert hooks.rows is not None
            tables[l] = hooks.rows
        return model.decode(out)

    # ---- training

    def _compare_gradients(self, key: int | None) -> None:
        """Compare outputs, gradients and buffers. key: of the masks; None: no dropout."""
        plain = self.plain
        model = self.model
        inputs = [self.x.clone().requires_grad_() for _ in range(2)]
        masks: AbstractContextManager[Any] = NoDropout() if key is None else KeyedMasks(plain, key, self.nodes)
        with masks:
            expected = self._expected(inputs[0])
        block = replace(self.whole, key=key)
        with NoDropout() if key is None else nullcontext():
            try:
                outputs = model(Batch(self.nodes, (block,) * model.num_layers, inputs[1], None, key=key))
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                raise NotTraceable(f"it fails layer by layer ({type(error).__name__}: {text})") from error
        factor = random_rows(*expected.shape)
        for rows in (expected, outputs):
            if rows.shape != expected.shape:
                raise NotTraceable(_NOT_EQUAL)
            if rows.requires_grad:
                (rows * factor).sum().backward()
        pairs = [(outputs, expected), (_gradient(inputs[1]), _gradient(inputs[0]))]
        pairs += zip(map(_gradient, model.module.parameters()), map(_gradient, plain.parameters()), strict=True)
        pairs += zip(model.module.buffers(), plain.buffers(), strict=True)
        if not all(is_close(a.double(), b.double()) for a, b in pairs):
            raise NotTraceable(_NOT_EQUAL)


_NOT_EQUAL = (
    "layer by layer it would compute something else than as a whole: between convs it may use modules and functions "
    "that compute each node's row by itself, and convs may read direct neighbours"
)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


class _Rows(LayerHooks):
    """Records the rows at a cut."""

    rows: Tensor | None = None

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        self.rows = h
        return h


class KeyedMasks(TorchFunctionMode):
    """A context in which a module's own dropouts draw the masks that its program draws.

    They are numbered in the order in which `forward` calls them. Dropout within convs and other leaves is left alone.
    """

    def __init__(self, module: nn.Module, key: int, ids: Tensor) -> None:
        super().__init__()
        self.key = key
        self.ids = ids
        self.num_calls = 0
        self._num_leaves = 0
        """Leaves that are running."""
        for part in module.modules():
            if is_leaf(part) and type(part) is not nn.Dropout:
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._num_leaves += 1

    def _leave(self, module: nn.Module, arguments: Any, out: Any) -> None:
        self._num_leaves -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in DROPOUTS or self._num_leaves:
            return func(*args, **kwargs)
        bound = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
        number = self.num_calls
        self.num_calls += 1
        p = bound.get("p", 0.5)
        if not bound.get("training", bound.get("train", True)) or not p:
            return bound["input"]
        return ops.keyed_dropout(bound["input"], p, ops.purpose_key(self.key, number), self.ids)


# ---- questions about a module as a whole


def check_traced(module: nn.Module, num_features: int, edge: Mapping[str, Tensor]) -> None:
    """Find the programs of a module for a dataset, in training and in evaluation.

    num_features, edge: columns of the features, and the graph's edge arrays.

    Raises:
        NotTraceable: A trial on such features and edges shows that a program would be wrong.
    """
    arguments = frozenset(arguments_for(module, edge))
    kinds = tuple((name, array.dtype, array.shape[1:]) for name, array in edge.items())
    for training in (False, True):
        modes, settings = _settings(module, training)
        question = ("program for", num_features, kinds, arguments, modes)
        found = findings.get(module, question, settings)
        if found is None:
            found = _try(module, arguments, training, num_features, edge)
            findings.put(module, question, settings, found)
            findings.put(module, ("program", arguments, modes), settings, found)
        if isinstance(found, NotTraceable):
            raise NotTraceable(str(found))


def mixing_in_training(module: nn.Module, program: Program, edge: Mapping[str, Tensor], over_ranks: bool) -> bool:
    """Whether something in a module mixes rows in training, or changes buffers, other than batch norms.

    over_ranks: leave out batch norms, convs and buffers, which ranks compute together.
    """
    trial = trial_of(module).train()
    for part in trial.modules():
        if isinstance(part, MessagePassing) and over_ranks:
            part.eval()
    arrays = frozenset(edge)
    graph = probe_graph(edge)
    x = random_rows(graph.num_nodes, program.shapes["x"].numel())
    buffers = [buffer.clone() for buffer in trial.buffers()]
    model = _Trial(trial, program, arrays)
    statistics = OwnStatistics(constant_statistics) if over_ranks else nullcontext()
    with NoDropout(), statistics, torch.no_grad(), torch.random.fork_rng([]):
        whole = block_of(graph, list(range(graph.num_nodes)))
        expected = model(Batch(whole.dst_ids, (whole,) * model.num_layers, x, None))
        for nodes in BATCHES[:2]:
            blocks: list[Block] = []
            for _ in range(model.num_layers):
                blocks.insert(0, block_of(graph, blocks[0].src_ids.tolist() if blocks else list(nodes)))
            outputs = model(Batch(torch.tensor(nodes), tuple(blocks), x[blocks[0].src_ids], None))
            if not is_close(outputs, expected[list(nodes)]):
                return True
    return not over_ranks and not all(map(torch.equal, buffers, trial.buffers()))


def have_equal_rows(module: nn.Module, programs: Sequence[Program], edge: Mapping[str, Tensor]) -> bool:
    """Whether two programs of a module have the same rows after each layer but the last, apart from dropout."""
    graph = probe_graph(edge)
    x = random_rows(graph.num_nodes, programs[0].shapes["x"].numel())
    whole = block_of(graph, list(range(graph.num_nodes)))
    rows: list[list[Tensor]] = []
    for program in programs:
        hooks = [_Rows() for _ in range(program.num_layers)]
        blocks = tuple(replace(whole, layer_hooks=hook) for hook in hooks)
        with NoDropout(), torch.no_grad(), torch.random.fork_rng([]):
            _Trial(trial_of(module), program, frozenset(edge))(Batch(whole.dst_ids, blocks, x, None))
        rows.append([hook.rows for hook in hooks[:-1] if hook.rows is not None])
    ours, expected = rows
    if len(ours) != len(expected):
        return False
    return all(a.shape == b.shape and is_close(a, b) for a, b in zip(ours, expected, strict=True))
