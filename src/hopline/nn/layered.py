"""`Layered`: the interface of models that are computed layer by layer.

    input rows  -- encode -->  State  -- layer(0, block) -->  State  -- ... -->  State  -- decode -->  outputs

`GNN` is a list of convs, `Traced` the layers that were found in a user's module. Methods, exact inference and budgets
know this class alone.

Between two layers rows may go through tables, with a row per node after each layer. `reads(l)` says which tables layer
`l` reads, at which nodes, and `state_of` makes a `State` of their rows. The rows after a layer have no dropout yet:
`state_of` draws it, from the key of the step and the node.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hopline.core.batch import Batch, Block
from hopline.core.row_handles import Handle, Readable, ReducedRows, Rows, as_dtype
from hopline.nn.conv_facts import facts_of
from hopline.nn.fused import input_reduction, read_ahead, reduced_input
from hopline.nn.norms import ignore_empty_slots, running_statistics
from hopline.nn.plain_call import plain_block

ENCODED = -1
"""The layer number of the rows before the first layer: encoded rows, or the features of a model that encodes none."""


@dataclass(frozen=True, eq=False)
class State:
    """The input of a layer, or its output: a few tensors with a row per node.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> model = hl.nn.GNN([SAGEConv(2, 8), SAGEConv(8, 3)])
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> (batch,) = hl.Sampled(fanouts=(2, 2)).loader(data, torch.tensor([0]))
        >>> state = hl.nn.State(h=batch.x)
        >>> for l, block in enumerate(batch.blocks):
        ...     state = model.layer(l, state, block)
        >>> model.decode(state).shape
        torch.Size([1, 3])
    """

    h: Handle | Tensor
    """[n, width]: rows of the current nodes, or a handle to rows that are not read or not computed yet."""
    x0: Tensor | None = None
    """[n, width]: initial rows, after the encoder. None if no later layer uses them."""
    jk: Tensor | None = None
    """[n, sum of widths]: the outputs of all layers so far, concatenated. None without jumping knowledge."""


class Reads(NamedTuple):
    """The layers after which a layer reads rows. `ENCODED` stands for the rows before the first layer."""

    sources: tuple[int, ...]
    """Read at all sources of a block."""
    own: tuple[int, ...] = ()
    """Read at its destinations alone."""

    @property
    def all(self) -> set[int]:
        return {*self.sources, *self.own}

    @property
    def tables(self) -> list[int]:
        """All of them, ascending, without `ENCODED`."""
        return sorted(self.all - {ENCODED})


class ConvCall(NamedTuple):
    """A conv of a layer, with the rows that it is called with."""

    conv: nn.Module
    h: Tensor
    """[num_src, width]"""
    x0: Tensor | None
    """[num_dst, width]: initial rows. None if the conv takes none."""
    block: Block
    """The edges that the conv is given."""
    number: int
    """Its number in the model, for random draws."""


class ConvSize(NamedTuple):
    """A conv, and the columns of its rows."""

    conv: nn.Module
    in_width: int
    width: int
    initial_width: int | None = None
    """Columns of the initial rows that the conv takes. None: it takes none."""


class LayerSizes(NamedTuple):
    """The widths of a layer, from which its memory is predicted."""

    convs: tuple[ConvSize, ...]
    needs_input_gradient: bool
    numbers_per_dst: float
    """Numbers per destination in forward and backward, besides those of the convs."""


class ModelSizes(NamedTuple):
    """The widths of a model. Numbers are the values per node that forward and backward hold, besides the convs'."""

    numbers_per_input: float
    layers: tuple[LayerSizes, ...]
    numbers_per_output: float
    row_widths: tuple[int, ...]
    """[num_layers + 1] columns of the rows before the first layer, and after each layer."""


