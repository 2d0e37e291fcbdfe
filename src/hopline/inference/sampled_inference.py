"""`sampled`: the outputs of a model over sampled edges, an estimate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hopline.budget.guard import BudgetGuard
from hopline.core.batch import Batch
from hopline.data.dataset import Dataset
from hopline.device.snapshots import evaluating
from hopline.nn.whole_module import as_batch_model
from hopline.util.progress import progress


def sampled(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_nodes: int | None = None,
    show: bool = False,
    guard: BudgetGuard | None = None,
) -> Tensor:
    """Return the model's output for the batches' seeds, in their order: an estimate over sampled edges.

    Args:
        model: A `GNN`, a PyG model, or any module with forward(x, edge_index). Its modes are restored
            afterwards.
        batches: Batches such as those of `hl.Sampled(fanouts=(20, 20), shuffle=False).loader(data, ids)`.
        num_nodes: The number of seeds, for the progress bar.
        show: Show progress.
        guard: The guard of training under a budget. Batches that exceed the budget are computed in
            micro-batches.

    Returns:
        [n, num_outputs] on the host, in the model's dtype.

    Raises:
        ValueError: The number of blocks of a batch is not the number of layers of the model.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> batches = hl.Sampled(fanouts=(2,), shuffle=False).loader(data, torch.tensor([2, 0]))
        >>> hl.infer.sampled(hl.nn.GNN([SAGEConv(2, 3)]), batches).shape
        torch.Size([2, 3])
    """
    if isinstance(batches, Dataset):
        raise ValueError(
            "sampled inference takes batches, not a Dataset: give it "
            "hl.Sampled(fanouts=(20, 20), shuffle=False).loader(data, ids)"
        )
    batch_model = as_batch_model(model)
    outputs = []
    with (
        evaluating(batch_model),
        progress("inference", num_nodes, "nodes", enabled=show, brief=True) as bar,
    ):
        for batch in batches:
            outputs.append(batch_model(batch).cpu() if guard is None else guard.outputs(batch_model, batch))
            bar.advance(batch.num_seeds)
    return torch.cat(outputs)
