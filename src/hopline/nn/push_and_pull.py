"""`push_and_pull`: historical embeddings in a `forward` of the user's own, as in GNNAutoScale's `ScalableGNN`.

A module that is not made of layers says by itself where rows come from tables: it calls `x = push_and_pull(x)` between
its convs. On a batch of `Historical` it runs once, on the batch's own nodes with all their in-edges, and on the halo:

    rows of x                   | own nodes               | halo                              |
    conv(x, edge_index)         | right: all in-edges     | without meaning: no in-edges      |
    push_and_pull(x), call i    | as they are; pushed     | pulled from the table of call i   |

So it must be called between every two convs. Calls are numbered in the order of `forward`. A trial finds their number
and the shape of their rows (`push_and_pull_probe`), and every forward pass is compared with it.

Two things would read what a batch does not have. Batch norms in training would mix in the halo's rows: here they take
their statistics from own rows alone. GCN's norm would read in-degrees of the halo: here GCNConv, GCN2Conv and APPNP run
by `convolve`, which takes degrees from the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hopline.core.batch import Block, LayerHooks
from hopline.nn.conv_adapter import convolve
from hopline.nn.conv_facts import NORMALISED, is_fused
from hopline.nn.norms import own_statistics
from hopline.nn.probe import findings

CALLS = "push_and_pull"
"""The question of `findings` whose answer is the shape of the rows of each call, by number."""

NORMALISE_ONCE = (
    "apply torch_geometric.transforms.GCNNorm to the graph once, and call GCNConv(normalize=False) with the "
    "edge_weight that forward is given"
)
"""What to type where GCN's norm stands in the way."""


def push_and_pull(x: Tensor) -> Tensor:
    """Mark a place between two convs of your own `forward`, where `hl.Historical` reads and writes its tables.

    Under `hl.Historical`, rows of nodes outside the batch are replaced by those that an earlier batch wrote for this
    call, as constants. Rows of the batch's own nodes stay, and are written after the optimizer's step. Everywhere else
    `x` is returned as it is: in plain PyG, in `hl.Sampled`, in `hl.FullBatch`, and in a module that hopline takes apart
    into layers itself.

    Call it between every two convs, equally often in each forward pass.

    Args:
        x: [num_nodes, ...], a row for each node that `forward` was given.

    Returns:
        [num_nodes, ...], rows in the same order.

    Raises:
        ValueError: Under `hl.Historical`: `x` has rows of some nodes alone. Or number or widths of the calls have
            changed.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv1, self.conv2 = SAGEConv(4, 8), SAGEConv(8, 2)
        ...
        ...     def forward(self, x, edge_index):
        ...         x = self.conv1(x, edge_index)
        ...         if x.isnan().any():  # no list of layers
        ...             raise RuntimeError("the loss diverges")
        ...         x = hl.nn.push_and_pull(x.relu())
        ...         return self.conv2(x, edge_index)
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> method = hl.Historical(num_parts=2, parts_per_batch=1, partition="range")
        >>> hl.Trainer(Net(), data, method, epochs=1, show=False).fit().finished
        True
    """
    calls = _active.get()
    return x if calls is None else calls.next(x)


class CallError(ValueError):
    """Raised where a `forward` cannot run on batches of `Historical`. The message says what to change."""


class Calls:
    """The calls of `push_and_pull` in one forward pass on a batch.

    name: of the module's class, for messages. hooks: `after_layer(l, rows)` gets the own rows of call `l`, and returns
    them with the halo's behind them. shapes: of a row at each call; None in a trial, which finds them.
    """

    def __init__(self, name: str, hooks: LayerHooks, block: Block, shapes: Sequence[torch.Size] | None) -> None:
        self.name = name
        self.hooks = hooks
        self.block = block
        self.shapes = shapes
        self.num_calls = 0

    def next(self, x: Tensor) -> Tensor:
        """The rows of x, with those of the halo replaced."""
        l = self.num_calls
        num_own = self.block.num_dst
        if x.dim() == 0 or x.size(0) != self.block.num_src:
            raise CallError(
                f"{self.name}.forward called hl.nn.push_and_pull with rows of shape {list(x.shape)} on a batch of "
                f"{self.block.num_src} nodes: give it a row for each node of x"
            )
        if self.shapes is not None and l == len(self.shapes):
            raise CallError(self._message(f"more than {len(self.shapes)} times"))
        if self.shapes is not None and x.shape[1:] != self.shapes[l]:
            raise CallError(
                f"{self.name}.forward called hl.nn.push_and_pull, call {l + 1}, with rows of shape "
                f"{list(x.shape[1:])}, which had {list(self.shapes[l])} before: a table has rows of one shape, so keep "
                "it in every forward pass"
            )
        self.num_calls += 1
        own_rows = x[:num_own]
        # A copy: rows are pushed after the step, and forward may change x in place until then.
        rows = self.hooks.after_layer(l, own_rows.detach().clone())
        return torch.cat([own_rows, rows[num_own:]])

    def end(self) -> None:
        """Raise `CallError` if there were fewer calls than expected."""
        if self.shapes is not None and self.num_calls < len(self.shapes):
            raise CallError(self._message(f"{self.num_calls} times, and {len(self.shapes)} times before"))

    def _message(self, how_often: str) -> str:
        return (
            f"{self.name}.forward called hl.nn.push_and_pull {how_often}: every call has a table of its own, so call "
            "it equally often in each forward pass, in training and in evaluation"
        )


