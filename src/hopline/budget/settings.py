"""How much memory a run may take, and what becomes of a batch that would take more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hopline.util.config import Removed, check_fields, nearest, parse_size, settings

if TYPE_CHECKING:
    import torch

OverBudget = Literal["split", "resample", "cut", "cut_by_degree", "cut_by_pagerank", "refuse"]
CutBy = Literal["random", "degree", "pagerank"]
CUTS: Mapping[str, CutBy] = {"cut": "random", "cut_by_degree": "degree", "cut_by_pagerank": "pagerank"}
"""Values of `Budget.over_budget` that leave out edges, and the order in which edges go."""


@settings
class Budget:
    """Memory that a run may take, and what becomes of a batch that would take more.

    `Trainer(budget="8GiB")` is short for `hl.Budget(device="8GiB")`.

    Raises:
        ValueError: A field has a value that is not allowed. From the Trainer: no size is given, or the run cannot fit.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> budget = hl.Budget(device="2GiB", over_budget="refuse")
        >>> trainer = hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, budget=budget, epochs=1, show=False)
        >>> trainer.fit().finished
        True
    """

    SHORT: ClassVar[str] = "device"
    """The field that `budget=8GiB` sets."""
    REMOVED: ClassVar = {
        "split_by": Removed("balance", "pieces of a batch always have equal cost, so leave it out"),
        "cut_by": Removed("random", "set budget.over_budget=cut_by_degree or budget.over_budget=cut_by_pagerank"),
    }
    device: str | None = None
    """Where the model is: "8GiB"; on a CPU that is the host."""
    host: str | None = None
    """Host memory."""
    disk: str | None = None
    """Files that a run may write for itself."""
    over_budget: OverBudget = "split"
    """`split`: pieces with the same gradients; `resample`: drawn anew; `cut`: fewer edges, left out at random,
    `cut_by_degree` and `cut_by_pagerank`: those between hubs first; `refuse`: the run ends."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("device", "host", "disk"):
            value = getattr(self, name)
            if value is not None and parse_size(value) <= 0:
                raise ValueError(f"budget.{name} must be more than nothing: write it as budget.{name}=8GiB")

    @classmethod
    def of(cls, given: Budget | str | int | Mapping[str, str]) -> Budget:
        """A budget from "8GiB", which is the device's, or from its fields."""
        if isinstance(given, Budget):
            if given.device is given.host is given.disk is None:
                raise ValueError("a budget needs a size: write budget=8GiB, budget.host=32GiB or budget.disk=100GiB")
            return given
        if isinstance(given, Mapping):
            for name in given:
                if name in cls.REMOVED:
                    raise ValueError(cls.REMOVED[name].refusal(f"budget.{name}"))
                if name not in cls.__dataclass_fields__:
                    known = ", ".join(cls.__dataclass_fields__)
                    raise ValueError(
                        f"a budget has no {name!r}: give some of {known}.{nearest(name, known.split(', '))}"
                    )
            return cls.of(cls(**given))  # type: ignore[arg-type]
        parse_size(given)
        return cls(device=str(given))

    def bytes_on(self, device: torch.device) -> int | None:
        """What a step and the model may take on a device; None where nothing was said."""
        given = [self.device] if device.type == "cuda" else [self.device, self.host]
        sizes = [parse_size(size) for size in given if size is not None]
        return min(sizes) if sizes else None


def renewed_budget(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored budget as this version has it: `over_budget` and `cut_by` were two settings, and are one."""
    kept = {key: value for key, value in stored.items() if key != "cut_by"}
    if stored.get("over_budget") == "cut" and stored.get("cut_by", "random") != "random":
        kept["over_budget"] = f"cut_by_{stored['cut_by']}"
    return kept
