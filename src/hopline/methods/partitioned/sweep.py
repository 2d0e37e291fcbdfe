"""Layer by layer over pieces of a graph and back: rows and gradients in the memory of a piece.

Going forward keeps every layer's rows; going back computes each layer again, piece by piece, and adds up the gradients
at the rows between the layers. Over all parts this gives the exact rows and gradients of all nodes: what one backward
pass over the whole graph would give. Over the micro-batches of one batch it gives what the batch gives at once
(`historical/micro_batches.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hopline.core.batch import Batch, Block
from hopline.inference import evaluating
from hopline.methods.historical.regularise import spreads
from hopline.methods.partitioned.sweep_loss import LossAtOnce, LossByPiece, Objective
from hopline.nn.gnn import State
from hopline.ops import derive_key
from hopline.tables.history import Reader, RecordedBlock, Sums
from hopline.units.loss_on_pieces import batch_of_seeds

if TYPE_CHECKING:
    from hopline.methods.historical.step import HistoricalBatch
    from hopline.methods.historical.work import HistoricalWork

HELD_EDGES = 1 << 20
"""Up to that many edges, the batches of a sweep over all parts are kept from one layer to the next."""


class Piece(Protocol):
    """Some nodes with all their in-edges, and those of them that have a loss."""

    @property
    def block(self) -> Block: ...
    @property
    def batch(self) -> Batch: ...


P = TypeVar("P", bound=Piece)


class Swept(ABC, Generic[P]):
    """What is swept: pieces, and where their rows and gradients at the layer boundaries are kept."""

    def __init__(self, work: HistoricalWork, key: int | None) -> None:
        self.work, self.key = work, key
        """key: of the draws; None where nothing is drawn."""

    @abstractmethod
    def pieces(self, l: int) -> Iterable[P]:
        """Those that layer `l` is computed at."""

    @abstractmethod
    def number(self, piece: P) -> int:
        """One of its own, for its draws."""

    # ---- rows

    def begin(self, l: int) -> None:
        """Forward, before layer `l`."""

    @abstractmethod
    def inputs(self, l: int, piece: P) -> Tensor:
        """Rows of a piece's sources after layer `l`: new memory."""

    @abstractmethod
    def own(self, l: int, piece: P) -> Tensor:
        """Rows of its destinations: new memory."""

    @abstractmethod
    def put(self, l: int, piece: P, rows: Tensor) -> None:
        """Keep the rows of its destinations after layer `l`."""

    @abstractmethod
    def end(self, l: int) -> None:
        """Forward, after layer `l`: its rows will be read."""

    # ---- gradients

    @abstractmethod
    def turn(self) -> None:
        """All rows are there; going back begins."""

    @abstractmethod
    def add(self, l: int, piece: P, rows: Tensor | None, *, own: bool = False) -> None:
        """Add to the gradient after layer `l`, at a piece's sources or at its own nodes."""

    @abstractmethod
    def gathered(self, l: int) -> None:
        """Every piece has added to the gradient after layer `l`."""

    @abstractmethod
    def gradient(self, l: int, piece: P) -> Tensor:
        """After layer `l`, at a piece's own nodes."""

    def went_back(self, l: int, piece: P) -> None:
        """Layer `l` is done with at a piece."""

    def loss_batch(self, seeds: Tensor, y: Tensor | None) -> Batch:
        """What a training step is given for the loss of all seeds at once."""
        return batch_of_seeds(self.work.job, seeds, y, self.key)


def forward(over: Swept[P]) -> None:
    """Rows after every layer but the last."""
    work = over.work
    for l in range(work.model.num_layers - 1):
        over.begin(l)
        for piece in over.pieces(l):
            with drawn_again(over, l, piece):
                inputs = None if l == 0 else over.inputs(l - 1, piece)
                over.put(l, piece, work.layer_at(l, piece.block, piece.block.src_ids, inputs))
                del inputs  # or the next piece would come beside it
        over.end(l)


def backward(over: Swept[P], scale: float, penalty: float = 0.0) -> Tensor:
    """Add the gradient of `scale` times the summed loss to the parameters'; returns that loss.

    penalty: weight of how far noise on a layer's input moves its output, per node and layer.
    """
    work, last = over.work, over.work.model.num_layers - 1
    summed = torch.zeros((), dtype=torch.promote_types(work.dtype, torch.float32), device=work.job.device)
    over.turn()
    usual = work.job.usual_loss
    loss = LossByPiece(work.job, scale, summed) if usual else LossAtOnce(over, scale, summed, outputs_of)
    for piece in over.pieces(last):
        with drawn_again(over, last, piece):
            from_loss(over, piece, loss, penalty)
        over.went_back(last, piece)
    over.gathered(last)
    for l in range(last - 1, -1, -1):
        over.gathered(l)
        for piece in over.pieces(l):
            with drawn_again(over, l, piece):
                through_layer(over, l, piece, penalty)
            over.went_back(l, piece)
    return summed


