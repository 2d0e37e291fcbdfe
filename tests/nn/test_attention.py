"""GATConv and GATv2Conv by fused kernels against stock PyG: on blocks and trees, with every option."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

pytest.importorskip("triton")

from hopline.core.batch import Block
from hopline.core.row_handles import Rows
from hopline.core.tree_layout import TreeBlock, TreeSampler
from hopline.nn import GNN, conv_adapter
from hopline.nn.attention import attention
from hopline.nn.conv_adapter import convolve
from hopline.nn.conv_facts import MAX_CHANNELS, facts_of, is_fused_attention
from hopline.tables import TensorTable
from tests.nn.test_fused import LargestFloats
from tests.nn.test_pairs import CONVS as PAIRS
from tests.nn.test_pairs import SIZES, conv_by, pair_of
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import (
    KERNEL_DEVICE,
    assert_close,
    assert_same_gradients,
    batch_of,
    generator,
    gradients,
    randn,
    random_graph,
    stock,
    twin,
)

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)
LAYOUTS = ["block", "tree"]
SEEDS = torch.tensor([0, 5, 2, 48, 49, 25])
WIDTH = 6

CONVS: dict[str, Any] = {
    "gat": lambda: pyg.GATConv(WIDTH, 3, heads=2),
    "gat-mean": lambda: pyg.GATConv(WIDTH, 4, heads=3, concat=False, negative_slope=0.4),
    "gat-no-loops": lambda: pyg.GATConv(WIDTH, 3, heads=2, add_self_loops=False),
    "gat-residual": lambda: pyg.GATConv(WIDTH, 3, heads=2, residual=True),
    "gat-no-bias": lambda: pyg.GATConv(WIDTH, 3, bias=False),
    "gat-two-linears": lambda: pyg.GATConv((WIDTH, WIDTH), 3, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 3, heads=2),
    "gatv2-mean": lambda: pyg.GATv2Conv(WIDTH, 4, heads=3, concat=False, negative_slope=0.4),
    "gatv2-no-loops": lambda: pyg.GATv2Conv(WIDTH, 3, heads=2, add_self_loops=False),
    "gatv2-shared": lambda: pyg.GATv2Conv(WIDTH, 3, heads=2, share_weights=True),
    "gatv2-residual": lambda: pyg.GATv2Conv(WIDTH, 3, heads=2, residual=True, bias=False),
}


def conv_of(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return CONVS[name]().to(dtype).to(DEVICE)


def block_of() -> Block:
    return batch_of(random_graph(loops=True), None, (5,), SEEDS).blocks[0].to(DEVICE)


def tree_of() -> Block:
    """Two hops of sources, some slots being empty."""
    return TreeSampler(random_graph(loops=True), (4, 3)).sample(SEEDS, 5)[0].to(DEVICE)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks say that they are on a GPU: in the interpreter, CPU tensors stand for a GPU's."""
    monkeypatch.setattr(Block, "on_gpu", True)
    monkeypatch.setattr(TreeBlock, "on_gpu", True)


def stock_on_slots(conv: nn.Module, x: Tensor, block: Block) -> Tensor:
    """Stock PyG on a graph with one node per slot.

    Where the conv adds self-loops, edges that are self-loops in the real graph are left out.
    """
    if not isinstance(block, TreeBlock):
        return stock(conv, x, block)
    child = ((block.tree.nodes[: block.num_src] >= 0) & (block.parents >= 0)).nonzero().view(-1)
    src = child
    dst = block.parents[child].long()
    if conv.add_self_loops:
        other = block.src_ids[src] != block.src_ids[dst]
        src = src[other]
        dst = dst[other]
    return conv(x, torch.stack([src, dst]))[: block.num_dst]


def backward(out: Tensor, block: Block) -> None:
    """Backpropagate a random projection of the outputs of present destinations."""
    is_present = torch.ones(block.num_dst, 1) > 0 if block.present is None else block.present[: block.num_dst]
    projection = randn(*out.shape, seed=7).to(out)
    (out * projection * is_present.view(-1, 1).to(out)).sum().backward()


def assert_equals_stock(name: str, block: Block, dtype: torch.dtype, tolerance: float) -> None:
    conv = conv_of(name, dtype)
    stock_conv = twin(conv)
    x, stock_x = (randn(block.num_src, WIDTH, seed=3).to(dtype).to(DEVICE).requires_grad_() for _ in range(2))
    ours = attention(conv, x, block)
    expected = stock_on_slots(stock_conv, stock_x, block)
    is_present = slice(None) if block.present is None else block.present[: block.num_dst]
    assert_close(ours[is_present], expected[is_present], tolerance)
    backward(ours, block)
    backward(expected, block)
    assert_same_gradients(conv, stock_conv, tolerance)
    assert x.grad is not None
    assert stock_x.grad is not None
    assert_close(x.grad, stock_x.grad, tolerance)


