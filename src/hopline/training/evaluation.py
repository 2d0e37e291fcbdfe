"""Metrics of a split: by exact inference, by sampled inference, or by the user's function.

`Measure` is a value that says how to measure. It is called with a job, which has the model, the data and the
device. So the same one serves the trainer's model and the copy of it that asynchronous evaluation uses.

The functions below `Measure` are about modules that are not made of layers (`Whole`). Exact evaluation may
run such a module on the neighbourhood of the nodes, some hops wide. A trial must have shown that this gives
the outputs of the whole graph. Otherwise the module runs on the whole graph at once, which must fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import NamedTuple

from torch import Tensor

from hopline import inference as infer
from hopline.budget.guard import BudgetGuard
from hopline.budget.plan import Budget, Plan
from hopline.contract import Job, KeepRows, Method
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.data.dataset import Dataset
from hopline.device.snapshots import evaluating
from hopline.inference import distributed as shard_infer
from hopline.inference import without_layers
from hopline.inference.captured_forward import CapturedInference, CapturedInferences
from hopline.nn.layered import Layered
from hopline.nn.whole_module import Whole
from hopline.nn.whole_module_probe import find_reach
from hopline.shards.data import ShardedData
from hopline.training.metric import run_test_step
from hopline.units.job import examples_of
from hopline.units.own_threads import own_threads
from hopline.util.config import format_size


@dataclass(frozen=True)
class Measure:
    """How to measure a split: over every edge, over sampled edges, or by the user's own function."""

    method: Method
    """The method, for the batches of sampled inference."""
    split: str = "valid"
    exact: bool = True
    """Whether inference uses every edge. Otherwise the method samples them, if it can."""
    show: bool = False
    chunk_bytes: int | None = None
    """Most bytes that a chunk of exact inference, or a sampled batch, may take. None: no budget."""
    rows_on_disk: bool = False
    """Whether exact inference keeps embeddings in files, which are removed afterwards."""
    part_hops: int | None = None
    """For a module that is not made of layers: the hops around a node that exact inference runs it on.
    None: the whole graph."""
    captured: CapturedInferences = field(default_factory=CapturedInferences)
    examples: dict[str, Examples] = field(default_factory=dict)
    """The cache of `examples_of`, by split."""

    @classmethod
    def within(cls, plan: Plan | None, method: Method, part_hops: int | None) -> Measure:
        """Exact evaluation of the validation split, within the plan of a budget if there is one."""
        if plan is None:
            return cls(method, part_hops=part_hops)
        on_disk = plan.hidden_place == "disk"
        return cls(method, part_hops=part_hops, chunk_bytes=plan.chunk_bytes, rows_on_disk=on_disk)

    def __call__(self, job: Job, keep: KeepRows | None = None) -> dict[str, float]:
        """Evaluate the model of a job. Returns metrics by name.

        keep: called with the embeddings that exact inference computes.
        """
        data = job.data
        examples = self.examples_of(job)
        ids = examples.nodes
        if job.task.test_step is not None:
            return run_test_step(job.task.test_step, job, ids)

        # None if inference is exact, by request or because the method has no other.
        has_limit = self.chunk_bytes is not None
        batches = None if self.exact else self.method.inference_batches(job, ids, on_host=has_limit)
        # On a CPU, fused convs use hopline's threads, as in training.
        with own_threads(job):
            if isinstance(data, ShardedData):
                return shard_infer.evaluate(job.model, data, job.task, examples, batches, job.device)
            if batches is None:
                scores = self._exact_scores(job, ids, keep)
            else:
                scores = self._sampled_scores(job, ids, batches)
        return job.task.measure(scores, self.labels(job))

    def _exact_scores(self, job: Job, ids: Tensor, keep: KeepRows | None) -> Tensor:
        """The outputs at `ids` over every edge.

        A captured CUDA graph computes them if there is one. Otherwise a module without layers runs as one,
        and any other model layer by layer.
        """
        # A replayed graph would hand no embeddings to `keep`.
        captured = self.captured_inference(job) if keep is None else None
        if captured is not None:
            return captured()
        if isinstance(job.model, Whole):
            # A run on the whole graph has no chunks to limit. `check_whole` has checked that it fits.
            chunk_bytes = None if self.part_hops is None else self.chunk_bytes
            with evaluating(job.model):
                read_scores = without_layers.whole_rows(
                    job.model,
                    job.data,
                    ids,
                    self.part_hops,
                    device=job.device,
                    chunk_bytes=chunk_bytes,
                    show=self.show,
                )
                return read_scores(ids)
        # `infer.exact` takes a folder or `keep`, not both.
        writes_files = self.rows_on_disk and keep is None
        with TemporaryDirectory() if writes_files else nullcontext() as folder:
            return infer.exact(
                job.model,
                job.data,
                ids,
                device=job.device,
                show=self.show,
                chunk_bytes=self.chunk_bytes,
                keep=keep,
                folder=folder,
            )

    def _sampled_scores(self, job: Job, ids: Tensor, batches: Iterable[Batch]) -> Tensor:
        """The outputs at `ids` over the edges of sampled batches, within `chunk_bytes` if that is set."""
        guard = None
        if self.chunk_bytes is not None:
            # An empty budget: `limit_bytes` alone counts.
            guard = BudgetGuard(job, Budget(), limit_bytes=self.chunk_bytes)
        return infer.sampled(job.model, batches, num_nodes=ids.numel(), show=self.show, guard=guard)

    def examples_of(self, job: Job) -> Examples:
        """The examples of the split: the same object at every call, by which captured inference knows it again."""
        if self.split not in self.examples:
            self.examples[self.split] = examples_of(job.task, job.data, self.split)
        return self.examples[self.split]

    def labels(self, job: Job) -> Tensor:
        """[num_examples, ...] on the host: the labels of the split's examples."""
        y = self.examples_of(job).labels(job.data.y)
        assert y is not None
        return y.cpu()

    def captured_inference(self, job: Job) -> CapturedInference | None:
        """Exact inference on the split, which later calls replay as a CUDA graph. None if it cannot be captured.

        Nothing is captured with a budget, on shards, for sampled inference, or for the user's function.
        """
        has_budget = self.chunk_bytes is not None or self.rows_on_disk
        if has_budget or not self.exact or job.task.test_step is not None or isinstance(job.data, ShardedData):
            return None
        return self.captured.of(job, self.examples_of(job).nodes)


