"""Rows a batch does not own: hidden rows of its neighbours, from tables that earlier batches wrote.

A table holds one layer's rows of all nodes in the order of a partition, so that a part's rows are one slab. Tables are
written by `commit` alone; reading one that nobody has written yet gives zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block
from hopline.util import trace

AGES = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the bins of the staleness histogram, in steps; older rows and those never written have bins too."""


class Reader(ABC):
    """Where rows of all nodes, or of some, are read by their places."""

    step: int
    """The steps that were committed so far."""

    @abstractmethod
    def rows(self, l: int, places: Tensor) -> Tensor:
        """The rows at some places of layer `l`, as they are stored."""

    @abstractmethod
    def stamps(self, places: Tensor) -> Tensor:
        """The step whose commit wrote these rows; -1 if none did."""

    def ages(self, places: Tensor) -> Tensor:
        """How many steps ago these rows were written; -1 if never."""
        stamps = self.stamps(places)
        return torch.where(stamps < 0, -1, self.step - stamps)

    def read(self, l: int, places: Tensor, like: Tensor) -> Tensor:
        """The rows at some places of layer `l`, where `like` is and in its precision."""
        return self.rows(l, places).to(like.device, like.dtype)

    def read_some(self, l: int, places: Tensor, idx: Tensor, like: Tensor) -> Tensor:
        """The rows at `places[idx]`, of places that a batch reads; idx is on the host."""
        return self.read(l, places[idx], like)


def report_ages(ages: Tensor) -> None:
    """Count how many steps ago rows that are about to be read were written."""
    known = ages[ages >= 0]
    trace.count("history.rows", ages.numel())
    trace.count("history.never_written", ages.numel() - known.numel())
    trace.count("history.age_sum", float(known.sum()))
    counts = torch.bincount(torch.bucketize(known, torch.tensor(AGES)), minlength=len(AGES) + 1)
    for name, count in zip([*(f"to_{high}" for high in AGES), "older"], counts.tolist(), strict=True):
        trace.count(f"history.age.{name}", count)


@dataclass(eq=False)
class Sums:
    """Rows that are added up, as many as a table has."""

    rows: Tensor

    def add(self, at: Tensor, rows: Tensor) -> None:
        """at: which of them, each once."""
        self.rows.index_add_(0, at.to(self.rows.device), rows.to(self.rows.device, self.rows.dtype))

    def read(self, at: Tensor) -> Tensor:
        return self.rows[at.to(self.rows.device)]

    def all(self) -> Tensor:
        return self.rows


