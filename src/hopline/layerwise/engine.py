"""`Layers`: a model computed layer by layer, forward and backward, over pieces of a graph.

A *piece* is a set of nodes with all their in-edges. All pieces go through a layer before any goes through the next.
The rows between two layers are kept in tables, so only one piece at a time needs device memory for a layer:

    forward     for each layer l, for each piece:
                    rows after l - 1, from the table --> model.layer(l) --> rows after l, into the table

    backward    for each layer l from the last, for each piece:
                    rows after l - 1, from the table --> model.layer(l) again, now with autograd
                    gradient at rows after l --> backward() --> parameters' .grad, and added at rows after l - 1

Adding up the gradients of all pieces gives what one backward pass over the whole graph gives, up to the order of
summation. It is gradient checkpointing with the layer boundaries as checkpoints. The price is that layers are
computed twice, and memory for a table of rows per layer and for the gradients at these rows. The tables may be on
the device, in host memory or on disk.

Random draws must be the same both times. Dropout is a function of the step's key and the node. For convs that draw by
themselves, `Layers.same_draws` seeds torch's generator.

In a forward pass two host threads may help. One prepares pieces that come next, the other writes rows of pieces that
are done (`LayerPlan.prefetch_pieces`, `LayerPlan.write_queue_pieces`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Batch, Block, LayerHooks
from hopline.core.row_handles import Rows, as_tensor
from hopline.device import pinned
from hopline.device.snapshots import preserve_rng
from hopline.nn.layered import ENCODED, Layered, State
from hopline.nn.smoothness import smoothness_penalty
from hopline.pipeline.stages import Pipeline, Stage
from hopline.tables.layers import LayerTables, RowSource, as_positions
from hopline.util import trace

C = TypeVar("C")


@dataclass(eq=False)
class Piece:
    """Nodes that a layer is computed at together, with all their in-edges. Plans make pieces."""

    block: Block
    """Destinations: the nodes of the piece. Sources: all their in-neighbours, and the nodes themselves."""
    src: Any
    """Table positions of the sources' rows, in a form that the `Boundaries` understand: the engine passes it on."""
    dst: Any
    """Table positions of the destinations' rows, in a form that the `Boundaries` understand."""
    number: int = 0
    """Tells the pieces of a layer apart: in `Layers.same_draws`, and for plans with `encodes_once`."""
    batch: Batch | None = None
    """Seeds and labels of the piece. None if no loss is computed at it."""
    chunk: Any = None
    """The chunk of the plan that the piece was made of."""


class LayerPlan(ABC, Generic[C]):
    """Decides at which nodes each layer is computed, and in which pieces.

    `C` is the type of a chunk: what a plan lists, before the edges of a piece are made. `piece` may run in a thread of
    the engine; all other methods run in the thread that computes.
    """

    span: str | None = None
    """Name of a piece's computation in the trace. None: it is not traced."""
    prefetch_pieces = 0
    """Pieces that a thread prepares before their turn. 0: the computing thread prepares each at its turn."""
    write_queue_pieces = 0
    """Pieces that may wait for a thread that writes their rows. 0: the computing thread writes them itself."""
    encodes_once = False
    """Whether encoded rows are kept from layer to layer, by piece number.

    A plan may set it if a piece number has the same nodes at every layer, and if there is memory for the rows.
    """

    @abstractmethod
    def chunks_of(self, l: int) -> Sequence[C]:
        """The chunks of layer `l`, in the order in which they are computed."""

    @abstractmethod
    def piece(self, l: int, chunk: C) -> Piece:
        """The piece of a chunk, with its edges. May run in a thread, which may also read rows that the piece needs."""

    @abstractmethod
    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        """The features of the nodes `ids`, for the model's encoder."""

    def to_device(self, piece: Piece) -> None:
        """Move the block of a piece to the device when its turn comes. Default: `piece` has put it there."""

    def on_piece_written(self, l: int, piece: Piece) -> None:
        """Called in the forward pass when the rows of a piece are written."""

    def on_layer_end(self, l: int) -> None:
        """Called in the forward pass when this rank has computed layer `l` at all its pieces.

        A plan may fetch rows that other ranks computed.
        """

    def on_piece_backward(self, l: int, piece: Piece) -> None:
        """Called when a piece is done with layer `l` in the backward pass, or in `Layers.outputs_at_seeds`."""


