"""Planted faults: small changes that break the code, and the test files that must notice them. `make planted`.

A test suite can lose its power without turning red: a case is left out, a tolerance grows, a mock stands in for the
code. So every area and every family of kernels has a fault here. The script copies the project into a temporary
folder, plants one fault at a time, runs the tests that it names, and prints which faults were caught:

    .venv/bin/python tests/planted.py [--only NAME ...] [--jobs 2] [--gpu] [--no-baseline] [--list]

A fault is a text that stands exactly once in its file, and the text that takes its place. Whoever moves or renames
code moves the fault with it: a text that is no longer there once ends the script with the fault's name, and
`tests/test_planted.py` says so in `make test`.

The tests first run without any fault: one that fails by itself proves nothing, and ends the script. A fault counts as
caught if a test fails, not if the planted code cannot be imported or compiled. The exit status is 0 if all were caught.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900.0
"""Seconds after which the tests of one fault are ended. A rule of thumb: the slowest take a minute or two."""
LEFT_OUT = (".git", ".venv*", ".pytest_cache", ".ruff_cache", ".hypothesis", "*.egg-info", "runs", "build", "dist")
"""What the copy does without. Numba's compiled kernels, in `__pycache__`, come along."""
BROKEN = ("SyntaxError", "NameError", "ImportError", "ModuleNotFoundError", "TypingError", "CompilationError")
"""Errors that say that the planted text is no code: any test would fail, so none has caught anything."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change that must not go unnoticed."""

    name: str
    """What goes wrong, in a few words."""
    area: str
    file: str
    """The file that is changed, relative to the project."""
    old: str
    """A text that stands exactly once in the file: short, so that it survives moves and renames around it."""
    new: str
    tests: tuple[str, ...]
    """The test files that must fail: as few and as quick as there are."""
    gpu: bool = False
    """Whether only tests that need a CUDA device can notice it."""
    target: str = "test"
    """The make target that runs these tests."""


