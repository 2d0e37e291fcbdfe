"""Time of a historical epoch, beside the same model in full batch and beside push and pull in plain torch.

    PYTHONPATH=src python benchmarks/history_time.py --data ../shared/data --json history_time.json

GNNAutoScale's GCN for cora and coauthor_physics: two layers, its hidden width, parts and dropout. An epoch is training
alone, without evaluation and refresh. "plain torch" has the same weights, groups and tables: embedding_bag for the
product with sparse features, gather and index_add over the edges, `table[rows] = h` after every batch and `table[halo]`
between layers; its blocks are made once. Before anything is timed, one epoch without dropout must give the same loss.
The ways take turns, some epochs each, so that whatever else the machine does meets all of them. Medians over all turns,
and in brackets the shortest epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reproduce_history import with_split
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv

import hopline as hl
from hopline.methods.historical.work import HistoricalWork
from hopline.nn import GNN

LR, DECAY = 0.01, 5e-4


@dataclass(frozen=True)
class Case:
    file: str
    hidden: int
    parts: tuple[int, int]
    epochs: int
    """Of a way's turn."""


CASES = (Case("cora.npz", 16, (40, 10), 12), Case("coauthor_physics.npz", 64, (4, 2), 6))


def model_of(data: hl.Dataset, hidden: int, dropout: float) -> GNN:
    torch.manual_seed(0)
    return GNN([GCNConv(data.num_features, hidden), GCNConv(hidden, data.num_classes)], dropout=dropout)


def trainer_of(data: hl.Dataset, case: Case, dropout: float, epochs: int, **method: Any) -> hl.Trainer:
    num_parts, parts_per_batch = case.parts
    settings = {"num_parts": num_parts, "parts_per_batch": parts_per_batch, "groups": "fixed"} | method
    model = model_of(data, case.hidden, dropout)
    train: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "evaluate_every": epochs, "show": False}
    return hl.Trainer(model, data, hl.Historical(**settings), epochs=epochs, **train)


@dataclass
class Piece:
    """A batch of the plain version."""

    x: tuple[Tensor, Tensor, Tensor]
    """Features of its own nodes and of the halo: columns, where each row begins, values."""
    src: Tensor
    dst: Tensor
    weight: Tensor
    nodes: Tensor
    halo: Tensor
    train: Tensor
    y: Tensor


