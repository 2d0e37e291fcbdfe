"""The resident bytes of a run by place (device, host, disk), known before anything runs.

`RunOutline` lists the bytes of weights, optimizer, data and embeddings, and the limits that a budget sets
for each place. Each method makes its own plan, which subtracts these bytes from the limits. The rest is the
limit of a step. The outline's predictor predicts the peak of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hopline.budget.plan import PLACES, Budget, Item, Outline, Place
from hopline.budget.predictor import Predictor, costs_of
from hopline.device.meter import free_bytes, library_bytes
from hopline.device.out_of_memory import free_memory
from hopline.nn.layered import Layered, row_widths
from hopline.tables import TieredTable
from hopline.util.config import parse_size

STATES = {"adam": 2, "adamw": 2, "sgd": 0, "own": 3}
"""The number of state tensors of a parameter's size that each optimizer keeps: Adam has two moments. One of the user
counts as the largest of torch: centred RMSprop with momentum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOutline(Outline):
    """The outline of a run, with predictors that learn from steps measured while the run is planned."""

    predictors: dict[int, Predictor] = field(default_factory=dict)
    """The predictor of the model's steps for each number of blocks in a batch."""

    def forget(self) -> RunOutline:
        """The outline of the same run, which has measured nothing yet: what a new run knows."""
        return replace(self, predictors={}, learnt={})

    def predictor(self, num_blocks: int) -> Predictor:
        if num_blocks not in self.predictors:
            costs = costs_of(self.model, self.data.tables.get("x"), num_blocks)
            self.predictors[num_blocks] = Predictor(costs)
        return self.predictors[num_blocks]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's first parameter, or float32 if it has none."""
        return next((p.dtype for p in self.model.parameters()), torch.float32)

    def resident_items(self) -> list[Item]:
        weights = [p for p in self.model.parameters() if not isinstance(p, nn.UninitializedParameter)]
        total = sum(p.numel() * p.element_size() for p in weights)
        items = [
            Item("weights", self.compute_place, total),
            Item("optimizer", self.compute_place, STATES[self.optimizer] * total),
        ]
        if self.device.type == "cuda":
            # CUDA's libraries keep a workspace per stream. With asynchronous evaluation there are three
            # streams: the one that was there, one for training and one for evaluation.
            num_streams = 3 if self.async_evaluation else 1
            workspace_bytes = num_streams * library_bytes(self.device)
            items.append(Item("workspace of CUDA's libraries", "device", workspace_bytes))
            items.append(Item("what the process had there before", "device", self._other_bytes))
        return items

    @cached_property
    def _other_bytes(self) -> int:
        """Bytes of the GPU that this process holds for something else, such as an earlier run."""
        tables = self.data.tables.values()
        if self.data.graph.indptr.is_cuda or any(isinstance(table, TieredTable) for table in tables):
            return 0  # the dataset is on the GPU already, and is counted with the run
        free_memory(self.device)
        module = self.job.module
        module_tensors = [t for t in (*module.parameters(), *module.buffers()) if not is_lazy(t) and t.is_cuda]
        run_bytes = library_bytes(self.device) + sum(t.nbytes for t in module_tensors)
        return max(0, torch.cuda.memory_allocated(self.device) - run_bytes)

    def limits(self, budget: Budget) -> dict[Place, int | None]:
        """A GPU without a limit has its free memory, and what this process has allocated on it."""
        limits: dict[Place, int | None] = {}
        for place in PLACES:
            size = getattr(budget, place)
            limits[place] = None if size is None else parse_size(size)
        if self.compute_place == "host":
            # The host is also the device here, so the smaller of both limits holds (`bytes_on`).
            return {**limits, "device": None, "host": budget.bytes_on(self.device)}
        if limits["device"] is None:
            limits["device"] = free_bytes(self.device) + torch.cuda.memory_allocated(self.device)
        return limits

    def hidden_bytes(self) -> int:
        """As if all tables were as wide as the widest layer."""
        if not isinstance(self.model, Layered):
            return 0
        widest = max(row_widths(self.model, self.data.num_features)[1:])
        num_tables = 2  # the rows before and after a layer
        # Two tables for each kind of rows that are kept besides. A rule of thumb.
        if self.model.encodes:  # encoded or initial rows
            num_tables += 2
        if self.model.keeps_rows:  # the rows after every layer, which jumping knowledge reads
            num_tables += 2 * self.model.num_layers
        return num_tables * widest * self.data.num_nodes * self.dtype.itemsize

    def data_on_host(self) -> list[Item]:
        data = self.data
        if data.folder is not None:
            return []
        items = [Item("graph", "host", data.graph.num_bytes)]
        for name, table in data.tables.items():
            title = "features" if name == "x" else f"table {name}"
            items.append(Item(title, "host", table.num_bytes))
        rest = data.num_bytes - sum(item.num_bytes for item in items)
        return [*items, Item("labels and splits", "host", rest)]
