"""Both loaders of neighbour sampling as `torch.utils.data.DataLoader`, as Lightning, Fabric and Accelerate use them.

The engines themselves run in `tests/engines`. Here their ways to divide a loader are written out: making it again from
its attributes with a `DistributedSampler`, and taking it apart.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, WeightedRandomSampler
from torch_geometric.data import Data

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.methods.sampled import seed_loader
from tests.support.helpers import dataset_of, randn, random_graph
from tests.support.ranks import AgreeingWorld

DATA = dataset_of(random_graph(50, 300, loops=True), randn(50, 6))
IDS = torch.tensor([40, 3, 49, 47, 0, 12, 31, 8, 22, 17, 5])


def neighbor_loader(**arguments: Any) -> Any:
    settings = {"batch_size": 2, "shuffle": True, "seed": 3, "num_workers": 1} | arguments
    return hl.NeighborLoader(DATA.to_pyg(), [3, 2], IDS, **settings)


def sampled_loader(**arguments: Any) -> Any:
    return hl.Sampled(fanouts=(3, 2), batch_size=2, workers=1).loader(DATA, IDS, seed=3, **arguments)


LOADERS = {"NeighborLoader": neighbor_loader, "Sampled.loader": sampled_loader}
Make = Callable[..., Any]


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest) -> Make:
    return LOADERS[request.param]


def seeds_of(batch: Any) -> list[int]:
    return (batch.n_id[: batch.batch_size] if isinstance(batch, Data) else batch.seeds).tolist()


def content_of(batch: Any) -> list[Any]:
    """The seeds, nodes and edges of a batch."""
    if hasattr(batch, "n_id"):
        return [seeds_of(batch), batch.n_id.tolist(), batch.edge_index.tolist()]
    return [seeds_of(batch), batch.input_ids.tolist(), *(block.edge_index.tolist() for block in batch.blocks)]


def made_again(loader: Any, sampler: Any) -> Any:
    """The loader as Lightning and Fabric make it again: by attributes that have the names of its arguments."""
    attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    parameters = inspect.signature(type(loader)).parameters | inspect.signature(DataLoader).parameters
    names = {"dataset"} | {
        name for name, one in parameters.items() if name in attributes and one.default is not attributes[name]
    }
    arguments = {name: attributes[name] for name in names}
    return type(loader)(**arguments | {"sampler": sampler, "shuffle": False, "batch_sampler": None})


def test_a_distributed_sampler_divides_the_seeds_and_its_epoch_shuffles_them(make: Make):
    loader = make()
    samplers = [DistributedSampler(loader.dataset, num_replicas=2, rank=rank) for rank in range(2)]
    assert issubclass(type(loader), DataLoader)
    assert loader.num_workers == 0, "no process is started"
    assert len(loader.dataset) == len(IDS)

    ranks = [made_again(loader, sampler) for sampler in samplers]
    orders = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(rank) for rank in ranks]
        assert [len(rank) for rank in ranks] == [len(one) for one in batches] == [3, 3]
        seeds = [[seed for batch in one for seed in seeds_of(batch)] for one in batches]
        for sampler, ours in zip(samplers, seeds, strict=True):
            assert ours == IDS[list(sampler)].tolist(), "in the order of the sampler"
        assert set(seeds[0]) | set(seeds[1]) == set(IDS.tolist())
        orders.append(seeds)
    assert orders[0] != orders[1]


def test_a_loader_that_is_made_again_keeps_its_settings():
    data = DATA.to_pyg()
    first = hl.NeighborLoader(
        data, [3, 2], IDS, batch_size=4, drop_last=True, replace=True, seed=9, num_workers=2, transform=copy.copy
    )
    again = made_again(first, range(len(IDS)))
    names = ("num_neighbors", "batch_size", "drop_last", "replace", "seed", "transform", "device")
    assert all(getattr(again, name) == getattr(first, name) for name in names)
    assert again.data is data
    assert again._edges is first._edges
    assert vars(again)["num_workers"] == 2, "threads"
    assert [content_of(batch) for batch in again] == [content_of(batch) for batch in first], "also the draws"


@contextmanager
def saved_arguments() -> Iterator[None]:
    """DataLoader's constructor as Lightning patches it during a hook, if our classes are imported in the hook."""
    original = DataLoader.__init__

    def save_and_init(loader: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(loader, "__pl_saved_args", args)
        object.__setattr__(loader, "__pl_inside_init", True)
        original(loader, *args, **kwargs)
        object.__setattr__(loader, "__pl_inside_init", False)

    DataLoader.__init__ = save_and_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__init__ = original  # type: ignore[method-assign]


def test_a_loader_of_a_hook_that_imports_it_is_made_again_by_its_attributes(make: Make):
    with saved_arguments():
        loader = make()
    assert not [name for name in vars(loader) if name.startswith("__pl_")]
    assert len(list(made_again(loader, range(4)))) == 2


def test_a_loader_that_is_taken_apart_gives_whole_batches_with_new_draws(make: Make):
    loader = make()
    apart = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    first, second = [[content_of(batch) for batch in apart] for _ in range(2)]
    for batches in (first, second):
        assert sorted(seed for batch in batches for seed in batch[0]) == sorted(IDS.tolist())
    in_order = [copy.deepcopy(loader) for _ in range(2)]
    one, other = ([content_of(one.collate_fn([0, 1, 2, 3])) for _ in range(20)] for one in in_order)
    assert one == other, "a copy draws the same"
    assert any(batch != one[0] for batch in one), "every call draws anew"


def test_taken_apart_without_a_seed_a_loader_follows_torch():
    def apart(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return [content_of(batch) for batch in map(neighbor_loader(seed=None).collate_fn, [[0, 1, 2]] * 20)]

    assert apart(0) == apart(0) != apart(1)


def epochs_of_ranks(world: World) -> list[Any]:
    """Two epochs on each rank, whose torch generators differ. Then the error of ranks with different seeds."""
    torch.manual_seed(world.rank)
    loader = neighbor_loader(seed=None, world=world)
    epochs = [[content_of(batch) for batch in loader] for _ in range(2)]
    ranks = [json.loads(content) for content in world.gather_bytes(json.dumps(epochs).encode())]
    with pytest.raises(ValueError, match="one seed"):
        neighbor_loader(seed=None if world.rank else 3, world=world)
    return ranks


def test_ranks_of_a_world_follow_torch_of_rank_0():
    ranks = run(epochs_of_ranks, LaunchSettings(devices=2, timeout_s=30))
    torch.manual_seed(0)
    alone = neighbor_loader(seed=None, batch_size=4)
    for epoch in range(2):
        seeds = [[one[0] for one in rank[epoch]] for rank in ranks]
        together = [first + second for first, second in zip(*seeds, strict=True)]
        assert together == [seeds_of(batch) for batch in alone]


def test_a_batch_sampler_decides_the_batches():
    batch_sampler = BatchSampler(range(len(IDS)), 3, drop_last=True)
    loader = hl.NeighborLoader(DATA, [2], IDS, batch_sampler=batch_sampler)
    assert [seeds_of(batch) for batch in loader] == [IDS[start : start + 3].tolist() for start in (0, 3, 6)]
    assert len(loader) == 3


def test_ranks_of_a_world_share_the_seeds_and_the_draws_of_each_step(make: Make):
    worlds = [AgreeingWorld(rank, 3) for rank in range(3)]
    ranks = [list(make(world=world)) for world in worlds]
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    assert sorted(seed for batches in ranks for batch in batches for seed in seeds_of(batch)) == sorted(IDS.tolist())
    for batches in zip(*ranks, strict=True):
        assert max(map(len, map(seeds_of, batches))) - min(map(len, map(seeds_of, batches))) <= 1


def test_a_step_with_fewer_seeds_than_ranks_is_refused_where_its_loss_would_be_nan():
    world = AgreeingWorld(0, 3)
    with pytest.raises(ValueError, match="drop_last=True"):
        neighbor_loader(world=world, batch_size=3)
    assert len(neighbor_loader(world=world, batch_size=3, drop_last=True)) == 1


def test_a_world_and_a_sampler_together_are_refused(make: Make):
    with pytest.raises(ValueError, match="leave out world="):
        make(world=World.alone(), sampler=range(4), **({"shuffle": False} if make is neighbor_loader else {}))
    with pytest.raises(ValueError, match=r"hl\.World\.current\(\)"):
        make(world=2)


def test_one_line_says_that_ranks_repeat_seeds(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(seed_loader, "_num_ranks", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    sampler: dict[str, Any] = {"sampler": range(4)} | ({"shuffle": False} if make is neighbor_loader else {})
    seed_loader._say_that_ranks_repeat_seeds.cache_clear()
    with caplog.at_level(logging.WARNING, "hopline"):
        for arguments in ({"world": World.alone()}, sampler):
            list(make(**arguments))
        loader = make()
        assert caplog.text == "", "an engine may still divide it"
        list(loader)
        list(make())
    seed_loader._say_that_ranks_repeat_seeds.cache_clear()
    (message,) = caplog.messages
    assert "world=hl.World.current()" in message
    assert "\n" not in message


def test_a_sampler_may_repeat_seeds(make: Make):
    """As PyG's `ImbalancedSampler` does. A repeated seed is a node of its own, with the in-edges of the first."""
    sampler = WeightedRandomSampler([1.0] * 3, num_samples=8, replacement=True)
    arguments: dict[str, Any] = {"shuffle": False, "batch_size": 8} if make is neighbor_loader else {}
    for batch in make(sampler=sampler, **arguments):
        seeds = seeds_of(batch)
        assert set(seeds) <= set(IDS[:3].tolist())
        blocks: Any = [batch] if isinstance(batch, Data) else batch.blocks[::-1]
        for block, fanout in zip(blocks, (3, 2), strict=False):
            ids: Any = block.n_id if hasattr(block, "n_id") else block.src_ids
            assert ids[: len(seeds)].tolist() == seeds
            assert ids[len(seeds) :].unique().numel() == ids.numel() - len(seeds)
            src, dst = block.edge_index.unbind()
            sources = [sorted(ids[src[dst == row]].tolist()) for row in range(len(seeds))]
            for row, seed in enumerate(seeds):
                assert sources[row] == sources[seeds.index(seed)]
                assert len(sources[row]) == min(DATA.graph.in_degrees(torch.tensor([seed])).item(), fanout)


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="no argument 'batchsize'"):
        hl.Loader(DATA, IDS, hl.Sampled(fanouts=(2,)), 0, torch.device("cpu"), None, batchsize=3)


def test_empty_seeds_and_shuffle_give_no_batch():
    assert list(hl.NeighborLoader(DATA, [2], IDS[:0], shuffle=True)) == []


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_continues_with_the_same_batches(make: Make, how: Callable[[Any], Any]):
    loader = make()
    list(loader)
    other = how(loader)
    assert other.collate_fn.__self__ is other
    for _ in range(2):
        assert [content_of(batch) for batch in other] == [content_of(batch) for batch in loader]


@pytest.mark.parametrize("seed", ["a", 1.5, -1, 2**70, True])
def test_a_seed_that_is_no_seed_is_refused_when_the_loader_is_made(seed: Any):
    data = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match="seed must be"):
        hl.NeighborLoader(data, [2], seed=seed)
    with pytest.raises(ValueError, match="seed must be"):
        hl.Sampled(fanouts=(2,)).loader(hl.from_pyg(data), torch.arange(3), seed=seed)
