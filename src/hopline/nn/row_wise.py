"""Checks that the modules between a model's convs are row-wise: that they compute each node's row by itself.

A batch, a chunk of inference, a part and a rank each hold some of the graph's rows. A norm that averages
over the rows present computes something else on each of them. Such a module must be refused, or handled,
before a run starts.

Modules of known types are row-wise without a trial. All others are tried, as copies in float64 on the tiny
graph of `probe`. The copy runs on all rows and on the rows of a few nodes (`SUBSET`). If the rows of these
nodes differ, the module *mixes* rows.

There are two questions, since batch norms mix rows in training but not in evaluation:

    check_row_wise, mixing_module    in evaluation: every method needs row-wise modules there
    mixing_in_training               in training: full-batch training asks, since its gradients must be exact
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hopline.core.batch import Block, ConvRunner
from hopline.core.row_handles import Handle
from hopline.nn.conv_adapter import NeedsWholeGraph, convolve, edge_arguments, takes_x0, whole_output
from hopline.nn.norms import OwnStatistics
from hopline.nn.probe import BATCHES, block_of, is_close, probe_graph, random_rows, trial_of

if TYPE_CHECKING:  # `gnn` imports this module
    from hopline.nn.gnn import GNN, State

Module = Callable[..., Any]
"""A module, or an activation function."""
KNOWN_TYPES = (
    nn.Identity, nn.Linear, pyg.Linear, nn.LayerNorm, nn.Dropout, pyg.JumpingKnowledge,
    nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SELU, nn.SiLU, nn.Tanh, nn.Sigmoid,
)  # fmt: skip
"""Modules that are row-wise in training and in evaluation.

Exact types only: a subclass may do something else.
"""
KNOWN_IN_EVALUATION = (*KNOWN_TYPES, nn.BatchNorm1d, pyg.BatchNorm)
"""Modules that are row-wise in evaluation. Batch norms then use their running statistics."""
KNOWN_FUNCTIONS = {None, torch.relu, torch.tanh, torch.sigmoid} | {
    getattr(nn.functional, name) for name in ("relu", "leaky_relu", "elu", "gelu", "selu", "silu", "tanh", "sigmoid")
}
"""Activation functions that are row-wise. None: a model without an activation."""
SUBSET = torch.tensor([3, 0, 5, 4, 11])
"""[5] int64: nodes of the tiny graph whose rows are computed without the other nodes' rows."""


def check_row_wise(model: GNN, num_features: int, edge: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a module between a model's convs mixes rows in evaluation.

    num_features: columns of the input rows. edge: edge arrays of the graph that the model is for.
    """
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                "SyncBatchNorm would wait for ranks that have no rows: use BatchNorm1d; method=full_batch takes its "
                "statistics over all ranks"
            )
    mixing = mixing_module(model, num_features, edge)
    if mixing is not None:
        raise ValueError(
            f"{describe_module(mixing)} averages over all nodes, and a batch has only some: use BatchNorm or "
            "LayerNorm(..., mode='node')"
        )


def mixing_module(model: GNN, num_features: int, edge: Mapping[str, Tensor]) -> Module | None:
    """The first module between convs that mixes rows in evaluation; None if all are row-wise."""
    if all(_is_known(module, KNOWN_IN_EVALUATION) for module in _between(model)):
        return None
    # The generator is restored afterwards: layers built without their widths draw parameters in a trial.
    with torch.random.fork_rng([]):
        return _find_mixing_module(trial_of(model), num_features, edge)


def mixing_in_training(
    model: GNN, num_features: int, edge: Mapping[str, Tensor], *, over_ranks: bool = False
) -> Module | None:
    """The first module that mixes rows in training, as batch norms do, or whose buffers change with the rows.

    None if there is none. Convs count too: some have norms inside.

    over_ranks: leave out batch norms, convs and buffers. Ranks sum the statistics of batch norms, and fetch
        each other's rows for convs.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if norms and not over_ranks:
        return norms[0]
    known_types = KNOWN_IN_EVALUATION if over_ranks else KNOWN_TYPES
    trial = trial_of(model).train()
    old_buffers = {module: [b.clone() for b in module.buffers(recurse=False)] for module in trial.modules()}
    statistics = OwnStatistics(constant_statistics) if over_ranks else nullcontext()
    with NoDropout(), statistics, torch.random.fork_rng([]):
        if not all(_is_known(module, known_types) for module in _between(model)):
            mixing = _find_mixing_module(trial, num_features, edge)
            if mixing is not None:
                return mixing
        if over_ranks:
            return None
        mixing = _find_mixing_conv(trial, num_features, edge)
    if mixing is not None:
        return mixing
    # A buffer that changes with the rows would be updated once per part, and again when backward recomputes
    # the part.
    for module, old in old_buffers.items():
        if not all(map(torch.equal, old, module.buffers(recurse=False))):
            return module
    return None


def describe_module(module: Module) -> str:
    """A module's type for a message, with the types inside a container and "with hooks".

    For an activation function, its name.
    """
    if not isinstance(module, nn.Module):
        return getattr(module, "__name__", repr(module))
    text = type(module).__name__
    if isinstance(module, nn.Sequential | nn.ModuleList):
        children = ", ".join(type(child).__name__ for child in module.children())
        text += f"({children})"
    if module._forward_hooks or module._forward_pre_hooks:
        text += " with hooks"
    return text


def _between(model: GNN) -> Iterable[Any]:
    """All modules of a model that are not convs: norms, activation, encoder, jumping knowledge and head."""
    ends = (model.encoder, getattr(model, "jk", None), getattr(model, "lin", None))
    return [*model.norms, model.act, *(module for module in ends if module is not None)]


def _is_known(module: Any, known_types: tuple[type, ...]) -> bool:
    """Whether a module is row-wise by its type alone.

    A hook may change the rows, so a module with hooks is not.
    """
    if not isinstance(module, nn.Module):
        return module in KNOWN_FUNCTIONS
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module) is nn.Sequential:
        return all(_is_known(child, known_types) for child in module)
    if type(module) is pyg.LayerNorm:
        return module.mode == "node"
    if isinstance(module, nn.BatchNorm1d | pyg.BatchNorm):
        torch_norm = module.module if isinstance(module, pyg.BatchNorm) else module
        if torch_norm.running_mean is None:
            return False  # without running statistics it uses those of the rows present, in evaluation too
    return type(module) in known_types


