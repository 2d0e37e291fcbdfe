"""One loop forward and one back: every piece of a graph goes through a layer before any goes through the next.

Going forward keeps the rows between layers in tables. Going back computes each layer again, piece by piece, and adds up
the gradients at these rows. That gives what one backward pass over the whole graph gives, in the memory of a piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Batch, Block, LayerHooks
from hopline.core.row_handles import Rows, as_tensor
from hopline.device import pinned
from hopline.nn.gnn import GNN, State
from hopline.nn.smoothness import spread_of
from hopline.pipeline.stages import Pipeline, Stage
from hopline.tables.layers import LayerTables, RowSource, as_positions
from hopline.util import trace

C = TypeVar("C")


@dataclass(eq=False)
class Piece:
    """Nodes that a layer is computed at together, with all their in-edges."""

    block: Block
    src: Any
    """Positions of the sources' rows, as `Boundaries` understand them; the engine only passes them on."""
    dst: Any
    """Those of the destinations' rows."""
    number: int = 0
    """Keys the random draws of the convs themselves, such as attention dropout, together with the layer."""
    batch: Batch | None = None
    """Seeds and labels, where the loss is computed at the piece."""
    chunk: Any = None
    """What the plan made it of."""
    ahead: Any = None
    """What a thread has read for it."""


class LayerPlan(ABC, Generic[C]):
    """Which nodes each layer is computed at, and in which pieces. `C` is what a plan lists, before edges are made."""

    span: str | None = None
    """Name of a piece's computation in the trace."""
    ahead, behind = 0, 0
    """Pieces that a thread prepares before their turn, and pieces that a thread writes after it; 0: no thread."""
    encodes_once = False
    """Whether a piece number has the same nodes at every layer, and there is room to keep their encoded rows."""

    @abstractmethod
    def chunks_of(self, l: int) -> Sequence[C]:
        """What layer `l` is cut into."""

    @abstractmethod
    def piece(self, l: int, chunk: C) -> Piece:
        """A chunk with its edges. May run in a thread."""

    @abstractmethod
    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        """Features of some nodes, for the model."""

    def read_ahead(self, l: int, piece: Piece, rows: Boundaries) -> None:
        """Read what can be read before the piece's turn, into `piece.ahead`. May run in a thread."""

    def state(self, l: int, piece: Piece) -> State | None:
        """What was read ahead, on the device, where the piece's block is from now on. None: the engine reads."""
        return None

    def written(self, l: int, piece: Piece) -> None:
        """Forward: the rows of a piece are computed and written."""

    def completed(self, l: int) -> None:
        """Forward: layer `l` is computed at all pieces of this rank. Rows that other ranks computed may be fetched."""

    def backward_done(self, l: int, piece: Piece) -> None:
        """Backward: layer `l` is done with at a piece."""


