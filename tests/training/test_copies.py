"""What a Trainer makes or holds can be copied and pickled, or says why not and what to do instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hopline as hl
from tests.support.ranks import AgreeingWorld
from tests.support.runs import sage, small

WAYS = [copy.copy, copy.deepcopy, lambda what: pickle.loads(pickle.dumps(what))]
DATA = small()
HISTORICAL = hl.Historical(num_parts=4, parts_per_batch=2, partition="range")


@pytest.mark.parametrize("how", WAYS, ids=["copy", "deepcopy", "pickle"])
def test_what_cannot_be_copied_says_what_to_do_instead(how: Callable[[Any], Any]):
    loader = HISTORICAL.loader(DATA, model=sage(DATA))
    trainer = hl.Trainer(sage(DATA), DATA, hl.Sampled(fanouts=(3, 3)), epochs=1, show=False)
    world = AgreeingWorld(rank=0, size=2)
    reasons = {
        r"copy\.deepcopy\(model\)": trainer,
        "load_state_dict": loader,
        "reads and writes the tables": next(iter(loader)),
        r"hl\.World\.current": world,
        r"a World of several ranks": hl.Sampled(fanouts=(3, 3)).loader(DATA, world=world),
    }
    for words, what in reasons.items():
        if what.__class__ is hl.Loader and how is copy.copy:
            continue  # a shallow copy has the same world
        with pytest.raises(TypeError, match=words):
            how(what)


@pytest.mark.parametrize("how", WAYS, ids=["copy", "deepcopy", "pickle"])
def test_a_full_batch_loader_and_batches_are_copied(how: Callable[[Any], Any]):
    model = sage(DATA).double().eval()
    batch_model = hl.nn.as_batch_model(model)
    loader = hl.FullBatch(num_shards=2).loader(DATA, model=model)
    for batches in (loader, hl.Sampled(fanouts=(3, 3), workers=0).loader(DATA, model=model)):
        other = how(batches)
        for ours, expected in zip(other, batches, strict=True):
            assert torch.equal(batch_model(ours), batch_model(expected))
            assert torch.equal(batch_model(how(ours)), batch_model(expected))