class Layered(nn.Module):
    """A model that is computed layer by layer: a `GNN`, or a `Traced`."""

    # ---- what subclasses define

    convs: Any
    """The convs of all layers: a list, or an `nn.ModuleList`."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """The number of layers. Each has a block of its own in a batch."""

    @property
    @abstractmethod
    def encodes(self) -> bool:
        """Whether `encode` changes the input rows in evaluation, or stores initial rows."""

    @abstractmethod
    def encode(self, x: Rows | Tensor, ids: Tensor, key: int | Tensor | None) -> State:
        """The state before the first layer.

        ids: [n] int64: keys of each row's draws, such as node ids.
        key: the key of this step's draws. None: dropout is drawn by torch's generator.
        """

    @abstractmethod
    def initial(self, state: State) -> State:
        """What layers after the first read of an encoded state. It is less to keep than all of it."""

    @abstractmethod
    def encoded_rows(self, state: State) -> Tensor:
        """[n, width]: the rows of an encoded state in evaluation, as exact inference stores them."""

    @abstractmethod
    def reads(self, l: int) -> Reads:
        """The layers whose rows layer `l` reads."""

    @abstractmethod
    def state_of(
        self,
        l: int,
        sources: Mapping[int, Handle | Tensor],
        own: Mapping[int, Tensor],
        encode: Callable[[], State] | None,
        block: Block,
    ) -> State:
        """The input of layer `l`, made of rows after earlier layers as `reads(l)` names them.

        sources: by layer, [num_src, width] rows of the block's sources. own: by layer, [num_dst, width] rows of its
            destinations.
        encode: computes the state that `initial` returns, if `reads(l)` names `ENCODED` and there is no table of these
            rows.
        """

    @abstractmethod
    def _layer(self, l: int, state: State, block: Block) -> State:
        """Layer `l`, without the callbacks before it and without care for norms (`layer`)."""

    @abstractmethod
    def decode(self, state: State) -> Tensor:
        """The model's outputs from the last layer's state."""

    @abstractmethod
    def conv_calls(self, l: int, state: State, block: Block) -> Sequence[ConvCall]:
        """The convs of layer `l`, with the rows that they are called with."""

    @abstractmethod
    def conv_sizes(self, l: int, width_after: Callable[[int], int]) -> Sequence[ConvSize]:
        """The convs of layer `l` with the widths of their input. width_after: of the rows after a layer."""

    @abstractmethod
    def modules_of(self, l: int) -> Sequence[nn.Module]:
        """The modules of layer `l`, or of the encoder for `ENCODED`."""

    @abstractmethod
    def sizes(self, num_features: int) -> ModelSizes:
        """The widths of the model for input rows of this width."""

    @property
    @abstractmethod
    def functions(self) -> Sequence[Any]:
        """The functions between convs that are no modules."""

    @property
    @abstractmethod
    def reads_rows(self) -> bool:
        """Whether the first conv aggregates input rows as they are, so that its kernel can read a table."""

    @abstractmethod
    def keeps_handle(self, table: Readable) -> bool:
        """Whether a batch should hold a handle to input rows of this table, and not the rows.

        True if the first conv's kernel reads the stored rows itself. True also if the table is sparse and the
        model begins with a product, which need not make the rows dense.
        """

    @property
    @abstractmethod
    def _input_conv(self) -> nn.Module | None:
        """The first conv, if its layer may run on aggregated features alone. None if not."""

    @abstractmethod
    def rest_parameters(self) -> list[nn.Parameter]:
        """Parameters that may have a weight decay of their own: those of encoder and head."""

    @abstractmethod
    def check_blocks(self, num_features: int, edge: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a module between convs computes something else on a block than on the graph.

        Convs are not checked here: `convolve` tries each when it first runs.

        num_features: columns of the input rows. edge: the edge arrays of the graph.
        """

    @abstractmethod
    def mixing_in_training(
        self, num_features: int, edge: Mapping[str, Tensor], *, over_ranks: bool = False
    ) -> Callable[..., Any] | None:
        """The first module that mixes rows in training, as batch norms do, or whose buffers change with the rows.

        over_ranks: leave out batch norms, convs and buffers, which ranks compute together.
        """

    @abstractmethod
    def edge_arrays_read(self, edge: Mapping[str, Tensor]) -> list[str]:
        """Names of the graph's edge arrays that a conv takes. edge: all arrays, of which no row is read."""

    # ---- what they share

    def check_history(self, num_features: int, edge: Mapping[str, Tensor]) -> None:
        """Raise ValueError if rows between layers differ in training and in evaluation by more than dropout."""

    @property
    def keeps_rows(self) -> bool:
        """Whether layers read rows of other layers than the one before, or of their own nodes, as for jumping
        knowledge."""
        layers = range(self.num_layers)
        reads_own = any(k != ENCODED for l in layers for k in self.reads(l).own)
        return reads_own or any(k not in (l - 1, ENCODED) for l in layers for k in self.reads(l).sources)

    @property
    def is_fused(self) -> bool:
        """Whether every conv is fused.

        The work is then in hopline's kernels and in linear layers. On a CPU both can use hopline's threads in
        place of torch's (`ops.own_threads`).
        """
        return all(facts_of(conv).is_fused for conv in self.convs)

    def read_ahead(self, rows: Rows, block: Block) -> Rows:
        """Compute the part of the first layer that needs no parameter, in a thread that prefetches batches.

        Returns `ReducedRows` with the result, or the handle as it is if there is no such part.
        """
        conv = self._input_conv
        return read_ahead(conv, rows, block) if conv is not None and self.reads_rows else rows

    @property
    def input_reduction(self) -> tuple[Any, ...] | None:
        """A key for the part of the first layer that needs no parameter. None if there is no such part.

        The part is the same in every evaluation, so exact inference caches its result by this key.
        """
        conv = self._input_conv
        return None if conv is None else input_reduction(conv)

    def reduced_input(self, h: Handle | Tensor, block: Block) -> tuple[Tensor, str] | None:
        """(rows, how): the part of the first layer that needs no parameter, computed on a block.

        None if the layer has no such part. `layer(0, ...)` computes the rest if its state holds the result as
        `ReducedRows`.
        """
        conv = self._input_conv
        return None if conv is None else reduced_input(conv, self._in_precision(h, conv), block)

    def layer(self, l: int, state: State, block: Block) -> State:
        """Compute layer `l` on a block: from the state of its sources, the state of its destinations.

        Layer hooks of the block may add rows of other nodes behind those of the destinations.
        """
        if block.layer_hooks is not None:
            block.layer_hooks.before_layer(l, self, state, block)
        # A single row, or none, has no variance, so batch norms use their running statistics. Not where
        # ranks sum statistics: a rank with one row must take part in the sum, or the others would wait for
        # it.
        sums_over_ranks = block.convs is not None and block.convs.over_ranks
        has_no_variance = block.num_dst <= 1 and not sums_over_ranks
        modules = self.modules_of(l)
        norms = running_statistics(modules) if has_no_variance else ignore_empty_slots(modules, block)
        with norms:
            return self._layer(l, state, block)

    def forward(
        self,
        batch: Batch | Tensor,
        edge_index: Tensor | None = None,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Outputs for the batch's examples: [num_examples, ...]. Or `model(x, edge_index)`, as PyG's models are called.

        batch: a `Batch`; or the rows [num_nodes, num_features] of a whole graph.
        edge_index: [2, num_edges] int64, sources first. Convs get `edge_weight` and `edge_attr` if they take them.
        """
        if isinstance(batch, Tensor):
            if edge_index is None:
                raise ValueError("the model was called with rows alone: call model(x, edge_index), or model(batch)")
            edge = {"weight": edge_weight, "attr": edge_attr}
            given = {name: array for name, array in edge.items() if array is not None}
            block = plain_block(batch.size(0), edge_index, given)
            batch = Batch(block.src_ids, (block,) * self.num_layers, batch, None)
        if len(batch.blocks) != self.num_layers:
            raise ValueError(f"the model has {self.num_layers} layers but the batch has {len(batch.blocks)} blocks")
        # On the blocks of a shard, batch norms are over the rows of all ranks.
        conv_runner = batch.blocks[0].convs
        with nullcontext() if conv_runner is None else conv_runner.global_norms():
            with ignore_empty_slots(self.modules_of(ENCODED), batch.blocks[0]):
                state = self.encode(batch.input_rows, batch.input_keys, batch.key)
            for l, block in enumerate(batch.blocks):
                state = self.layer(l, state, block)
            out = self.decode(state)
        return out if batch.output_idx is None else out[batch.output_idx]

    def _in_precision(self, h: Handle | Tensor, conv: nn.Module) -> Handle | Tensor:
        """The first layer's input in the model's precision, if its conv has no parameters.

        A conv with parameters converts its input itself.
        """
        if has_parameters(conv):
            return h
        if isinstance(h, ReducedRows) and h.reduced_and_own.dtype == self._dtype:
            return h
        if isinstance(h, Rows) and h.table.dtype == self._dtype == torch.float32:
            return h  # in the right precision already, and the conv can read the table itself
        return self._as_dtype(h)

    def _as_dtype(self, rows: Handle | Tensor) -> Tensor:
        """The rows as a tensor in the model's precision. A handle is read."""
        return as_dtype(rows, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The precision of the model's parameters; float32 if it has none."""
        return next((p.dtype for p in self.parameters()), torch.float32)


def row_widths(model: Layered, num_features: int) -> list[int]:
    """[num_layers + 1] columns of the rows before the first layer, and after each layer."""
    return list(model.sizes(num_features).row_widths)


def has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def inner_widths(modules: Iterable[nn.Module]) -> int:
    """The sum of both widths of every weight matrix."""
    return sum(sum(p.shape) for module in modules for p in module.parameters() if p.dim() >= 2)