class Plain:
    """Two GCN layers, a table of rows between them, and nothing but torch."""

    def __init__(self, data: hl.Dataset, case: Case, dropout: float, groups: list[Tensor]) -> None:
        convs: Any = model_of(data, case.hidden, dropout).convs
        self.weights = [nn.Parameter(conv.lin.weight.detach().t().clone()) for conv in convs]
        self.biases = [nn.Parameter(conv.bias.detach().clone()) for conv in convs]
        # The usual decay of all weights.
        self.optimizer = torch.optim.Adam([*self.weights, *self.biases], lr=LR, weight_decay=DECAY)
        self.dropout = dropout
        self.table = torch.zeros(data.num_nodes, case.hidden)
        src, dst = data.graph.edge_index()
        apart, every = src != dst, torch.arange(data.num_nodes)
        src, dst = torch.cat([src[apart], every]), torch.cat([dst[apart], every])
        degree = torch.bincount(dst, minlength=data.num_nodes).float()
        self.pieces = [self._piece(data, nodes, src, dst, degree.rsqrt()) for nodes in groups]
        self.whole = self._piece(data, every, src, dst, degree.rsqrt())

    def _piece(self, data: hl.Dataset, nodes: Tensor, src: Tensor, dst: Tensor, norm: Tensor) -> Piece:
        own = torch.zeros(data.num_nodes, dtype=torch.bool)
        own[nodes] = True
        edges = own[dst].nonzero().view(-1)
        halo = src[edges].unique()
        halo = halo[~own[halo]]
        ids = torch.cat([nodes, halo])
        place = torch.empty(data.num_nodes, dtype=torch.int64)
        place[ids] = torch.arange(ids.numel())
        indptr, columns, values = data.x.read_csr(ids)  # type: ignore[misc]
        x = (columns.long(), indptr[:-1], values.float())
        weight = (norm[src[edges]] * norm[dst[edges]])[:, None]
        train = place[data.splits["train"][own[data.splits["train"]]]]
        return Piece(x, place[src[edges]], place[dst[edges]], weight, nodes, halo, train, data.labels[nodes[train]])

    def _conv(self, l: int, rows: Tensor, piece: Piece) -> Tensor:
        messages = rows[piece.src] * piece.weight
        out = torch.zeros(piece.nodes.numel(), rows.size(1)).index_add_(0, piece.dst, messages)
        return out + self.biases[l]

    def _hidden(self, piece: Piece) -> Tensor:
        columns, starts, values = piece.x
        bags = functional.embedding_bag(columns, self.weights[0], starts, mode="sum", per_sample_weights=values)
        return torch.relu(self._conv(0, bags, piece))

    @torch.no_grad()
    def fill(self) -> None:
        self.table[:] = self._hidden(self.whole)

    def epoch(self, pieces: list[Piece]) -> float:
        """Mean loss over the training nodes."""
        total, seeds = 0.0, 0
        for piece in pieces:
            h = self._hidden(piece)
            pushed = h.detach()
            if piece.halo.numel():
                h = torch.cat([h, self.table[piece.halo]])
            if piece.train.numel():
                h = functional.dropout(h, self.dropout)
                loss = functional.cross_entropy(self._conv(1, h @ self.weights[1], piece)[piece.train], piece.y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total, seeds = total + loss.item() * piece.train.numel(), seeds + piece.train.numel()
            self.table[piece.nodes] = pushed
        return total / seeds


WAYS = ("full batch, plain torch", "full batch", "history, plain torch", "history, fixed groups", "history, redrawn")
ONE_PART: dict[str, Any] = {"num_parts": 1, "parts_per_batch": 1, "partition": "range"}


def groups_of(data: hl.Dataset, case: Case, epoch: int) -> list[Tensor]:
    work: Any = trainer_of(data, case, 0.0, 1).work
    assert isinstance(work, HistoricalWork)
    return [work.partitioned.parts.nodes_of(group) for group in work.groups.groups_of(epoch)]


def turns(data: hl.Dataset, case: Case, dropout: float) -> dict[str, Callable[[int], tuple[list[float], float]]]:
    """By way, a function of a number of epochs: seconds of each but the first two, and the first epoch's loss."""
    groups = groups_of(data, case, 1)
    plain, full = (Plain(data, case, dropout, groups) for _ in range(2))
    plain.fill()

    def in_torch(model: Plain, pieces: list[Piece], epochs: int) -> tuple[list[float], float]:
        seconds, losses = [], []
        for _ in range(epochs):
            started = time.perf_counter()
            losses.append(model.epoch(pieces))
            seconds.append(time.perf_counter() - started)
        return seconds[2:], losses[0]

    def ours(epochs: int, **method: Any) -> tuple[list[float], float]:
        history = trainer_of(data, case, dropout, epochs, **method).fit().history
        return [epoch.seconds for epoch in history][2:], history[0].loss

    return dict(
        zip(
            WAYS,
            (
                lambda n: in_torch(full, [full.whole], n),
                lambda n: ours(n, **ONE_PART),
                lambda n: in_torch(plain, plain.pieces, n),
                ours,
                lambda n: ours(n, groups="redrawn"),
            ),
            strict=True,
        )
    )


def measured(data: hl.Dataset, case: Case, rounds: int) -> dict[str, list[float]]:
    losses = {way: turn(1)[1] for way, turn in turns(data, case, 0.0).items()}
    for one, other in ((WAYS[0], WAYS[1]), (WAYS[2], WAYS[3])):
        assert abs(losses[one] - losses[other]) < 1e-4, f"not the same model: {losses}"
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    timed = turns(data, case, 0.5)
    for _ in range(rounds):
        for way, turn in timed.items():
            found[way] += turn(case.epochs)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the .npz files")
    parser.add_argument("--json", type=Path, help="where all figures are written")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--threads", type=int, default=1, help="more of them wait for each other on a busy machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures: dict[str, dict[str, list[float]]] = {}
    for case in CASES:
        data = hl.from_npz(args.data / case.file)
        data = data.normalized() if case.file == "cora.npz" else with_split(data, 0)
        figures[case.file.removesuffix(".npz")] = measured(data, case, args.rounds)
    print("| ms an epoch | " + " | ".join(figures) + " |\n|---|" + "---|" * len(figures))
    for way in WAYS:
        cells = [f"{1000 * statistics.median(of[way]):.1f} ({1000 * min(of[way]):.1f})" for of in figures.values()]
        print(f"| {way} | " + " | ".join(cells) + " |")
    if args.json is not None:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "seconds": figures}
        args.json.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