class Boundaries:
    """Rows after every layer, and the gradients at them, by position in tables.

    The tables belong to the caller. The sums of gradients belong to the boundaries, for one backward pass. At most
    one layer's gradient is complete at a time; `gradients_complete` replaces it by that of the next layer.

    All methods are for the thread that computes, but `write` for the engine's thread that writes, if there is one.

    Args:
        tables: The tables that rows are read from and written to.
        device: The device of the model.
        dtype: Element type of the model's parameters.
        reads: (layer) -> [n] int64, ascending: the positions that this rank's pieces read. None: all positions.
        keep_gradients: Called with (layer, gradients at all rows of the layer). None: nobody wants them.
        collect: Sums gradients over ranks. Returns the sums at this rank's rows, and the position of the first row.
            None: there is one rank.
    """

    has_encoded = False
    """Whether the rows before the first layer are here too, as those after layer `ENCODED`. For evaluation alone, where
    no dropout is drawn. False: the model encodes the features at every piece."""

    def __init__(
        self,
        tables: LayerTables,
        *,
        device: torch.device,
        dtype: torch.dtype,
        reads: Callable[[int], Tensor | None] = lambda l: None,
        keep_gradients: Callable[[int, Tensor], None] | None = None,
        collect: Callable[[Tensor], tuple[Tensor, int]] | None = None,
    ) -> None:
        self.tables = tables
        self.device = device
        self.dtype = dtype
        self.reads = reads
        self.keep_gradients = keep_gradients
        self.collect = collect
        self._source: RowSource = tables
        self._sums: dict[int, Tensor] = {}
        """The gradient at the rows after each layer, by layer, as far as pieces have added to it."""
        self._gradient: Tensor | None = None
        """The gradient at the rows after one layer, complete."""
        self._first = 0
        """The position of the first row of `_gradient`, if `collect` made it."""

    # ---- rows

    def begin(self, layers: Sequence[int]) -> None:
        """Prepare to read the rows after these layers. Collective: rows of other hosts are fetched."""
        # The positions of one layer are enough: only tables on several hosts use them, and there the same positions
        # are read after every layer (`methods/partitioned/sweep.py`).
        self._source = self.tables.begin_reading(layers, self.reads(layers[-1])) if layers else self.tables

    def handle(self, l: int, piece: Piece) -> Rows | Tensor:
        """The sources' rows after layer `l`: a handle if a conv can read them from the table itself, else a copy."""
        table = self.tables.in_place(l, self.device, self.dtype)
        return self.read(l, piece.src) if table is None else Rows(table, as_positions(piece.src))

    def read(self, l: int, at: Any) -> Tensor:
        """A copy of the rows at `at` after layer `l`, on the device and in the dtype of the model."""
        return self._source.rows(l, as_positions(at)).to(self.device, self.dtype)

    def write(self, l: int, piece: Piece, rows: Tensor) -> None:
        """Write the rows of a piece's destinations after layer `l`."""
        self.tables.write(l, piece.dst, rows)

    def complete(self, l: int) -> None:
        """Note that all rows after layer `l` are written, so that the next layer may read them. Collective."""
        self.tables.complete(l)

    # ---- gradients

    @property
    def wants_last(self) -> bool:
        """Whether somebody wants the gradient at the rows after the last layer. The engine itself does not."""
        return self.keep_gradients is not None

    def add(self, l: int, at: Any, rows: Tensor | None) -> None:
        """Add `rows` to the gradient at the rows after layer `l`. No position may occur twice in one call."""
        if rows is not None:
            sums = self._sum(l, rows)
            sum_rows = self._rows_of_sum(l, as_positions(at))
            ops.add_rows(sums, self._to_kernel_device(sums, sum_rows), rows)

    def gradients_complete(self, l: int) -> None:
        """Make the gradient at the rows after layer `l` readable: every piece has added to it. Collective."""
        # A rank whose pieces added nothing contributes zeros, because the others wait for its part of the sum.
        if l not in self._sums and l in self.tables.tables:
            self._sum(l, self.tables.tables[l])
        self._gradient = self._sums.pop(l, None)
        if self._gradient is None:
            return
        if self.device.type == "cuda" and not self._gradient.is_cuda and (self.collect or self.keep_gradients):
            # The host is about to read the sums in pinned memory, and kernels of the GPU may still add to them.
            torch.cuda.current_stream(self.device).synchronize()
        if self.collect is not None:
            self._gradient, self._first = self.collect(self._gradient)
        if self.keep_gradients is not None:
            self.keep_gradients(l, self._gradient)

    def gradient(self, l: int, at: Any) -> Tensor:
        """The complete gradient at the rows `at` after layer `l`."""
        assert self._gradient is not None
        positions = as_positions(at)
        idx = self._rows_of_sum(l, positions) if self.collect is None else positions - self._first
        return ops.gather_rows(self._gradient, self._to_kernel_device(self._gradient, idx))

    def _sum(self, l: int, like: Tensor) -> Tensor:
        """The sum of gradients after layer `l`, zeros at first. It has a row only for positions that are read."""
        if l not in self._sums:
            positions = self.reads(l)
            num_rows = self.tables.num_rows if positions is None else positions.numel()
            self._sums[l] = self.tables.sums(l, (num_rows, *like.shape[1:]), self.dtype)
        return self._sums[l]

    def _to_kernel_device(self, sums: Tensor, idx: Tensor) -> Tensor:
        """`idx` on the device whose kernels use these sums: a GPU, also if the sums are in pinned host memory."""
        return idx.to(self.device if sums.is_cuda or pinned.is_registered(sums) else sums.device)

    def _rows_of_sum(self, l: int, positions: Tensor) -> Tensor:
        """[n] int64: for each position, its row in the sum of gradients after layer `l`."""
        read_positions = self.reads(l)
        return positions if read_positions is None else torch.searchsorted(read_positions, positions)


