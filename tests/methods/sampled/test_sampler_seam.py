"""A sampler of the user's in place of hopline's: the same runs to the bit, and refusals before anything trains."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, GraphConv, SAGEConv
from torch_geometric.nn import GraphSAGE as PlainSAGE

import hopline as hl
from hopline.budget.guard import BudgetGuard
from hopline.budget.plan import Budget
from hopline.methods.sampled.loader import Loader
from hopline.run.compare_methods import outline_of_run
from hopline.training.settings import TrainSettings
from hopline.util.config import to_dict
from tests.support.runs import fit, in_float64, losses, sage, same_weights, small

FANOUTS = (4, 3)


def built_in(**changes: Any) -> hl.Sampled:
    return hl.Sampled(**({"fanouts": FANOUTS, "batch_size": 50, "workers": 1} | changes))


class Wrapped:
    """hopline's sampler, as somebody else would write one."""

    def __init__(self, graph: hl.Graph, thread_safe: bool = True) -> None:
        self.inner = hl.extend.NeighborSampler(graph, FANOUTS)
        self.thread_safe = thread_safe
        self.calls: list[tuple[list[int], int]] = []

    def sample(self, seeds: Tensor, key: int) -> list[hl.extend.Block]:
        self.calls.append((seeds.tolist(), key))
        return [replace(block, key=None) for block in self.inner.sample(seeds, key)]


@dataclasses.dataclass(frozen=True)
class Settings(hl.extend.SamplerSettings):
    fanouts: tuple[int, ...] = FANOUTS

    def bind(self, graph: hl.Graph) -> hl.extend.BlockSampler:
        return hl.extend.NeighborSampler(graph, self.fanouts)


def of_user(data: hl.Dataset, **changes: Any) -> hl.Sampled:
    return hl.Sampled(**({"sampler": Wrapped(data.graph), "batch_size": 50, "workers": 1} | changes))


def assert_same_batches(ours: Any, expected: Any) -> None:
    ours, expected = list(ours), list(expected)
    assert len(ours) == len(expected) > 1
    for our, other in zip(ours, expected, strict=True):
        assert (our.key, our.total_seeds) == (other.key, other.total_seeds)
        assert torch.equal(our.seeds, other.seeds)
        assert torch.equal(our.labels, other.labels)
        for block, other_block in zip(our.blocks, other.blocks, strict=True):
            assert torch.equal(block.src_ids, other_block.src_ids)
            assert torch.equal(block.edge_index, other_block.edge_index)
            assert (block.num_dst, block.key, block.in_graph_order) == (other_block.num_dst, other_block.key, False)


def assert_same_runs(data: hl.Dataset, ours: hl.Sampled, expected: hl.Sampled, **settings: Any) -> None:
    """Runs have the same losses, metrics and weights to the bit."""
    runs, weights = [], []
    for method in (ours, expected):
        model = sage(data, dropout=0.3)
        run = fit(data, model, method, **settings)
        runs.append((losses(run), [evaluation.metrics for evaluation in run.evaluations]))
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert runs[0] == runs[1]
    assert same_weights(*weights)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", ["object", "settings"])
def test_batches_are_those_of_the_built_in_sampler(workers: int, given: str):
    data = small()
    sampler: Any = Settings() if given == "settings" else Wrapped(data.graph)
    ours = of_user(data, sampler=sampler, workers=workers).loader(data, seed=5)
    expected = built_in(workers=workers).loader(data, seed=5)
    assert_same_batches(ours.epoch(2), expected.epoch(2))


def test_a_repeated_position_is_a_row_of_its_own_as_with_the_built_in_sampler():
    data = small()
    positions = [3, 5, 3, 0, 3, 5, 9]
    (ours,) = of_user(data).loader(data, sampler=positions)
    (expected,) = built_in().loader(data, sampler=positions)
    assert torch.equal(ours.seeds, expected.seeds)
    for block, other in zip(ours.blocks, expected.blocks, strict=True):
        assert torch.equal(block.src_ids, other.src_ids)
        assert torch.equal(block.edge_index, other.edge_index)


@pytest.mark.parametrize("workers", [0, 2])
def test_runs_are_those_of_the_built_in_sampler(workers: int):
    data = small()
    assert_same_runs(data, of_user(data, workers=workers), built_in(workers=workers))


