"""`GNN`: PyG convs with norm, activation, dropout, residuals and jumping knowledge, run layer by layer.

    input rows  -- encode -->  State  -- layer(0, block) -->  State  -- ... -->  State  -- decode -->  outputs

Mini-batch training runs the whole chain (`forward`). Other methods stop between two layers: exact inference
computes a layer for all nodes before the next one, and historical training replaces rows between layers.
All call the same three methods, so the mathematics of a model is written down once.

A state may hold a handle in place of rows, so that rows are read or computed where they are used:

    Rows           rows of a table, which the first conv's kernel reads itself
    ReducedRows    the first layer's aggregation of the features, computed before the layer runs
    DroppedRows    rows of a table with input dropout
    PendingRows    a hidden layer that the next layer's kernel completes (`tree_layers`)

Dropout is keyed: a mask depends on the step's key, the layer and `Block.src_keys`. These are node ids, or
slots in the tree layout. So it does not matter in which micro-batch or order a row is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, JumpingKnowledge
from torch_geometric.nn.models.basic_gnn import BasicGNN

from hopline import ops
from hopline.core.batch import Batch, Block
from hopline.core.row_handles import DroppedRows, Handle, Readable, ReducedRows, Rows, as_dtype, as_tensor
from hopline.nn.conv_adapter import convolve
from hopline.nn.conv_facts import facts_of, has_hooks, is_linear, reads_rows, takes_x0
from hopline.nn.fused import defer_layer, input_reduction, own_rows, project, read_ahead, reduced_input
from hopline.nn.norms import ignore_empty_slots, make_norm, running_statistics
from hopline.nn.plain_call import plain_block
from hopline.nn.row_wise import check_row_wise
from hopline.nn.tree_layers import is_tree_on_gpu

INPUT = -1
"""The number of the input dropout among the keys of a step, next to the layers' numbers 0, 1, ..."""


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


