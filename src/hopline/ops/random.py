"""Keyed (counter-based) random numbers: SplitMix64, with the same bits in Python, torch, Numba and Triton.

A draw is a hash of a key, a node and a position in that node's sequence:

    s      = mix(key ^ node)
    draw j = mix(s + (j + 1) * GOLDEN)        # all in unsigned 64-bit arithmetic

There is no generator state. So a draw does not depend on threads, ranks or the order of calls. Any draw can
be made again, for example in the backward pass. Keys form a tree: a run's seed gives the keys of
epochs, these the keys of steps, and these the keys of single purposes:

    derive_key(seed, epoch)  ->  derive_key(epoch key, step)  ->  purpose_key, layer_key, another_key

A node with a self-loop draws neighbours by a key per layer (`draw_ids`), any other by a key per pair of layers.

torch has no shifts on uint64, so torch code holds the bits in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of SplitMix64 from draw to draw: 2**64 divided by the golden ratio, made odd."""
MIX_1 = 0xBF58476D1CE4E5B9
"""First multiplier of SplitMix64's finaliser."""
MIX_2 = 0x94D049BB133111EB
"""Second multiplier of SplitMix64's finaliser."""
_MASK = (1 << 64) - 1
"""Cuts Python's integers to 64 bits."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    """SplitMix64's finaliser on a Python integer of 64 bits, unsigned."""
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK
    return z ^ (z >> 31)


def _times_golden(number: int) -> int:
    """number * GOLDEN modulo 2**64, as an int64: what `number` draws add to a state."""
    return _signed((number * GOLDEN) & _MASK)


def derive_key(seed: int, *parts: int) -> int:
    """The key of a path of numbers below a seed, such as an epoch and a step. It decides random draws.

    Other seeds and paths have other keys. A sum has not: seed 0 in epoch 1 would draw as seed 1 in epoch 0.

    Args:
        seed: The seed of a run, or a key.
        parts: The path, such as epoch and step.

    Returns:
        An int of 64 bits, for `NeighborSampler.sample`, `Batch(key=)` and `torch.Generator().manual_seed`.

    Example:
        >>> hl.extend.derive_key(0, 1) == hl.extend.derive_key(1, 0)  # (seed 0, epoch 1) and (seed 1, epoch 0)
        False
    """
    state = _mix_int(seed & _MASK)
    for part in parts:
        state = _mix_int((state + ((part + 1) * GOLDEN)) & _MASK)
    return _signed(state)


NUM_PURPOSES = 32
"""Number of purposes for which a step has keys on a device.

A purpose is a dropout of the model: -1 is that of the input, l that of layer l, and `num_layers` that of the
encoder. Attention counts down from the last one (`nn.attention`).
"""


def purpose_key(key: int | Tensor, purpose: int) -> int | Tensor:
    """The key of the draws for one purpose of a step. purpose: -1 .. NUM_PURPOSES - 2, see `NUM_PURPOSES`.

    key: a number, or on a device a tensor [1 + NUM_PURPOSES] int64. Its first element is the step's own
    key; the keys of the purposes from -1 on follow. One kernel makes them all (`ops.gpu.tree.next_step`).
    The result is a number, or a view [1] of that tensor.
    """
    if isinstance(key, int):
        return derive_key(key, purpose)
    assert purpose + 1 < NUM_PURPOSES, "too many layers for the keys of a step"
    return key[purpose + 2 : purpose + 3]


AGAIN = 1 << 23
"""First of the numbers that `another_key` passes to `derive_key`.

The numbers of purposes, and those of `layer_key` (from LAYERS on), lie below it.
"""


def another_key(key: int | Tensor, number: int) -> int | Tensor:
    """A key for other dropout masks of a step (`Batch.with_other_dropout`), different for each `number`.

    key: the step's, an integer or a tensor as in `purpose_key`. All elements of a tensor are mapped, so that
    its keys of purposes are new too. They are not the keys that an integer `key` would give.
    """
    if isinstance(key, int):
        return derive_key(key, AGAIN + number)
    return mix(key + _times_golden(AGAIN + number + 1))


LAYERS = 1 << 22
"""First of the numbers that `layer_key` passes to `derive_key`.

The numbers of purposes lie below it, those of `another_key` (from AGAIN on) above.
"""