def test_sampled_validation_draws_by_the_sampler_too():
    data = small()
    sampler = Wrapped(data.graph)
    assert_same_runs(data, of_user(data, sampler=sampler), built_in(), inference="sampled")
    valid = set(data.splits["valid"].tolist())
    assert any(set(seeds) <= valid for seeds, _ in sampler.calls if seeds)


def test_a_model_without_layers_runs_on_the_union_of_the_blocks():
    data = small()
    model = PlainSAGE(data.num_features, 8, num_layers=2, out_channels=data.num_classes)

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.inner(x, edge_index)

    one_list = hl.extend.NeighborSampler(data.graph, FANOUTS, one_list=True)
    ours = fit(data, Plain(), of_user(data, sampler=one_list), epochs=1)
    assert losses(ours)[0] > 0


def predicted(data: hl.Dataset, method: hl.Sampled) -> Any:
    """The plan of a run without a limit."""
    outline = outline_of_run(sage(data), data, TrainSettings(device="cpu", show=False))
    return method.plan(outline, Budget())


@pytest.mark.parametrize("over_budget", ["split", "resample", "cut"])
def test_batches_that_do_not_fit_are_split_drawn_again_or_cut_as_those_of_the_built_in_sampler(
    over_budget: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(BudgetGuard, "learn", lambda *arguments: None)  # measured bytes are not the same twice
    data = in_float64(small(num_nodes=2000, num_edges=40_000, num_train=1000))
    results = []
    for method in (of_user(data, batch_size=250), built_in(batch_size=250)):
        trainer = hl.Trainer(sage(data).double(), data, method, show=False)
        plan = predicted(data, method)
        share = 0.99 if over_budget == "resample" else 0.5
        guard = BudgetGuard(trainer.job, Budget(over_budget=over_budget), limit_bytes=int(share * plan.step_bytes))
        units = list(trainer.work.guarded(guard, plan).units(1))
        loss_sums = [float(unit.forward_backward(250).detach()) for unit in units]
        gradients = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        record = guard.ledger.take()
        results.append((loss_sums, gradients, {name: record[name] for name in ("split", "pieces", "resampled", "cut")}))
    ours, expected = results
    assert ours[2] == expected[2]
    assert ours[2][{"split": "pieces", "resample": "resampled", "cut": "cut"}[over_budget]] > 2
    assert ours[0] == expected[0]
    assert all(map(torch.equal, ours[1], expected[1]))


def test_a_run_keeps_to_a_budget():
    data = small()
    run = fit(data, sage(data), of_user(data), budget="8MiB")
    assert run.finished
    assert losses(run)[1] < losses(run)[0]


def test_a_plan_counts_the_batches_of_the_sampler():
    data = small()
    ours, expected = predicted(data, of_user(data)), predicted(data, built_in())
    assert ours.num_blocks == expected.num_blocks == 2
    assert ours.step_bytes == expected.step_bytes
    assert ours.min_step_bytes == pytest.approx(expected.min_step_bytes, rel=0.1)  # that of one seed, drawn


def test_a_resumed_run_goes_on_by_the_same_draws(tmp_path: Path):
    data = small()
    uninterrupted = sage(data)
    fit(data, uninterrupted, of_user(data), epochs=3)
    part = {"out": tmp_path / "run", "checkpoint_s": 0.0}
    fit(data, sage(data), of_user(data), epochs=1, **part)
    resumed = sage(data)
    fit(data, resumed, of_user(data), epochs=3, resume=True, **part)
    weights = [{name: p.detach() for name, p in model.named_parameters()} for model in (resumed, uninterrupted)]
    assert same_weights(*weights)
    with pytest.raises(ValueError, match="sampler"):
        fit(data, sage(data), hl.Sampled(sampler=Settings((4, 4)), batch_size=50), epochs=4, resume=True, **part)


def test_the_settings_of_a_run_name_the_class():
    data = small()
    name = f"{__name__}:"
    assert to_dict(hl.Sampled(sampler=Settings()))["sampler"] == {"kind": f"{name}Settings", "fanouts": [4, 3]}
    stored = to_dict(of_user(data))["sampler"]
    assert stored == {"kind": f"{name}Wrapped", "thread_safe": True}


class Slow(Wrapped):
    """Notes how many threads are in `sample` at once."""

    def __init__(self, graph: hl.Graph, thread_safe: bool) -> None:
        super().__init__(graph, thread_safe)
        self.inside: set[int] = set()
        self.most = 0
        self.both = threading.Event()

    def sample(self, seeds: Tensor, key: int) -> list[hl.extend.Block]:
        self.inside.add(threading.get_ident())
        self.most = max(self.most, len(self.inside))
        if self.most > 1:
            self.both.set()
        elif len(self.calls) >= 2:  # not in the trial
            self.both.wait(1.0 if self.thread_safe else 0.02)
        blocks = super().sample(seeds, key)
        self.inside.discard(threading.get_ident())
        return blocks


def test_one_thread_at_a_time_calls_a_sampler_that_is_not_thread_safe():
    data = small()
    most = {}
    for thread_safe in (True, False):
        sampler = Slow(data.graph, thread_safe)
        assert_same_batches(
            of_user(data, sampler=sampler, workers=3).loader(data, seed=1).epoch(1),
            built_in().loader(data, seed=1).epoch(1),
        )
        most[thread_safe] = sampler.most
    assert most[True] > 1
    assert most[False] == 1


def test_settings_are_bound_once_for_a_graph():
    data = small()
    bound: list[hl.Graph] = []

    class Counted(Settings):
        def bind(self, graph: hl.Graph) -> hl.extend.BlockSampler:
            bound.append(graph)
            return super().bind(graph)

    method = hl.Sampled(sampler=Counted(), batch_size=50)
    fit(data, sage(data), method, inference="sampled", epochs=2)
    assert bound == [data.graph]
    fit(small(), sage(data), method, epochs=1)
    assert len(bound) == 2


# ---- what a sampler may not do


Change = Callable[[list[hl.extend.Block]], Any]


def with_part(block: hl.extend.Block, **changes: Any) -> hl.extend.Block:
    return replace(block, parts=(replace(block.part, **changes),))


def first(change: Callable[[hl.extend.Block], hl.extend.Block]) -> Change:
    return lambda blocks: [change(blocks[0]), blocks[1]]


MISTAKES: dict[str, tuple[Change, str]] = {
    "no blocks": (lambda blocks: None, "returned None: return a list of hl.extend.Block, one per layer"),
    "a batch": (lambda blocks: blocks[0], "returned a Block: return a list"),
    "one block too many": (lambda blocks: [*blocks, blocks[1]], "destinations are not the sources of the next block"),
    "other seeds": (
        lambda blocks: [blocks[0], replace(blocks[1], num_dst=blocks[1].num_dst - 1)],
        "the destinations are not the seeds, in their order: begin src_ids with the seeds",
    ),
    "too many destinations": (
        lambda blocks: [blocks[0], replace(blocks[1], num_dst=10**6)],
        "the destinations are not the seeds",
    ),
    "layers that do not fit": (lambda blocks: [blocks[1], blocks[1]], "not the sources of the next block"),
    "no node": (
        first(lambda b: replace(b, src_ids=torch.cat([b.src_ids[:-1], torch.tensor([400])]))),
        "an id of src_ids is no node: give ids from 0 to 399",
    ),
    "no source": (
        first(lambda b: with_part(b, src_idx=b.part.src_idx + 1 - b.part.src_idx.min() + b.num_src)),
        "src_idx is not from 0",
    ),
    "offsets that end early": (
        first(lambda b: with_part(b, src_idx=torch.cat([b.part.src_idx, b.part.src_idx[:1]]))),
        "indptr does not rise from 0 to the",
    ),
    "offsets that fall": (
        first(lambda b: with_part(b, indptr=b.part.indptr.index_fill(0, torch.tensor([1]), b.num_edges))),
        "indptr does not rise",
    ),
    "int64 indices": (first(lambda b: with_part(b, src_idx=b.part.src_idx.long())), "torch.int64: make blocks by"),
    "weights of other edges": (
        first(lambda b: with_part(replace(b, graph=None), edge={"weight": torch.ones(b.num_edges + 1)})),
        "weight is",
    ),
    "weights that the graph has not": (
        first(lambda b: with_part(b, edge={"weight": torch.ones(b.num_edges)})),
        "arrays weight, and the graph has none: give those of the graph, or leave graph= out",
    ),
    "scaled sums of no graph": (
        first(lambda b: replace(b, graph=None, scale_sums=True)),
        "scale_sums is set without a graph",
    ),
    "another graph": (
        first(lambda b: replace(b, graph=small(num_nodes=90, num_edges=400, num_train=30, num_valid=9).graph)),
        "make the sampler for the graph of the dataset",
    ),
}


class Wrong:
    def __init__(self, graph: hl.Graph, change: Change) -> None:
        self.inner = hl.extend.NeighborSampler(graph, FANOUTS)
        self.change = change

    def sample(self, seeds: Tensor, key: int) -> Any:
        return self.change(list(self.inner.sample(seeds, key)))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_blocks_that_do_not_fit_are_refused_before_anything_trains(mistake: str):
    data = small()
    change, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=r"Wrong\.sample") as refused:
        hl.Trainer(sage(data), data, hl.Sampled(sampler=Wrong(data.graph, change)), show=False)
    assert words in str(refused.value)