class GNN(nn.Module):
    """A model made of PyG convs.

    Parameters are named as in PyG's own models (`convs.0...`, `norms.0...`, `lin`).

    Every conv but the last is followed by norm, activation and dropout. With jumping knowledge the last one
    is too. An encoder is followed by activation and dropout. Call the model with a `Batch`, or on a whole graph
    as PyG's models are called, `model(x, edge_index)`. `hl.infer.exact` runs it on graphs that do not fit.

    Args:
        convs: One per layer. The first takes rows of width num_features, or of the encoder's output.
        norm: "batch", "layer", None, or a module per conv.
        act: The activation: "relu", "elu", ..., a module or function, or None.
        act_first: Whether the activation comes before the norm.
        dropout: Probability of dropout after every activation, drawn from the node's key.
        input_dropout: Probability of dropout on the input rows.
        residual: Whether a hidden layer's input is added to its output, where the widths are equal.
        residual_first: Whether the residual is added before the activation instead of after it.
        initial_residual: Weight of the encoder's output mixed into every layer. GCN2Conv mixes it in itself.
        jk: Jumping knowledge: "cat", "max", "lstm", "last" or a module. It needs `head`.
        jk_encoder: Whether jumping knowledge includes the encoder's rows, as the first.
        encoder: A module before the first conv, such as a Linear, that computes each node's row by itself.
        head: A module after the last conv, or after jumping knowledge.

    Raises:
        TypeError: `convs`, `encoder` or `head` is no module.
        ValueError: There is no conv, a dropout is not between 0 and 1, or norms are not one per conv. Or
            jumping knowledge has no head, or layers of several widths.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> model = hl.nn.GNN([SAGEConv(2, 8), SAGEConv(8, 3)], norm="batch", dropout=0.5)
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> (batch,) = hl.Sampled(fanouts=(2, 2)).loader(data, torch.arange(4))
        >>> model(batch).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        convs: Iterable[nn.Module],
        *,
        norm: str | Sequence[nn.Module] | None = None,
        act: str | Callable[[Tensor], Tensor] | None = "relu",
        act_first: bool = False,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        residual: bool = False,
        residual_first: bool = False,
        initial_residual: float = 0.0,
        jk: str | nn.Module | None = None,
        jk_encoder: bool = False,
        encoder: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if isinstance(convs, Iterable):
            layers = list(convs)
            ends = [module for module in (encoder, head) if module is not None]
            wrong = [part for part in (*layers, *ends) if not isinstance(part, nn.Module)]
        else:
            wrong = [convs]
        if wrong:
            raise TypeError(
                f"GNN is made of a list of modules, not of {wrong[0]!r}: write GNN([SAGEConv(in_channels, "
                "out_channels), ...])"
            )
        self.convs = nn.ModuleList(layers)
        if not len(self.convs):
            raise ValueError("GNN needs at least one conv: GNN([SAGEConv(in_channels, out_channels)])")
        for p in (dropout, input_dropout):
            if not 0 <= p <= 1:
                raise ValueError(f"dropout must be between 0 and 1, not {p}")
        if jk is not None and head is None:
            raise ValueError("jumping knowledge needs head=, for example torch.nn.Linear(hidden, num_classes)")
        self.norms = self._make_norms(norm, with_last=jk is not None)
        self.act = _activation(act) if isinstance(act, str) else act
        self.act_first = act_first
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.residual = residual
        self.residual_first = residual_first
        self.initial_residual = initial_residual
        self.encoder = encoder
        self.keeps_jk = jk is not None and jk != "last"
        self.jk_encoder = jk_encoder and self.keeps_jk
        self.acts_last = jk is not None
        if isinstance(jk, nn.Module):
            self.jk = jk
        elif jk is not None and jk != "last":
            widths = {out_width(conv) for conv in self.convs}
            if len(widths) > 1:
                raise ValueError(
                    f"jumping knowledge needs layers of one width, not {sorted(widths)}: use head= for the rest"
                )
            num_inputs = len(self.convs) + (1 if self.jk_encoder else 0)
            self.jk = JumpingKnowledge(jk, out_width(self.convs[0]), num_inputs)
        if head is not None:
            self.lin = head

    def _make_norms(self, norm: str | Sequence[nn.Module] | None, with_last: bool) -> nn.ModuleList:
        """One norm per conv, `Identity` for none. with_last: a norm given by name follows the last conv
        too."""
        if norm is None:
            norms: list[nn.Module] = [nn.Identity() for _ in self.convs]
        elif isinstance(norm, str):
            norms = [make_norm(norm, out_width(conv)) for conv in self.convs]
            if not with_last:
                norms[-1] = nn.Identity()  # no norm on the output
        elif isinstance(norm, Iterable):
            norms = list(norm)
        else:
            raise ValueError(
                f"norm must be a list with a module per conv: write norm=[{type(norm).__name__}(...), ...]"
            )
        if len(norms) == len(self.convs) - 1:  # no norm for the last conv, as in PyG's models
            norms.append(nn.Identity())
        if len(norms) != len(self.convs):
            raise ValueError(f"norm must have one module per conv: {len(self.convs)} convs, {len(norms)} norms")
        return nn.ModuleList(norms)

    @classmethod
    def from_pyg(cls, model: BasicGNN) -> GNN:
        """A `GNN` with the layers of a PyG model (GraphSAGE, GCN, GAT, ...).

        Parameters are shared, not copied.
        """
        # PyG has no module for jk="last", only its name in `jk_mode`.
        jk = getattr(model, "jk", None) or ("last" if model.jk_mode is not None else None)
        return cls(
            model.convs,
            norm=list(model.norms),
            act=model.act,
            act_first=model.act_first,
            dropout=model.dropout.p,
            jk=jk,
            head=getattr(model, "lin", None),
        )

    @property
    def num_layers(self) -> int:
        return len(self.convs)

    @property
    def reads_rows(self) -> bool:
        """Whether the first conv aggregates input rows as they are, so that its kernel can read a table."""
        return self.encoder is None and not self.input_dropout and not self.keeps_x0 and reads_rows(self.convs[0])

    def keeps_handle(self, table: Readable) -> bool:
        """Whether a batch should hold a handle to input rows of this table, and not the rows.

        True if the first conv's kernel reads the stored rows itself. True also if the table is sparse and the
        model begins with a product, which need not make the rows dense.
        """
        stored = table.storage()
        if stored is not None:
            return self.reads_rows and stored.dtype == next(self.parameters()).dtype
        # Reading no rows tells whether the table is sparse.
        return self._projects and table.read_csr(torch.empty(0, dtype=torch.int64)) is not None

    @property
    def _projects(self) -> bool:
        """Whether the first operation on input rows, apart from dropout, is a linear layer."""
        if self.encoder is not None:
            return is_linear(self.encoder)
        return isinstance(self.convs[0], GCNConv) and not self.keeps_x0

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
        return read_ahead(self.convs[0], rows, block) if self.reads_rows else rows

    @property
    def input_reduction(self) -> tuple[Any, ...] | None:
        """A key for the part of the first layer that needs no parameter. None if there is no such part.

        The part is the same in every evaluation, so exact inference caches its result by this key.
        """
        return input_reduction(self.convs[0]) if self._reduces_input else None

    def reduced_input(self, h: Handle | Tensor, block: Block) -> tuple[Tensor, str] | None:
        """(rows, how): the part of the first layer that needs no parameter, computed on a block.

        None if the layer has no such part. `layer(0, ...)` computes the rest if its state holds the result as
        `ReducedRows`.
        """
        return reduced_input(self.convs[0], self._in_precision(h), block) if self._reduces_input else None

    @property
    def _reduces_input(self) -> bool:
        """Whether the first layer may run on aggregated features alone.

        The conv must take the features as they are. GCNConv keeps no own rows in `ReducedRows`, so it must
        have no residual that reads them.
        """
        return not self.encodes and not (self.residual and isinstance(self.convs[0], GCNConv))

    @property
    def encodes(self) -> bool:
        """Whether `encode` changes the input rows in evaluation, or stores initial rows."""
        return self.encoder is not None or self.keeps_x0

    @property
    def keeps_x0(self) -> bool:
        """Whether layers read the initial rows, so `State.x0` holds them: `initial_residual`, or a conv's argument."""
        return self.initial_residual > 0 or any(map(takes_x0, self.convs))

    def rest_parameters(self) -> list[nn.Parameter]:
        """Parameters that may have a weight decay of their own: those of encoder and head.

        If the model has neither, those of the last conv. If the convs have no parameters, as in APPNP, only
        the last layer of encoder and head counts.
        """
        modules = [module for module in (self.encoder, getattr(self, "lin", None)) if module is not None]
        if not _has_parameters(self.convs):
            layers = [layer for module in modules for layer in module.modules()]
            with_parameters = [layer for layer in layers if _has_parameters(layer, recurse=False)]
            modules = with_parameters[-1:]
        if not modules:
            modules = [self.convs[-1]]
        return [p for module in modules for p in module.parameters()]

    def check_blocks(self, num_features: int, edge: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a module between convs computes something else on a block than on the graph.

        Convs are not checked here: `convolve` tries each when it first runs.

        num_features: columns of the input rows. edge: the edge arrays of the graph.
        """
        check_row_wise(self, num_features, edge)

    def encode(self, x: Rows | Tensor, ids: Tensor, key: int | Tensor | None) -> State:
        """The state before the first layer: input rows after input dropout and encoder.

        ids: [n] int64: keys of each row's draws, such as node ids.
        key: the key of this step's draws. None: dropout is drawn by torch's generator.
        """
        if self.training and self.input_dropout:
            # Sparse rows must stay a handle for the product, so dropout is put off until they are read.
            if key is not None and isinstance(x, Rows) and self.keeps_handle(x.table):
                x = DroppedRows(x.table, x.ids, self.input_dropout, ops.purpose_key(key, INPUT), ids)
            else:
                x = self._drop(self._as_dtype(x), self.input_dropout, ids, key, INPUT)
        if self.encoder is not None:
            if isinstance(x, Rows) and is_linear(self.encoder):
                encoded = project(self.encoder, x)
            else:
                encoded = self.encoder(self._as_dtype(x))
            x = encoded if self.act is None else self.act(encoded)
        x0 = self._as_dtype(x) if self.keeps_x0 else None
        if self.encoder is not None:
            # Layers draw by the numbers 0 .. num_layers - 1, the encoder by the next one.
            x = self._drop(self._as_dtype(x), self.dropout, ids, key, self.num_layers)
        jk = self._as_dtype(x) if self.jk_encoder else None
        # Without an encoder `x` may be a handle. `x0` then holds its rows, so they are not read again.
        h = x0 if x0 is not None and self.encoder is None else x
        return State(h, x0, jk)

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
        modules = [self.convs[l], self.norms[l]]
        norms = running_statistics(modules) if has_no_variance else ignore_empty_slots(modules, block)
        with norms:
            return self._layer(l, state, block)

    def _layer(self, l: int, state: State, block: Block) -> State:
        """Layer `l`: conv, initial residual, `_after_conv`, layer hooks, dropout, jumping knowledge."""
        num_dst = block.num_dst
        if l == 0:
            state = State(self._in_precision(state.h), state.x0, state.jk)
        x0 = None if state.x0 is None else state.x0[:num_dst]
        if is_tree_on_gpu(block) and self._is_plain(l):
            p = self.dropout if self.training else 0.0
            key = None if block.key is None or not p else ops.purpose_key(block.key, l)
            pending = defer_layer(self.convs[l], state.h, block, p, key)
            if pending is not None:
                return State(pending)

        h = convolve(self.convs[l], state.h, block, x0, l)
        if self.initial_residual and x0 is not None and not takes_x0(self.convs[l]):
            if h.shape != x0.shape:
                raise ValueError(
                    f"initial_residual mixes rows of width {x0.size(1)} into layer {l}, whose width is {h.size(1)}: "
                    "make all widths equal and give head= for the output"
                )
            h = (1 - self.initial_residual) * h + self.initial_residual * x0

        has_act = l < self.num_layers - 1 or self.acts_last
        fuses_relu = self._fuses_relu_and_dropout(block)
        if has_act:
            h = self._after_conv(l, h, state.h, relu_later=fuses_relu)
        if block.layer_hooks is not None:
            h = block.layer_hooks.after_layer(l, h)
        if has_act:
            h = self._drop(h, self.dropout, block.src_keys[: h.size(0)], block.key, l, with_relu=fuses_relu)

        jk = None
        if self.keeps_jk:
            jk = h[:num_dst] if state.jk is None else torch.cat([state.jk[:num_dst], h[:num_dst]], dim=1)
        return State(h, x0, jk)

    def _is_plain(self, l: int) -> bool:
        """Whether layer `l` is hidden, and nothing but conv, ReLU and dropout.

        Only such layers are deferred.
        """
        is_hidden = l < self.num_layers - 1
        has_norm = type(self.norms[l]) is not nn.Identity
        has_more = self.residual or self.keeps_jk or self.keeps_x0 or has_norm
        return self._acts_by_relu and not has_more and is_hidden

    @property
    def _acts_by_relu(self) -> bool:
        """Whether the activation is a ReLU without hooks."""
        if type(self.act) is nn.ReLU:
            return not has_hooks(self.act)
        return self.act in (torch.relu, torch.nn.functional.relu)

    def _fuses_relu_and_dropout(self, block: Block) -> bool:
        """Whether dropout comes right after a ReLU, so that one kernel computes both (`ops.relu_dropout`)."""
        draws = self.training and self.dropout > 0 and block.key is not None
        # A norm, a residual or layer hooks may stand between the activation and dropout.
        something_between = self.act_first or (self.residual and not self.residual_first)
        return draws and not something_between and block.layer_hooks is None and self._acts_by_relu

    def decode(self, state: State) -> Tensor:
        """The model's outputs from the last layer's state: jumping knowledge, then the head."""
        h = as_tensor(state.h)
        if self.keeps_jk:
            assert state.jk is not None
            h = self.jk(list(state.jk.split(h.size(1), dim=1)))
        return self.lin(h) if hasattr(self, "lin") else h

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
            with ignore_empty_slots([] if self.encoder is None else [self.encoder], batch.blocks[0]):
                state = self.encode(batch.input_rows, batch.input_keys, batch.key)
            for l, block in enumerate(batch.blocks):
                state = self.layer(l, state, block)
            out = self.decode(state)
        return out if batch.output_idx is None else out[batch.output_idx]

    def _after_conv(self, l: int, h: Tensor, layer_input: Handle | Tensor, relu_later: bool = False) -> Tensor:
        """Norm, activation and residual of layer `l`, in the order of the model's settings.

        layer_input: its first rows, those of the destinations, are the residual. relu_later: the activation is a
        ReLU that `_drop` computes together with dropout.
        """
        residual: Tensor | None = None
        if self.residual and tuple(h.shape[1:]) == tuple(layer_input.shape[1:]):
            residual = self._as_dtype(own_rows(layer_input, h.size(0)))
        if self.act is not None and self.act_first:
            h = self.act(h)
        h = self.norms[l](h)
        if residual is not None and self.residual_first:
            h = h + residual
        if self.act is not None and not self.act_first and not relu_later:
            h = self.act(h)
        if residual is not None and not self.residual_first:
            h = h + residual
        return h

    def apply_dropout(self, h: Tensor, ids: Tensor, key: int | Tensor | None, l: int) -> Tensor:
        """The rows `h` after layer `l` with that layer's dropout, as the next layer reads them.

        ids: [n] int64: keys of each row's draws. key: the key of the step's draws.
        """
        return self._drop(h, self.dropout, ids, key, l)

    def _drop(
        self, h: Tensor, p: float, ids: Tensor, key: int | Tensor | None, purpose: int, with_relu: bool = False
    ) -> Tensor:
        """Rows after dropout, and after a ReLU before it if `with_relu`.

        purpose: the number of the draw among the keys of a step: `INPUT`, a layer, or `num_layers` for the
        encoder.
        """
        if not self.training or p == 0:
            return h
        if key is None:
            return torch.nn.functional.dropout(h, p)
        drop = ops.relu_dropout if with_relu else ops.keyed_dropout
        return drop(h, p, ops.purpose_key(key, purpose), ids)

    def _in_precision(self, h: Handle | Tensor) -> Handle | Tensor:
        """The first layer's input in the model's precision, if the first conv has no parameters.

        A conv with parameters converts its input itself.
        """
        if _has_parameters(self.convs[0]):
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


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of torch.nn.functional with this name."""
    function: Any = getattr(torch.nn.functional, name, None)
    if not callable(function):
        raise ValueError(f"act must be a function of torch.nn.functional such as 'relu' or 'elu', not {name!r}")
    return cast("Callable[[Tensor], Tensor]", function)


def out_width(conv: Any) -> int:
    """The number of columns that a conv or an encoder puts out, over all heads if they are concatenated."""
    width = getattr(conv, "out_channels", None) or getattr(conv, "channels", None)
    if width is None:
        # torch's Linear has `out_features`, PyG's has `out_channels`.
        widths = [getattr(inner, "out_features", getattr(inner, "out_channels", None)) for inner in conv.modules()]
        inner_widths = [inner_width for inner_width in widths if isinstance(inner_width, int)]
        if not inner_widths:
            raise ValueError(f"{type(conv).__name__} does not tell its width: pass norm and jk as modules")
        width = inner_widths[-1]
    return width * getattr(conv, "heads", 1) if getattr(conv, "concat", False) else width


def row_widths(model: GNN, num_features: int) -> list[int]:
    """[num_layers + 1] columns of the rows before the first layer, and after each layer.

    A conv without parameters, such as APPNP, keeps the width of its input.
    """
    widths = [num_features if model.encoder is None else out_width(model.encoder)]
    for conv in model.convs:
        widths.append(out_width(conv) if _has_parameters(conv) else widths[-1])
    return widths


def _has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None