FAULTS: tuple[Fault, ...] = (
    # ---- CPU kernels
    Fault(
        name="an edge of the future is eligible",
        area="typed sampling",
        file="src/hopline/ops/cpu/hops.py",
        old="if times[at] <= bound:",
        new="if times[at] <= bound + 1:",
        tests=("tests/ops/test_hops.py",),
    ),
    Fault(
        name="the last edges are one too few",
        area="typed sampling",
        file="src/hopline/ops/cpu/hops.py",
        old="max(starts[i], low - most)",
        new="max(starts[i], low - most + 1)",
        tests=("tests/ops/test_hops.py",),
    ),
    Fault(
        name="repeated seeds draw the same edges",
        area="typed sampling",
        file="src/hopline/ops/cpu/hops.py",
        old="np.uint64(first_row + i)",
        new="np.uint64(node)",
        tests=("tests/ops/test_hops.py",),
    ),
    Fault(
        name="a node is expanded in every hop",
        area="typed sampling",
        file="src/hopline/ops/hops.py",
        old="        begin = end\n",
        new="        begin = [0] * num_types\n",
        tests=("tests/ops/test_hops.py",),
    ),
    Fault(
        name="draws by weight with replacement take a neighbour",
        area="typed sampling",
        file="src/hopline/ops/cpu/hops.py",
        old="sums[place] = sum_so_far",
        new="sums[place] = sum_so_far - w",
        tests=("tests/ops/test_hops.py",),
    ),
    Fault(
        name="a row that is not cut loses its edges",
        area="typed sampling",
        file="src/hopline/ops/cpu/hops.py",
        old="for e in range(starts[i], stops[i]):",
        new="for e in range(starts[i], stops[i] - 1):",
        tests=("tests/ops/test_hops.py",),
    ),
    Fault(
        name="seeds of another type take the first type's times",
        area="PyG's operators",
        file="src/hopline/pyg/operators.py",
        old="return ops.gather_rows(node_time, seeds)",
        new="return ops.gather_rows(node_time, seeds * 0)",
        tests=("tests/pyg/test_operators.py",),
    ),
    Fault(
        name="PyG multiplies segments without being asked",
        area="PyG's operators",
        file="src/hopline/pyg/door.py",
        old="dict.fromkeys(_MATMUL_FLAGS, matmul)",
        new="dict.fromkeys(_MATMUL_FLAGS, True)",
        tests=("tests/pyg/test_other_operators.py",),
    ),
    Fault(
        name="modules of PyG keep their copies of the flags",
        area="PyG's operators",
        file="src/hopline/pyg/door.py",
        old='if path.split(".")[0] == "torch_geometric" and',
        new='if path == "torch_geometric.typing" and',
        tests=("tests/pyg/test_door.py",),
    ),
    Fault(
        name="a walk forgets where it came from",
        area="random walks",
        file="src/hopline/ops/cpu/walks.py",
        old="            before = node\n",
        new="            before = np.int64(-1)\n",
        tests=("tests/ops/cpu/test_walks.py",),
    ),
    Fault(
        name="shuffle of a large row forgets a swap",
        area="CPU sampling",
        file="src/hopline/ops/cpu/sampling.py",
        old="swap_value[j] = swap_value[slots[j_slot]] if slots[j_slot] >= 0 else j",
        new="swap_value[j] = j",
        tests=("tests/ops/cpu/test_sampling.py",),
    ),
    Fault(
        name="nodes with a self-loop draw once for both layers of a pair",
        area="layer keys",
        file="src/hopline/core/sampler.py",
        old="loops_apart=layer % 2 == 1",
        new="loops_apart=False",
        tests=("tests/nn/test_gcn_norm.py",),
    ),
    Fault(
        name="a sampler that is not thread-safe is called by several threads",
        area="own samplers",
        file="src/hopline/methods/sampled/own_sampler.py",
        old='getattr(self._sampler, "thread_safe", True)',
        new="True",
        tests=("tests/methods/sampled/test_sampler_seam.py",),
    ),
    Fault(
        name="sources of a user's block are not checked",
        area="own samplers",
        file="src/hopline/methods/sampled/own_sampler.py",
        old="if not _all_below(part.src_idx, block.num_src):",
        new="if False:",
        tests=("tests/methods/sampled/test_sampler_seam.py",),
    ),
    Fault(
        name="blocks of a user have no key of the step",
        area="own samplers",
        file="src/hopline/methods/sampled/own_sampler.py",
        old="return replace(block, key=key, in_graph_order=in_order)",
        new="return replace(block, in_graph_order=in_order)",
        tests=("tests/methods/sampled/test_sampler_seam.py",),
    ),
    Fault(
        name="edges of a user's block count as in order",
        area="own samplers",
        file="src/hopline/methods/sampled/own_sampler.py",
        old="in_order = block.in_graph_order and _has_all_in_order(block)",
        new="in_order = block.in_graph_order",
        tests=("tests/methods/sampled/test_sampler_seam.py",),
    ),
    Fault(
        name="random numbers do not depend on the id",
        area="own samplers",
        file="src/hopline/ops/random.py",
        old="uniform(draw(derive_key(key), ids[:, None], torch",
        new="uniform(draw(derive_key(key), 0 * ids[:, None], torch",
        tests=("tests/ops/test_random.py",),
    ),
    Fault(
        name="a run folder imports the sampler that it names",
        area="own samplers",
        file="src/hopline/run/settings.py",
        old="if sampler_name == own_sampler or not sampler_name or own_sampler is None:",
        new="if True:",
        tests=("tests/test_own_sampler.py",),
    ),
    Fault(
        name="an owner draws for nodes with a self-loop as for others",
        area="layer keys over shards",
        file="src/hopline/shards/collective_sampler.py",
        old="if hop_key.loops_apart:",
        new="if False:",
        tests=("tests/shards/test_collective_sampler.py",),
    ),
    Fault(
        name="probability of a weighted draw ends at the last key that is drawn",
        area="CPU draws by weight",
        file="src/hopline/ops/cpu/sampling.py",
        old="limits[i] = keys[size - 1]",
        new="limits[i] = keys[size - 2]",
        tests=("tests/ops/test_laws.py",),
    ),
    Fault(
        name="copies of an edge have one number by LABOR",
        area="CPU draws by LABOR",
        file="src/hopline/ops/cpu/sampling.py",
        old="if copies.shape[0]:",
        new="if copies.shape[0] < 0:",
        tests=("tests/ops/test_laws.py",),
    ),
    Fault(
        name="weighted draws count positions from one more",
        area="GPU draws by weight",
        file="src/hopline/ops/gpu/sampling.py",
        old="(place + 1).to(tl.uint64)",
        new="(place + 2).to(tl.uint64)",
        tests=("tests/ops/gpu/test_laws.py",),
    ),
    Fault(
        name="sources have one number in two layers by LABOR",
        area="layer keys",
        file="src/hopline/core/laws.py",
        old="key_per_layer = True",
        new="key_per_layer = False",
        tests=("tests/methods/sampled/test_laws.py",),
    ),
    Fault(
        name="GCN counts edges drawn by weight once",
        area="GCN norm",
        file="src/hopline/nn/gcn_norm.py",
        old="weight = weight / inclusion",
        new="weight = weight * 1.0",
        tests=("tests/nn/test_gcn_norm.py",),
    ),
    Fault(
        name="choices of LABOR change in every step",
        area="layer keys",
        file="src/hopline/core/seed_order.py",
        old="step - step % every",
        new="step",
        tests=("tests/methods/sampled/test_laws.py",),
    ),
    Fault(
        name="owners draw by the order of a shard's weights",
        area="draws by weight over shards",
        file="src/hopline/shards/collective_sampler.py",
        old="ops.gather_rows(shard.edge[weight], edge_numbers)",
        new="shard.edge[weight]",
        tests=("tests/shards/test_collective_sampler.py",),
    ),
    Fault(
        name="id map keeps the last node of the batch before",
        area="CPU relabel",
        file="src/hopline/ops/cpu/sampling.py",
        old="for i in range(size):",
        new="for i in range(size - 1):",
        tests=("tests/ops/cpu/test_sampling.py",),
    ),
    Fault(
        name="mean over two edges is not divided",
        area="CPU reduce, forward",
        file="src/hopline/ops/cpu/reduce.py",
        old="if mean and indptr[d + 1] - indptr[d] > 1:",
        new="if mean and indptr[d + 1] - indptr[d] > 2:",
        tests=("tests/ops/cpu/test_reduce.py",),
    ),
    Fault(
        name="initial zero is no tie of a maximum",
        area="CPU reduce, backward",
        file="src/hopline/ops/cpu/reduce.py",
        old="ties[c] = 1 if maximum[c] == 0 else 0",
        new="ties[c] = 0",
        tests=("tests/ops/cpu/test_reduce.py",),
    ),
    Fault(
        name="compiled kernel for another signature is run",
        area="CPU kernel cache",
        file="src/hopline/ops/cpu/kernel_cache.py",
        old="if not content[:-HASH_BYTES].endswith(self._identity(key)):",
        new="if not content:",
        tests=("tests/ops/cpu/test_kernel_cache.py",),
    ),
    Fault(
        name="flipped bit of a compiled kernel is run",
        area="CPU kernel cache",
        file="src/hopline/ops/cpu/kernel_cache.py",
        old="if hashlib.sha256(content[:-HASH_BYTES]).digest() != content[-HASH_BYTES:]:",
        new="if not content:",
        tests=("tests/ops/cpu/test_kernel_cache.py",),
    ),
    Fault(
        name="bias gradient loses the last range of rows",
        area="CPU linear",
        file="src/hopline/ops/cpu/linear.py",
        old="bias_parts.sum(0)",
        new="bias_parts[:-1].sum(0)",
        tests=("tests/ops/cpu/test_linear.py",),
    ),
    Fault(
        name="tree draws by the place and not by the slot",
        area="CPU tree",
        file="src/hopline/ops/cpu/sampling.py",
        old="_segments(indptr, nodes, slots, key, indices.numel(), has_slots=True)",
        new="_segments(indptr, nodes, torch.arange(num_slots), key, indices.numel(), has_slots=True)",
        tests=("tests/ops/cpu/test_sampling.py",),
    ),
    Fault(
        name="only neighbour of a node is lost",
        area="CPU partition",
        file="src/hopline/ops/cpu/partition.py",
        old="if i == 0 or row[i] != row[i - 1]:",
        new="if row[i] != row[i - 1]:",
        tests=("tests/ops/cpu/test_partition.py",),
    ),
    Fault(
        name="pieces beyond the 64th count nodes of the first",
        area="CPU pieces",
        file="src/hopline/ops/cpu/cut_batches.py",
        old="marks[:] = 0",
        new="marks[: num_nodes[-1]] = 0",
        tests=("tests/ops/cpu/test_cut_batches.py",),
    ),
    Fault(
        name="last edge that fits is left out",
        area="CPU prune",
        file="src/hopline/ops/cpu/cut_batches.py",
        old="if edge_entry[e] <= last:",
        new="if edge_entry[e] < last:",
        tests=("tests/ops/cpu/test_cut_batches.py",),
    ),
    Fault(
        name="last member of a class is never a source",
        area="CPU synthetic graphs",
        file="src/hopline/ops/cpu/synthetic.py",
        old="num_members = (num_nodes - own_class + num_classes - 1) // num_classes",
        new="num_members = num_nodes // num_classes",
        tests=("tests/ops/cpu/test_synthetic.py", "tests/ops/gpu/test_synthetic.py"),
    ),
    Fault(
        name="last row of each piece of a file is not read",
        area="CPU pages",
        file="src/hopline/ops/cpu/page_cache.py",
        old="order[i : i + rows_per_piece]",
        new="order[i : i + max(1, rows_per_piece - 1)]",
        tests=("tests/ops/cpu/test_page_cache.py",),
    ),
    # ---- Triton kernels; without a GPU they run in Triton's interpreter
    Fault(
        name="distinct draws of a large fan-out forget a swap",
        area="GPU sampling",
        file="src/hopline/ops/gpu/sampling.py",
        old="value_at_j = _value_at(swap_targets, swap_values, columns, position_j, position_j)",
        new="value_at_j = position_j",
        tests=("tests/ops/gpu/test_sampling.py",),
    ),
    Fault(
        name="weight gradient leaves out the second block of columns",
        area="GPU reduce",
        file="src/hopline/ops/gpu/reduce.py",
        old="mask = is_valid[:, None] & (column < WIDTH)[None, :]",
        new="mask = is_valid[:, None] & (column < min(WIDTH, COLUMNS))[None, :]",
        tests=("tests/ops/gpu/test_reduce.py",),
    ),
    Fault(
        name="weights count in sums but not in means",
        area="GPU reduce",
        file="src/hopline/ops/gpu/reduce.py",
        old="        if weight is not None:\n            messages *=",
        new="        if weight is not None and not MEAN:\n            messages *=",
        tests=("tests/ops/gpu/test_reduce.py",),
    ),
    Fault(
        name="maximum over no edges is not zero",
        area="GPU reduce",
        file="src/hopline/ops/gpu/reduce.py",
        old="maximum = tl.where((stop > start)[:, None], maximum, 0)",
        new="maximum = tl.where((stop >= start)[:, None], maximum, 0)",
        tests=("tests/ops/gpu/test_reduce.py",),
    ),
    Fault(
        name="seeds of a step are the first rank's on every rank",
        area="GPU tree",
        file="src/hopline/ops/gpu/tree.py",
        old="seed_position = position + first + i",
        new="seed_position = position + i",
        tests=("tests/ops/gpu/test_tree.py",),
    ),
    Fault(
        name="children that are not there tie with a maximum of zero",
        area="GPU tree reduce",
        file="src/hopline/ops/gpu/tree.py",
        old='mask=mask & (child < count)[:, None], other=float("nan")',
        new="mask=mask & (child < count)[:, None], other=0.0",
        tests=("tests/ops/gpu/test_tree.py",),
    ),
    Fault(
        name="bias gradient of many rows loses some of each range",
        area="GPU dense",
        file="src/hopline/ops/gpu/dense.py",
        old="for step in range(0, PER, R):",
        new="for step in range(0, PER - R, R):",
        tests=("tests/ops/gpu/test_dense.py",),
    ),
    Fault(
        name="backward of attention reads outputs rounded to bfloat16",
        area="GPU attend",
        file="src/hopline/ops/gpu/attention.py",
        old="ctx.save_for_backward(x, own, att, att_own, key, exact, sums)",
        new="ctx.save_for_backward(x, own, att, att_own, key, out.to(exact.dtype), sums)",
        tests=("tests/ops/gpu/test_attention.py",),
    ),
    Fault(
        name="sum before a higher score is not scaled down",
        area="GPU attend",
        file="src/hopline/ops/gpu/attention.py",
        old="total = total * shrink[:, None] +",
        new="total = total +",
        tests=("tests/ops/gpu/test_attention.py",),
    ),
    Fault(
        name="decoupled weight decay has the wrong sign",
        area="GPU Adam",
        file="src/hopline/ops/gpu/loss_and_adam.py",
        old="p = p * (1 - rate * decay)",
        new="p = p * (1 + rate * decay)",
        tests=("tests/ops/gpu/test_loss_and_adam.py",),
    ),
    Fault(
        name="second block of columns repeats the draws of the first",
        area="GPU dropout",
        file="src/hopline/ops/gpu/reduce.py",
        old="(draw + 1).to(tl.uint64)",
        new="(draw % DRAWS + 1).to(tl.uint64)",
        tests=("tests/ops/gpu/test_reduce.py",),
    ),
    Fault(
        name="classes beyond the last have a score of zero",
        area="GPU loss",
        file="src/hopline/ops/gpu/loss_and_adam.py",
        old="other=-1e30",
        new="other=0.0",
        tests=("tests/ops/gpu/test_loss_and_adam.py",),
    ),
    Fault(
        name="id map keeps the stamps of the batch before",
        area="GPU map",
        file="src/hopline/ops/gpu/sampling.py",
        old="self._step += 1",
        new="self._step += 0",
        tests=("tests/ops/gpu/test_sampling.py",),
    ),
    Fault(
        name="row is claimed twice in one window",
        area="GPU stage",
        file="src/hopline/ops/gpu/tiers.py",
        old="is_new = is_cold & (last_window != window)",
        new="is_new = is_cold",
        tests=("tests/ops/gpu/test_tiers.py",),
    ),
    Fault(
        name="reader beside training takes staged rows",
        area="GPU tiers",
        file="src/hopline/ops/gpu/tiers.py",
        old="slots = tl.maximum(slots, -1)",
        new="slots = slots + 0",
        tests=("tests/ops/gpu/test_tiers.py",),
    ),
    Fault(
        name="first edge of a node belongs to the node before",
        area="GPU synthetic graphs",
        file="src/hopline/ops/gpu/synthetic.py",
        old="has_begun = tl.load(indptr_ptr + middle) <= edge",
        new="has_begun = tl.load(indptr_ptr + middle) < edge",
        tests=("tests/ops/gpu/test_synthetic.py",),
    ),
    # ---- batches
    Fault(
        name="last and smaller batch is dropped",
        area="seed order",
        file="src/hopline/core/seed_order.py",
        old="if drop_last:",
        new="if True:",
        tests=("tests/core/test_sampler.py",),
    ),
    Fault(
        name="epoch that goes on draws with the keys of its beginning",
        area="loader",
        file="src/hopline/core/seed_order.py",
        old="enumerate(batches, start=done)",
        new="enumerate(batches, start=0)",
        tests=("tests/methods/sampled/test_sampled.py",),
    ),
    Fault(
        name="buffer is filled again before its copy is done",
        area="pipeline",
        file="src/hopline/pipeline/transfer.py",
        old="slot.event.synchronize()",
        new="slot.event = None",
        tests=("tests/pipeline/test_transfer.py",),
    ),
    Fault(
        name="written rows stay old in the cache",
        area="cached tables",
        file="src/hopline/tables/ram_cache.py",
        old="self.hot[slot[is_hit]] = rows[is_hit].to(self.dtype)",
        new="self.hot[slot[is_hit]] = self.hot[slot[is_hit]]",
        tests=("tests/equivalence/test_2_tables.py",),
    ),
    Fault(
        name="a loader does not follow its sampler",
        area="batches over ranks",
        file="src/hopline/methods/sampled/seed_loader.py",
        old="self._follows_sampler = sampler is not None or batch_sampler is not None",
        new="self._follows_sampler = batch_sampler is not None",
        tests=("tests/methods/sampled/test_seed_loader.py",),
    ),
    Fault(
        name="edges are shared though they were changed by NumPy",
        area="batches of PyG",
        file="src/hopline/methods/sampled/pyg_loader.py",
        old="checksum(edge_index.as_subclass(Tensor))",
        new="0",
        tests=("tests/methods/sampled/test_pyg_loader.py",),
    ),
    Fault(
        name="arrays made in inference mode never change",
        area="cached values",
        file="src/hopline/core/graph.py",
        old="checksum(tensor) if tensor.is_inference()",
        new="0 if tensor.is_inference()",
        tests=("tests/core/test_graph.py",),
    ),
    Fault(
        name="edge ids count the edges sorted by destination",
        area="other frameworks",
        file="src/hopline/interop/sampler.py",
        old="part.edge.get(EDGE_IDS, part.edge_ids)",
        new="part.edge_ids",
        tests=("tests/interop/test_interop.py",),
    ),
    Fault(
        name="rows of repeated seeds shift all others",
        area="other frameworks",
        file="src/hopline/core/sampler.py",
        old='return new_ids.scatter_reduce(0, seed_idx.long(), rows, "amin", include_self=False)',
        new="return new_ids",
        tests=("tests/interop/test_interop.py",),
    ),
    # ---- models
    Fault(
        name="loops of the graph count beside the loops that are added",
        area="GCN norm",
        file="src/hopline/nn/gcn_norm.py",
        old="weight = weight.masked_fill(src == dst, 0)",
        new="weight = weight + 0",
        tests=("tests/nn/test_gcn_norm.py",),
    ),
    Fault(
        name="edge weights are lost where sums are scaled",
        area="fused convs",
        file="src/hopline/nn/fused.py",
        old="weight = block.edge_factors if weight is None else weight * block.edge_factors",
        new="weight = block.edge_factors",
        tests=("tests/nn/test_fused.py",),
    ),
    Fault(
        name="dropout of attention is the same in every layer",
        area="attention",
        file="src/hopline/nn/attention.py",
        old="ops.purpose_key(block.key, NUM_PURPOSES - 2 - layer)",
        new="ops.purpose_key(block.key, NUM_PURPOSES - 2)",
        tests=("tests/nn/test_attention.py",),
    ),
    Fault(
        name="gradient of a norm stays on its rank",
        area="norms over ranks",
        file="src/hopline/shards/convs/batch_norm.py",
        old="return _all_reduce(grad, ctx.world), None",
        new="return grad.clone(), None",
        tests=("tests/shards/convs/test_batch_norm.py",),
    ),
    Fault(
        name="jumping knowledge in the wrong order",
        area="layer walk",
        file="src/hopline/nn/gnn.py",
        old="torch.cat([state.jk[:num_dst], h[:num_dst]], dim=1)",
        new="torch.cat([h[:num_dst], state.jk[:num_dst]], dim=1)",
        tests=("tests/nn/test_gnn.py",),
    ),
    Fault(
        name="initial residual has the weights of the two swapped",
        area="layer walk",
        file="src/hopline/nn/gnn.py",
        old="(1 - self.initial_residual) * h + self.initial_residual * x0",
        new="self.initial_residual * h + (1 - self.initial_residual) * x0",
        tests=("tests/nn/test_gnn.py",),
    ),
    # ---- layers found in a module
    Fault(
        name="all dropouts of a traced module draw one mask",
        area="traced modules",
        file="src/hopline/nn/traced_model.py",
        old="ops.purpose_key(place.key, op.dropout.number)",
        new="ops.purpose_key(place.key, 0)",
        tests=("tests/nn/test_traced.py",),
    ),
    Fault(
        name="a trial accepts modules that mix rows",
        area="traced modules",
        file="src/hopline/nn/traced_probe.py",
        old="if outputs.shape != expected[nodes].shape or not is_close(outputs, expected[nodes]):",
        new="if outputs.shape != expected[nodes].shape:",
        tests=("tests/nn/test_traced.py",),
    ),
    Fault(
        name="a program keeps numbers of the trial's weights",
        area="traced modules",
        file="src/hopline/nn/traced_probe.py",
        old="for factor in (1.0, 100.0, 0.01):",
        new="for factor in (1.0,):",
        tests=("tests/nn/test_traced.py",),
    ),
    Fault(
        name="a changed setting of a module is not traced anew",
        area="traced modules",
        file="src/hopline/nn/traced_probe.py",
        old="settings += (name, value)",
        new="settings += (name,)",
        tests=("tests/nn/test_traced.py",),
    ),
    # ---- historical training
    Fault(
        name="evaluation leaves rows before older commits are written",
        area="history tables",
        file="src/hopline/methods/historical/work.py",
        old="self.flush(0)  # older rows must not come later",
        new="pass",
        tests=("tests/methods/historical/test_work.py",),
    ),
    Fault(
        name="pushed gradients are not scaled back",
        area="compensation",
        file="src/hopline/methods/historical/step.py",
        old="{l: h.grad * total for",
        new="{l: h.grad for",
        tests=("tests/methods/historical/test_micro_batches.py",),
    ),
    Fault(
        name="sweep loses the gradients that jumped ahead",
        area="sweep",
        file="src/hopline/layerwise/engine.py",
        old="self.rows.add(k, piece.dst, rows.grad)",
        new="self.rows.add(k, piece.dst, None)",
        tests=("tests/equivalence/test_5_historical.py",),
    ),
    # ---- ranks
    Fault(
        name="ties of a smaller maximum are still counted",
        area="sharded aggregation",
        file="src/hopline/shards/convs/accumulate.py",
        old="ties *= extremes == new_extremes",
        new="ties *= 1",
        tests=("tests/shards/convs/test_accumulate.py",),
    ),
    Fault(
        name="rows are read before they have arrived",
        area="sharded aggregation",
        file="src/hopline/shards/transports.py",
        old="                work.wait()",
        new="                pass",
        tests=("tests/shards/test_transports.py",),
    ),
    Fault(
        name="answers come back in the order of their owners",
        area="all-to-all",
        file="src/hopline/distributed/all_to_all.py",
        old="self._inverse[order] = torch.arange(order.numel())",
        new="self._inverse = torch.arange(order.numel())",
        tests=("tests/shards/test_collective_sampler.py",),
    ),
    Fault(
        name="gradient that only one rank has is lost",
        area="gradient sum",
        file="src/hopline/distributed/gradients.py",
        old="        elif num_ranks:",
        new="        elif num_ranks > 1:",
        tests=("tests/distributed/test_world.py",),
    ),
    Fault(
        name="damaged weights are read",
        area="checkpoints",
        file="src/hopline/util/files.py",
        old="hexdigest() not in listed:",
        new="hexdigest() not in listed and not content:",
        tests=("tests/run/test_train.py",),
    ),
    Fault(
        name="a kill between the checksum and the weights makes them unreadable",
        area="checkpoints",
        file="src/hopline/util/files.py",
        old="(*self._current, checksum)",
        new="(checksum,)",
        tests=("tests/util/test_files.py",),
    ),
    Fault(
        name="ranks with other training nodes train together",
        area="ranks",
        file="src/hopline/units/rank_facts.py",
        old="facts |= {name: ids_fact(ids) for name, ids in seeds.items()}",
        new="pass",
        tests=("tests/distributed/test_agreement.py",),
    ),
    Fault(
        name="arrays with a stored checksum are compared by some rows",
        area="ranks",
        file="src/hopline/distributed/agreement.py",
        old="    if checksum and other_checksum:",
        new="    if False:",
        tests=("tests/distributed/test_agreement.py",),
    ),
    Fault(
        name="a rank that steps apart resumes with the first one's weights",
        area="checkpoints",
        file="src/hopline/training/checkpoint.py",
        old="_restore_rank(trainer, ranks[trainer.world.rank])",
        new="_restore_rank(trainer, ranks[0])",
        tests=("tests/training/test_gradients.py",),
    ),
    Fault(
        name="gradients are combined after they are clipped",
        area="ranks",
        file="src/hopline/training/trainer.py",
        old="""            self._exchange(self.gradients.combine)
            self.update()
""",
        new="""            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm or 1e9)
            self._exchange(self.gradients.combine)
            self.update()
""",
        tests=("tests/training/test_gradients.py",),
    ),
    Fault(
        name="a method that a run folder names is imported without being asked for",
        area="run folders of others",
        file="src/hopline/run/settings.py",
        old='if ":" not in kind or kind == own_method:',
        new="if True:",
        tests=("tests/run/test_own_method.py",),
    ),
    Fault(
        name="source of another shard is off by its owner",
        area="shards",
        file="src/hopline/shards/shard.py",
        old="halo_idx = (idx + self.halo_ptr[owner])",
        new="halo_idx = (idx + self.halo_ptr[0])",
        tests=("tests/shards/test_shard.py",),
    ),
    # ---- runs
    Fault(
        name="generator is not restored",
        area="checkpoints",
        file="src/hopline/training/checkpoint.py",
        old='restore_random_states(state["rng"])',
        new="pass",
        tests=("tests/test_golden.py",),
    ),
    Fault(
        name="snapshot of the weights is not a copy",
        area="evaluation beside training",
        file="src/hopline/training/validation.py",
        old="value.detach().to(device, copy=True) if",
        new="value.detach().to(device) if",
        tests=("tests/training/test_evaluation.py",),
    ),
    Fault(
        name="asynchronous evaluation does not see the attributes of its epoch",
        area="evaluation beside training",
        file="src/hopline/training/async_evaluation.py",
        old="set_attributes(self._job.module, snapshot.attributes)",
        new="snapshot.attributes",
        tests=("tests/training/test_changing_models.py",),
    ),
    Fault(
        name="a closure is no part of a model's fingerprint",
        area="checkpoints",
        file="src/hopline/nn/structure.py",
        old='self.add(f"{path}.{name}", cell.cell_contents)',
        new='self.add(f"{path}.{name}", type(cell.cell_contents))',
        tests=("tests/nn/test_structure.py",),
    ),
    Fault(
        name="each piece of a batch weighs as a whole batch",
        area="budget",
        file="src/hopline/budget/guard.py",
        old="BatchUnit(self.job, micro_batch).forward_backward(total)",
        new="BatchUnit(self.job, micro_batch).forward_backward(micro_batch.num_seeds)",
        tests=("tests/budget/test_guard.py",),
    ),
    Fault(
        name="plan of a sweep keeps a part that is too large",
        area="budget",
        file="src/hopline/methods/full_batch/memory_plan.py",
        old="(part_bytes / target_bytes).ceil()",
        new="(part_bytes.mean() / target_bytes).ceil().expand_as(part_bytes)",
        tests=("tests/methods/test_plan_within.py",),
    ),
    Fault(
        name="promise does not grow with a larger step",
        area="predictor",
        file="src/hopline/budget/predictor.py",
        old="np.maximum(times, 1, out=times) * self.peaks",
        new="np.minimum(times, 1, out=times) * self.peaks",
        tests=("tests/budget/test_predictor.py",),
    ),
    Fault(
        name="node between two chunks is left out",
        area="inference",
        file="src/hopline/inference/layerwise_chunks.py",
        old="            start = stop\n",
        new="            start = stop + 1\n",
        tests=("tests/inference/test_layerwise_chunks.py",),
    ),
    Fault(
        name="kept sums outlive a change of the features",
        area="inference",
        file="src/hopline/inference/cache.py",
        old=" and self.x_version == x.version",
        new="",
        tests=("tests/inference/test_cache.py",),
    ),
    # ---- data, metrics, settings
    Fault(
        name="first line of a file without names is lost",
        area="data, CSV",
        file="src/hopline/data/formats/csv_parquet.py",
        old="return [str(i) for i in range(len(first))], 0",
        new="return [str(i) for i in range(len(first))], num_lines",
        tests=("tests/data/formats/test_text.py",),
    ),
    Fault(
        name="second chunk of an edge file begins too early",
        area="data, conversion",
        file="src/hopline/data/edges.py",
        old="if by_row else 2 * first",
        new="if by_row else first",
        tests=("tests/data/test_edges.py",),
    ),
    Fault(
        name="node with the largest id is not counted",
        area="data, conversion",
        file="src/hopline/data/convert.py",
        old="    return largest + 1",
        new="    return largest",
        tests=("tests/data/formats/test_npz.py",),
    ),
    Fault(
        name="ends of edges by destination are not swapped back",
        area="data, DGL",
        file="src/hopline/data/formats/dgl_stream.py",
        old="(columns, rows) if bit == 4",
        new="(rows, columns) if bit == 4",
        tests=("tests/data/formats/test_dgl.py",),
    ),
    Fault(
        name="edge ids of a sparse format are not followed",
        area="data, DGL",
        file="src/hopline/data/formats/dgl_stream.py",
        old="rows, columns = rows[order], columns[order]",
        new="pass",
        tests=("tests/data/formats/test_dgl.py",),
    ),
    Fault(
        name="two processes may write one folder",
        area="data, conversion",
        file="src/hopline/util/file_lock.py",
        old="fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="pass",
        tests=("tests/data/test_writer.py",),
    ),
    Fault(
        name="equal scores do not share their ranks",
        area="metrics",
        file="src/hopline/metrics.py",
        old="(size.double() - 1) / 2",
        new="(size.double() - 1)",
        tests=("tests/test_metrics.py",),
    ),
    Fault(
        name="warm-up ends one epoch early",
        area="learning rate",
        file="src/hopline/training/lr_schedule.py",
        old="self.epoch <= self.warmup",
        new="self.epoch < self.warmup",
        tests=("tests/training/test_lr_schedule.py",),
    ),
    Fault(
        name="first of two settings of one key wins",
        area="command line",
        file="src/hopline/util/config.py",
        old="value = _read(whole[-1], annotation",
        new="value = _read(whole[0], annotation",
        tests=("tests/util/test_config.py",),
    ),
    Fault(
        name="recorded inference goes on after the weights moved",
        area="evaluation on a GPU",
        file="src/hopline/inference/captured_forward.py",
        old="return same and self.addresses(features=capture.reads_features) == capture.addresses",
        new="return same",
        tests=("tests/inference/test_captured_forward.py",),
    ),
    Fault(
        name="training goes on before a capture has put its state back",
        area="captured steps",
        file="src/hopline/device/cuda_graph.py",
        old="            outer.wait_stream(stream)",
        new="            pass",
        tests=("tests/device/test_cuda_graph.py",),
    ),
    # ---- predictions on new data
    Fault(
        name="new data are standardised by their own numbers",
        area="predictions",
        file="src/hopline/data/inputs.py",
        old="return _Changed(ordered, partial(standardize, mean=mean, deviation=deviation))",
        new="return data.with_fields(tables={**data.tables, 'x': ordered}).standardized().x",
        tests=("tests/run/test_saved.py",),
    ),
    Fault(
        name="columns of new data are read in their own order",
        area="predictions",
        file="src/hopline/data/inputs.py",
        old="return torch.cat(parts)",
        new="return None",
        tests=("tests/run/test_saved.py",),
    ),
    Fault(
        name="labels of new data keep their own class numbers",
        area="predictions",
        file="src/hopline/data/inputs.py",
        old="return number_of[y]",
        new="return y",
        tests=("tests/run/test_saved.py",),
    ),
    # ---- on a GPU only
    Fault(
        name="replay writes over gradients of the unit before",
        area="captured steps",
        file="src/hopline/methods/sampled/captured_step.py",
        old="earlier = earlier.clone()",
        new="pass",
        tests=("tests/methods/sampled/test_captured_step.py",),
        gpu=True,
    ),
    Fault(
        name="rows are written before they are computed",
        area="history on a GPU",
        file="src/hopline/device/row_mover.py",
        old="self.stream.wait_event(computed or self.now())",
        new="pass",
        tests=("tests/tables/test_history_on_gpu.py",),
        gpu=True,
    ),
)