class Boundaries:
    """Rows after every layer and gradients at them, by position in tables.

    Args:
        tables: Where the rows are.
        device: Where the model is.
        dtype: Of its parameters.
        reads: (layer) -> positions that have a row, ascending; None where all have.
        keep_gradients: Is given the gradients at all rows of a layer, where these are wanted.
        collect: Sums gradients over ranks. Returns this rank's rows and the position of the first of them.
    """

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
        self.tables, self.device, self.dtype, self.reads = tables, device, dtype, reads
        self.keep_gradients, self.collect = keep_gradients, collect
        self._source: RowSource = tables
        self._sums: dict[int, Tensor] = {}
        """By layer, the gradients at its rows, as far as pieces have added to them."""
        self._gradient: Tensor | None = None
        """The gradient after one layer, complete."""
        self._first = 0
        """The position of its first row."""

    # ---- rows

    def begin(self, layers: Sequence[int]) -> None:
        """The rows after these layers are about to be read. Collective."""
        self._source = self.tables.begin_reading(layers, self.reads(layers[-1])) if layers else self.tables

    def handle(self, l: int, piece: Piece) -> Rows | Tensor:
        """The sources' rows after layer `l`: a handle where a conv can read them in place, else a copy."""
        table = self.tables.in_place(l, self.device, self.dtype)
        return self.read(l, piece.src) if table is None else Rows(table, as_positions(piece.src))

    def read(self, l: int, at: Any) -> Tensor:
        """Rows after layer `l`: new memory, where the model is."""
        return self._source.rows(l, as_positions(at)).to(self.device, self.dtype)

    def write(self, l: int, piece: Piece, rows: Tensor) -> None:
        """The destinations' rows after layer `l`."""
        self.tables.write(l, piece.dst, rows)

    def complete(self, l: int) -> None:
        """All rows after layer `l` are written. Collective."""
        self.tables.complete(l)

    # ---- gradients

    @property
    def wants_last(self) -> bool:
        """Whether gradients after the last layer are wanted."""
        return self.keep_gradients is not None

    def add(self, l: int, at: Any, rows: Tensor | None) -> None:
        """Add to the gradient after layer `l`, at each position once."""
        if rows is not None:
            sums = self._sum(l, rows)
            ops.add_rows(sums, self._near(sums, self._among(l, as_positions(at))), rows)

    def gradients_complete(self, l: int) -> None:
        """Every piece has added to the gradient after layer `l`. Collective.

        A rank whose pieces added nothing has zeros, since the others wait for its part of the sum.
        """
        if l not in self._sums and l in self.tables.tables:
            self._sum(l, self.tables.tables[l])
        self._gradient = self._sums.pop(l, None)
        if self._gradient is None:
            return
        if self.device.type == "cuda" and not self._gradient.is_cuda and (self.collect or self.keep_gradients):
            # The host is about to read them: what the GPU added to pinned memory must be there.
            torch.cuda.current_stream(self.device).synchronize()
        if self.collect is not None:
            self._gradient, self._first = self.collect(self._gradient)
        if self.keep_gradients is not None:
            self.keep_gradients(l, self._gradient)

    def gradient(self, l: int, at: Any) -> Tensor:
        """The complete gradient after layer `l` at some rows."""
        assert self._gradient is not None
        at = as_positions(at)
        at = self._among(l, at) if self.collect is None else at - self._first
        return ops.gather_rows(self._gradient, self._near(self._gradient, at))

    def _sum(self, l: int, like: Tensor) -> Tensor:
        if l not in self._sums:
            read = self.reads(l)
            count = self.tables.num_rows if read is None else read.numel()
            self._sums[l] = self.tables.sums(l, (count, *like.shape[1:]), self.dtype)
        return self._sums[l]

    def _near(self, sums: Tensor, at: Tensor) -> Tensor:
        """Positions on the device that adds to these sums and reads them: pinned memory is the GPU's to use."""
        return at.to(self.device if sums.is_cuda or pinned.is_registered(sums) else sums.device)

    def _among(self, l: int, at: Tensor) -> Tensor:
        read = self.reads(l)
        return at if read is None else torch.searchsorted(read, at)


class Recorder(LayerHooks):
    """Keeps the rows that layers give at their destinations, before dropout.

    keeps_gradients: autograd keeps the gradients of these rows. measures: also how far noise moves each layer.
    """

    def __init__(self, *, keeps_gradients: bool = False, measures: bool = False) -> None:
        self.rows: dict[int, Tensor] = {}
        self.spreads: list[Tensor] = []
        self.keeps_gradients, self.measures = keeps_gradients, measures

    def before_layer(self, l: int, model: GNN, state: State, block: Block) -> None:
        spread = spread_of(model, l, state, block) if self.measures else None
        if spread is not None:
            self.spreads.append(spread)

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        self.record(l, h)
        # What comes next, such as a head with ReLU(inplace=True), may change its input in place. The gradient of
        # the recorded rows would then be that of the changed ones.
        return h.clone() if self.keeps_gradients else h

    def record(self, l: int, h: Tensor) -> None:
        """Keep rows after layer `l`."""
        self.rows[l] = h
        if self.keeps_gradients and h.requires_grad:
            h.retain_grad()


class Objective(Protocol):
    """The loss of a model whose outputs come piece by piece."""

    def begin(self, layers: Layers[Any]) -> None:
        """All rows before the last layer can be read."""
        ...

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        """A scalar whose gradient is the share of a piece: its batch, and the outputs at its seeds."""
        ...


