"""Exact inference at the same nodes with changing weights, captured once as a CUDA graph and then replayed.

Evaluation after every epoch computes the same kernels each time. Launching a few dozen kernels keeps the
host busy for longer than they run, so one replay takes their place:

    1st inference        runs as usual, and compiles kernels
    before the 2nd       inference runs until the cache has all blocks; then it is captured
    from the 2nd on      replay; the graph reads the weights that are in memory at that moment

A replay reads fixed addresses. The graph is thus valid only while weights, features and cached blocks stay
at their addresses (`CapturedInference._is_current`); otherwise inference runs as usual, and may be captured
again. The price is memory: a graph keeps all that it computes in, limited by `SHARE`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hopline.contract import Job
from hopline.core.row_handles import Rows
from hopline.device.cuda_graph import CapturedCall, CaptureDeclined
from hopline.device.meter import free_bytes
from hopline.device.snapshots import evaluating
from hopline.inference.cache import InferenceCache
from hopline.inference.exact_inference import exact
from hopline.inference.layerwise_chunks import CPU, Chunks
from hopline.nn.conv_facts import is_fused, is_fused_attention
from hopline.nn.layered import Layered
from hopline.nn.probe import options_of
from hopline.util import trace

WARM_UP_INFERENCES = 1
"""Inferences that run before the capture. They compile the kernels."""
MAX_CAPTURES = 3
"""Captures of one inference, at most. Weights or features that keep moving in memory are not worth another
one."""
SHARE = 16
"""A graph may keep 1 / SHARE of the GPU's memory, and at most a quarter of the free memory."""
KNOWN_PACKAGES = ("torch", "torch_geometric", "hopline")
"""Packages whose modules do the same at every call.

Other modules may count calls, or read more than weights.
"""


