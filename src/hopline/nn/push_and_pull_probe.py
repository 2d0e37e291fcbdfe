"""Finds out whether a module with calls of `push_and_pull` is right on batches of `Historical`, by a trial.

Copies of the module run on the tiny graph of `whole_module_probe`, with drawn weights:

    on the whole tiny graph        -> number of the calls, and the rows of all nodes at each: exact tables
    on batches of a few nodes,     -> own rows at each call, and the outputs, must be those of the whole graph
      halo rows from these tables
    in training, with other rows   -> outputs must not change: nothing may read rows that have no meaning
      where they have no meaning

So a module that reads more than direct neighbours between two calls is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from hopline.core.batch import Batch, Block, LayerHooks
from hopline.core.row_handles import Readable
from hopline.nn.probe import block_of, findings
from hopline.nn.push_and_pull import CALLS, NORMALISE_ONCE, CallError, CallReached, UpToCall, active
from hopline.nn.whole_module import Whole
from hopline.nn.whole_module_probe import MAX_BYTES, _are_equal, _text, _TinyGraph, _Trial

INSTEAD = "use hl.nn.GNN, or a PyG model such as GCN"
"""Ends the messages about modules that cannot train on historical embeddings."""


class WithCalls(Whole):
    """A module with calls of `push_and_pull`, as `Historical` counts them: a layer ends at each call, and at the end.

    shapes: of a row at each call, by `find_calls`.
    """

    def __init__(self, batch_model: Whole, shapes: tuple[torch.Size, ...]) -> None:
        super().__init__(batch_model.module)
        self.num_layers = len(shapes) + 1


def find_calls(
    batch_model: Whole, x: Readable, edge: Mapping[str, Tensor], *, has_halo: bool = True
) -> tuple[torch.Size, ...]:
    """The shape of a row at each call of `push_and_pull`, by number. Later forward passes are compared with it.

    x, edge: the dataset's features and edge arrays. has_halo: False if batches have no halo: then nothing can be wrong
    with it.

    Raises:
        ValueError: A batch with exact tables would not give the outputs of the whole graph.
    """
    kinds = tuple((name, array.dtype, array.shape[1:]) for name, array in edge.items())
    settings = (x.shape[1:], x.dtype, kinds, has_halo)
    shapes = findings.get(batch_model.module, ("trial of", CALLS), settings)
    if shapes is None:
        # The generator is restored afterwards: a trial must not change what training draws.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            shapes = _find(batch_model.module, x, edge, has_halo)
        findings.put(batch_model.module, ("trial of", CALLS), settings, shapes)
    findings.put(batch_model.module, CALLS, None, shapes)
    return shapes


def _find(module: nn.Module, x: Readable, edge: Mapping[str, Tensor], has_halo: bool) -> tuple[torch.Size, ...]:
    name = type(module).__name__
    if sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p)) > MAX_BYTES:
        raise ValueError(f"{name} is too large to be tried out on a small graph, which history needs: {INSTEAD}")
    tiny = _TinyGraph(1, x, edge)
    error: Exception | None = None
    # In float64 first, where equal outputs differ least. Some modules run only in the precision they were built in.
    for dtype in (torch.float64, None):
        try:
            for seed in (0, 1):
                shapes = _calls_of(name, _Trial(module, dtype, seed, tiny), tiny, has_halo)
            return shapes
        except CallError:
            raise
        except Exception as raised:
            error = raised
    raise ValueError(
        f"{name} fails on a small graph, on which history tries it out ({_text(error)}): let forward(x, edge_index) "
        f"run on any graph, or {INSTEAD}"
    ) from error


def _calls_of(name: str, trial: _Trial, tiny: _TinyGraph, has_halo: bool) -> tuple[torch.Size, ...]:
    """The shapes at the calls of one copy of the module, which is compared on all batches."""
    exact = _run(trial.batch_model, tiny.block, tiny.x, _Recorded())
    exact = replace(exact, outputs=trial.outputs)  # by a plain call of the module
    if has_halo:
        # Most nodes at once too: an own node whose neighbours are own nodes reads their new rows.
        for seeds in (*tiny.seeds, torch.arange(tiny.graph.num_nodes - 5).flip(0)):
            block = block_of(tiny.graph, seeds.tolist())
            try:
                on_batch = _run(trial.batch_model, block, tiny.x, _FromTables(exact.rows, block))
            except CallError:
                raise
            except Exception as error:
                raise CallError(
                    f"{name} fails on a batch of {block.num_dst} nodes ({_text(error)}): {INSTEAD}"
                ) from error
            _compare(name, exact, on_batch, block.dst_ids)
        _check_training(name, trial, tiny, exact)
    return exact.shapes


@dataclass(eq=False)
class _Pass:
    """What one forward pass has computed."""

    rows: list[Tensor]
    """By call: rows of the own nodes."""
    outputs: Tensor

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(rows.shape[1:] for rows in self.rows)


class _Recorded(LayerHooks):
    """Records the own rows at each call."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        self.rows.append(h)
        return h


