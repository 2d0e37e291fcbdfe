"""Ids to consecutive ones by sorting, in plain torch: for any device, in memory that only depends on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from hopline.ops import reference


class SortedIdMap:
    """Global node ids to consecutive local ones, in order of first occurrence; reused batch after batch."""

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.num_nodes = num_nodes
        self.device = device
        self.size = 0
        self._ids = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, nodes: Tensor) -> Tensor:
        """Each node's local id [n] int32, new ones numbered on from the last. Waits for the device."""
        if bool(((nodes < 0) | (nodes >= self.num_nodes)).any()):
            raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
        self._ids, idx = reference.relabel(self.ids(), nodes)
        self.size = self._ids.numel()
        return idx

    def ids(self) -> Tensor:
        """The nodes added since the last clear, by local id: [size] int64."""
        return self._ids[: self.size]

    def clear(self) -> None:
        self.size = 0