class CapturedInference:
    """Exact inference with a job's model at some nodes: run, then captured, then replayed.

    It owns the CUDA graph and the buffers of the output. The job is referenced weakly, and owns the model
    and the data. One thread at a time may use it.
    """

    def __init__(self, job: Job, ids: Tensor) -> None:
        assert isinstance(job.model, Layered)
        self.model = job.model
        self.data = job.data
        self.device = job.device
        self.ids = ids
        self.left_to_others = False
        """Whether `__call__` leaves capturing to other threads. Asynchronous evaluation sets it."""
        self._job = weakref.ref(job)
        self._captured: CapturedCall[_Capture] = CapturedCall(
            job.device,
            purpose="evaluations",
            subject="evaluation is",  # begins the message "evaluation is not captured ..."
            say=_say_for(self._job),
            warm_up=WARM_UP_INFERENCES,
            max_captures=MAX_CAPTURES,
        )

    def __call__(self) -> Tensor:
        """The output rows of the nodes: [n, num_outputs] on the host. Replays the graph if it is valid."""
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
        return exact(self.model, self.data, self.ids, device=self.device)

    def launch(self, weights: Mapping[str, Tensor], after: Any, stream: torch.cuda.Stream) -> PendingInference | None:
        """Replay the graph with other weights on a stream, without waiting. None if there is no valid graph.

        The stream first waits for the event `after`, which says that `weights` are complete. It copies them
        into the job's module, and then replays. At most two launches may be pending: each writes its rows
        into one of two host buffers.
        """
        captured = self._captured
        job = self._job()
        if captured.graph is None or job is None or not self._is_current(captured.result):
            return None
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(after)
            job_weights = job.module.state_dict()
            torch._foreach_copy_(list(job_weights.values()), [weights[name] for name in job_weights])
            host_rows = captured.result.next_host_buffer()
            begun = torch.cuda.Event(enable_timing=True)
            done = torch.cuda.Event(enable_timing=True, blocking=True)
            begun.record()
            host_rows.copy_(captured.replay().rows, non_blocking=True)
            done.record()
        return PendingInference(host_rows, begun, done)

    @property
    def is_captured(self) -> bool:
        return self._captured.graph is not None

    @property
    def is_due(self) -> bool:
        """Whether the inference should be captured before it runs the next time."""
        return self._captured.is_due

    @property
    def is_settled(self) -> bool:
        """Whether the inference is captured, or never will be."""
        return self._captured.is_settled

    def capture(self, stream: torch.cuda.Stream | None = None) -> None:
        """Capture the inference as a CUDA graph, if that is possible. Its kernels have the stream's priority.

        No other thread may draw random numbers on the GPU meanwhile.
        """
        self._captured.capture(self._prepare_capture(), stream=stream)

    @contextmanager
    def _prepare_capture(self) -> Iterator[Callable[[], _Capture]]:
        """Yield the function to capture, once the cache has the blocks of all layers.

        Raises `CaptureDeclined` where the graph would take too much memory, or would read tensors that may
        move or that are on the host.
        """
        model, device = self.model, self.device
        with evaluating(model):
            work = Chunks(model, self.data, None, device)
            ids = self.ids.to(device)
            for _ in range(2):  # the cache stores blocks from the second inference on
                if not work.is_cached:
                    Rows(work.outputs(self.ids, show=False), ids).read_on(device)
            cache = work.cache
            if not work.is_cached or cache is None:
                raise CaptureDeclined
            encodes_nodes_on_host = model.encodes and cache.layer_nodes[0].device.type == "cpu"
            if encodes_nodes_on_host:
                raise CaptureDeclined
            reads_features = not cache.has_sums(model.num_layers)
            addresses = self.addresses(features=reads_features)
            if addresses is None:
                raise CaptureDeclined
            # Without unused memory in the allocator, reserved memory grows by that of the graph.
            torch.cuda.empty_cache()
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            max_bytes = min(total_bytes // SHARE, free_bytes(device) // 4)
            bytes_before = torch.cuda.memory_reserved(device)

            def run() -> _Capture:
                rows = Rows(work.outputs(self.ids, show=False), ids).read_on(device)
                return _Capture(
                    rows=rows,
                    cache=cache,
                    reads_features=reads_features,
                    addresses=addresses,
                    attributes=self._attributes(),
                    keep_alive=(work, ids),
                )

            yield run  # captured by the caller
            if torch.cuda.memory_reserved(device) - bytes_before > max_bytes:
                raise CaptureDeclined

    def _is_current(self, capture: _Capture) -> bool:
        """Whether the captured graph is valid: the same nodes and features, with all tensors where they
        were, and the same numbers in the attributes of modules."""
        if self._attributes() != capture.attributes:
            return False
        same = capture.cache.matches(self.data.graph, self.ids, capture.cache.settings, self.data.x)
        return same and self.addresses(features=capture.reads_features) == capture.addresses

    def _attributes(self) -> list[Any]:
        """Attributes that modules read in Python. Their values are part of a captured graph."""
        return [(options_of(module), getattr(module, "act", None)) for module in self.model.modules()]

    def addresses(self, *, features: bool) -> list[int] | None:
        """The memory addresses of the weights and, if `features`, of the features.

        None if the features are to be read but are not one tensor on the GPU: they have no fixed address.
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if features:
            x = self.data.x.storage()
            if x is None or not x.is_cuda:
                return None
            tensors.append(x)
        return [tensor.data_ptr() for tensor in tensors]


class PendingInference(NamedTuple):
    """An inference that was launched on a GPU and may not have finished."""

    rows: Tensor
    """[n, num_outputs] in pinned host memory: the output, valid after the event `done`."""
    begun: torch.cuda.Event
    """The event before the replay."""
    done: torch.cuda.Event
    """The event after the copy of the output to the host."""

    def wait(self) -> tuple[Tensor, float]:
        """Synchronise, and return the output rows and the seconds that the GPU spent on them.

        The rows are a copy: a later launch writes the buffer again.
        """
        self.done.synchronize()
        return self.rows.clone(), self.begun.elapsed_time(self.done) / 1e3


@dataclass(eq=False)
class _Capture:
    """The tensors that a captured inference reads and writes.

    The CUDA graph itself holds only their addresses.
    """

    rows: Tensor
    """[n, num_outputs] on the GPU: the output. Each replay overwrites it."""
    cache: InferenceCache
    """The cache whose blocks the graph reads."""
    reads_features: bool
    """Whether the graph reads the features, since the first layer's sums are not cached."""
    addresses: list[int]
    """The addresses of the weights, and of the features if they are read, at the capture."""
    attributes: list[Any]
    """Attributes of the modules at the capture."""
    keep_alive: tuple[Chunks, Tensor]
    """Objects whose tensors the graph reads. Held so that their memory is not given to others."""
    host_buffers: list[Tensor] = field(default_factory=list)
    """Two tensors like `rows` in pinned host memory, for the outputs of two pending launches."""

    def next_host_buffer(self) -> Tensor:
        """The buffer that the launch before the last one used; the two buffers take turns."""
        if not self.host_buffers:
            self.host_buffers = [torch.empty_like(self.rows, device=CPU, pin_memory=True) for _ in range(2)]
        self.host_buffers.reverse()
        return self.host_buffers[0]


def _say_for(job_ref: weakref.ref[Job]) -> Callable[[str], None]:
    """A function that passes a line to `job.say` as long as the job lives, and does not keep it alive."""

    def say(text: str) -> None:
        job = job_ref()
        if job is not None:
            job.say(text)

    return say


def repeats(model: nn.Module) -> bool:
    """Whether a model can be captured: it launches the same kernels at every call, whatever its weights are.

    All convs must be fused, all modules of known packages (`KNOWN_PACKAGES`), and no forward hook may be
    registered: a replay would not call it.
    """
    if not isinstance(model, Layered) or not all(is_fused(conv) or is_fused_attention(conv) for conv in model.convs):
        return False
    modules = list(model.modules())
    are_known = all(_is_known(type(module)) for module in modules)
    have_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return are_known and not have_hooks and all(map(_is_known, model.functions))


def _is_known(class_or_function: Any) -> bool:
    """Whether a class or function is of a known package.

    Compiled functions without a module count as torch's.
    """
    module_name = getattr(class_or_function, "__module__", None) or "torch"
    return module_name.split(".")[0] in KNOWN_PACKAGES


class CapturedInferences:
    """The captured inferences of one owner, such as a Trainer, by job and nodes.

    An inference is freed with its job. The job of an evaluating thread ends with that thread.
    """

    def __init__(self) -> None:
        self._by_job: WeakKeyDictionary[Job, dict[int, CapturedInference]] = WeakKeyDictionary()

    def of(self, job: Job, ids: Tensor) -> CapturedInference | None:
        """The captured inference of a job at some nodes, made at the first call; None where it cannot be
        captured."""
        if job.device.type != "cuda" or not repeats(job.model):
            return None
        by_ids = self._by_job.setdefault(job, {})
        # Keyed by identity. The stored inference holds `ids`, so no other tensor can get the same id.
        if id(ids) not in by_ids:
            by_ids[id(ids)] = CapturedInference(job, ids)
        return by_ids[id(ids)]