class Recorder(LayerHooks):
    """Keeps the rows that layers compute at their destinations, before dropout.

    keeps_gradients: whether autograd keeps the gradients of these rows.
    measures: whether to measure how far noise on a layer's input moves its output, into `spreads`.
    """

    def __init__(self, *, keeps_gradients: bool = False, measures: bool = False) -> None:
        self.rows: dict[int, Tensor] = {}
        self.spreads: list[Tensor] = []
        self.keeps_gradients = keeps_gradients
        self.measures = measures

    def before_layer(self, l: int, model: Layered, state: State, block: Block) -> None:
        spread = smoothness_penalty(model, l, state, block) if self.measures else None
        if spread is not None:
            self.spreads.append(spread)

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        self.record(l, h)
        # The next module, such as a head with ReLU(inplace=True), may change its input in place. Without the clone,
        # the gradient of the recorded rows would be that of the changed ones.
        return h.clone() if self.keeps_gradients else h

    def record(self, l: int, h: Tensor) -> None:
        self.rows[l] = h
        if self.keeps_gradients and h.requires_grad:
            h.retain_grad()


class Objective(Protocol):
    """The loss of a model whose outputs come piece by piece."""

    def begin(self, layers: Layers[Any]) -> None:
        """Called before the backward pass, when all rows that the last layer reads can be read."""
        ...

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        """A scalar whose gradient is that of a piece's share of the loss.

        outputs: the model's outputs at the seeds of `batch`.
        """
        ...