@contextmanager
def drawn_again(over: Swept[P], l: int, piece: P) -> Iterator[None]:
    """Within, what convs draw by themselves (attention dropout) is the same each time for a layer and a piece."""
    if over.key is None:
        yield
        return
    device = over.work.job.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derive_key(over.key, l, over.number(piece)))
        yield


def through_layer(over: Swept[P], l: int, piece: P, penalty: float) -> None:
    """Layer `l` at a piece again, and back: gradients are added to the parameters' and at its inputs."""
    work, block = over.work, piece.block
    inputs = None if l == 0 else over.inputs(l - 1, piece).requires_grad_()
    with spreads(work.model, penalty > 0) as found:
        out = work.layer_at(l, block, block.src_ids, inputs)
    given = over.gradient(l, piece).to(out.device, out.dtype)
    moved = [torch.full_like(spread, penalty * block.num_dst) for spread in found]
    if out.requires_grad:
        torch.autograd.backward([out, *found], [given, *moved])
    if inputs is not None:
        over.add(l - 1, piece, inputs.grad)


def from_loss(over: Swept[P], piece: P, objective_of: Objective, penalty: float) -> None:
    """The last layer at a piece again, and back from the loss.

    Gradients are added to the parameters', at the last layer's rows, at its inputs, and at what jumped ahead.
    """
    model, block, batch = over.work.model, piece.block, piece.batch
    last = model.num_layers - 1
    inputs = over.inputs(last - 1, piece).requires_grad_() if last else None
    kept = {l: over.own(l, piece).requires_grad_() for l in range(last)} if model.keeps_jk else {}
    state, recorded = _last_input(over, block, inputs, kept), RecordedBlock(block, keeps_gradients=True)
    with spreads(model, penalty > 0) as found:
        ended = model.layer(last, state, recorded)
    out, objective = recorded.own[last], torch.zeros((), device=block.src_ids.device)
    if found:
        objective = penalty * block.num_dst * torch.stack(found).sum()
    if batch.num_seeds:
        outputs = model.decode(ended)[batch.output_idx]
        objective = objective + objective_of(batch, outputs)
    if objective.requires_grad:
        objective.backward()
    over.add(last, piece, torch.zeros_like(out) if out.grad is None else out.grad, own=True)
    if inputs is not None:
        over.add(last - 1, piece, inputs.grad)
    for l, rows in kept.items():
        over.add(l, piece, rows.grad, own=True)


def outputs_of(over: Swept[P], piece: P, batch: Batch) -> Tensor:
    """What the model puts out at the seeds of a piece."""
    model, block = over.work.model, piece.block
    last = model.num_layers - 1
    with torch.no_grad(), drawn_again(over, last, piece):
        inputs = over.inputs(last - 1, piece) if last else None
        kept = {l: over.own(l, piece) for l in range(last)} if model.keeps_jk else {}
        ended = model.layer(last, _last_input(over, block, inputs, kept), RecordedBlock(block))
        return model.decode(ended)[batch.output_idx]


def _last_input(over: Swept[P], block: Block, inputs: Tensor | None, kept: dict[int, Tensor]) -> State:
    """What the last layer reads. kept: own rows after the layers before, where they jump ahead."""
    work = over.work
    state = work.state_of(work.model.num_layers - 1, block, block.src_ids, inputs)
    return State(state.h, state.x0, _jumped(work, block, kept) if work.model.keeps_jk else None)


def _jumped(work: HistoricalWork, block: Block, kept: dict[int, Tensor]) -> Tensor | None:
    """What jumping knowledge has of a piece's own nodes before the last layer."""
    model, keys = work.model, block.src_keys[: block.num_dst]
    rows = [model.dropped(rows, keys, block.key, l) for l, rows in kept.items()]
    if model.jk_encoder:
        encoded = model.encode(work.batches.inputs_of(block.dst_ids), keys, block.key).jk
        assert encoded is not None
        rows = [encoded, *rows]
    return torch.cat(rows, dim=1) if rows else None


# ---- all parts


