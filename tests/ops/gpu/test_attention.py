"""Triton kernels of graph attention against plain torch, in Triton's interpreter or on a GPU."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from hopline.ops import random
from hopline.ops.gpu import attention as gpu_attention
from hopline.ops.gpu import tree as gpu_tree
from hopline.ops.gpu.attention import AttentionEdges
from hopline.ops.gpu.runtime import check_device_errors
from hopline.ops.tree_slots import Slots
from tests.ops.gpu.test_tree import csr, on_device
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint, randn

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)
SLOPE = 0.3


def tree(seeds: int = 9, fanouts: tuple[int, ...] = (3, 10, 2), hop: int = 1) -> AttentionEdges:
    """A tree with empty slots, an empty seed, and nodes that are their own neighbours."""
    indptr, indices = csr()
    indices[indptr[3] : indptr[3] + 3] = 3
    start = torch.cat([torch.tensor([3, -1]), torch.arange(seeds - 2)])
    slots = Slots(seeds, fanouts)
    indptr, indices, start = on_device(indptr, indices, start)
    nodes, counts, _ = gpu_tree.sample_tree(indptr, indices, start, slots, 3)
    return gpu_attention.tree_edges(slots, hop, nodes, counts)


def block(num_src: int = 40, num_dst: int = 24) -> AttentionEdges:
    """A block with a hub, destinations and a source without edges, double edges and self-loops."""
    degrees = torch.cat([torch.tensor([70, 0, 1]), randint(0, 12, num_dst - 4), torch.zeros(1, dtype=torch.int64)])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    src = randint(0, num_src - 1, int(indptr[-1]))
    src[:3] = 0
    ids = torch.arange(num_dst) * 7
    return gpu_attention.block_edges(indptr.to(DEVICE), src.int().to(DEVICE), num_src, ids.to(DEVICE))


LAYOUTS = {"tree": tree, "block": block}
both_of_each = parametrize_kernel([("tree", True), ("block", False)], layout=[*LAYOUTS], v2=[False, True])


def pairs(edges: AttentionEdges, loops: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(destinations, sources, place of each among its destination's edges), self-loops being at place 0."""
    triples = []
    is_tree = edges.slots is not None
    for d in range(edges.num_dst):
        if is_tree and edges.sources[d] < 0:
            continue
        start = int(edges.starts[d])
        stop = int(edges.stops[d]) + (int(edges.starts[d]) if is_tree else 0)
        if loops:
            triples.append((d, d, 0))
        for place, e in enumerate(range(start, stop)):
            src = e if is_tree else int(edges.sources[e])
            same = edges.sources[e] == edges.sources[d] if is_tree else src == d
            if not (loops and same):
                triples.append((d, src, place + 1))
    dst, src, place = torch.tensor(triples).t().to(DEVICE)
    return dst, src, place