@parametrize_kernel(
    [*zip(CONVS, itertools.cycle(LAYOUTS), strict=False), ("gat", "tree"), ("gatv2", "tree")],
    name=[*CONVS],
    layout=LAYOUTS,
)
def test_outputs_and_gradients_are_those_of_stock_pyg(name: str, layout: str):
    assert_equals_stock(name, block_of() if layout == "block" else tree_of(), torch.float64, 1e-10)


@parametrize_kernel([("gat", "tree"), ("gatv2", "block")], name=["gat", "gatv2"], layout=LAYOUTS)
def test_outputs_and_gradients_are_those_of_stock_pyg_in_float32(name: str, layout: str):
    assert_equals_stock(name, block_of() if layout == "block" else tree_of(), torch.float32, 1e-5)


@parametrize_kernel(
    [("gat", "block"), ("gat-residual", "tree"), ("gatv2", "block")],
    name=["gat", "gat-residual", "gatv2"],
    layout=LAYOUTS,
)
def test_autocast_is_near_by_relative_norm(name: str, layout: str):
    """To PyG under autocast: in other precisions scores near 0 take the other side of leaky ReLU."""
    block = block_of() if layout == "block" else tree_of()
    conv = conv_of(name, torch.float32)
    stock_conv = twin(conv)
    x = randn(block.num_src, WIDTH, seed=3, dtype=torch.float32).to(DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        ours = attention(conv, x, block)
        expected = stock_on_slots(stock_conv, x, block)
    assert ours.dtype == torch.bfloat16
    backward(ours.float(), block)
    backward(expected, block)
    is_present = slice(None) if block.present is None else block.present[: block.num_dst]
    assert (ours - expected)[is_present].norm() < 1e-2 * expected[is_present].norm()
    our_gradient, stock_gradient = (torch.cat([g.flatten() for g in gradients(c).values()]) for c in (conv, stock_conv))
    assert (our_gradient - stock_gradient).norm() < 1e-2 * stock_gradient.norm()


def test_nothing_has_a_row_per_edge():
    block = batch_of(random_graph(30, 700), None, (-1,)).blocks[0].to(DEVICE)
    conv = pyg.GATConv(16, 16, heads=2).to(DEVICE)
    with LargestFloats() as sizes:
        attention(conv, torch.randn(30, 16, device=DEVICE), block).sum().backward()
    assert sizes.largest <= 2 * block.num_edges * 2  # the weights and scores of backward, by edge and head


@pytest.mark.parametrize("layout", ["block", "tree"])
def test_convolve_takes_the_kernels_where_the_block_is_on_a_gpu(layout: str, monkeypatch: pytest.MonkeyPatch):
    block = block_of() if layout == "block" else tree_of()
    conv = conv_of("gat")
    calls = []
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(conv_adapter, "attention", lambda *args: calls.append(args) or attention(*args))
    x = randn(50, WIDTH).to(DEVICE)
    ours = convolve(conv, Rows(TensorTable(x), block.src_ids), block, None, 2)
    assert len(calls) == 1
    assert calls[0][-1] == 2
    assert_close(ours, attention(conv, x[block.src_ids], block))


def test_on_the_cpu_pyg_runs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conv_adapter, "attention", None)
    block = batch_of(random_graph(), None, (5,), SEEDS).blocks[0]
    conv = conv_of("gat").cpu()
    x = randn(block.num_src, WIDTH)
    assert_close(convolve(conv, x, block), stock(conv, x, block))


def test_convs_with_edge_features_other_aggregations_or_hooks_are_not_fused():
    assert all(is_fused_attention(make()) for make in CONVS.values())
    assert not is_fused_attention(pyg.SAGEConv(4, 4))
    assert not is_fused_attention(pyg.GATConv(4, 4, edge_dim=2))
    assert not is_fused_attention(pyg.GATConv(4, 4, aggr="mean"))
    assert not is_fused_attention(pyg.GATConv(4, MAX_CHANNELS + 1))
    assert not is_fused_attention(type("Other", (pyg.GATConv,), {})(4, 4))
    for listen in ("register_forward_hook", "register_message_forward_hook", "register_edge_update_forward_hook"):
        conv = pyg.GATv2Conv(4, 4)
        handle = getattr(conv, listen)(lambda *args: None)
        assert not is_fused_attention(conv)
        handle.remove()
        assert is_fused_attention(conv)