class Moved(Exception):
    """A fault's text is not in its file, or more than once."""


def check(faults: Iterable[Fault], root: Path) -> None:
    """Refuse faults whose text is not there exactly once, or whose files are gone, each by its name."""
    problems = []
    for fault in faults:
        missing = [path for path in (fault.file, *fault.tests) if not (root / path).is_file()]
        if missing:
            problems.append(f"{fault.name!r}: there is no {' and no '.join(missing)}")
            continue
        count = (root / fault.file).read_text().count(fault.old)
        if count != 1:
            problems.append(f"{fault.name!r}: {fault.old!r} stands {count} times in {fault.file}, not once")
    if problems:
        raise Moved("\n".join(["faults that have to be moved along with the code:", *problems]))


# ---- a copy of the project


class Project:
    """A copy of the project, in which one fault at a time is planted. One thread at a time may use it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def copied(cls, source: Path, target: Path) -> Project:
        """Modification times are kept: Numba's compiled kernels are valid by them."""
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        return cls(target)

    @contextmanager
    def planted(self, fault: Fault, number: int) -> Iterator[None]:
        """Within, the fault is there; afterwards the file is as it was, its time and compiled kernels included.

        number: of the fault among all, so that no two faults give a file the same time.
        """
        path = self.root / fault.file
        text, stat = path.read_text(), path.stat()
        if text.count(fault.old) != 1:
            raise Moved(f"{fault.name!r}: {fault.old!r} does not stand exactly once in {fault.file}")
        stems = _importers(self.root / "src", path)
        path.write_text(text.replace(fault.old, fault.new))
        # Python and Numba compare the time in whole seconds, or the size: both may be those of another fault.
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (1 + number) * 10**9))
        try:
            with self._kernels_aside(stems):
                yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    @contextmanager
    def _kernels_aside(self, stems: set[str]) -> Iterator[None]:
        """Within, no compiled kernel of these modules is there: it may have code of the planted file in it.

        Numba notices that the file of a kernel has changed, but not a file whose kernels it calls.
        """
        folders = {path.parent for path in (self.root / "src").rglob("*.nbc")}
        kept = [path for folder in folders for path in folder.iterdir() if _is_kernel_of(path, stems)]
        contents = [(path, path.read_bytes(), path.stat()) for path in kept]
        for path in kept:
            path.unlink()
        try:
            yield
        finally:
            for folder in folders:
                for path in folder.iterdir():
                    if _is_kernel_of(path, stems):
                        path.unlink()
            for path, content, stat in contents:
                path.write_bytes(content)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def run(self, tests: Sequence[str], *options: str, timeout_s: float = TIMEOUT_S) -> Outcome:
        """The tests, as `make test` runs them: marks, warnings and interpreter are those of pyproject and conftest."""
        command = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.root / "src"), str(self.root)]),
            "COLUMNS": "300",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        data = ROOT.parent / "shared" / "data"  # where conftest looks, seen from the project and not from its copy
        environment.setdefault("HOPLINE_TEST_DATA", str(data))
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, *options, *tests],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with _ended_with_this(process):
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                _end(process)
                output = process.communicate()[0]
                return Outcome("HANGS", time.monotonic() - started, f"ended after {timeout_s:.0f} s", output)
        return outcome(process.returncode, output, time.monotonic() - started)