def attend_by_definition(
    x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, edges: AttentionEdges, loops: bool,
    factors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention by its definition, with a row per edge."""
    heads, columns = att.shape
    rows = x.view(-1, heads, columns)
    own_rows = (x[: edges.num_dst] if own is None else own).view(-1, heads, columns)
    dst, src, _ = pairs(edges, loops)
    if att_own is None:
        score = (torch.nn.functional.leaky_relu(rows[src] + own_rows[dst], SLOPE) * att).sum(-1)
    else:
        score = torch.nn.functional.leaky_relu((rows[src] * att).sum(-1) + (own_rows[dst] * att_own).sum(-1), SLOPE)
    weights = torch.zeros(edges.num_dst, heads, dtype=x.dtype, device=x.device).index_add(0, dst, score.exp())
    a = score.exp() / weights[dst]
    a = a if factors is None else a * factors
    out = torch.zeros(edges.num_dst, heads, columns, dtype=x.dtype, device=x.device)
    return out.index_add(0, dst, rows[src] * a[:, :, None]).view(edges.num_dst, -1)


def inputs(
    edges: AttentionEdges, heads: int, columns: int, v2: bool, shared: bool, dtype: torch.dtype = torch.float64
) -> list[Tensor | None]:
    width = heads * columns
    tensors = [
        randn(edges.num_src, width, seed=1),
        None if shared else randn(edges.num_dst, width, seed=2),
        randn(heads, columns, seed=3),
        None if v2 else randn(heads, columns, seed=4),
    ]
    if edges.slots is not None:
        assert tensors[0] is not None
        tensors[0][(edges.sources[: edges.num_src] < 0).cpu()] = 1e3  # nobody may read these
    kinds = (dtype, dtype, torch.promote_types(dtype, torch.float32), torch.promote_types(dtype, torch.float32))
    return [None if t is None else t.to(k).to(DEVICE).requires_grad_() for t, k in zip(tensors, kinds, strict=True)]


def run(function: Any, tensors: list[Tensor | None], *options: Any, **named: Any) -> tuple[Tensor, list[Tensor | None]]:
    """(output, gradients of a random projection of it)."""
    out = function(*tensors, *options, **named)
    (out * randn(*out.shape, seed=9).bfloat16().to(out)).sum().backward()
    return out.detach(), [None if t is None else t.grad for t in tensors]


def assert_equal(ours: Any, expected: Any, tolerance: float) -> None:
    for our_tensor, expected_tensor in zip([ours[0], *ours[1]], [expected[0], *expected[1]], strict=True):
        assert (our_tensor is None) == (expected_tensor is None)
        if our_tensor is not None:
            torch.testing.assert_close(our_tensor, expected_tensor, rtol=tolerance, atol=tolerance)


@parametrize_kernel(
    [
        ("tree", False, True, False),
        ("tree", True, False, True),
        ("block", False, False, True),
        ("block", True, True, False),
    ],
    layout=[*LAYOUTS],
    v2=[False, True],
    loops=[False, True],
    shared=[False, True],
)
def test_outputs_and_gradients_are_those_of_the_definition(layout: str, v2: bool, loops: bool, shared: bool):
    edges = LAYOUTS[layout]()
    expected = run(attend_by_definition, inputs(edges, 2, 5, v2, shared), edges, loops)
    ours = run(gpu_attention.attend, inputs(edges, 2, 5, v2, shared), edges, slope=SLOPE, loops=loops)
    assert_equal(ours, expected, 1e-10)
    check_device_errors()


@parametrize_kernel(
    [("tree", True, (3, 40)), ("block", False, (1, 300))],
    layout=[*LAYOUTS],
    v2=[False, True],
    shape=[(1, 1), (3, 40), (4, 8), (1, 300)],
)
def test_any_number_and_width_of_heads_equals_the_definition(layout: str, v2: bool, shape: tuple[int, int]):
    edges = LAYOUTS[layout]()
    heads, columns = shape
    inputs_of_definition, inputs_of_kernel = (inputs(edges, heads, columns, v2, shared=True) for _ in range(2))
    expected = run(
        attend_by_definition, [t if i < 2 else scale_down(t) for i, t in enumerate(inputs_of_definition)], edges, True
    )
    ours = run(
        gpu_attention.attend,
        [t if i < 2 else scale_down(t) for i, t in enumerate(inputs_of_kernel)],
        edges,
        slope=SLOPE,
    )
    assert_equal(ours, expected, 1e-9)


def scale_down(att: Tensor | None) -> Tensor | None:
    """Scores that plain `exp` can take for rows of any width."""
    return None if att is None else (att.detach() / 20).requires_grad_()


@parametrize_kernel([("tree", False), ("block", True)], layout=[*LAYOUTS], v2=[False, True])
def test_single_precision_is_near_the_definition_in_double(layout: str, v2: bool):
    edges = LAYOUTS[layout]()
    inputs_of_kernel, inputs_of_definition = (
        inputs(edges, 2, 8, v2, shared=True, dtype=torch.float32) for _ in range(2)
    )
    exact = [None if t is None else t.detach().double().requires_grad_() for t in inputs_of_definition]
    out, grads = run(attend_by_definition, exact, edges, True)
    expected = out.float(), [None if g is None else g.float() for g in grads]
    assert_equal(run(gpu_attention.attend, inputs_of_kernel, edges, slope=SLOPE), expected, 1e-5)


@both_of_each
def test_half_precision_is_summed_in_single(layout: str, v2: bool):
    edges = LAYOUTS[layout]()
    tensors = inputs(edges, 2, 8, v2, shared=True, dtype=torch.bfloat16)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected, grads = run(attend_by_definition, exact, edges, True)
    ours, our_grads = run(gpu_attention.attend, tensors, edges, slope=SLOPE)
    assert ours.dtype == torch.bfloat16
    for our_tensor, exact_tensor in zip([ours, *our_grads], [expected, *grads], strict=True):
        if our_tensor is not None:
            assert exact_tensor is not None
            assert (our_tensor.double() - exact_tensor).norm() < 5e-3 * exact_tensor.norm()


def factors_of(edges: AttentionEdges, loops: bool, heads: int, p: float, key: int) -> Tensor:
    """[edges, heads] as documented: a draw per destination, place among its edges, and head."""
    dst, _, place = pairs(edges, loops)
    number = place[:, None] * heads + torch.arange(heads, device=DEVICE)
    raw = random.draw(key, edges.ids[: edges.num_dst][dst][:, None], number)
    is_kept = ((raw >> 48) & 0xFFFF) >= round(p * 65536)
    return is_kept.double() * (65536 / (65536 - round(p * 65536)))


@parametrize_kernel(
    [("tree", False, True), ("block", True, False)],
    layout=[*LAYOUTS],
    v2=[False, True],
    key_on_device=[False, True],
)
def test_dropout_is_drawn_from_the_key_and_again_in_backward(layout: str, v2: bool, key_on_device: bool):
    edges = LAYOUTS[layout]()
    key = random.derive_key(3, 4)
    p = 0.4
    factors = factors_of(edges, True, 2, p, key)
    assert 0.3 < float((factors == 0).double().mean()) < 0.5
    expected = run(attend_by_definition, inputs(edges, 2, 5, v2, False), edges, True, factors)
    key_argument = torch.tensor([key], device=DEVICE) if key_on_device else key
    ours = run(gpu_attention.attend, inputs(edges, 2, 5, v2, False), edges, slope=SLOPE, p=p, key=key_argument)
    assert_equal(ours, expected, 1e-10)


def test_dropout_of_one_gives_zeros():
    edges = block()
    out, (grad, *_) = run(gpu_attention.attend, inputs(edges, 2, 5, False, True), edges, p=1.0, key=1)
    assert not out.any()
    assert grad is not None
    assert not grad.any()


@parametrize_kernel([(True,)], v2=[False, True])
def test_rows_of_empty_slots_are_not_read(v2: bool):
    edges = tree()
    is_empty = edges.sources[: edges.num_src] < 0
    clean, spoilt = (inputs(edges, 2, 5, v2, shared=True) for _ in range(2))
    assert spoilt[0] is not None
    spoilt[0].data[is_empty] = float("nan")
    out, grads = run(gpu_attention.attend, clean, edges)
    spoilt_out, spoilt_grads = run(gpu_attention.attend, spoilt, edges)
    assert torch.equal(out, spoilt_out)
    assert not out[is_empty[: edges.num_dst]].any()
    for grad, spoilt_grad in zip(grads, spoilt_grads, strict=True):
        assert grad is None or (spoilt_grad is not None and torch.equal(grad, spoilt_grad))
    assert grads[0] is not None
    assert is_empty.any()
    assert not grads[0][is_empty].any()


@parametrize_kernel([("block",)], layout=[*LAYOUTS])
def test_every_run_gives_the_same_bits(layout: str):
    edges = LAYOUTS[layout]()
    num_runs = 2 if DEVICE.type == "cpu" else 3  # interpreted programs run one after the other, in one order
    runs = [run(gpu_attention.attend, inputs(edges, 2, 5, True, True, torch.float32), edges) for _ in range(num_runs)]
    for out, grads in runs[1:]:
        assert torch.equal(out, runs[0][0])
        for one, other in zip(grads, runs[0][1], strict=True):
            assert one is None or (other is not None and torch.equal(one, other))


def test_large_scores_do_not_overflow():
    edges = block()
    tensors = inputs(edges, 1, 4, False, True, torch.float32)
    tensors[2] = torch.full((1, 4), 500.0, device=DEVICE, requires_grad=True)
    out, grads = run(gpu_attention.attend, tensors, edges)
    assert out.isfinite().all()
    assert all(g is None or bool(g.isfinite().all()) for g in grads)


def test_destinations_without_edges_get_zeros():
    none = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    edges = gpu_attention.block_edges(none, none[:0].int(), 3, none[:0])
    x = torch.ones(3, 4, device=DEVICE, requires_grad=True)
    out = gpu_attention.attend(x, None, torch.ones(2, 2, device=DEVICE), None, edges)
    assert out.shape == (0, 4)
    edges = gpu_attention.block_edges(torch.zeros(3, dtype=torch.int64, device=DEVICE), none[:0].int(), 3, none)
    out = gpu_attention.attend(x, None, torch.ones(2, 2, device=DEVICE), None, edges, loops=False)
    out.sum().backward()
    assert not out.any()
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("damage", ["source", "indptr"])
def test_edges_that_do_not_fit_raise_later(damage: str):
    indptr = torch.tensor([0, 2, 9 if damage == "indptr" else 3])
    src = torch.tensor([0, 77 if damage == "source" else 1, 2], dtype=torch.int32)
    edges = gpu_attention.block_edges(indptr.to(DEVICE), src.to(DEVICE), 4, torch.arange(2, device=DEVICE))
    gpu_attention.attend(torch.ones(4, 4, device=DEVICE), None, torch.ones(2, 2, device=DEVICE), None, edges)
    with pytest.raises(IndexError, match="edge's source is outside"):
        check_device_errors()


@both_of_each
def test_the_tile_sizes_change_no_result(layout: str, v2: bool, monkeypatch: pytest.MonkeyPatch):
    """Many programs, each with several rounds of edges; in the interpreter tiles are large otherwise."""
    edges = LAYOUTS[layout]()
    expected = run(attend_by_definition, inputs(edges, 2, 5, v2, True), edges, True)
    monkeypatch.setattr(gpu_attention, "_tile", lambda columns, edges: {"R": 16, "E": 4})
    ours = run(gpu_attention.attend, inputs(edges, 2, 5, v2, True), edges, slope=SLOPE)
    assert_equal(ours, expected, 1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(KERNEL_DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_waits_for_the_device(layout: str):
    edges = LAYOUTS[layout]()
    tensors = inputs(edges, 2, 8, False, True, torch.float32)
    projection = randn(edges.num_dst, 16, dtype=torch.float32).to(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = gpu_attention.attend(*tensors, edges, p=0.5, key=3)  # type: ignore[arg-type]
        out.mul(projection).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, gpu_attention.attend(*tensors, edges, p=0.5, key=3))  # type: ignore[arg-type]


@triton.jit
def _kept_kernel(key, ids, out, HEADS: tl.constexpr, THRESHOLD: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    d = tl.arange(0, R)
    e = tl.arange(0, E)
    states = gpu_attention._load_states(key, ids, d, d < R, THRESHOLD)
    number = tl.broadcast_to(e[None, :], (R, E))
    for head in tl.static_range(HEADS):
        factors = gpu_attention._dropout_factors(states, number, head, HEADS, THRESHOLD, 2.0, tl.float64)
        tl.store(out + (d[:, None] * E + e[None, :]) * HEADS + head, factors)


def test_every_edge_and_head_has_a_draw_of_its_own():
    key = random.derive_key(7)
    ids = torch.tensor([3, 1 << 41, 5, 9]).to(DEVICE)
    heads = 3
    edges = 16
    out = torch.empty(4, edges, heads, dtype=torch.float64, device=DEVICE)
    _kept_kernel[(1,)](torch.tensor([key], device=DEVICE), ids, out, heads, 1 << 15, 4, edges)
    number = torch.arange(edges * heads, device=DEVICE).view(1, edges, heads)
    raw = random.draw(key, ids.view(4, 1, 1), number)
    assert torch.equal(out, torch.where(raw < 0, 2.0, 0.0).double())  # the highest bit says whether half is reached


def test_without_dropout_nothing_is_scaled():
    ids = torch.arange(4, device=DEVICE)
    out = torch.empty(4, 2, 1, dtype=torch.float64, device=DEVICE)
    _kept_kernel[(1,)](ids, ids, out, 1, 0, 4, 2)
    assert (out == 1).all()