def test_a_later_batch_that_does_not_fit_is_refused_too():
    data = small()
    calls: list[int] = []

    def fifth(blocks: list[hl.extend.Block]) -> Any:
        calls.append(1)
        return blocks if len(calls) < 5 else blocks[1:]

    with pytest.raises(ValueError, match="returned 1 blocks, and 2 before"):
        fit(data, sage(data), hl.Sampled(sampler=Wrong(data.graph, fifth), batch_size=30, workers=0))
    assert len(calls) == 5


def test_draws_that_are_no_function_of_seeds_and_key_are_refused():
    data = small()
    numbers = iter(range(100))

    class Counts(Wrapped):
        def sample(self, seeds: Tensor, key: int) -> Any:
            return super().sample(seeds, key + next(numbers))

    class Global(Wrapped):
        def sample(self, seeds: Tensor, key: int) -> Any:
            torch.manual_seed(key)
            return super().sample(seeds, key)

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"Counts.* gave other blocks .*torch.Generator\(\)\.manual_seed\(key\)"):
        of_user(data, sampler=Counts(data.graph)).loader(data)
    with pytest.raises(ValueError, match=r"Global.* draws from torch's default generator"):
        of_user(data, sampler=Global(data.graph)).loader(data)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_no_sampler_and_settings_of_the_other_one_are_refused():
    data = small()
    sampler = Wrapped(data.graph)
    with pytest.raises(ValueError, match=r"sampler=Wrapped\(\.\.\.\)"):
        hl.Sampled(sampler=Wrapped)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loader\(data, sampler=\.\.\.\)"):
        hl.Sampled(sampler=torch.utils.data.SequentialSampler([1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hl\.Sampled\(sampler=Wrapped"):
        built_in().loader(data, sampler=sampler)  # type: ignore[arg-type]
    changes: dict[str, Any] = {"fanouts": (3, 3), "replace": True, "layout": "tree", "scale_sums": True}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=name):
            hl.Sampled(sampler=sampler, **{name: value})
    model = hl.nn.GNN([SAGEConv(8, 8), SAGEConv(8, 8), SAGEConv(8, 4)])
    with pytest.raises(ValueError, match=r"3 layers .* returns 2 blocks"):
        hl.Trainer(model, data, of_user(data), show=False)

    class NoSampler(Settings):
        def bind(self, graph: hl.Graph) -> Any:
            return graph

    with pytest.raises(ValueError, match=r"NoSampler\.bind returned a Graph"):
        hl.Sampled(sampler=NoSampler()).loader(data)


class Weighted(Wrapped):
    """Edges with weights that the graph has not."""

    def sample(self, seeds: Tensor, key: int) -> Any:
        blocks = super().sample(seeds, key)
        return [
            with_part(replace(b, graph=None), edge={"weight": torch.rand(b.num_edges, generator=seeded(key))})
            for b in blocks
        ]


def seeded(key: int) -> torch.Generator:
    return torch.Generator().manual_seed(key)


def test_exact_inference_of_convs_that_read_arrays_of_the_sampler_alone_is_refused():
    data = small()
    method = of_user(data, sampler=Weighted(data.graph))
    by_weights = hl.nn.GNN([GraphConv(8, 8), GraphConv(8, 4)])
    with pytest.raises(ValueError, match=r"test_step="):
        hl.Trainer(by_weights, data, method, show=False)
    own = {"test_step": lambda model, data, ids: {"accuracy": 0.5}}
    assert fit(data, by_weights, method, **own).test == 0.5
    assert fit(data, sage(data), method).finished  # reads no weights


def test_convs_with_degrees_of_the_graph_are_refused_on_blocks_that_name_none():
    data = small()
    model = hl.nn.GNN([GCNConv(8, 8), GCNConv(8, 4)])
    with pytest.raises(ValueError, match=r"GCNConv takes degrees .*graph=graph"):
        fit(data, model, of_user(data, sampler=Weighted(data.graph)), test_step=lambda *_: {"accuracy": 0.0})


def test_edges_count_as_in_the_graphs_order_only_if_they_are():
    data = small()

    def claimed(order: Callable[[Tensor], Tensor]) -> list[bool]:
        def change(blocks: list[hl.extend.Block]) -> list[hl.extend.Block]:
            return [with_part(replace(b, in_graph_order=True), src_idx=order(b.part.src_idx)) for b in blocks]

        sampler = Wrong(data.graph, change)
        sampler.inner = hl.extend.NeighborSampler(data.graph, (-1, -1))
        batch = next(iter(hl.Sampled(sampler=sampler).loader(data)))
        return [block.in_graph_order for block in batch.blocks]

    assert claimed(lambda src_idx: src_idx) == [True, True]
    assert claimed(lambda src_idx: src_idx.flip(0)) == [False, False]
    sampler = Wrong(data.graph, lambda blocks: [replace(b, in_graph_order=True) for b in blocks])
    batch = next(iter(hl.Sampled(sampler=sampler).loader(data)))
    assert [block.in_graph_order for block in batch.blocks] == [False, False]


def test_a_rank_without_a_share_of_a_step_does_not_call_the_sampler():
    data = small()
    loader = of_user(data).loader(data)
    assert isinstance(loader, Loader)
    sampler: Any = loader.neighbor_sampler
    num_calls = len(sampler.given.calls)
    blocks = sampler.sample(torch.zeros(0, dtype=torch.int64), 3)
    assert [(b.num_src, b.num_dst, b.num_edges, b.key) for b in blocks] == [(0, 0, 0, 3)] * 2
    assert len(sampler.given.calls) == num_calls


def test_shards_refuse_a_sampler_of_the_whole_graph(tmp_path: Path):
    data = small()
    hl.shards.cut(data, tmp_path / "shards", 1, how="range")
    shard = hl.shards.open_shard(tmp_path / "shards", rank=0)
    with pytest.raises(ValueError, match="leave out sampler= on shards"):
        of_user(data).loader(shard)


def test_a_block_of_edges_has_the_edges_that_it_was_given() -> None:
    """A loop, double edges, a destination without edges, and sources that are destinations."""
    dst_ids = torch.tensor([7, 2, 9])
    src = torch.tensor([4, 7, 4, 9, 1, 4])
    dst_idx = torch.tensor([2, 0, 0, 0, 2, 0])
    weight = torch.arange(6.0)
    block = hl.extend.block_of_edges(dst_ids, src, dst_idx, edge={"weight": weight})
    assert block.dst_ids.tolist() == dst_ids.tolist()
    assert block.src_ids.unique().numel() == block.num_src == 5
    ends = torch.stack([block.src_ids[block.edge_index[0]], block.dst_ids[block.edge_index[1]]])
    ours = sorted(zip(*ends.tolist(), block.edge["weight"].tolist(), strict=True))
    expected = sorted(zip(src.tolist(), dst_ids[dst_idx].tolist(), weight.tolist(), strict=True))
    assert ours == expected
    assert not block.in_graph_order
    empty = hl.extend.block_of_edges(dst_ids, src[:0], dst_idx[:0])
    assert (empty.num_src, empty.num_edges) == (3, 0)
    with pytest.raises(ValueError, match=r"positions up to 3 in 3 destinations"):
        hl.extend.block_of_edges(dst_ids, src, dst_idx + 1)
    with pytest.raises(ValueError, match=r"give \[num_edges\] for both"):
        hl.extend.block_of_edges(dst_ids, src, dst_idx[:3])