def fill(work: HistoricalWork, key: int | None = None) -> None:
    """Fill the tables of rows by an exact forward pass; each rank fills what it keeps.

    key: of the draws, where the pass is one of training; without, it is in evaluation mode.
    """
    work.prepare()
    work.job.world.barrier()  # nobody reads any more
    with _mode(work, key), torch.no_grad(), work.encoding_once():
        forward(_AllParts(work, key))
    work.histories.stamp([_slab(work)], work.histories.step)
    work.job.world.barrier()


def go_back(work: HistoricalWork, key: int | None = None, scale: float = 1.0, *, keep: bool = True) -> Tensor:
    """Add the gradient of `scale` times the summed loss to the parameters', for tables of rows that are exact.

    Each rank goes over what it keeps: the parameters' gradients are to be summed over ranks. Returns the summed loss of
    its nodes. key: as `fill` had it. keep: write the gradients at all rows into the tables of gradients.
    """
    with torch.enable_grad() if key is not None else _evaluating_with_gradients(work.model):
        summed = backward(_AllParts(work, key, keep), scale)
    work.job.world.barrier()
    return summed


def _mode(work: HistoricalWork, key: int | None) -> AbstractContextManager[None]:
    return evaluating(work.model) if key is None else nullcontext()


@contextmanager
def _evaluating_with_gradients(model: nn.Module) -> Iterator[None]:
    # cuDNN's recurrent kernels, an LSTM for jumping knowledge, cannot go back in evaluation mode. Torch's own can.
    with evaluating(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield


def _slab(work: HistoricalWork) -> slice:
    """The rows that this rank keeps."""
    return slice(work.owners.own.start, work.owners.own.stop)


class _AllParts(Swept["HistoricalBatch"]):
    """All nodes that this rank keeps, by parts; rows are in the tables."""

    def __init__(self, work: HistoricalWork, key: int | None, keep: bool = False) -> None:
        super().__init__(work, key)
        self.keep, self.last = keep, work.model.num_layers - 1
        self.swept, self.position = work.swept_places, work.partition.position
        self.totals: dict[int, Sums] = {}
        self.known: Sums | None = None
        """The gradient after one layer at the rows that this rank keeps."""
        self.kept: list[HistoricalBatch] = []

    def pieces(self, l: int) -> Iterable[HistoricalBatch]:
        """Few edges are not moved to a GPU again at every layer."""
        if self.work.job.data.num_edges > HELD_EDGES:
            return self.work.all_batches(self.key, inputs=False)
        self.kept = self.kept or list(self.work.all_batches(self.key, inputs=False))
        return self.kept

    def number(self, piece: HistoricalBatch) -> int:
        return piece.block.slabs[0].start

    def begin(self, l: int) -> None:
        self.source: Reader = self.work.histories.snapshot(range(l)[-1:], self.swept)

    def inputs(self, l: int, piece: HistoricalBatch) -> Tensor:
        return self._rows(l, piece.block.src_places)

    def own(self, l: int, piece: HistoricalBatch) -> Tensor:
        return self._rows(l, self.position[piece.nodes])

    def _rows(self, l: int, places: Tensor) -> Tensor:
        return self.source.rows(l, places).to(self.work.job.device, self.work.dtype)

    def put(self, l: int, piece: HistoricalBatch, rows: Tensor) -> None:
        self.work.histories.write(l, piece.block.slabs, rows)

    def end(self, l: int) -> None:
        self.work.job.world.barrier()  # the next layer reads what others wrote

    def turn(self) -> None:
        self.source = self.work.histories.snapshot(range(self.last), self.swept)
        for l in range(self.last):
            self._add_up(l, self.work.histories.tables[l])

    def add(self, l: int, piece: HistoricalBatch, rows: Tensor | None, *, own: bool = False) -> None:
        if rows is None or (l == self.last and not self.keep):
            return
        places = self.position[piece.nodes] if own else piece.block.src_places
        self._add_up(l, rows).add(torch.searchsorted(self.swept, places), rows)

    def _add_up(self, l: int, like: Tensor) -> Sums:
        if l not in self.totals:
            self.totals[l] = self.work.histories.sums(l, (self.swept.numel(), *like.shape[1:]), self.work.dtype)
        return self.totals[l]

    def gathered(self, l: int) -> None:
        work, total = self.work, self.totals.pop(l, None)
        if total is not None:
            self.known = total if work.job.world.size == 1 else Sums(work.owners.collect(self.swept, total.all()))
            if self.keep:
                work.gradients.write(l, [_slab(work)], self.known.all())

    def gradient(self, l: int, piece: HistoricalBatch) -> Tensor:
        assert self.known is not None
        return self.known.read(self.position[piece.nodes] - self.work.owners.own.start)
