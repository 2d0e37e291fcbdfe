"""Neighbours by random walks, as in PinSAGE: those of a node are the nodes that short walks from it visit most."""

from dataclasses import dataclass

import torch
from torch import Tensor

import hopline as hl


@dataclass(frozen=True)
class RandomWalks(hl.extend.SamplerSettings):
    neighbors: tuple[int, ...] = (10, 5)
    """Neighbours of a node, one number per layer, the seeds' own first."""
    walks: int = 20
    """Walks from each node."""
    length: int = 3
    """Steps of a walk, each along an in-edge."""
    restart: float = 0.5
    """Probability with which a walk is back at its node before a step."""

    def bind(self, graph: hl.Graph) -> "Walker":
        return Walker(self, graph)


@dataclass(frozen=True)
class Walker:
    settings: RandomWalks
    graph: hl.Graph

    def sample(self, seeds: Tensor, key: int) -> list[hl.extend.Block]:
        """One block per layer, in the order of computation: the last one leads to the seeds."""
        blocks: list[hl.extend.Block] = []
        dst = seeds
        for layer, count in enumerate(self.settings.neighbors):
            row, node, visits = self.most_visited(dst, count, hl.extend.derive_key(key, layer))
            total = torch.zeros(dst.numel()).index_add_(0, row, visits)
            blocks.append(hl.extend.block_of_edges(dst, node, row, edge={"weight": visits / total[row]}))
            dst = blocks[-1].src_ids
        return blocks[::-1]

    def most_visited(self, dst: Tensor, count: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
        """(position of the node in `dst`, a node that its walks visit, and how often), `count` of each at most."""
        walks, length, num_nodes = self.settings.walks, self.settings.length, self.graph.num_nodes
        start = dst[:, None].expand(-1, walks)
        draws = hl.extend.random_numbers(key, dst, 2 * walks * length).view(-1, length, 2, walks)
        at, visited = start, []
        for step in range(length):
            at = torch.where(draws[:, step, 0] < self.settings.restart, start, at)
            degree = self.graph.indptr[at + 1] - self.graph.indptr[at]
            edge = self.graph.indptr[at] + (draws[:, step, 1] * degree).long()
            found = self.graph.indices[edge.clamp(max=self.graph.num_edges - 1)].long()
            at = torch.where(degree > 0, found, start)  # a walk without a way on is back at its node
            visited.append(at)
        at = torch.cat(visited, 1)
        row = torch.arange(dst.numel())[:, None].expand_as(at)
        pair, visits = (row * num_nodes + at)[at != dst[:, None]].unique(return_counts=True)
        order = visits.argsort(descending=True, stable=True)
        order = order[(pair[order] // num_nodes).argsort(stable=True)]  # by node, then by visits, then by id
        row = pair[order] // num_nodes
        rank = torch.arange(row.numel()) - torch.searchsorted(row, row)
        best = order[rank < count]
        return pair[best] // num_nodes, pair[best] % num_nodes, visits[best].float()
