"""`ProgramModel`: runs a program of `traced_program`, layer by layer on blocks.

    values by name  -- convs, then the stage's operations -->  rows at the cut  -- hooks -->  dropout, ...  -->  values

A state holds the values that later stages read. Rows of a table are those at the cut, side by side. Who starts from
tables computes dropout, and what follows it, again: `TablePlan`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import GCNConv

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.row_handles import DroppedRows, Handle, Readable, Rows
from hopline.core.tree_layout import TreeBlock
from hopline.nn.conv_adapter import EDGE_ARGUMENTS, convolve
from hopline.nn.conv_facts import arguments_of, is_linear, reads_rows
from hopline.nn.fused import own_rows, project
from hopline.nn.layered import (
    ENCODED,
    ConvCall,
    ConvSize,
    Layered,
    LayerSizes,
    ModelSizes,
    Reads,
    State,
    has_parameters,
    inner_widths,
)
from hopline.nn.traced_program import ConvOp, Op, Program


@dataclass(frozen=True, eq=False)
class TracedState(State):
    """The values of a program that later stages read, by name."""

    values: Mapping[str, Handle | Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """The rows at which operations are computed."""

    num_rows: int
    keys: Tensor
    """[num_rows] int64: keys of each row's draws."""
    key: int | Tensor | None
    """The key of the step's draws."""


NO_ROWS = torch.empty(0)
"""Stands for `State.h`, which a traced model does not use."""


