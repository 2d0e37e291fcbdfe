"""`Traced`: layers found in a module whose `forward` is the user's own.

    traced_program    takes `forward` apart
    traced_model      runs it layer by layer
    traced_probe      shows on a tiny graph that this is equal to `forward`

Programs are found when they are first asked for, for the present settings and modes of the module, and stored in
`findings`. So copies and pickles of a model have none, and a changed setting of the module asks for a new one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hopline.core.batch import Batch
from hopline.core.row_handles import Rows
from hopline.nn.conv_adapter import EDGE_ARGUMENTS
from hopline.nn.plain_call import call_module, takes_adjs, takes_data
from hopline.nn.traced_model import ProgramModel, TracedState
from hopline.nn.traced_probe import check_traced, find_program, have_equal_rows, mixing_in_training
from hopline.nn.traced_program import NotTraceable, Op, Program


class Traced(ProgramModel):
    """Layers found in a module of your own.

    `hl.nn.as_batch_model` makes one of every module whose layers it can find: whose `forward(x, edge_index)` calls PyG
    convs, and between them modules and functions that compute each node's row by itself. Everything that takes a `GNN`
    takes it. Parameters, buffers and their names stay the module's own.

    Args:
        module: A module with forward(x, edge_index). It may also take edge_weight, edge_attr or edge_type.

    Raises:
        ValueError: Its layers cannot be found. The message names the line that stands in the way.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv1, self.conv2 = SAGEConv(2, 8), SAGEConv(8, 3)
        ...
        ...     def forward(self, x, edge_index):
        ...         x = self.conv1(x, edge_index).relu()
        ...         x = torch.nn.functional.dropout(x, 0.5, self.training)
        ...         return self.conv2(x, edge_index)
        >>> model = hl.nn.Traced(Net())
        >>> print(model)
        Traced(Net: 2 layers
          layer 0: conv1, relu
          layer 1: dropout, conv2)
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        check_signature(module)
        self.module = module
        self.training = module.training
        self._arrays = required_arrays(module)
        """Names of the edge arrays of the graph that the model was last used on."""
        self._current: dict[bool, Program] = {}
        """By mode: the program that the last call of `encode` or `check_blocks` found."""
        for training in (False, True):
            try:
                find_program(module, self._arrays, training)
            except NotTraceable as error:
                self._refuse(error)

    # ---- the program

    @property
    def program(self) -> Program:
        """The program of the module in its present mode.

        Raises:
            ValueError: Its layers cannot be found.
        """
        program = self._current.get(self.module.training)
        return self._find() if program is None else program

    def _find(self) -> Program:
        """The program for the settings that the module has now."""
        try:
            program = find_program(self.module, self._arrays)
        except NotTraceable as error:
            self._refuse(error)
        self._current[self.module.training] = program
        return program

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": {}}  # a copy finds programs of its own module

    def encode(self, x: Rows | Tensor, ids: Tensor, key: int | Tensor | None) -> TracedState:
        self._find()  # a callback may have changed the module since the last step
        return super().encode(x, ids, key)

    def _refuse(self, error: NotTraceable) -> NoReturn:
        raise ValueError(
            f"the layers of {type(self.module).__name__}.forward cannot be found: {error}. Change this, or give "
            "hl.nn.Whole(module), which method=sampled runs on all edges of a batch at once"
        ) from error

    def arrays(self) -> frozenset[str]:
        return self._arrays

    def __repr__(self) -> str:
        lines = [f"Traced({type(self.module).__name__}: {self.num_layers} layers"]
        before: list[str] = []
        for s, stage in enumerate(self.program.stages):
            names = [*before, *(conv.module for conv in stage.convs), *map(_title, stage.before)]
            if names and s == 0:
                lines.append(f"  before: {', '.join(names)}")
            elif names:
                lines.append(f"  layer {s - 1}: {', '.join(names)}")
            before = [_title(op) for op in stage.after]
        if before:
            lines.append(f"  after: {', '.join(before)}")
        return "\n".join(lines) + ")"

    # ---- what methods ask

    def check_blocks(self, num_features: int, edge: Mapping[str, Tensor]) -> None:
        self._use_arrays(edge)
        try:
            check_traced(self.module, num_features, edge)
        except NotTraceable as error:
            self._refuse(error)
        self._find()

    def _use_arrays(self, edge: Iterable[str]) -> None:
        """Run on a graph with these edge arrays from now on."""
        arrays = frozenset(edge)
        check_edge_arguments(self.module, arrays)
        if arrays != self._arrays:
            self._arrays = arrays
            self._current.clear()

    def check_history(self, num_features: int, edge: Mapping[str, Tensor]) -> None:
        programs = [find_program(self.module, frozenset(edge), training) for training in (False, True)]
        if not have_equal_rows(self.module, programs, edge):
            raise ValueError(
                f"{type(self.module).__name__}.forward computes other rows between two convs in training than in "
                "evaluation, apart from dropout, and hl.Historical keeps them in one table: compute the same in both, "
                "or use method=sampled"
            )

    def mixing_in_training(
        self, num_features: int, edge: Mapping[str, Tensor], *, over_ranks: bool = False
    ) -> Callable[..., Any] | None:
        norms = [part for part in self.module.modules() if isinstance(part, _BatchNorm)]
        if norms and not over_ranks:
            return norms[0]
        program = find_program(self.module, frozenset(edge), training=True)
        return self.module if mixing_in_training(self.module, program, edge, over_ranks) else None

    def edge_arrays_read(self, edge: Mapping[str, Tensor]) -> list[str]:
        program = find_program(self.module, frozenset(edge))
        names = {EDGE_ARGUMENTS[a] for stage in program.stages for conv in stage.convs for a in conv.arguments}
        return [name for name in edge if name in names]

    def forward(
        self,
        batch: Batch | Tensor,
        edge_index: Tensor | None = None,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Outputs for the batch's examples: [num_examples, ...]. Or `model(x, edge_index)`, as the module is called."""
        if isinstance(batch, Tensor):
            arguments = {"edge_weight": edge_weight, "edge_attr": edge_attr}
            given = {name: array for name, array in arguments.items() if array is not None}
            return call_module(self.module, batch, edge_index, given)
        block = batch.blocks[0]
        if block.convs is None:
            self._use_arrays(block.edge if block.graph is None else block.graph.edge)
        return super().forward(batch)


def required_arguments(module: nn.Module) -> list[str]:
    """Names of the edge arguments without which a module's `forward` cannot be called."""
    parameters = inspect.signature(module.forward).parameters
    return [name for name in EDGE_ARGUMENTS if name in parameters and parameters[name].default is Parameter.empty]


def required_arrays(module: nn.Module) -> frozenset[str]:
    """Names of the edge arrays without which a module's `forward` cannot be called."""
    return frozenset(EDGE_ARGUMENTS[name] for name in required_arguments(module))


def check_edge_arguments(module: nn.Module, arrays: Iterable[str]) -> None:
    """Raise ValueError if a graph with some edge arrays does not go with the arguments of a module's `forward`."""
    arrays = frozenset(arrays)
    name = type(module).__name__
    for argument in required_arguments(module):
        if EDGE_ARGUMENTS[argument] not in arrays:
            raise ValueError(
                f"{name}.forward needs {argument}, and the graph has no edge array {EDGE_ARGUMENTS[argument]!r}: "
                f"give the dataset one, or give the argument a default ({argument}=None)"
            )
    parameters = inspect.signature(module.forward).parameters
    if "adj_t" in parameters and "weight" in arrays and "edge_weight" not in parameters:
        raise ValueError(
            f"{name}.forward(x, adj_t) expects the weights of the edges in adj_t, and is given edges alone: write "
            "forward(x, edge_index, edge_weight), or leave the edge array 'weight' out of the dataset"
        )


def check_signature(module: nn.Module) -> None:
    """Raise ValueError if a module's `forward` does not take (x, edge_index, ...), or needs an unknown argument."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [p.name for p in parameters]
    class_name = type(module).__name__
    # By position: PyG's convs take edges where OGB's models hand them an adj_t.
    if takes_data(module) or (takes_adjs(module) and len(names) == 2):
        return
    if names[1:2] not in (["edge_index"], ["adj_t"]):
        raise ValueError(
            f"{class_name}.forward takes ({', '.join(names)}): write forward(x, edge_index, ...), "
            "or use hl.nn.GNN([...convs...])"
        )
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters[2:] if p.default is p.empty and p.kind not in optional]
    unknown = [name for name in required if name not in EDGE_ARGUMENTS]
    if unknown:
        raise ValueError(
            f"{class_name}.forward needs {', '.join(unknown)} besides x and edge_index, and is only given "
            f"{', '.join(EDGE_ARGUMENTS)} where the graph has them: give {unknown[0]} a default, if need be in a "
            "module around it with forward(x, edge_index)"
        )


def _title(op: Op) -> str:
    """The name of an operation for a listing."""
    if op.module is not None:
        return op.module
    return getattr(op.function, "__name__", None) or op.name
