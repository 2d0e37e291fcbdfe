"""Exact inference at the same nodes, again and again with other weights: on a GPU as one CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hopline import inference as infer
from hopline.contract import Job
from hopline.core.row_handles import Rows
from hopline.device.cuda_graph import CapturedCall, CaptureDeclined
from hopline.device.meter import free_bytes
from hopline.inference.cache import InferenceCache
from hopline.inference.layerwise_chunks import CPU, Chunks
from hopline.nn.attention import is_fused_attention
from hopline.nn.fused import is_fused
from hopline.nn.gnn import GNN
from hopline.util import trace

WARM_UP_INFERENCES = 1
"""Inferences before one is recorded, in which kernels are compiled."""
MAX_CAPTURES = 3
"""Weights or features that keep moving about in memory are not worth another graph."""
SHARE = 16
"""A graph keeps the memory that it computes in: at most 1 / so many of the GPU's, and of what is free a quarter."""
KNOWN = ("torch", "torch_geometric", "hopline")
"""Whose modules do the same every time: others may count, or read what is no weight."""


class CapturedInference:
    """Exact inference with a job's model at some nodes: recorded when it was done once, and then replayed.

    A graph computes with the weights that are in memory when it is replayed, and leaves the host alone, which launching
    a few dozen kernels would keep busy for longer than they take.
    """

    def __init__(self, job: Job, ids: Tensor) -> None:
        assert isinstance(job.model, GNN)
        self.model, self.data, self.device, self.ids = job.model, job.data, job.device, ids
        self.left_to_others = False
        """Whether it waits for somebody to call `capture`, and does not do so itself."""
        self._job = weakref.ref(job)
        self._captured: CapturedCall[_Capture] = CapturedCall(
            job.device,
            purpose="evaluations",
            subject="evaluation is",
            say=_say_for(self._job),
            warm_up=WARM_UP_INFERENCES,
            max_captures=MAX_CAPTURES,
        )

    def __call__(self) -> Tensor:
        """The output rows of the nodes, on the host."""
        captured = self._captured
        if captured.graph is not None and not self._is_current(captured.result):
            captured.reset()
        if captured.is_due and not self.left_to_others:
            self.capture()
        if captured.graph is not None:
            with trace.span("infer.layer", self.device):
                rows = captured.replay().rows
            return rows.to(CPU)
        captured.runs += 1
        return infer.exact(self.model, self.data, self.ids, device=self.device)

    def launch(self, weights: Mapping[str, Tensor], after: Any, stream: torch.cuda.Stream) -> PendingInference | None:
        """Given to a stream with other weights, when those are there, and not waited for; None if it is not recorded.

        At most two may be under way, since each leaves its rows in one of two places.
        """
        captured, job = self._captured, self._job()
        if captured.graph is None or job is None or not self._is_current(captured.result):
            return None
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(after)
            own = job.module.state_dict()
            torch._foreach_copy_(list(own.values()), [weights[name] for name in own])
            place = captured.result.next_host_buffer()
            begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
            begun.record()
            place.copy_(captured.replay().rows, non_blocking=True)
            done.record()
        return PendingInference(place, begun, done)

    @property
    def is_captured(self) -> bool:
        return self._captured.graph is not None

    @property
    def is_due(self) -> bool:
        """Whether it is to be recorded before the next time."""
        return self._captured.is_due

    @property
    def is_settled(self) -> bool:
        """Whether it is recorded, or never will be."""
        return self._captured.is_settled

    def capture(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make it a graph whose kernels have the stream's priority, if that can be; nobody else may draw meanwhile."""
        self._captured.capture(self._prepare_capture(), stream=stream)

    @contextmanager
    def _prepare_capture(self) -> Iterator[Callable[[], _Capture]]:
        """Gives the inference to record, when it finds all blocks made.

        Declined where a graph would take too much memory, or read what may move or is the host's.
        """
        model, device = self.model, self.device
        with infer.evaluating(model):
            work, ids = Chunks(model, self.data, None, device), self.ids.to(device)
            for _ in range(2):  # as a rehearsal: what is asked for twice is kept
                if not work.is_cached:
                    Rows(work.outputs(self.ids, show=False), ids).read_on(device)
            cache = work.cache
            if not work.is_cached or cache is None or (model.encodes and cache.layer_nodes[0].device.type == "cpu"):
                raise CaptureDeclined
            reads_features = not cache.has_sums(model.num_layers)
            addresses = self.addresses(features=reads_features)
            if addresses is None:
                raise CaptureDeclined
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            max_bytes, before = min(total // SHARE, free_bytes(device) // 4), torch.cuda.memory_reserved(device)

            def run() -> _Capture:
                rows = Rows(work.outputs(self.ids, show=False), ids).read_on(device)
                return _Capture(rows, cache, reads_features, addresses, (work, ids))

            yield run
            if torch.cuda.memory_reserved(device) - before > max_bytes:
                raise CaptureDeclined

    def _is_current(self, capture: _Capture) -> bool:
        """Whether all that a graph reads is where it was, and of the same nodes and features."""
        same = capture.cache.matches(self.data.graph, self.ids, capture.cache.settings, self.data.x)
        return same and self.addresses(features=capture.reads_features) == capture.addresses

    def addresses(self, *, features: bool) -> list[int] | None:
        """Where the weights are, and the features; None where these are not on the GPU, or may be moved there."""
        read = [*self.model.parameters(), *self.model.buffers()]
        if features:
            stored = self.data.x.storage()
            if stored is None or not stored.is_cuda:
                return None
            read.append(stored)
        return [tensor.data_ptr() for tensor in read]


class PendingInference(NamedTuple):
    """An inference that a GPU has been given."""

    rows: Tensor
    """Where its output will be, on the host,"""
    begun: torch.cuda.Event
    done: torch.cuda.Event
    """when this has come."""

    def wait(self) -> tuple[Tensor, float]:
        """The output rows, and the seconds that they took."""
        self.done.synchronize()
        return self.rows.clone(), self.begun.elapsed_time(self.done) / 1e3


@dataclass(eq=False)
class _Capture:
    """What a recorded inference reads and leaves: the graph itself knows only where that is."""

    rows: Tensor
    """Where it leaves the output."""
    cache: InferenceCache
    reads_features: bool
    addresses: list[int]
    keep_alive: tuple[Chunks, Tensor]
    host_buffers: list[Tensor] = field(default_factory=list)
    """Pinned memory for the output of two that are under way."""

    def next_host_buffer(self) -> Tensor:
        """That of the one before the last."""
        if not self.host_buffers:
            self.host_buffers = [torch.empty_like(self.rows, device=CPU, pin_memory=True) for _ in range(2)]
        self.host_buffers.reverse()
        return self.host_buffers[0]


def _say_for(job: weakref.ref[Job]) -> Callable[[str], None]:
    """Says a line where the job says its own, and does not keep the job."""

    def say(text: str) -> None:
        known = job()
        if known is not None:
            known.say(text)

    return say


def repeats(model: nn.Module) -> bool:
    """Whether a model does the same every time but for its weights, and nobody listens to what its modules do."""
    if not isinstance(model, GNN) or not all(is_fused(conv) or is_fused_attention(conv) for conv in model.convs):
        return False
    modules, act = list(model.modules()), model.act
    known = all(_is_known(type(module)) for module in modules)
    silent = not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return known and silent and (isinstance(act, nn.Module | None) or _is_known(act))


def _is_known(made: Any) -> bool:
    """By where a class or function comes from; what is compiled has no such place."""
    return (getattr(made, "__module__", None) or "torch").split(".")[0] in KNOWN


class CapturedInferences:
    """The captured inferences of whoever evaluates again and again, by job and nodes.

    They go with their job: that of a thread that evaluates ends with the thread.
    """

    def __init__(self) -> None:
        self._by_job: WeakKeyDictionary[Job, dict[int, CapturedInference]] = WeakKeyDictionary()

    def of(self, job: Job, ids: Tensor) -> CapturedInference | None:
        """A job's inference at some nodes, the same one every time; None where it is not for a graph."""
        if job.device.type != "cuda" or not repeats(job.model):
            return None
        known = self._by_job.setdefault(job, {})
        if id(ids) not in known:
            known[id(ids)] = CapturedInference(job, ids)
        return known[id(ids)]