class ProgramModel(Layered):
    """A module whose layers are those of a program. Subclasses say which program."""

    module: nn.Module
    program: Program

    @abstractmethod
    def arrays(self) -> frozenset[str]:
        """Names of the edge arrays of the graph at hand."""

    @property
    def num_layers(self) -> int:
        return self.program.num_layers

    @property
    def convs(self) -> Sequence[nn.Module]:
        found = [self._module(conv.module) for stage in self.program.stages for conv in stage.convs]
        return list(dict.fromkeys(found))

    def _module(self, name: str) -> nn.Module:
        return self.module.get_submodule(name)

    def modules_of(self, l: int) -> Sequence[nn.Module]:
        stage = self.program.stages[l + 1]
        names = [conv.module for conv in stage.convs]
        names += [op.module for op in (*stage.before, *stage.after) if op.module is not None]
        return [self._module(name) for name in names]

    @property
    def functions(self) -> Sequence[Any]:
        ops_of_program = self.program.op_of.values()
        return [op.function for op in ops_of_program if op.function is not None]

    # ---- input rows

    @property
    def _only_reader(self) -> Op | ConvOp | None:
        """What reads the features, if it alone does."""
        readers = self.program.x_readers
        return readers[0] if len(readers) == 1 else None

    @property
    def _input_conv(self) -> nn.Module | None:
        reader = self._only_reader
        return self._module(reader.module) if isinstance(reader, ConvOp) and reader.x0 != "x" else None

    def read_ahead(self, rows: Rows, block: Block) -> Rows:
        return rows if self._ignores_array(_named_arrays(block)) else super().read_ahead(rows, block)

    @property
    def input_reduction(self) -> tuple[Any, ...] | None:
        return None if self._ignores_array(self.arrays()) else super().input_reduction

    def reduced_input(self, h: Handle | Tensor, block: Block) -> tuple[Tensor, str] | None:
        return None if self._ignores_array(_named_arrays(block)) else super().reduced_input(h, block)

    def _ignores_array(self, arrays: Iterable[str]) -> bool:
        """Whether the first conv takes one of these edge arrays, and `forward` does not give it."""
        reader = self._only_reader
        return isinstance(reader, ConvOp) and bool(_unwanted(self._module(reader.module), reader, arrays))

    @property
    def reads_rows(self) -> bool:
        conv = self._input_conv
        return conv is not None and reads_rows(conv)

    def keeps_handle(self, table: Readable) -> bool:
        stored = table.storage()
        if stored is not None:
            return self.reads_rows and stored.dtype == self._dtype
        # Reading no rows tells whether the table is sparse.
        return self._projects and table.read_csr(torch.empty(0, dtype=torch.int64)) is not None

    @property
    def _projects(self) -> bool:
        """Whether the first operation on input rows, apart from dropout, is a linear layer."""
        reader = self._only_reader
        if isinstance(reader, Op) and reader.dropout is not None:
            readers = [op for op in self._all_ops if reader.name in _inputs(op)]
            reader = readers[0] if len(readers) == 1 else None
        if isinstance(reader, ConvOp):
            return type(self._module(reader.module)) is GCNConv
        return reader is not None and reader.module is not None and is_linear(self._module(reader.module))

    @property
    def _all_ops(self) -> list[Op | ConvOp]:
        return [op for stage in self.program.stages for op in (*stage.convs, *stage.before, *stage.after)]

    @property
    def encodes(self) -> bool:
        return self.program.stages[0].alive != ["x"]

    def rest_parameters(self) -> list[nn.Parameter]:
        stages = self.program.stages
        ends = [*stages[0].before, *stages[0].after, *stages[-1].before, *stages[-1].after]
        modules = [self._module(op.module) for op in ends if op.module is not None]
        modules = [m for m in modules if has_parameters(m) and not isinstance(m, _BatchNorm)]
        if not modules:
            modules = [self._module(conv.module) for conv in stages[-1].convs]
        return list(dict.fromkeys(p for module in modules for p in module.parameters()))

    # ---- encode, layer, decode

    def encode(self, x: Rows | Tensor, ids: Tensor, key: int | Tensor | None) -> TracedState:
        stage = self.program.stages[0]
        place = Place(ids.numel(), ids, key)
        values: dict[str, Any] = {"x": x if isinstance(x, Handle) else self._as_dtype(x)}
        self._compute(stage.before, values, place)
        self._compute(stage.after, values, place)
        return self._state(stage.alive, values)

    def initial(self, state: State) -> State:
        return state

    def encoded_rows(self, state: State) -> Tensor:
        values = _values(state)
        return self._pack([self._rows(values[name]) for name in self.program.stages[0].alive])

    def reads(self, l: int) -> Reads:
        plan = self.program.plans[l]
        return Reads(sources=plan.source_tables, own=plan.own_tables)

    def state_of(
        self,
        l: int,
        sources: Mapping[int, Handle | Tensor],
        own: Mapping[int, Tensor],
        encode: Callable[[], State] | None,
        block: Block,
    ) -> TracedState:
        plan = self.program.plans[l]
        values: dict[str, Any] = {}
        for tables in (own, sources):
            for k, rows in tables.items():
                values.update(self._unpack(k, rows))
        if encode is not None:
            values.update(_values(encode()))
        num_dst = block.num_dst
        source_place = Place(block.num_src, block.src_keys, block.key)
        own_place = Place(num_dst, block.src_keys[:num_dst], block.key)
        self._compute(plan.source_ops, values, source_place)
        own_values = {name: self._head(value, num_dst) for name, value in values.items() if name in plan.own_inputs}
        self._compute(plan.own_ops, own_values, own_place)
        return TracedState(NO_ROWS, values={**values, **{op.name: own_values[op.name] for op in plan.own_ops}})

    def _layer(self, l: int, state: State, block: Block) -> TracedState:
        stage = self.program.stages[l + 1]
        num_dst = block.num_dst
        values = _values(state)
        here: dict[str, Any] = {name: self._head(values[name], num_dst) for name in stage.needs}
        for call, conv in zip(self.conv_calls(l, state, block), stage.convs, strict=True):
            here[conv.name] = convolve(call.conv, call.h, call.block, call.x0, call.number)
        draws = self.training and block.key is not None
        # Layer hooks need the rows between ReLU and dropout.
        fused = stage.relu_inputs if draws and block.layer_hooks is None else {}
        self._compute((op for op in stage.before if op.name not in fused), here, self._place(block, num_dst))
        num_rows = num_dst
        if block.layer_hooks is not None:
            rows = block.layer_hooks.after_layer(l, self._pack([here[name] for name in stage.rows]))
            # Rows of other nodes may stand behind those of the destinations.
            num_rows = rows.size(0)
            here.update(self._unpack(l, rows))
            here.update({name: self._head(values[name], num_rows) for name in stage.needs})
        self._compute(stage.after, here, self._place(block, num_rows), fused)
        carried = {name: self._head(value, num_rows) for name, value in values.items() if name in stage.alive}
        return self._state(stage.alive, {**carried, **here})

    def decode(self, state: State) -> Tensor:
        return self._rows(_values(state)[self.program.output])

    def conv_calls(self, l: int, state: State, block: Block) -> Sequence[ConvCall]:
        values = _values(state)
        calls = []
        for op in self.program.stages[l + 1].convs:
            conv = self._module(op.module)
            h: Any = values[op.x]
            if op.x == "x":
                h = self._in_precision(h, conv)
            x0 = None if op.x0 is None else self._head(values[op.x0], block.num_dst)
            calls.append(ConvCall(conv, h, x0, self._edges_for(conv, op, block), op.number))
        return calls

    # ---- parts of these

    def _place(self, block: Block, num_rows: int) -> Place:
        return Place(num_rows, block.src_keys[:num_rows], block.key)

    def _state(self, alive: Iterable[str], values: Mapping[str, Any]) -> TracedState:
        # Who starts from tables has read those values alone that the layer reads.
        return TracedState(NO_ROWS, values={name: values[name] for name in alive if name in values})

    def _compute(
        self, operations: Iterable[Op], values: dict[str, Any], place: Place, fused: Mapping[str, str] | None = None
    ) -> None:
        """Compute operations in order, and add their values. fused: by ReLU that is left out, its input."""
        for op in operations:
            if op.dropout is not None:
                values[op.name] = self._drop(op, values, place, fused or {})
                continue
            first = values[op.inputs[0]] if op.inputs else None
            if isinstance(first, Rows) and op.module is not None and is_linear(self._module(op.module)):
                values[op.name] = project(self._module(op.module), first)  # which reads sparse rows as they are
                continue
            for name in op.inputs:
                values[name] = self._rows(values[name])
            values[op.name] = op.run(self.module, values, place.num_rows)

    def _drop(self, op: Op, values: Mapping[str, Any], place: Place, fused: Mapping[str, str]) -> Handle | Tensor:
        """Rows after a keyed dropout."""
        assert op.dropout is not None
        (name,) = op.inputs
        rows = values[fused[name]] if name in fused else values[name]
        p = op.dropout.p
        is_on = op.dropout.training
        if op.module is not None:
            module: Any = self._module(op.module)
            p = module.p
            is_on = module.training
        assert p is not None
        if not is_on or p == 0:
            return rows.relu() if name in fused else rows
        if place.key is None:
            return torch.nn.functional.dropout(self._rows(rows), p)
        key = ops.purpose_key(place.key, op.dropout.number)
        # Sparse rows stay a handle for the product. Kernels that read dense tables read them without dropout.
        if isinstance(rows, Rows) and rows.table.storage() is None and self.keeps_handle(rows.table):
            return DroppedRows(rows.table, rows.ids, p, key, place.keys)
        drop = ops.relu_dropout if name in fused else ops.keyed_dropout
        return drop(self._rows(rows), p, key, place.keys)

    def _rows(self, value: Handle | Tensor) -> Tensor:
        return self._as_dtype(value) if isinstance(value, Handle) else value

    def _head(self, value: Handle | Tensor, num_rows: int) -> Tensor:
        """The first rows of a value."""
        if isinstance(value, Handle):
            return self._as_dtype(own_rows(value, num_rows))
        return value if value.size(0) == num_rows else value[:num_rows]

    def _pack(self, rows: Sequence[Tensor]) -> Tensor:
        """[n, width]: the rows of several values side by side."""
        if len(rows) == 1 and rows[0].dim() == 2:
            return self._rows(rows[0])
        return torch.cat([self._rows(value).flatten(1) if value.dim() > 1 else value[:, None] for value in rows], dim=1)

    def _unpack(self, k: int, rows: Handle | Tensor) -> dict[str, Any]:
        """The values that stand side by side in the rows after layer `k`."""
        program = self.program
        names = program.stages[0].alive if k == ENCODED else program.stages[k + 1].rows
        if len(names) == 1 and len(program.shapes[names[0]]) == 1:
            return {names[0]: rows}
        tensor = self._rows(rows)
        widths = [program.shapes[name].numel() for name in names]
        parts = tensor.split(widths, dim=1)
        return {
            name: part.reshape(part.size(0), *program.shapes[name]) for name, part in zip(names, parts, strict=True)
        }

    def _edges_for(self, conv: nn.Module, op: ConvOp, block: Block) -> Block:
        """The block with those edge arrays alone that `forward` gives to a conv."""
        arrays = self.arrays() if block.convs is not None else frozenset(_named_arrays(block))
        unwanted = _unwanted(conv, op, arrays)
        if not unwanted:
            return block
        if block.convs is not None or isinstance(block, TreeBlock):
            (array, *_) = sorted(unwanted)
            raise ValueError(
                f"{type(self.module).__name__}.forward calls {op.module} ({type(conv).__name__}) without the edge "
                f"array {array!r} of the graph: leave {array!r} out of the dataset, or hand it over"
            )
        return _without(block, unwanted)

    # ---- widths

    def conv_sizes(self, l: int, width_after: Callable[[int], int]) -> Sequence[ConvSize]:
        shapes = self.program.shapes
        return [
            ConvSize(self._module(op.module), op.in_width, shapes[op.name].numel(), op.initial_width)
            for op in self.program.stages[l + 1].convs
        ]

    def sizes(self, num_features: int) -> ModelSizes:
        program = self.program
        first, *stages = program.stages

        def numbers(operations: Iterable[Op]) -> int:
            """Values that operations hold in forward and backward: outputs, and what modules hold inside."""
            modules = [self._module(op.module) for op in operations if op.module is not None]
            return sum(3 * program.shapes[op.name].numel() for op in operations) + 2 * inner_widths(modules)

        per_input: float = numbers([*first.before, *first.after])
        if not self.reads_rows:
            per_input += 3 * num_features
        layers = []
        for l, stage in enumerate(stages):
            carried = program.width(stage.alive) + program.width(stage.rows)
            convs = tuple(self.conv_sizes(l, lambda k: 0))
            layers.append(
                LayerSizes(
                    convs=convs,
                    needs_input_gradient=l > 0 or self.encodes,
                    numbers_per_dst=numbers([*stage.before, *stage.after])
                    + 4 * carried
                    + 6 * sum(conv.width for conv in convs),
                )
            )
        widths = [program.width(program.stages[0].alive), *(program.width(stage.rows) for stage in stages)]
        return ModelSizes(per_input, tuple(layers), 6 * program.shapes[program.output].numel(), tuple(widths))


