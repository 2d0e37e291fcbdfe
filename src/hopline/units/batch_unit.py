"""The unit of one batch, the usual losses of a task, and the threads that training uses on a CPU.

A unit returns its loss summed over its seeds. It scales its gradients by 1 / total, where total is the
number of seeds of the step on all ranks. The gradients of units and ranks then add up to those of the mean
over the step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.contract import Job, TrainStep, Unit
from hopline.core.batch import Batch
from hopline.nn.gnn import GNN
from hopline.nn.whole_module import as_batch_model, is_layered, unwrap
from hopline.util import trace
from hopline.util.host import num_cores


def supervised_loss(task: str, num_classes: int) -> TrainStep:
    """The training step with the usual loss of a task: the mean over the batch's seeds.

    The loss is cross entropy. It is binary cross entropy if nodes have several labels (task "multi"), or if
    the model has a single score for two classes.
    """

    def train_step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch)
        y = batch.labels
        is_single_score = scores.size(-1) == 1 and num_classes <= 2  # a score of the second of two classes
        if task == "multi" or is_single_score:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            return nn.functional.binary_cross_entropy_with_logits(scores.view(y.shape), y.to(scores.dtype))
        if scores.size(-1) < num_classes:
            raise ValueError(narrow_output_error(scores.size(-1), num_classes))
        return ops.cross_entropy(scores, y)

    return train_step


def narrow_output_error(num_columns: int, num_classes: int) -> str:
    """The message for a model with fewer output columns than classes."""
    columns = "1 column" if num_columns == 1 else f"{num_columns} columns"
    return f"the model puts out {columns} for {num_classes} classes: widen its last layer"


def check_loss_of(train_step: TrainStep) -> TrainStep:
    """A user's own training step, with a check of its loss.

    The step raises a ValueError unless the loss is one number and, with gradients enabled, has a gradient.
    """

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = train_step(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            value = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"train_step returned {value}: return the mean loss of the batch's seeds, as one number")
        if not loss.requires_grad and torch.is_grad_enabled():
            raise ValueError("the loss of train_step has no gradient: compute it from model(batch), without detach()")
        return loss.view(())

    return step


@dataclass
class BatchUnit(Unit):
    """One batch through the job's training step, for methods that make batches. `Method` has an example."""

    job: Job
    batch: Batch

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.batch.num_seeds

    @property
    def total_size(self) -> float | None:
        return self.batch.total_seeds

    def forward_backward(self, total: float) -> Tensor:
        job = self.job
        if not self.size:  # the last step of an epoch may have fewer seeds than there are ranks
            return torch.zeros((), device=job.device)
        with autocast(job), trace.span("forward", job.device):
            loss = job.train_step(job.model, self.batch)
        with trace.span("backward", job.device):
            (loss * (self.size / total)).backward()
        return loss.detach() * self.size


def autocast(job: Job) -> torch.autocast:
    """The autocast context of the forward pass: bfloat16 if the job asks for it.

    Autocast's cache of casts is off: a captured step is replayed with new weights, and cached casts would
    be of old ones.
    """
    return torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=job.bf16, cache_enabled=False)


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
    if device.type == "cpu" and isinstance(model, GNN) and model.is_fused:
        return ops.own_threads(min(torch.get_num_threads(), max_threads, MAX_TRAINING_THREADS))
    return nullcontext()