class Layers(Generic[C]):
    """A model, computed layer by layer over the pieces of a plan.

    Args:
        model: The layers.
        plan: Which nodes, in which pieces.
        rows: From which table a layer reads, and into which it writes.
        key: Of the random draws, so that going back draws the same again; None in evaluation.
        keep: Is also given the rows of every layer but the last: (layer, piece, rows of its destinations).

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
        >>> tables.tables[1].argmax(dim=1).tolist()  # the node that two edges lead from
        [2, 3, 0, 1]
    """

    def __init__(
        self,
        model: GNN,
        plan: LayerPlan[C],
        rows: Boundaries,
        *,
        key: int | None = None,
        keep: Callable[[int, Piece, Tensor], None] | None = None,
    ) -> None:
        self.model, self.plan, self.rows, self.key, self.keep = model, plan, rows, key, keep
        self.device, self.last = rows.device, model.num_layers - 1
        self._encoded: dict[int, Tensor | None] = {}

    # ---- forward

    def forward(self, layers: Iterable[int]) -> None:
        """Write the rows after these layers, of which each reads what the one before it wrote."""
        for l in layers:
            self.rows.begin(range(l) if l == self.last and self.model.keeps_jk else range(l)[-1:])
            chunks = self.plan.chunks_of(l)
            with closing(self._computed(l, chunks)) as computed, closing(self._written(computed, len(chunks))) as done:
                for piece in done:
                    self.plan.written(l, piece)
                    del piece
            self.rows.complete(l)
            self.plan.completed(l)

    def _computed(self, l: int, chunks: Sequence[C]) -> Generator[tuple[int, Piece, Tensor], None, None]:
        """(layer, piece, the rows of its destinations), piece after piece."""

        def prepare(chunk: C) -> Piece:
            piece = self.plan.piece(l, chunk)
            self.plan.read_ahead(l, piece, self.rows)
            return piece

        with closing(self._prepared(prepare, chunks)) as prepared:
            for piece in prepared:
                with self._span(), self.same_draws(l, piece):
                    state = self.state(l, piece)  # which may move the piece's block to the device
                    rows = self._outputs(state, piece) if l == self.last else layer_rows(self.model, l, state, piece)
                    del state
                if self.keep is not None and l < self.last:
                    self.keep(l, piece, rows)
                yield l, piece, rows
                del piece, rows  # a plan without threads is promised one piece at a time

    def _prepared(self, prepare: Callable[[C], Piece], chunks: Sequence[C]) -> Generator[Piece, None, None]:
        if not self.plan.ahead or len(chunks) < 2:
            # A pipeline would keep its last request while the caller computes.
            for chunk in chunks:
                yield prepare(chunk)
            return
        idle = self.device.type != "cpu"  # the host, but for what it prepares
        stage = Stage("infer.prepare", prepare)
        yield from Pipeline([stage], workers=1, look_ahead=self.plan.ahead, all_cores=idle).run(chunks)

    def _written(self, computed: Iterator[tuple[int, Piece, Tensor]], count: int) -> Generator[Piece, None, None]:
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def write(one: tuple[int, Piece, Tensor]) -> Piece:
            l, piece, rows = one
            with torch.cuda.stream(stream):  # that of who computes, whichever thread writes
                self.rows.write(l, piece, rows)
            return piece

        if self.plan.behind and count > 1:
            yield from Pipeline([Stage("infer.write", write)], workers=1, look_ahead=self.plan.behind).run(computed)
            return
        for one in computed:
            yield write(one)
            del one  # or the next piece would come on top of it

    def _span(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.plan.span is None else trace.span(self.plan.span, self.device)

    def _outputs(self, state: State, piece: Piece) -> Tensor:
        return self.model.decode(self.model.layer(self.last, state, piece.block))

    # ---- what a layer reads

    def state(
        self, l: int, piece: Piece, inputs: Tensor | None = None, jumped: Sequence[Tensor] | None = None
    ) -> State:
        """What layer `l` reads at a piece.

        inputs, jumped: the sources' rows after the layer before, and the destinations' rows after all layers before, in
        place of those in the tables. Gradients are asked of them.
        """
        if inputs is None and jumped is None and (found := self.plan.state(l, piece)) is not None:
            return found
        model, block = self.model, piece.block
        jk = self._jumped(piece, jumped) if l == self.last else None
        if l == 0:
            state = model.encode(self.plan.inputs_of(block.src_ids), block.src_keys, block.key)
            return state if l < self.last else replace(state, jk=jk)
        h = self.rows.handle(l - 1, piece) if inputs is None else inputs
        if model.training and model.dropout:
            h = model.apply_dropout(as_tensor(h), block.src_keys, block.key, l - 1)
        return State(h, self._initial(piece), jk)

    def _initial(self, piece: Piece) -> Tensor | None:
        """The destinations' encoded rows, where a layer uses them again."""
        if not self.model.encodes:
            return None
        block = piece.block
        keeps = self.plan.encodes_once and not torch.is_grad_enabled()  # weights do not change while it goes forward
        if keeps and piece.number in self._encoded:
            return self._encoded[piece.number]
        keys = block.src_keys[: block.num_dst]
        x0 = self.model.encode(self.plan.inputs_of(block.dst_ids), keys, block.key).x0
        if keeps:
            self._encoded[piece.number] = x0
        return x0

    def _jumped(self, piece: Piece, given: Sequence[Tensor] | None) -> Tensor | None:
        """What jumping knowledge has of the destinations before the last layer."""
        model, block = self.model, piece.block
        if not model.keeps_jk:
            return None
        keys = block.src_keys[: block.num_dst]
        own = [self.rows.read(l, piece.dst) for l in range(self.last)] if given is None else given
        rows = [model.apply_dropout(rows, keys, block.key, l) for l, rows in enumerate(own)]
        if model.jk_encoder:
            encoded = model.encode(self.plan.inputs_of(block.dst_ids), keys, block.key).jk
            assert encoded is not None
            rows = [encoded, *rows]
        return torch.cat(rows, dim=1) if rows else None

    @contextmanager
    def same_draws(self, l: int, piece: Piece) -> Iterator[None]:
        """Within, what convs draw from torch's generator is the same each time for a layer and a piece."""
        if self.key is None:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(ops.derive_key(self.key, l, piece.number))
            yield

    # ---- backward

    def backward(self, objective: Objective, penalty: float = 0.0) -> None:
        """Add the gradient of an objective to the parameters' gradients, by the rows that `forward` wrote.

        penalty: weight of how far noise on a layer's input moves its output, per node and layer.
        """
        self.rows.begin(range(self.last))
        objective.begin(self)
        for piece in self._pieces(self.last):
            with self.same_draws(self.last, piece):
                self.from_loss(piece, objective, penalty)
            self.plan.backward_done(self.last, piece)
            del piece
        self.rows.gradients_complete(self.last)
        for l in range(self.last - 1, -1, -1):
            self.rows.gradients_complete(l)
            for piece in self._pieces(l):
                with self.same_draws(l, piece):
                    self.through_layer(l, piece, penalty)
                self.plan.backward_done(l, piece)
                del piece

    def _pieces(self, l: int) -> Iterator[Piece]:
        for chunk in self.plan.chunks_of(l):
            yield self.plan.piece(l, chunk)

    def outputs_at_seeds(self) -> Iterator[tuple[Batch, Tensor]]:
        """(batch, the model's outputs at its seeds) of each piece that has seeds, without gradients."""
        for piece in self._pieces(self.last):
            batch = piece.batch
            assert batch is not None
            if batch.num_seeds:
                with torch.no_grad(), self.same_draws(self.last, piece):
                    outputs = self._outputs(self.state(self.last, piece), piece)[batch.output_idx]
                yield batch, outputs
            self.plan.backward_done(self.last, piece)
            del piece

    def through_layer(self, l: int, piece: Piece, penalty: float = 0.0) -> None:
        """Compute layer `l` at a piece again and go back: gradients are added to the parameters' and at its inputs."""
        inputs = self.rows.read(l - 1, piece.src).requires_grad_() if l else None
        recorder = Recorder(measures=penalty > 0)
        out = layer_rows(self.model, l, self.state(l, piece, inputs), piece, recorder)
        given = self.rows.gradient(l, piece.dst).to(out.device, out.dtype)
        moved = [torch.full_like(spread, penalty * piece.block.num_dst) for spread in recorder.spreads]
        if out.requires_grad:
            torch.autograd.backward([out, *recorder.spreads], [given, *moved])
        if inputs is not None:
            self.rows.add(l - 1, piece.src, inputs.grad)

    def from_loss(self, piece: Piece, objective: Objective, penalty: float = 0.0) -> None:
        """Compute the last layer at a piece again, and go back from the loss.

        Gradients are added to the parameters', at the last layer's rows, at its inputs, and at rows that jump ahead.
        """
        model, block, batch, last = self.model, piece.block, piece.batch, self.last
        assert batch is not None
        inputs = self.rows.read(last - 1, piece.src).requires_grad_() if last else None
        jumped = [self.rows.read(l, piece.dst).requires_grad_() for l in range(last)] if model.keeps_jk else []
        recorder = Recorder(keeps_gradients=True, measures=penalty > 0)
        state = model.layer(last, self.state(last, piece, inputs, jumped), replace(block, layer_hooks=recorder))
        loss = torch.zeros((), device=block.src_ids.device)
        if recorder.spreads:
            loss = penalty * block.num_dst * torch.stack(recorder.spreads).sum()
        if batch.num_seeds:
            loss = loss + objective(batch, model.decode(state)[batch.output_idx])
        if loss.requires_grad:
            loss.backward()
        if self.rows.wants_last:
            out = recorder.rows[last]
            self.rows.add(last, piece.dst, torch.zeros_like(out) if out.grad is None else out.grad)
        if inputs is not None:
            self.rows.add(last - 1, piece.src, inputs.grad)
        for l, rows in enumerate(jumped):
            self.rows.add(l, piece.dst, rows.grad)


def layer_rows(model: GNN, l: int, state: State, piece: Piece, recorder: Recorder | None = None) -> Tensor:
    """The destinations' rows after layer `l`, before dropout."""
    recorder = recorder or Recorder()
    after = model.layer(l, state, replace(piece.block, layer_hooks=recorder))
    # A layer whose rows are put off gives a handle and records nothing.
    return recorder.rows[l] if l in recorder.rows else as_tensor(after.h)