class _FromTables(_Recorded):
    """Reads rows of the halo from exact tables. tables: by call, [num_nodes, ...]."""

    def __init__(self, tables: list[Tensor], block: Block) -> None:
        super().__init__()
        self.tables = tables
        self.halo_ids = block.src_ids[block.num_dst :]

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        return torch.cat([super().after_layer(l, h), self.tables[l][self.halo_ids].to(h.dtype)])


def _run(batch_model: Whole, block: Block, x: Tensor, hooks: _Recorded) -> _Pass:
    """One forward pass on a block, as `Historical` makes it. x: features of all nodes of the tiny graph."""
    block = replace(block, layer_hooks=hooks)
    outputs = batch_model(Batch(block.dst_ids, (block,), x[block.src_ids], None))
    return _Pass(hooks.rows, outputs)


def _compare(name: str, exact: _Pass, ours: _Pass, nodes: Tensor) -> None:
    """Raise `CallError` if rows at a call, or the outputs, are not those of the whole graph."""
    if ours.shapes != exact.shapes:
        raise CallError(
            f"{name}.forward called hl.nn.push_and_pull {len(ours.rows)} times on a batch, and {len(exact.rows)} times "
            "on a whole graph, or with rows of other shapes: call it equally often in each forward pass"
        )
    pairs = zip([*ours.rows, ours.outputs], [*exact.rows, exact.outputs], strict=True)
    wrong = next((l for l, (rows, all_rows) in enumerate(pairs) if not _are_equal(rows, all_rows[nodes])), None)
    if wrong is None:
        return
    num_calls = len(exact.rows)
    if not num_calls:
        raise CallError(
            f"{name} is not made of layers, between which history could be kept, and its forward reads more than "
            f"direct neighbours: write x = hl.nn.push_and_pull(x) between every two convs, or {INSTEAD}"
        )
    place = f"after call {num_calls}" if wrong == num_calls else f"before call {wrong + 1}"
    raise CallError(
        f"{name} would compute other rows on a batch than on the whole graph: {place} of hl.nn.push_and_pull its "
        "forward reads more than direct neighbours and the rows of the call before. Write x = hl.nn.push_and_pull(x) "
        "between every two convs, and leave out what reads all nodes or their degrees (pooling, a norm over nodes or "
        f"by degree). For GCN's norm {NORMALISE_ONCE}"
    )


def _check_training(name: str, trial: _Trial, tiny: _TinyGraph, exact: _Pass) -> None:
    """Raise `CallError` if the module in training reads rows that have no meaning, or calls in its backward pass."""
    block = block_of(tiny.graph, tiny.seeds[0].tolist())
    passes = []
    for noise in (0.0, 1.0):
        batch_model = trial.copy_module(tiny).train()
        for module in batch_model.modules():
            if isinstance(module, MessagePassing):
                module.register_forward_hook(_Noise(noise, block))
        torch.manual_seed(0)  # both draw the same dropout
        with torch.enable_grad():
            passes.append(_run(batch_model, block, tiny.x, _FromTables(exact.rows, block)))
    plain, noisy = passes
    if plain.shapes != exact.shapes:
        raise CallError(
            f"{name}.forward calls hl.nn.push_and_pull {len(plain.rows)} times in training and {len(exact.rows)} times "
            "in evaluation, or with rows of other shapes: call it equally often in each forward pass"
        )
    pairs = zip([*noisy.rows, noisy.outputs], [*plain.rows, plain.outputs], strict=True)
    if not all(_are_equal(rows, plain_rows) for rows, plain_rows in pairs):
        raise CallError(
            f"{name} in training mixes the rows of nodes, also of those outside the batch, which have no meaning "
            "before hl.nn.push_and_pull (a norm over nodes of your own): use torch.nn.BatchNorm1d or a LayerNorm"
        )
    if plain.outputs.requires_grad:
        with active(_InBackward(name)), torch.enable_grad():
            plain.outputs.sum().backward()


class _Noise:
    """A forward hook that adds noise to a conv's rows of the halo, which have no meaning."""

    def __init__(self, noise: float, block: Block) -> None:
        self.noise = noise
        self.block = block

    def __call__(self, conv: nn.Module, arguments: Any, rows: Any) -> Any:
        if not isinstance(rows, Tensor) or rows.size(0) != self.block.num_src:
            return rows
        return torch.cat([rows[: self.block.num_dst], rows[self.block.num_dst :] + self.noise])


class _InBackward:
    """Stands for the calls of a backward pass, of which there must be none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def next(self, x: Tensor) -> Tensor:
        raise CallError(
            f"{self.name} calls hl.nn.push_and_pull again in its backward pass, as torch.utils.checkpoint does: leave "
            "it out of what is checkpointed"
        )


def rows_at_call(batch_model: Whole, number: int, batch: Batch, read: Any) -> Tensor:
    """[num_own, ...]: rows of a batch's own nodes at a call, by a forward pass that ends there.

    read: (call, own rows) -> the halo's rows at that call, for the calls before.
    """
    block = replace(batch.blocks[-1], layer_hooks=UpToCall(number, read))
    try:
        batch_model(replace(batch, blocks=(block,)))
    except CallReached as reached:
        return reached.rows
    raise AssertionError("forward has fewer calls than its trial")