def _importers(source: Path, changed: Path) -> set[str]:
    """The stems of all modules that import a file, directly or by another one, and its own."""
    imports = {path.stem: _imported(path) for path in source.rglob("*.py")}
    found = {changed.stem}
    while more := {stem for stem, names in imports.items() if stem not in found and names & found}:
        found |= more
    return found


def _imported(path: Path) -> set[str]:
    """Last parts of the names that a file imports, and of the modules that it imports from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module).rpartition(".")[2], *(alias.name for alias in node.names)}
    return names


def _is_kernel_of(path: Path, stems: set[str]) -> bool:
    """Whether a file is a compiled kernel of one of these modules: Numba names it `module.function-line.…`."""
    return path.suffix == ".nbc" and path.name.partition(".")[0] in stems


# ---- what the tests say


@dataclass(frozen=True)
class Outcome:
    """What became of some tests."""

    status: str
    """passed, caught, BROKEN, HANGS or SKIPPED."""
    seconds: float
    first: str
    """The test that failed first, or what went wrong instead."""
    output: str


def outcome(code: int, output: str, seconds: float) -> Outcome:
    """The meaning of pytest's exit status and summary."""
    # A test that failed is named by file and function; a file that could not be read, by the file alone.
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py::.*)$", output, re.MULTILINE)
    unread = re.findall(r"^ERROR (\S+?\.py)(?: - (.*))?$", output, re.MULTILINE)
    if code == 0:
        passed = re.search(r"\b\d+ passed", output) is not None
        return Outcome("passed" if passed else "SKIPPED", seconds, "" if passed else "all tests are skipped", output)
    if unread or code != 1 or not failed:
        reason = f"{unread[0][0]} cannot be read: {unread[0][1]}" if unread else f"pytest ended with status {code}"
        return Outcome("BROKEN", seconds, reason, output)
    test, _, reason = failed[0].partition(" - ")
    if reason.partition(":")[0].rpartition(".")[2] in BROKEN:
        return Outcome("BROKEN", seconds, failed[0], output)
    return Outcome("caught", seconds, test, output)