# ---- modules that are not made of layers


def hops_by_fanouts(model: Layered | Whole, data: Dataset, method: Method) -> int | None:
    """The hops around a node that a module without layers reads, for `without_layers.part_hops_of`.

    That is the number of hops of the method's batches, if a trial on a tiny graph shows that they are enough: a
    neighbourhood of these hops, or one more, gives the outputs of the whole graph. None: unknown, or the model has
    layers.
    """
    # The tables of a shard have no "x".
    if not isinstance(model, Whole) or "x" not in data.tables:
        return None
    num_hops = method.num_hops(model)
    if num_hops is None:
        return None
    reach = find_reach(model, num_hops, data.x, data.graph.edge)
    return None if reach.part_hops is None else num_hops


def part_hops_of(job: Job, method: Method) -> int | None:
    """The hops of the neighbourhood on which exact evaluation runs a module without layers.

    None for the whole graph, and for models that are made of layers.
    """
    if not isinstance(job.model, Whole):
        return None
    num_hops = hops_by_fanouts(job.model, job.data, method)
    # limits=[]: a module whose hops are unknown is not refused, but runs on the whole graph.
    return without_layers.part_hops_of(job.model, job.data, num_hops, limits=[])


def check_whole(job: Job, part_hops: int | None, chunk_bytes: int | None) -> None:
    """Refuse exact evaluation on the whole graph if the graph is too large, or the budget too small.

    Called before training, so that a run does not fail at its first evaluation.
    """
    if not isinstance(job.model, Whole) or "x" not in job.data.tables or part_hops is not None:
        return
    name = type(job.model.module).__name__
    if without_layers.is_too_large(job.data):
        raise ValueError(
            f"exact evaluation would run {name} on the whole graph at once, which is too large for that: build it as "
            "hl.nn.GNN([...convs...]), or evaluate by a function of your own, test_step="
        )
    if chunk_bytes is not None and without_layers.whole_bytes(job.model, job.data) > chunk_bytes:
        raise ValueError(
            f"{without_layers.describe_whole(job.model, job.data)}, and the budget leaves "
            f"{format_size(chunk_bytes)}: set a larger budget=, build it as hl.nn.GNN([...convs...]), or "
            "evaluate by a function of your own, test_step="
        )


class WholeNotes(NamedTuple):
    """What the start of a run says about a module without layers. "" where there is nothing to say."""

    approximation: str = ""
    """That training on batches is an approximation, and why. A warning."""
    evaluation: str = ""
    """How exact evaluation runs the module."""


def whole_notes(job: Job, method: Method, part_hops: int | None, *, evaluates: bool) -> WholeNotes:
    """What to say at the start of a run. evaluates: whether the run evaluates exactly."""
    if not isinstance(job.model, Whole) or "x" not in job.data.tables:
        return WholeNotes()
    approximation = ""
    evaluation = ""
    reason = ""
    num_hops = method.num_hops(job.model)
    if num_hops is not None:
        name = type(job.model.module).__name__
        reach = find_reach(job.model, num_hops, job.data.x, job.data.graph.edge)
        reason = reach.reason
        at_border = (
            "nodes at the border of a batch lack in-edges, and it reads these (degrees in the norm of GCNConv, or one "
            f"more hop than the {num_hops} fan-outs); hl.nn.GNN([...convs...]) takes degrees from the whole graph"
        )
        if not reach.in_batch:
            approximation = (
                f"{name} in batches is an approximation of {name} on the whole graph, with all neighbours too: "
                f"{reason or at_border}"
            )
    if evaluates and part_hops is None:
        evaluation = without_layers.describe_whole(job.model, job.data)
        if reason and not approximation:
            evaluation += f": {reason}"
    return WholeNotes(approximation, evaluation)