def _unwanted(conv: nn.Module, op: ConvOp, arrays: Iterable[str]) -> frozenset[str]:
    """The edge arrays that a conv takes, and that `forward` does not give it. arrays: names of those of the graph."""
    takes = {EDGE_ARGUMENTS[name] for name in EDGE_ARGUMENTS if name in arguments_of(type(conv))}
    return frozenset(takes & frozenset(arrays)) - {EDGE_ARGUMENTS[name] for name in op.arguments}


def _values(state: State) -> Mapping[str, Any]:
    return state.values if isinstance(state, TracedState) else {"x": state.h}


def _inputs(op: Op | ConvOp) -> tuple[str | None, ...]:
    return op.inputs if isinstance(op, Op) else (op.x, op.x0)


def _named_arrays(block: Block) -> Mapping[str, Tensor]:
    """The edge arrays of a block by name. Those of a tree would be gathered, and only the names count."""
    return block.edge if block.graph is None else block.graph.edge


def _without(block: Block, names: frozenset[str]) -> Block:
    """A block without some of its edge arrays. Cached with its edges and its graph."""

    def rest(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: array for name, array in arrays.items() if name not in names}

    parts = []
    for part in block.parts:
        key = ("without", names)
        if key not in part.cache:
            part.cache[key] = Part(part.indptr, part.src_idx, rest(part.edge), part.edge_ids)
        parts.append(part.cache[key])
    graph = block.graph
    if graph is not None:
        whole = graph
        graph = whole.get_cached(
            ("without", names), lambda: whole.with_arrays(whole.indptr, whole.indices, rest(whole.edge))
        )
    return replace(block, parts=tuple(parts), graph=graph)