class Layers(Generic[C]):
    """A model, computed layer by layer over the pieces of a plan.

    Model, plan and tables belong to the caller. The threads that the plan wants start with each layer of `forward`
    and end with it. All methods are for the one thread that computes.

    Args:
        model: The model whose layers are computed.
        plan: Decides at which nodes each layer is computed, and in which pieces.
        rows: Reads and writes the rows between layers, and adds up the gradients at them.
        key: Key of the random draws, so that the backward pass draws as the forward pass did. None in evaluation.
        keep: Called with (layer, piece, rows of its destinations) for every layer but the last.

    Example:
        >>> from torch_geometric.nn import SimpleConv
        >>> class Halves(hl.extend.LayerPlan):
        ...     def __init__(self, data):
        ...         self.data, self.sampler = data, hl.extend.NeighborSampler(data.graph, [-1])
        ...     def chunks_of(self, l):
        ...         return torch.arange(self.data.num_nodes).chunk(2)
        ...     def piece(self, l, chunk):
        ...         (block,) = self.sampler.sample(chunk, key=0)
        ...         return hl.extend.Piece(block, src=block.src_ids, dst=chunk)
        ...     def inputs_of(self, ids):
        ...         return self.data.x[ids]
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4))
        >>> tables = hl.extend.LayerTables(data.num_nodes)
        >>> between = hl.extend.Boundaries(tables, device=torch.device("cpu"), dtype=torch.float32)
        >>> model = hl.nn.GNN([SimpleConv(), SimpleConv()], act=None).eval()
        >>> with torch.no_grad():
        ...     hl.extend.Layers(model, Halves(data), between).forward(range(2))
        >>> tables.tables[1].argmax(dim=1).tolist()  # for each node, the node two edges before it
        [2, 3, 0, 1]
    """

    def __init__(
        self,
        model: Layered,
        plan: LayerPlan[C],
        rows: Boundaries,
        *,
        key: int | None = None,
        keep: Callable[[int, Piece, Tensor], None] | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.rows = rows
        self.key = key
        self.keep = keep
        self.device = rows.device
        self.last = model.num_layers - 1
        self._encoded: dict[int, State] = {}
        """What layers read of the destinations' encoded rows, by piece number, if the plan has `encodes_once`."""

    # ---- forward

    def forward(self, layers: Iterable[int]) -> None:
        """Compute these layers at all pieces, and write their rows. Each layer reads the rows of the one before."""
        for l in layers:
            self.rows.begin(self.model.reads(l).tables)
            chunks = self.plan.chunks_of(l)
            # Closed also if this loop fails, so that their threads end with the layer.
            with closing(self._compute(l, chunks)) as computed, closing(self._write(computed, len(chunks))) as written:
                for piece in written:
                    self.plan.on_piece_written(l, piece)
                    del piece  # else it would be in memory while the next one is computed
            self.rows.complete(l)
            self.plan.on_layer_end(l)

    def _compute(self, l: int, chunks: Sequence[C]) -> Generator[tuple[int, Piece, Tensor], None, None]:
        """(layer, piece, the rows of its destinations) for each piece, in order."""
        with closing(self._prepare(l, chunks)) as pieces:
            for piece in pieces:
                with self._span(), self.same_draws(l, piece):
                    self.plan.to_device(piece)
                    state = self.state(l, piece)
                    rows = self._outputs(state, piece) if l == self.last else layer_rows(self.model, l, state, piece)
                    del state
                if self.keep is not None and l < self.last:
                    self.keep(l, piece, rows)
                yield l, piece, rows
                del piece, rows  # without threads only one piece may be in memory: this frame must not hold it

    def _prepare(self, l: int, chunks: Sequence[C]) -> Generator[Piece, None, None]:
        """The pieces of the chunks, prepared by a thread if the plan wants one."""
        if not self.plan.prefetch_pieces or len(chunks) < 2:
            # No pipeline: it would hold each piece until the next one is ready.
            for chunk in chunks:
                yield self.plan.piece(l, chunk)
            return
        stage = Stage("infer.prepare", partial(self.plan.piece, l))
        is_host_idle = self.device.type != "cpu"  # with a GPU the host has nothing else to compute
        look_ahead = self.plan.prefetch_pieces
        yield from Pipeline([stage], workers=1, look_ahead=look_ahead, all_cores=is_host_idle).run(chunks)

    def _write(self, computed: Iterator[tuple[int, Piece, Tensor]], count: int) -> Generator[Piece, None, None]:
        """The pieces whose rows are written, by a thread if the plan wants one."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def write(computed_piece: tuple[int, Piece, Tensor]) -> Piece:
            l, piece, rows = computed_piece
            # The stream that computes, also in another thread: there the write comes after the computation.
            with torch.cuda.stream(stream):
                self.rows.write(l, piece, rows)
            return piece

        queue_pieces = self.plan.write_queue_pieces
        if queue_pieces and count > 1:
            stage = Stage("infer.write", write)
            yield from Pipeline([stage], workers=1, look_ahead=queue_pieces).run(computed)
            return
        for computed_piece in computed:
            yield write(computed_piece)
            del computed_piece  # else this piece would still be in memory while the next one is computed

    def _span(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.plan.span is None else trace.span(self.plan.span, self.device)

    def _outputs(self, state: State, piece: Piece) -> Tensor:
        return self.model.decode(self.model.layer(self.last, state, piece.block))

    # ---- what a layer reads

    def state(
        self,
        l: int,
        piece: Piece,
        sources: Mapping[int, Rows | Tensor] | None = None,
        own: Mapping[int, Tensor] | None = None,
    ) -> State:
        """The input of layer `l` at a piece.

        The backward pass gives rows of its own in place of those in the tables, because it needs their gradients.

        sources, own: by layer, the rows after it at the sources and at the destinations. None: read from the tables.
        """
        model = self.model
        block = piece.block
        if l == 0 and not self.rows.has_encoded:
            return model.encode(self.plan.inputs_of(block.src_ids), block.src_keys, block.key)
        reads = model.reads(l)
        # In training there is no table of encoded rows: they are computed again.
        has_table = {k for k in reads.all if k != ENCODED or self.rows.has_encoded}
        if own is None:
            own = {k: self.rows.read(k, piece.dst) for k in reads.own if k in has_table}
        if sources is None:
            sources = {k: self.rows.handle(k, piece) for k in reads.sources if k in has_table}
        encode = None if has_table == reads.all else partial(self._encode, piece, ENCODED in reads.sources)
        return model.state_of(l, sources, own, encode, block)

    def _encode(self, piece: Piece, at_sources: bool) -> State:
        """What a layer reads of the encoded rows of the destinations, or of all sources."""
        block = piece.block
        # Kept in the forward pass only: the weights do not change in it, and no gradient goes through these rows.
        keeps = self.plan.encodes_once and not at_sources and not torch.is_grad_enabled()
        if keeps and piece.number in self._encoded:
            return self._encoded[piece.number]
        ids = block.src_ids if at_sources else block.dst_ids
        keys = block.src_keys[: ids.numel()]
        encoded = self.model.initial(self.model.encode(self.plan.inputs_of(ids), keys, block.key))
        if keeps:
            self._encoded[piece.number] = encoded
        return encoded

    @contextmanager
    def same_draws(self, l: int, piece: Piece) -> Iterator[None]:
        """Seed torch's generator for a layer and a piece, so that convs draw the same in both passes.

        The state of the generator is restored at the end. In evaluation (`key` is None) nothing is changed.
        """
        if self.key is None:
            yield
            return
        with preserve_rng(self.device):
            torch.manual_seed(ops.derive_key(self.key, l, piece.number))
            yield

    # ---- backward

    def backward(self, objective: Objective, penalty: float = 0.0) -> None:
        """Add the gradient of an objective to the parameters' `.grad`, from the rows that `forward` wrote.

        penalty: weight of the smoothness penalty, per node and layer: how far noise on a layer's input moves its
            output.
        """
        self.rows.begin(range(self.last))
        objective.begin(self)
        for piece in self._pieces(self.last):
            with self.same_draws(self.last, piece):
                self.from_loss(piece, objective, penalty)
            self.plan.on_piece_backward(self.last, piece)
            del piece
        self.rows.gradients_complete(self.last)
        for l in range(self.last - 1, -1, -1):
            self.rows.gradients_complete(l)
            for piece in self._pieces(l):
                with self.same_draws(l, piece):
                    self.through_layer(l, piece, penalty)
                self.plan.on_piece_backward(l, piece)
                del piece

    def _pieces(self, l: int) -> Iterator[Piece]:
        """The pieces of layer `l`, each made when it is asked for."""
        for chunk in self.plan.chunks_of(l):
            yield self._piece(l, chunk)

    def _piece(self, l: int, chunk: C) -> Piece:
        piece = self.plan.piece(l, chunk)
        self.plan.to_device(piece)
        return piece

    def outputs_at_seeds(self) -> Iterator[tuple[Batch, Tensor]]:
        """(batch, the model's outputs at its examples) for each piece that has seeds, without gradients."""
        for piece in self._pieces(self.last):
            batch = piece.batch
            assert batch is not None
            if batch.num_seeds:
                with torch.no_grad(), self.same_draws(self.last, piece):
                    outputs = self._outputs(self.state(self.last, piece), piece)[batch.output_idx]
                yield batch, outputs
            self.plan.on_piece_backward(self.last, piece)
            del piece

    def through_layer(self, l: int, piece: Piece, penalty: float = 0.0) -> None:
        """Compute layer `l` at a piece again, with autograd, and run its backward pass.

        Gradients are added to the parameters' `.grad`, and at the rows after layer l - 1.
        """
        sources, own = self._leaves(l, piece)
        recorder = Recorder(measures=penalty > 0)
        out = layer_rows(self.model, l, self.state(l, piece, sources, own), piece, recorder)
        out_gradient = self.rows.gradient(l, piece.dst).to(out.device, out.dtype)
        # The penalty enters as a gradient at the spreads, so one backward pass does both.
        spread_gradients = [torch.full_like(spread, penalty * piece.block.num_dst) for spread in recorder.spreads]
        # False for a first layer without parameters, such as `SimpleConv`: nothing needs a gradient.
        if out.requires_grad:
            torch.autograd.backward([out, *recorder.spreads], [out_gradient, *spread_gradients])
        self._add_gradients(piece, sources, own)

    def _leaves(self, l: int, piece: Piece) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The rows that layer `l` reads at the sources and at the destinations, by layer, as leaves of autograd."""
        reads = self.model.reads(l)
        sources = {k: self.rows.read(k, piece.src).requires_grad_() for k in reads.sources if k != ENCODED}
        own = {k: self.rows.read(k, piece.dst).requires_grad_() for k in reads.own if k != ENCODED}
        return sources, own

    def _add_gradients(self, piece: Piece, sources: Mapping[int, Tensor], own: Mapping[int, Tensor]) -> None:
        for k, rows in sources.items():
            self.rows.add(k, piece.src, rows.grad)
        for k, rows in own.items():
            self.rows.add(k, piece.dst, rows.grad)

    def from_loss(self, piece: Piece, objective: Objective, penalty: float = 0.0) -> None:
        """Compute the last layer and the loss at a piece, with autograd, and run the backward pass.

        Gradients are added to the parameters' `.grad` and at the rows that the last layer reads. If somebody wants
        them, they are added at the last layer's own rows too.
        """
        model = self.model
        last = self.last
        block = piece.block
        batch = piece.batch
        assert batch is not None
        sources, own = self._leaves(last, piece)
        recorder = Recorder(keeps_gradients=True, measures=penalty > 0)
        state = model.layer(last, self.state(last, piece, sources, own), replace(block, layer_hooks=recorder))
        loss = torch.zeros((), device=block.src_ids.device)
        if recorder.spreads:
            loss = penalty * block.num_dst * torch.stack(recorder.spreads).sum()
        if batch.num_seeds:
            loss = loss + objective(batch, model.decode(state)[batch.output_idx])
        if loss.requires_grad:
            loss.backward()
        if self.rows.wants_last:
            out = recorder.rows[last]
            # Zeros where no gradient came, as at a piece without seeds.
            self.rows.add(last, piece.dst, torch.zeros_like(out) if out.grad is None else out.grad)
        self._add_gradients(piece, sources, own)


def layer_rows(model: Layered, l: int, state: State, piece: Piece, recorder: Recorder | None = None) -> Tensor:
    """The destinations' rows after layer `l`, before dropout."""
    recorder = recorder or Recorder()
    after = model.layer(l, state, replace(piece.block, layer_hooks=recorder))
    # A layer whose rows are computed later gives a handle, and has recorded nothing.
    return recorder.rows[l] if l in recorder.rows else as_tensor(after.h)