class Histories(Reader):
    """Tables of rows per layer boundary, made when the width of their rows is known, and the age of every row.

    dtype: of what is stored, that of the first rows by default. folder: where tables are kept as files, mapped; None
    keeps them in memory.
    """

    def __init__(
        self, num_rows: int, *, name: str = "h", dtype: torch.dtype | None = None, folder: Path | None = None
    ) -> None:
        self.num_rows, self.name, self.dtype, self.folder = num_rows, name, dtype, folder
        self.tables: dict[int, Tensor] = {}
        self.written = torch.full((num_rows,), -1, dtype=torch.int64)  # the step of each row's last commit
        self.step = 0

    def table(self, l: int, like: Tensor) -> Tensor:
        """The table of layer `l`: [num_rows, *row_shape], for rows like these."""
        shape = (self.num_rows, *like.shape[1:])
        if l not in self.tables:
            self.tables[l] = self._new(l, shape, self.dtype or like.dtype)
        table = self.tables[l]
        assert table.shape == shape, f"layer {l} has rows of {tuple(table.shape[1:])}, not {tuple(like.shape[1:])}"
        return table

    def _new(self, l: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.folder is None:
            return torch.zeros(shape, dtype=dtype)
        path = self._file_of(l)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return mapped(path, shape, dtype)  # a new file reads as zeros

    def _file_of(self, l: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.name}.{l}.bin"

    def snapshot(self, layers: Sequence[int], places: Tensor) -> Reader:
        """What some rows are now. All ranks must ask at the same time; where nothing is far away these are the tables.

        places: ascending, each once.
        """
        return self

    def ahead(self, layers: Sequence[int], places: Tensor) -> Reader:
        """Where a batch will read these rows, which may be on their way from now on: they are those of now."""
        return self

    def rows(self, l: int, places: Tensor) -> Tensor:
        table = self.tables[l]
        return ops.gather_rows(table, places.to(table.device))

    def sums(self, l: int, shape: Sequence[int], dtype: torch.dtype) -> Sums:
        """Zeros to add to, where the tables are; those that were given for this layer before are done with."""
        return Sums(torch.zeros(shape, dtype=dtype))

    def read(self, l: int, places: Tensor, like: Tensor) -> Tensor:
        self.table(l, like)
        return super().read(l, places, like)

    def stamps(self, places: Tensor) -> Tensor:
        return self.written[places]

    def mark(self) -> Any:
        """This moment of the computation, for `write`; None where computation is done when it returns."""
        return None

    def write(self, l: int, slabs: Sequence[slice], rows: Tensor, mark: Any = None) -> None:
        """Rows of some slabs, one after the other. mark: when they were computed; now, by default."""
        table, start = self.table(l, rows), 0
        for slab in slabs:
            count = slab.stop - slab.start
            table[slab].copy_(rows[start : start + count])
            start += count

    def write_at(self, l: int, places: Tensor, rows: Tensor) -> None:
        """Rows at some places."""
        table = self.table(l, rows)
        table[places.to(table.device)] = rows.to(table.device, table.dtype)

    def stamp(self, slabs: Sequence[slice], step: int) -> None:
        """These rows are as of a step."""
        for slab in slabs:
            self.written[slab] = step

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tables.values()) + self.written.nbytes

    def state_dict(self) -> dict[str, Any]:
        tables = {str(l): table.to("cpu", copy=True) for l, table in self.tables.items()}
        return {"tables": tables, "written": self.written.clone(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tables = {}
        for l, rows in state["tables"].items():
            self.dtype = self.dtype or rows.dtype
            self.table(int(l), rows).copy_(rows)
        self.written, self.step = state["written"].clone(), state["step"]


def mapped(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A file as a tensor that all who map it write and read."""
    return torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)


class HaloBlock(Block):
    """All in-edges of a batch's nodes: behind them stand the halo, sources that belong to other parts.

    Between two layers the halo's rows come from a table. What the batch's own rows were is kept for `commit`.
    """

    def __init__(
        self,
        block: Block,
        slabs: Sequence[slice],
        halo_places: Tensor,
        histories: Reader | None,
        last: int,
        keeps_gradients: bool = False,
    ) -> None:
        for name in ("src_ids", "num_dst", "parts", "graph", "key", "scale_sums"):
            object.__setattr__(self, name, getattr(block, name))
        kept: dict[int, Tensor] = {}
        extra = {"slabs": slabs, "halo_places": halo_places, "histories": histories, "last": last}
        for name, value in {**extra, "own": kept, "keeps_gradients": keeps_gradients}.items():
            object.__setattr__(self, name, value)

    slabs: Sequence[slice]
    """The places of its nodes, in their order."""
    halo_places: Tensor
    """Those of the halo; on the host."""
    histories: Reader | None
    """Where halo rows come from; None in a block without any."""
    last: int
    """The last layer, after which no rows are needed."""
    own: dict[int, Tensor]
    """By layer, the batch's own rows before dropout."""
    keeps_gradients: bool
    """Whether gradients of these rows are wanted."""

    def exchange(self, l: int, h: Tensor) -> Tensor:
        self.own[l] = h
        if self.keeps_gradients and h.requires_grad:
            h.retain_grad()
        if l == self.last or self.histories is None or not self.halo_places.numel():
            # What comes next, such as a head with ReLU(inplace=True), may change its input in place. The gradient of
            # the rows that are kept would then be that of the changed ones.
            return h.clone() if self.keeps_gradients else h
        return torch.cat([h, self.histories.read(l, self.halo_places, h)])

    @property
    def src_places(self) -> Tensor:
        """Of all sources, on the host."""
        own = [torch.arange(slab.start, slab.stop) for slab in self.slabs]
        return torch.cat([*own, self.halo_places])

    def to(self, device: torch.device, non_blocking: bool = False) -> HaloBlock:
        known = self.__dict__.setdefault("_moved", {})  # a batch has it once per layer
        if device not in known:
            plain = Block(self.src_ids, self.num_dst, self.parts, self.graph, self.key, self.scale_sums)
            known[device] = HaloBlock(
                plain.to(device, non_blocking), self.slabs, self.halo_places, self.histories, self.last,
                self.keeps_gradients,
            )  # fmt: skip
        return known[device]

    def scaling_sums(self, wanted: bool) -> Block:
        """For one conv: its edges alone."""
        return Block(self.src_ids, self.num_dst, self.parts, self.graph, self.key, wanted)

    def commits(self) -> Iterator[tuple[int, Tensor]]:
        """(layer, rows) to write into the tables: all but the last layer's."""
        for l, rows in self.own.items():
            if l != self.last:
                yield l, rows.detach()


class RecordedBlock(HaloBlock):
    """A block whose rows after a layer are only looked at: nothing is read for it, and nothing committed."""

    def __init__(self, block: Block, keeps_gradients: bool = False) -> None:
        super().__init__(block, (), torch.empty(0, dtype=torch.int64), None, -1, keeps_gradients)