def layer_key(key: int | Tensor, layer: int) -> int | Tensor:
    """The key by which a layer of a sampled block draws neighbours. layer: 0 is the first to be computed.

    Layers 2i and 2i + 1 share a key, so a node that both expand has the same neighbours in both. That keeps
    batches small. Compared with one key for all layers, a batch of the ogbn-products recipe has 2.4% more
    nodes; with a key per layer it would have 7.6% more (`benchmarks/layer_keys.py`).

    Two layers per key are enough for an unbiased sum. A linear GCN adds up products of edge weights along
    walks, with one sampled edge per layer. The mean of a product is the product of the means if no two
    edges of a walk come from one draw. One draw means: from one node, by one key. A walk that is at one node
    in both layers of a pair went from the node to itself in between, by a self-loop. A loop that GCN adds is
    exact and not drawn. A loop of the data is drawn, so nodes that have one need a key per layer (`draw_ids`).
    """
    pair = layer // 2
    if pair == 0:
        return key
    if isinstance(key, int):
        return derive_key(key, LAYERS + pair)
    return mix(mix(key) + _times_golden(LAYERS + pair + 1))


def dropout_numbers(p: float) -> tuple[int, float]:
    """(threshold, scale) for a dropout of probability p, which is rounded to a multiple of 1 / 65536.

    An element is kept where its 16 bits are at least the threshold, and is then multiplied by the scale.
    With p = 1 nothing is kept, and the scale is 0.
    """
    # 16 bits decide about an element, so that one draw of 64 bits serves four columns.
    threshold = round(p * 65536)
    return threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0


LOOP_BIT = 62
"""The bit of a draw id that `draw_ids` sets. No node id has it, and int64 stays positive."""


def draw_ids(nodes: Tensor, has_loop: Tensor) -> Tensor:
    """[n] int64: the ids by which nodes draw neighbours in the second layer of a pair, in place of their own.

    Those of nodes with a self-loop in the data have one bit more, which is the same as another key: `draw` begins
    with key ^ id. So a walk along the loop meets two draws. With one, a node that drew its loop in one layer would
    draw it in the other too, and the mean output would be off.

    nodes: [n] int64. has_loop: [n] bool.
    """
    return nodes | (has_loop.long() << LOOP_BIT)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros from the left. torch's own `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 bit patterns. The overflow of int64 wraps, as that of unsigned numbers does."""
    z = (z ^ _shift_right(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX_2)
    return z ^ _shift_right(z, 31)


def draw(key: int, nodes: Tensor, position: Tensor | int) -> Tensor:
    """Draw number `position`, from 0 on, of each node's sequence: int64 bit patterns.

    nodes and position broadcast against each other.
    """
    return draw_from(first_state(key, nodes), position)


def first_state(key: int, ids: Tensor) -> Tensor:
    """The state from which each id's sequence starts: int64 bit patterns, shaped like `ids`."""
    return mix(ids.long() ^ key)


def draw_from(states: Tensor, position: Tensor | int) -> Tensor:
    """Draw number `position`, from 0 on, of the sequences that start at some states: int64 bit patterns."""
    if isinstance(position, int):
        return mix(states + _times_golden(position + 1))
    return mix(states + (position + 1) * _signed(GOLDEN))


def bounded(raw: Tensor, limit: Tensor) -> Tensor:
    """raw * limit / 2**64 with `raw` unsigned, rounded down: int64 in 0 .. limit - 1. limit: below 2**31.

    The product has up to 95 bits, so it is added up from the halves of `raw`.
    """
    high = _shift_right(raw, 32)
    low = raw & 0xFFFFFFFF
    return _shift_right(high * limit + _shift_right(low * limit, 32), 32)


def permutation(key: int, size: int) -> Tensor:
    """[size] int64: a random order of 0 .. size - 1 that depends on the key alone."""
    return torch.argsort(draw(key, torch.arange(size), 0), stable=True)


def inside_unit(raw: Tensor) -> Tensor:
    """float64 numbers above 0 and below 1, from the upper 53 bits of draws. Shaped like `raw`."""
    return _shift_right(raw, 11).clamp(min=1).double() * 2.0**-53


def uniform(raw: Tensor, bits: int) -> Tensor:
    """float64 numbers in [0, 1), from the lowest `bits` bits of draws. Shaped like `raw`."""
    return (raw & ((1 << bits) - 1)).double() / (1 << bits)


def random_numbers(key: int, ids: Tensor, count: int) -> Tensor:
    """Random numbers from 0 to 1, for a sampler of your own: a row depends on the key and its id alone.

    So a node draws the same in any batch, thread and rank.

    Args:
        key: Decides the numbers.
        ids: [n] int64, such as nodes.
        count: Numbers per id.

    Returns:
        [n, count] float64, from 0 up to but not including 1.

    Example:
        >>> numbers = hl.extend.random_numbers(0, torch.tensor([3, 5]), 4)
        >>> torch.equal(hl.extend.random_numbers(0, torch.tensor([5]), 4), numbers[1:])
        True
    """
    # Hashed, since `draw` begins with key ^ id: with keys 5 and 6 two ids would swap their numbers.
    return uniform(draw(derive_key(key), ids[:, None], torch.arange(count, device=ids.device)), 53)
