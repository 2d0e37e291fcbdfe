"""The numbering of a tree's slots."""

from __future__ import annotations

import torch

from hopline.ops.tree_slots import HOP_BITS, Slots

CPU = torch.device("cpu")


def test_parents_and_first_children_are_each_others_inverse():
    slots = Slots(3, (2, 4, 3))
    assert slots.offsets == (0, 3, 9, 33, 105)
    assert [slots.up_to(hop) for hop in range(4)] == [3, 9, 33, 105]
    first = slots.first_children(CPU)
    parents = slots.parents(CPU)
    assert first.numel() == slots.up_to(2)
    assert parents[:3].tolist() == [-1, -1, -1]
    for slot in range(slots.up_to(2)):
        hop = sum(slot >= offset for offset in slots.offsets[1:])
        children = range(int(first[slot]), int(first[slot]) + slots.fanouts[hop])
        assert [int(parents[c]) for c in children] == [slot] * slots.fanouts[hop]


def test_ids_do_not_depend_on_how_the_seeds_are_divided():
    whole = Slots(5, (2, 3))
    fanouts = (2, 3)
    parts = [Slots(2, fanouts, 0), Slots(3, fanouts, 2)]
    for hop in range(3):
        joined = torch.cat([part.ids(CPU)[part.offsets[hop] : part.offsets[hop + 1]] for part in parts])
        assert torch.equal(joined, whole.ids(CPU)[whole.offsets[hop] : whole.offsets[hop + 1]])
    assert whole.ids(CPU).unique().numel() == whole.offsets[-1]
    assert int(whole.ids(CPU)[-1]) == (2 << HOP_BITS) + 29
