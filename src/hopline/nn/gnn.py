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
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, JumpingKnowledge
from torch_geometric.nn.models.basic_gnn import BasicGNN

from hopline import ops
from hopline.core.batch import Block
from hopline.core.row_handles import DroppedRows, Handle, Readable, Rows, as_tensor
from hopline.nn.conv_adapter import EDGE_ARGUMENTS, convolve, edge_arguments_of
from hopline.nn.conv_facts import has_hooks, is_linear, reads_rows, takes_x0
from hopline.nn.fused import defer_layer, own_rows, project
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
from hopline.nn.norms import make_norm
from hopline.nn.row_wise import Module, check_row_wise, mixing_in_training
from hopline.nn.tree_layers import is_tree_on_gpu

INPUT = -1
"""The number of the input dropout among the keys of a step, next to the layers' numbers 0, 1, ..."""


class GNN(Layered):
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
    def _input_conv(self) -> nn.Module | None:
        """The first conv, if its layer may run on aggregated features alone.

        The conv must take the features as they are. GCNConv keeps no own rows in `ReducedRows`, so it must
        have no residual that reads them.
        """
        reduces = not self.encodes and not (self.residual and isinstance(self.convs[0], GCNConv))
        return self.convs[0] if reduces else None

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
        if not has_parameters(self.convs):
            layers = [layer for module in modules for layer in module.modules()]
            with_parameters = [layer for layer in layers if has_parameters(layer, recurse=False)]
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

    def mixing_in_training(
        self, num_features: int, edge: Mapping[str, Tensor], *, over_ranks: bool = False
    ) -> Module | None:
        return mixing_in_training(self, num_features, edge, over_ranks=over_ranks)

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

    # ---- one layer

    def initial(self, state: State) -> State:
        return replace(state, h=torch.empty(0))

    def encoded_rows(self, state: State) -> Tensor:
        return as_tensor(state.h)

    def reads(self, l: int) -> Reads:
        jumps = l == self.num_layers - 1 and self.keeps_jk
        reads_encoded = self.keeps_x0 or (jumps and self.jk_encoder)
        own = (ENCODED,) if reads_encoded else ()
        return Reads(sources=(l - 1,), own=(*own, *range(l)) if jumps else own)

    def state_of(
        self,
        l: int,
        sources: Mapping[int, Handle | Tensor],
        own: Mapping[int, Tensor],
        encode: Callable[[], State] | None,
        block: Block,
    ) -> State:
        jk = None
        if l == self.num_layers - 1 and self.keeps_jk:
            keys = block.src_keys[: block.num_dst]
            rows = [self.apply_dropout(own[k], keys, block.key, k) for k in range(l)]
            if self.jk_encoder:
                encoded = own[ENCODED] if encode is None else encode().jk
                assert encoded is not None
                rows = [encoded, *rows]
            jk = torch.cat(rows, dim=1) if rows else None
        h = sources[l - 1]
        if l and self.training and self.dropout:
            h = self.apply_dropout(as_tensor(h), block.src_keys, block.key, l - 1)
        x0 = None
        if self.keeps_x0:
            x0 = own[ENCODED] if encode is None else encode().x0
        return State(h, x0, jk)

    def _layer(self, l: int, state: State, block: Block) -> State:
        """Layer `l`: conv, initial residual, `_after_conv`, layer hooks, dropout, jumping knowledge."""
        num_dst = block.num_dst
        if l == 0:
            state = State(self._in_precision(state.h, self.convs[0]), state.x0, state.jk)
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

    def conv_calls(self, l: int, state: State, block: Block) -> Sequence[ConvCall]:
        x0 = None if state.x0 is None else state.x0[: block.num_dst]
        return [ConvCall(self.convs[l], as_tensor(state.h), x0, block, l)]

    def conv_sizes(self, l: int, width_after: Callable[[int], int]) -> Sequence[ConvSize]:
        initial_width = width_after(ENCODED) if self.keeps_x0 else None
        return [ConvSize(self.convs[l], width_after(l - 1), 0, initial_width)]

    def modules_of(self, l: int) -> Sequence[nn.Module]:
        if l == ENCODED:
            return [] if self.encoder is None else [self.encoder]
        return [self.convs[l], self.norms[l]]

    @property
    def functions(self) -> Sequence[Any]:
        return [] if isinstance(self.act, nn.Module | None) else [self.act]

    def edge_arrays_read(self, edge: Mapping[str, Tensor]) -> list[str]:
        # A subclass counts as reading all of them, since its own layers may take any from a block.
        if type(self) is not GNN:
            return list(edge)
        names = {EDGE_ARGUMENTS[argument] for conv in self.convs for argument in edge_arguments_of(conv, edge)}
        return [name for name in edge if name in names]

    def sizes(self, num_features: int) -> ModelSizes:
        per_input: float = 0
        width = num_features
        if self.encoder is not None:
            per_input += 2 * width + 4 * inner_widths([self.encoder])
            width = out_width(self.encoder)
        if not self.reads_rows:  # the first conv's input rows are a tensor, not read from the table
            per_input += 3 * width
        widths = [width]
        for conv in self.convs:
            # A conv without parameters, such as APPNP, keeps the width of its input.
            widths.append(out_width(conv) if has_parameters(conv) else widths[-1])
        has_norm = any(type(norm) is not nn.Identity for norm in self.norms)
        rows_after_conv = 12 if self.residual or self.encodes or has_norm else 6
        jk_numbers = 2 * sum(widths) if self.keeps_jk else 0
        layers = []
        for l, (in_width, conv_width) in enumerate(pairwise(widths)):
            layers.append(
                LayerSizes(
                    convs=(ConvSize(self.convs[l], in_width, conv_width),),
                    needs_input_gradient=l > 0 or self.encodes,
                    numbers_per_dst=rows_after_conv * conv_width + jk_numbers,
                )
            )
        # Jumping knowledge and the last linear layer, if the model has them.
        head = [getattr(self, name) for name in ("jk", "lin") if getattr(self, name, None) is not None]
        per_output = 6 * (inner_widths(head) + widths[-1])
        return ModelSizes(per_input, tuple(layers), per_output, tuple(widths))

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
