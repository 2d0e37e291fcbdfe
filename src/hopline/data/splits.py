"""Random splits of the labelled nodes, for graphs that come without one.

Every draw is a hash of (seed, node id). So a seed gives the same split on every machine, and a run that is
resumed draws again the split that it began with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hopline.data.dataset import Dataset
from hopline.data.options import check_shares
from hopline.ops import derive_key
from hopline.ops.random import draw
from hopline.tasks.labels import is_labelled

SPLITS = ("train", "valid", "test")
"""The splits in the order of their shares."""
PURPOSE = 1 << 40
"""Second part of the key of a split, where the keys of a run have the epoch. No epoch is as large."""


def random_split(data: Dataset, shares: Sequence[float] = (0.6, 0.2, 0.2), *, seed: int = 0) -> Dataset:
    """Return the dataset with a random split of its labelled nodes, in place of all splits that it has.

    Nodes are drawn whatever their class, so a split may lack a small class.

    Args:
        data: With labels.
        shares: Of train, valid and test. If they add up to 1, every labelled node is in one of the three;
            if to less, the other nodes are in none.
        seed: The same seed draws the same split on every machine.

    Returns:
        A dataset that shares all other arrays with `data`. Splits are sorted int64 ids.

    Raises:
        ValueError: There are no labels, or the shares are not three numbers from 0 that leave training
            nodes.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([0, 1, 0, 1, -1]))
        >>> data = hl.random_split(data, (0.5, 0.25, 0.25))
        >>> {name: ids.numel() for name, ids in data.splits.items()}
        {'train': 2, 'valid': 1, 'test': 1}
    """
    splits, sentence = draw_split(data.labels, shares, seed)
    return replace(data, splits=splits, alternatives=(), meta={**data.meta, "split": sentence})


def draw_split(y: Tensor | None, shares: Sequence[float], seed: int = 0) -> tuple[dict[str, Tensor], str]:
    """(sorted node ids of each split that has some, a sentence for `meta`) of a random split.

    y: labels as a `Dataset` holds them.
    """
    check_shares(shares)
    labelled = torch.empty(0, dtype=torch.int64) if y is None else _labelled_nodes(y)
    num_labelled = labelled.numel()
    if not num_labelled:
        raise ValueError(
            "A split is drawn from labelled nodes, and there are none: convert with nodes=FILE that has a label column "
            "(columns.label=NAME if it is called otherwise), or in Python give y=."
        )
    bounds = [round(share * num_labelled) for share in itertools.accumulate(shares, initial=0)]
    if bounds[1] == 0:
        raise ValueError(
            f"A share of {shares[0]:g} of {num_labelled} labelled nodes is no training node: give a larger first "
            "share, or more labels."
        )

    # Nodes are sorted by their first draw, which has the number 0.
    shuffled = labelled[torch.argsort(draw(derive_key(seed, PURPOSE), labelled, 0), stable=True)]
    splits: dict[str, Tensor] = {}
    for name, (start, stop) in zip(SPLITS, itertools.pairwise(bounds), strict=True):
        if stop > start:
            splits[name] = shuffled[start:stop].sort().values
    shares_text = ", ".join(f"{share:g} {name}" for name, share in zip(SPLITS, shares, strict=True))
    return splits, f"drawn at random with seed {seed} from {num_labelled} labelled nodes: {shares_text}"


def _labelled_nodes(y: Tensor) -> Tensor:
    """[n] int64: ids of the nodes that have a label, ascending, on the host."""
    return is_labelled(y).nonzero().view(-1).cpu()