_active: ContextVar[Calls | None] = ContextVar("push_and_pull", default=None)
"""The calls of the forward pass that runs in this thread on a batch of `Historical`; None in any other."""


@contextmanager
def pulling(module: nn.Module, hooks: LayerHooks, block: Block) -> Iterator[None]:
    """A context in which `push_and_pull` reads and records rows by `hooks`, for one forward pass of a module.

    block: own nodes as destinations, with the halo behind them as sources.
    """
    calls = Calls(type(module).__name__, hooks, block, findings.get(module, CALLS, settings=None))
    with active(calls), own_statistics(module, block):
        yield
    calls.end()


@contextmanager
def active(calls: Any) -> Iterator[None]:
    """A context in which `push_and_pull(x)` is `calls.next(x)`."""
    token = _active.set(calls)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def degrees_of_graph(module: nn.Module, edge_index: Tensor, arguments: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which convs with GCN's norm take degrees from the graph, on a batch of `Historical`.

    They may then be called with the edges of the batch alone, as the module got them: edge_index, and an edge_weight
    among `arguments`.
    """
    calls = _active.get()
    if calls is None or calls.block.num_src == calls.block.num_dst:
        yield
        return
    convs = [conv for conv in module.modules() if type(conv) in NORMALISED and getattr(conv, "normalize", True)]
    # What has hooks or a method of the user's runs as it is, and the trial refuses it.
    convs = [conv for conv in convs if is_fused(conv)]
    for conv in convs:
        vars(conv)["forward"] = partial(_run_normalised, conv, calls, edge_index, arguments.get("edge_weight"))
    try:
        yield
    finally:
        for conv in convs:
            vars(conv).pop("forward", None)


def _run_normalised(
    conv: nn.Module, calls: Calls, edge_index: Tensor, edge_weight: Tensor | None, *given: Any, **named: Any
) -> Tensor:
    """[num_src, ...]: the output of a conv with GCN's norm: right at own rows, and zeros at those of the halo."""
    arguments = inspect.signature(type(conv).forward).bind(conv, *given, **named).arguments
    block = calls.block
    reads_weight = edge_weight is not None or "weight" not in block.edge
    if arguments["edge_index"] is not edge_index or arguments.get("edge_weight") is not edge_weight or not reads_weight:
        raise CallError(
            f"{calls.name}.forward calls {type(conv).__name__} with other edges or weights than it is given, and GCN's "
            f"norm reads degrees, which a batch of hl.Historical has of the given ones alone: {NORMALISE_ONCE}"
        )
    own_forward = vars(conv).pop("forward")  # `convolve` calls the conv itself
    try:
        rows = convolve(conv, arguments["x"], block, arguments.get("x_0"))
    finally:
        vars(conv)["forward"] = own_forward
    return torch.cat([rows, rows.new_zeros(block.num_src - block.num_dst, *rows.shape[1:])])


class CallReached(BaseException):
    """Ends a forward pass at a call. No `Exception`, which the user's `forward` might catch."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


class UpToCall(LayerHooks):
    """Ends a forward pass at a call, by raising `CallReached` with the own rows there.

    read: (call, own rows) -> the halo's rows at that call, on the device and in the dtype of the own rows.
    """

    def __init__(self, last: int, read: Callable[[int, Tensor], Tensor]) -> None:
        self.last = last
        self.read = read

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        if l == self.last:
            raise CallReached(h)
        return torch.cat([h, self.read(l, h)])
