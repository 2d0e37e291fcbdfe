"""Training on threads of hopline's own, where every conv of a model is fused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from hopline import ops
from hopline.contract import Job
from hopline.nn.layered import Layered
from hopline.nn.whole_module import as_batch_model, is_layered, unwrap
from hopline.util.host import num_cores

MAX_TRAINING_THREADS = 8
"""The most threads of hopline that train on a CPU. More gain nothing: between products and reductions, a
single thread works. The number is a rule of thumb."""


def own_threads(job: Job) -> AbstractContextManager[None]:
    """A context for the steps of a job on the CPU: if all convs are fused, hopline's threads do the long operations.

    Torch's other operations run in the calling thread alone, since torch's threads would compete for the
    cores. For other models and devices nothing changes.
    """
    return _threads_for(job.model, job.device, job.world.num_cores)


def own_threads_for(model: nn.Module) -> AbstractContextManager[None]:
    """Divide the cores between hopline's threads and torch's in a loop of your own, as the Trainer does.

    Both compute in a loop on the CPU. With a thread per core each, they wait for each other. In this
    context, a model whose convs are all fused (SAGEConv, GCNConv, GINConv, GraphConv) leaves the long
    operations to hopline's threads. For other models, and on a GPU, nothing changes. No result depends on
    it.

    Args:
        model: A `GNN` or a PyG model.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> model = hl.nn.GNN([SAGEConv(2, 3)])
        >>> with hl.extend.own_threads(model):
        ...     for batch in hl.Sampled(fanouts=(2,)).loader(data, torch.arange(4), model=model):
        ...         print(model(batch).shape)
        torch.Size([4, 3])
    """
    batch_model = as_batch_model(model) if is_layered(unwrap(model)) else model
    return _threads_for(batch_model, next(model.parameters()).device, num_cores())


def _threads_for(model: nn.Module, device: torch.device, max_threads: int) -> AbstractContextManager[None]:
    """A context in which fused convs on the CPU use hopline's threads, up to `max_threads`.

    It does nothing for other models and devices.
    """
    if device.type == "cpu" and isinstance(model, Layered) and model.is_fused:
        return ops.own_threads(min(torch.get_num_threads(), max_threads, MAX_TRAINING_THREADS))
    return nullcontext()