@parametrize_kernel([("block",)], layout=LAYOUTS)
def test_attention_dropout_is_keyed_and_off_in_evaluation(layout: str):
    """Drawn by key and layer, from torch's generator where there is no key, and not at all in evaluation."""
    block = block_of() if layout == "block" else tree_of()
    conv = pyg.GATConv(WIDTH, 3, heads=2, dropout=0.5).double().to(DEVICE)
    x = randn(block.num_src, WIDTH).to(DEVICE)
    keys = torch.arange(100, 133, device=DEVICE)
    for key in (7, keys):
        out = attention(conv, x, replace(block, key=key), layer=0)
        assert torch.equal(out, attention(conv, x, replace(block, key=key), layer=0))
        assert not torch.equal(out, attention(conv, x, replace(block, key=key), layer=1))
    unkeyed = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        unkeyed.append(attention(conv, x, replace(block, key=None)))
    assert torch.equal(unkeyed[0], unkeyed[1])
    assert not torch.equal(unkeyed[0], unkeyed[2])
    conv.eval()
    is_present = slice(None) if block.present is None else block.present[: block.num_dst]
    assert_close(attention(conv, x, replace(block, key=7))[is_present], stock_on_slots(conv, x, block)[is_present])


@parametrize_kernel([("tree",)], layout=LAYOUTS)
def test_a_gnn_of_attention_layers_equals_stock_pyg(layout: str, monkeypatch: pytest.MonkeyPatch):
    """Its gradients pass through kernel after kernel: the same as by PyG's own code on the same batch."""
    graph = random_graph(loops=True)
    x = randn(50, WIDTH).to(DEVICE)
    torch.manual_seed(0)
    model = GNN([pyg.GATConv(WIDTH, 4, heads=2), pyg.GATv2Conv(8, 4, heads=2), pyg.GATConv(8, 3)]).double().to(DEVICE)
    other = twin(model)
    if layout == "block":
        blocks = batch_of(graph, None, (4, 3, 2), SEEDS).blocks
    else:
        blocks = TreeSampler(graph, (4, 3, 2)).sample(SEEDS, 5)
    blocks = [block.to(DEVICE) for block in blocks]
    pretend_gpu(monkeypatch)
    for this, fused in ((model, True), (other, False)):
        assert isinstance(this, GNN)
        monkeypatch.setattr(
            conv_adapter, "facts_of", lambda conv, fused=fused: replace(facts_of(conv), is_fused_attention=fused)
        )
        state = this.encode(x[blocks[0].src_ids], blocks[0].src_keys, None)
        for l, block in enumerate(blocks):
            state = this.layer(l, state, block)
        out = this.decode(state)
        (out * torch.randn(out.shape, generator=generator(3), dtype=torch.float64).to(DEVICE)).sum().backward()
    assert_same_gradients(model, other)


ATTENTION = [name for name in PAIRS if name.startswith("gat")]


@parametrize_kernel(
    [*zip(ATTENTION, itertools.cycle(SIZES)), ("gat", "no edges"), ("gatv2", "more destinations than sources")],
    name=ATTENTION,
    sizes=[*SIZES],
)
def test_attention_between_two_tables_is_stock_pygs(name: str, sizes: str) -> None:
    conv = conv_by(name).to(DEVICE)
    plain = twin(conv)
    part, edge_index, *rows = pair_of(name, sizes)
    h_src, h_dst, plain_src, plain_dst = (h.detach().to(DEVICE).requires_grad_() for h in (*rows, *rows))
    num_dst = h_dst.size(0)
    block = Block(torch.arange(num_dst, device=DEVICE), num_dst, (part.to(DEVICE),))
    ours = attention(conv, h_src, block, h_dst=h_dst)
    expected = plain((plain_src, plain_dst), edge_index.to(DEVICE))
    assert_close(ours, expected)
    (ours * randn(*ours.shape, seed=7).to(ours)).sum().backward()
    (expected * randn(*ours.shape, seed=7).to(ours)).sum().backward()
    assert_same_gradients(conv, plain)
    for h, plain_h in ((h_src, plain_src), (h_dst, plain_dst)):
        assert h.grad is not None
        assert plain_h.grad is not None
        assert_close(h.grad, plain_h.grad)
