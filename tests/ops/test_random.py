"""The keyed random generator against published numbers and Python integers, and its permutations."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from hopline.ops import random
from hopline.ops.random import bounded, derive_key, draw, mix, permutation, random_numbers

MASK = (1 << 64) - 1


def unsigned(values: torch.Tensor) -> list[int]:
    return [v & MASK for v in values.tolist()]


def mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * random.MIX_1) & MASK
    z = ((z ^ (z >> 27)) * random.MIX_2) & MASK
    return z ^ (z >> 31)


def test_mix_gives_the_published_sequence_of_splitmix64() -> None:
    golden = random.GOLDEN - (1 << 64)
    states = torch.tensor(1234567) + torch.arange(1, 6) * torch.tensor(golden)
    assert unsigned(mix(states)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), derive_key(3, 1, 4)])
def test_draw_is_defined_by_key_node_and_position_alone(key: int) -> None:
    nodes = torch.tensor([0, 1, 7, 2**31, 2**40])
    for j in (0, 1, 299):
        expected = [mix_int((mix_int((key & MASK) ^ v) + (j + 1) * random.GOLDEN) & MASK) for v in nodes.tolist()]
        assert unsigned(draw(key, nodes, j)) == expected
        assert torch.equal(draw(key, nodes.flip(0), j), draw(key, nodes, j).flip(0))


def test_bounded_is_the_high_half_of_the_full_product() -> None:
    raw = draw(5, torch.arange(200), 0)
    raw[:3] = torch.tensor([0, -1, 2**63 - 1])  # all bits clear, all set, the largest positive
    for limit in (1, 2, 3, 10, 1000, 2**31 - 1):
        expected = [(r * limit) >> 64 for r in unsigned(raw)]
        assert bounded(raw, torch.tensor(limit)).tolist() == expected


def test_derived_keys_are_64_bit_distinct_and_depend_on_order() -> None:
    keys = {derive_key(seed, epoch, step) for seed in range(10) for epoch in range(10) for step in range(-1, 10)}
    assert len(keys) == 10 * 10 * 11
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert derive_key(0, 1, 2) != derive_key(0, 2, 1)
    assert derive_key(0) != derive_key(0, 0) != derive_key(0, 0, 0)
    assert derive_key(-1, 5) == derive_key(2**64 - 1, 5)


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_permutation_has_every_number_once(size: int) -> None:
    assert permutation(3, size).sort().values.tolist() == list(range(size))


def test_permutations_are_uniform_over_all_orders() -> None:
    rounds = 4800
    orders = torch.stack([permutation(derive_key(1, r), 4) for r in range(rounds)])
    counts = torch.unique(orders @ torch.tensor([64, 16, 4, 1]), return_counts=True)[1].double()
    assert counts.numel() == 24
    statistic = float(((counts - rounds / 24) ** 2 / (rounds / 24)).sum())
    assert chi2.isf(1 - 1e-4, 23) < statistic < chi2.isf(1e-4, 23)


def test_permutation_changes_with_the_key_only() -> None:
    assert torch.equal(permutation(1, 100), permutation(1, 100))
    assert not torch.equal(permutation(1, 100), permutation(2, 100))


def test_random_numbers_are_uniform_and_those_of_an_id_in_any_company() -> None:
    numbers = random_numbers(5, torch.arange(4000), 3)
    assert numbers.shape == (4000, 3)
    assert numbers.unique().numel() == numbers.numel()
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=20, min=0, max=1).double()
    statistic = float(((counts - 600) ** 2 / 600).sum())
    assert chi2.isf(1 - 1e-4, 19) < statistic < chi2.isf(1e-4, 19)
    assert torch.equal(random_numbers(5, torch.tensor([7, 3]), 3), numbers[[7, 3]])
    assert torch.equal(random_numbers(5, torch.tensor([7]), 2), numbers[[7], :2])
    assert not torch.isin(random_numbers(6, torch.arange(10), 3), numbers).any()