# ---- processes


_running: set[subprocess.Popen[str]] = set()


@contextmanager
def _ended_with_this(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the process when the context is left, by whichever way."""
    _running.add(process)
    try:
        yield
    finally:
        _end(process)
        _running.discard(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and the ranks that it started and left: they are in a session of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- the table


def plant_all(faults: Sequence[Fault], projects: Sequence[Project]) -> list[Outcome]:
    """What became of each fault, printed as it is known; as many at a time as there are copies."""
    free: SimpleQueue[Project] = SimpleQueue()
    for project in projects:
        free.put(project)
    printing = threading.Lock()

    def plant(numbered: tuple[int, Fault]) -> Outcome:
        """Plant one fault in a free copy and run its tests."""
        number, fault = numbered
        project = free.get()
        try:
            with project.planted(fault, number):
                result = project.run(fault.tests, "-x")
        finally:
            free.put(project)
        if result.status == "passed":
            result = Outcome("MISSED", result.seconds, " ".join(fault.tests), result.output)
        with printing:
            target = "" if fault.target == "test" else f" (make {fault.target})"
            print(f"{fault.name:<60} {fault.area:<26} {result.status:<8} {result.seconds:6.1f}  {result.first}{target}")
            sys.stdout.flush()
        return result

    print(f"{'fault':<60} {'area':<26} {'':<8} {'s':>6}  first test that failed", flush=True)
    with ThreadPoolExecutor(len(projects)) as pool:
        try:
            return list(pool.map(plant, enumerate(faults)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _end(process)
            raise


def chosen(faults: Sequence[Fault], names: Sequence[str], gpu: bool) -> list[Fault]:
    """The faults whose name or area has one of the texts; with `gpu` those that need a GPU, else the others."""
    named = [f for f in faults if not names or any(name in f.name or name in f.area for name in names)]
    return [fault for fault in named if fault.gpu == gpu]


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults one by one, and see which of them the tests catch.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="faults or areas with this in the name")
    parser.add_argument("--gpu", action="store_true", help="the faults that only tests on a CUDA device can catch")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the project that are tested at a time")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    args = parser.parse_args()
    faults = chosen(FAULTS, args.only, args.gpu)
    if not faults:
        parser.error(f"no fault or area has {' or '.join(args.only)} in its name: see --list")
    try:
        check(FAULTS, ROOT)
    except Moved as error:
        print(error)
        return 1
    if args.list or not faults:
        for fault in faults:
            print(f"{fault.name:<60} {fault.area:<26} {fault.file}: {' '.join(fault.tests)}")
        print(f"{len(faults)} faults")
        return 0 if faults else 1
    # A shell ignores Ctrl-C on behalf of what it runs in the background, and tests of interruptions would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hopline-planted-") as folder:
        first = Project.copied(ROOT, Path(folder) / "0" / "hopline")
        if not args.no_baseline and not _holds_without(first, faults, args.jobs):
            return 1
        others = [Project.copied(first.root, Path(folder) / str(i) / "hopline") for i in range(1, args.jobs)]
        outcomes = plant_all(faults, [first, *others])
    caught = sum(result.status == "caught" for result in outcomes)
    left_out = sum(fault.gpu for fault in FAULTS) if not args.gpu and not args.only else 0
    more = f"; {left_out} more need a GPU: --gpu" if left_out else ""
    print(f"{caught} of {len(outcomes)} caught in {time.monotonic() - started:.0f} s{more}")
    return 0 if caught == len(outcomes) else 1


def _holds_without(project: Project, faults: Sequence[Fault], jobs: int) -> bool:
    """Whether all the tests pass without a fault; compiles the kernels, too."""
    tests = list(dict.fromkeys(path for fault in faults for path in fault.tests))
    options = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    result = project.run(tests, *options, timeout_s=4 * TIMEOUT_S)
    if result.status == "passed":
        print(f"without a fault the {len(tests)} test files pass, in {result.seconds:.0f} s", flush=True)
        return True
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", result.output, re.MULTILINE) or [result.output[-2000:]]
    print("without any fault these tests fail, so that they prove nothing:", *failed, sep="\n")
    return False


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: the copies are removed")
