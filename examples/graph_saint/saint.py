"""GraphSAINT's random-walk sampler. A batch is the subgraph of the nodes that walks from its seeds visit. Edges and
losses are divided by how often subgraphs have them, which is counted in many subgraphs before training."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import hopline as hl


class SaintWalks:
    """Subgraphs for training, with their norms. For convs that add up rows times edge weights: GraphConv.

    data: its edge weights make the sum over all in-edges what is to be learnt, such as 1 / in-degree for a mean.
    batch_size: as in `hl.Sampled`. layers: 2 or more. samples: subgraphs that are drawn before training.
    """

    def __init__(
        self, data: hl.Dataset, batch_size: int, layers: int = 2, length: int = 2, samples: int = 50, seed: int = 0
    ) -> None:
        self.layers, self.length, self.samples, self.batch_size, self.seed = layers, length, samples, batch_size, seed
        self._graph, self._train_ids = data.graph, data.train_ids
        num_drawn, num_drawn_edges = torch.zeros(data.num_nodes), torch.zeros(data.num_edges)
        for number in range(samples):
            nodes, edges, _, _ = self.drawn_before(number)
            num_drawn[nodes] += 1
            num_drawn_edges[edges] += 1
        # C_v / C_uv, or 1 / alpha in the paper: with it the sum at v is right on average. As in PyG at most 10,000.
        targets = torch.arange(data.num_nodes).repeat_interleave(data.graph.in_degrees())
        self.edge_norm = (num_drawn[targets] / num_drawn_edges.clamp(min=1)).clamp(max=1e4)
        # 1 / lambda in the paper, over the training nodes: with it the sum of a batch is their mean loss on average.
        is_trained = torch.zeros(data.num_nodes).index_fill_(0, data.train_ids, 1)
        self.loss_norm = is_trained * samples / num_drawn.clamp(min=1) / len(data.train_ids)

    def drawn_before(self, number: int) -> tuple[Tensor, ...]:
        """The subgraph number 0 .. samples - 1 of those that are counted."""
        key = hl.extend.derive_key(self.seed, number)
        order = torch.randperm(len(self._train_ids), generator=torch.Generator().manual_seed(key))
        return self.subgraph(self._train_ids[order[: self.batch_size]], key)

    def subgraph(self, seeds: Tensor, key: int) -> tuple[Tensor, ...]:
        """(nodes, the seeds first; all edges between them, by destination; source and destination of each).

        Edges are positions in the graph, their ends positions among the nodes.
        """
        graph = self._graph
        draws = hl.extend.random_numbers(key, seeds, self.length)
        path = [seeds]
        for step in range(self.length):
            at = path[-1]
            degree = graph.in_degrees(at)
            edge = graph.indptr[at] + (draws[:, step] * degree).long()
            path.append(torch.where(degree > 0, graph.indices[edge.clamp(max=graph.num_edges - 1)].long(), at))
        visited = torch.cat(path).unique()
        nodes = torch.cat([seeds, visited[~torch.isin(visited, seeds)]])
        local = torch.full((graph.num_nodes,), -1)
        local[nodes] = torch.arange(len(nodes))
        degree = graph.in_degrees(nodes)
        first = (graph.indptr[nodes] - (degree.cumsum(0) - degree)).repeat_interleave(degree)
        edges = first + torch.arange(len(first))
        src_idx = local[graph.indices[edges].long()]
        is_inside = src_idx >= 0
        dst_idx = torch.arange(len(nodes)).repeat_interleave(degree)
        return nodes, edges[is_inside], src_idx[is_inside], dst_idx[is_inside]

    def sample(self, seeds: Tensor, key: int) -> list[hl.extend.Block]:
        """All layers have one block, from all nodes to all. Only the last leads to the seeds alone."""
        nodes, edges, src_idx, dst_idx = self.subgraph(seeds, key)
        indptr = torch.nn.functional.pad(torch.bincount(dst_idx, minlength=len(nodes)).cumsum(0), (1, 0))
        weight = self._graph.edge["weight"][edges] * self.edge_norm[edges]
        part = hl.extend.Part(indptr, src_idx.int(), {"weight": weight})
        # Without graph=: in-edges are not equally likely, so GCNConv must not scale them as if they were.
        everywhere = hl.extend.Block(nodes, len(nodes), (part,))
        stop = int(indptr[len(seeds)])
        to_seeds = hl.extend.Part(indptr[: len(seeds) + 1], part.src_idx[:stop], {"weight": weight[:stop]})
        return [everywhere] * (self.layers - 1) + [replace(everywhere, num_dst=len(seeds), parts=(to_seeds,))]

    def train_step(self, labels: Tensor) -> Callable[[torch.nn.Module, hl.Batch], Tensor]:
        """The loss at all training nodes of a subgraph, of which the seeds are some."""

        def step(model: torch.nn.Module, batch: hl.Batch) -> Tensor:
            everywhere = batch.blocks[0]
            nodes = everywhere.dst_ids.cpu()
            outputs = model(
                replace(batch, seeds=everywhere.dst_ids, blocks=(everywhere,) * self.layers, y=None, output_idx=None)
            )
            norm = self.loss_norm[nodes].to(outputs)
            y = labels[nodes].to(outputs.device)
            return (cross_entropy(outputs, y, ignore_index=-1, reduction="none") * norm).sum()

        return step