@dataclass(frozen=True, eq=False)
class _KnownOutput(ConvRunner):
    """Returns an output that was computed before, in place of running a conv.

    With it `GNN.layer` computes only the rest of a layer: the modules between this conv and the next.
    """

    output: Tensor
    """[num_dst, ...]: the conv's output."""

    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        return self.output

    def block_to(self, block: Block, device: torch.device) -> Block:
        return replace(block, src_ids=block.src_ids.to(device), convs=_KnownOutput(self.output.to(device)))


def _find_mixing_module(trial: GNN, num_features: int, edge: Mapping[str, Tensor]) -> Module | None:
    """The first module between convs whose rows at `SUBSET` change if the other rows are left out.

    None if there is none.

    trial: a copy of the model, in the mode that is asked about. Convs always run on the whole tiny graph.
    """
    graph = probe_graph(edge)
    ids = torch.arange(graph.num_nodes)
    with torch.no_grad():
        try:
            x = random_rows(graph.num_nodes, num_features)
            state = trial.encode(x, ids, None)
        except Exception:
            # An encoder such as nn.Embedding takes whole numbers.
            x = torch.zeros(graph.num_nodes, num_features, dtype=torch.int64)
            state = trial.encode(x, ids, None)
        if not _is_same(state, trial.encode(x[SUBSET], ids[SUBSET], None)):
            return trial.encoder
        for l in range(trial.num_layers):
            h = trial._as_dtype(state.h)
            out = whole_output(trial.convs[l], h, graph, state.x0)
            layer_input = replace(state, h=h)
            # A layer runs norm and activation together. If there is a norm, it is named as the one that
            # mixes.
            is_norm = type(trial.norms[l]) is not nn.Identity
            suspect: Any = trial.norms[l] if is_norm else trial.act
            try:
                block = Block(ids, ids.numel(), (), convs=_KnownOutput(out))
                state = trial.layer(l, layer_input, block)
                subset_block = Block(SUBSET, SUBSET.numel(), (), convs=_KnownOutput(out[SUBSET]))
                subset_state = trial.layer(l, _subset_of(layer_input), subset_block)
            except Exception as error:
                raise ValueError(f"layer {l} cannot run with {describe_module(suspect)}: {error}") from error
            if not _is_same(state, subset_state):
                return suspect
        subset_out = trial.decode(_subset_of(state))
        expected_out = trial.decode(state)[SUBSET]
    if not is_close(subset_out, expected_out):
        return getattr(trial, "lin", None) or trial.jk
    return None


def _subset_of(state: State) -> State:
    rows: dict[str, Any] = {name: getattr(state, name) for name in ("h", "x0", "jk")}
    return replace(state, **{name: None if tensor is None else tensor[SUBSET] for name, tensor in rows.items()})


def _is_same(state: State, subset_state: State) -> bool:
    """Whether `subset_state`, computed from the rows of `SUBSET` alone, equals these rows of `state`."""
    expected = _subset_of(state)
    pairs = [(getattr(subset_state, name), getattr(expected, name)) for name in ("h", "x0", "jk")]
    return all(a is None or is_close(a, b) for a, b in pairs)


def _find_mixing_conv(trial: GNN, num_features: int, edge: Mapping[str, Tensor]) -> Module | None:
    """The first conv whose output on a block differs from that on the whole graph; None if none does.

    trial: a copy of the model in training mode, in which convs with norms inside differ.
    """
    graph = probe_graph(edge)
    x = random_rows(graph.num_nodes, num_features)
    with torch.no_grad():
        state = trial.encode(x, torch.arange(graph.num_nodes), None)
        h = trial._as_dtype(state.h)
        x0 = state.x0
        for conv in trial.convs:
            whole_output(conv, h, graph, x0)  # for its error alone, if plain PyG cannot run the conv
            initial = (x0,) if takes_x0(conv) else ()
            out = conv(h, *initial, graph.edge_index(), **edge_arguments(conv, graph.edge, torch.float64))
            for nodes in BATCHES[:2]:  # every node of these two has in-edges
                block = block_of(graph, nodes)
                block_x0 = None if x0 is None else x0[block.dst_ids]
                try:
                    block_out = convolve(conv, h[block.src_ids], block, block_x0)
                except NeedsWholeGraph:
                    return conv
                if not is_close(block_out, out[block.dst_ids]):
                    return conv
            h = out
    return None


def constant_statistics(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean 0, variance 1, 2 rows): statistics that do not depend on the rows.

    With them batch norms do not mix rows, so a trial finds the other modules that do.
    """
    mean = rows.new_zeros(rows.size(1))
    variance = rows.new_ones(rows.size(1))
    num_rows = rows.new_tensor(2.0)
    return mean, variance, num_rows


class NoDropout(TorchFunctionMode):
    """A context in which dropout does nothing, so that two runs in training mode can be compared."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").endswith("dropout"):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)
