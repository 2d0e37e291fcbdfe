"""The work of `Sampled`: its loaders, and the units of an epoch.

`bind` decides how a job is sampled:

    job                                                 loader             work
    ---                                                 ------             ----
    graph in shards                                     CollectiveLoader   SampledWork
    layout "tree", graph on a GPU                       Loader             CapturedWork (`captured_step`)
    all others: graph on the host, or layout "block"    Loader             SampledWork

`Sampled.layout` describes both layouts.

A unit is one batch. With a budget, the guard makes the units: it may split a batch, sample it again, or cut
edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hopline.budget.plan import Plan
from hopline.contract import Guard, Job, Redraw, Unit, Work, WorkDescription
from hopline.core.examples import Examples
from hopline.core.sampler import NodeIds
from hopline.core.tree_layout import TreeSampler
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.nodes import select_nodes
from hopline.device.snapshots import evaluating
from hopline.distributed.world import World
from hopline.methods.sampled.captured_step import CapturedWork
from hopline.methods.sampled.collective_loader import CollectiveLoader
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.own_sampler import OwnSampler
from hopline.methods.sampled.settings import Sampled
from hopline.nn.whole_module import Whole, as_batch_model, edge_arrays_read, refuse_batches, unwrap
from hopline.nn.whole_module_probe import check_batches
from hopline.shards.collective_sampler import CollectiveSampler
from hopline.shards.data import ShardedData
from hopline.shards.shard import Shard
from hopline.units.batch_unit import BatchUnit
from hopline.units.rank_facts import check_loader_ranks


def bind(method: Sampled, job: Job) -> Work:
    """The work of a job.

    Raises:
        ValueError: The model does not go with the fan-outs, with `scale_sums`, or with sampled blocks.
    """
    method = method.for_model(job.model)
    num_fanouts = method.num_hops(job.model)
    num_layers = getattr(job.model, "num_layers", None)
    if num_layers is not None and num_layers != (num_fanouts or num_layers):
        raise ValueError(
            f"the model has {num_layers} layers and fanouts={method.fanouts} names {num_fanouts}: "
            f"give one fan-out per layer, for example fanouts={','.join(['10'] * num_layers)}"
        )
    if method.scale_sums and isinstance(job.model, Whole):
        raise ValueError("scale_sums=true needs a model made of layers: use hl.nn.GNN, or set scale_sums=false")
    if isinstance(job.data, ShardedData):
        shard = job.data.shard
        job.model.check_blocks(shard.num_features, shard.edge)
        loader = make_loader(
            method, shard, job.examples, seed=job.seed, device=job.device, model=job.model, world=job.world
        )
        return SampledWork(job, loader)

    job.model.check_blocks(job.data.num_features, job.data.graph.edge)
    # Not by `Sampled.loader`: the Trainer has compared the ranks already.
    loader = Loader(
        data=job.data,
        examples=job.examples,
        method=method,
        seed=job.seed,
        device=job.device,
        model=job.model,
        world=job.world,
    )
    sampler = loader.neighbor_sampler
    if isinstance(sampler, OwnSampler) and num_layers not in (None, sampler.num_blocks):
        raise ValueError(
            f"the model has {num_layers} layers and {sampler.name}.sample(seeds, key) returns {sampler.num_blocks} "
            "blocks: return one per layer"
        )
    # A module that is not made of layers is tried out, to see whether its outputs mean anything in sampled
    # batches. The trial needs features.
    if isinstance(job.model, Whole) and "x" in job.data.tables:
        fanouts = (1,) * sampler.num_blocks if isinstance(sampler, OwnSampler) else method.fanout_per_layer
        check_batches(job.model, fanouts, job.data.graph, job.data.x, job.train_ids)
    # A captured step scales its loss by the number of seeds, which is known before its labels are. It reads the labels
    # by node.
    is_captured = not job.task.has_weights and job.examples.y is None
    if loader.layout == "tree" and loader.on_gpu and is_captured:
        return CapturedWork(job, loader)
    return SampledWork(job, loader)


def inference_batches(method: Sampled, job: Job, ids: Tensor | str, on_host: bool) -> Loader | CollectiveLoader:
    """Batches whose seeds are `ids`, in the given order, for approximate inference.

    on_host: whether they wait on the host. Those of a graph in shards always do.
    """
    in_order = replace(method.for_model(job.model), shuffle=False, drop_last=False)
    if isinstance(job.data, ShardedData):
        # Made directly, because `Sampled.loader` takes no channel. The channel of the data is used again, so
        # that inference makes no process group of its own. one_list: as in `make_loader`.
        return CollectiveLoader(
            job.data.shard,
            ids,
            in_order,
            seed=job.seed,
            device=job.device,
            channel=job.data.channel,
            one_list=isinstance(job.model, Whole),
        )
    # The ids are those of this rank, so no other rank has a share of them.
    alone = World.alone(job.device)
    loader = make_loader(in_order, job.data, ids, seed=job.seed, device=job.device, model=job.model, world=alone)
    if on_host and isinstance(loader, Loader):
        return loader.with_budget(split_ahead=None, batches_on_host=True)
    return loader


def make_loader(
    method: Sampled,
    data: Dataset | Shard,
    ids: NodeIds | Examples | str,
    *,
    seed: int,
    device: torch.device | str,
    model: nn.Module | None,
    world: World | None,
    sampler: Iterable[int] | None = None,
) -> Loader | CollectiveLoader:
    """Make the loader of `Sampled.loader`, which describes the arguments.

    data: `ShardedData` is a `Dataset` as well. Of it, the shard of this rank is used.
    """
    if isinstance(data, ShardedData):
        world = data.channel.world if world is None else world
        data = data.shard
    if isinstance(data, Shard):
        if sampler is not None:
            raise ValueError("the ranks of a graph in shards share the seeds of each step already: leave out sampler=")
        # A Whole runs on the union of the blocks, so a node must draw the same neighbours in all layers.
        one_list = model is not None and isinstance(as_batch_model(model), Whole)
        return CollectiveLoader(data, ids, method, seed=seed, device=device, world=world, one_list=one_list)

    expect_dataset(data, "Sampled.loader")
    seeds = ids if isinstance(ids, Examples) else select_nodes(data, ids)
    check_loader_ranks(world, method, data, ids, seed=seed, model=model)

    batch_model = None
    if model is not None:
        # The user's own module cannot read a batch. If it is called with one, it raises an error with advice.
        refuse_batches(unwrap(model))
        # A GNN or Whole can read a batch. It shares its parameters with the user's module.
        batch_model = as_batch_model(model)
        method = method.for_model(batch_model)
    return Loader(
        data=data,
        examples=seeds,
        method=method,
        seed=seed,
        device=torch.device(device),
        model=batch_model,
        world=world,
        sampler=sampler,
    )


def _run_once(job: Job, loader: Loader) -> None:
    """Run the model on a tiny batch, so that the first step is like all others in its memory.

    Convs are tried out when they first run, and degrees of the graph are computed and cached.
    """
    if loader.on_gpu:
        return
    num_layers = getattr(job.model, "num_layers", 1)
    # One seed and one edge per node: a batch of the usual fan-outs could take more than the budget.
    tiny = replace(loader.method, batch_size=1, workers=0)
    if tiny.sampler is None:
        tiny = replace(tiny, fanouts=(1,) * num_layers)
    # By a loader, which reads rows on the host that the model's device cannot read itself.
    tiny_loader = Loader(
        data=job.data, examples=job.train_ids[:1], method=tiny, seed=job.seed, device=job.device, model=job.model
    )
    with closing(tiny_loader.epoch(1)) as batches, evaluating(job.model):
        job.model(next(batches))


@dataclass
class SampledWork(Work):
    """Sampled training of one job, batch by batch."""

    job: Job
    loader: Loader | CollectiveLoader
    guard: Guard | None = None
    """Keeps the steps within a budget. None without a budget."""

    def guarded(self, guard: Guard, plan: Plan) -> SampledWork:
        """A copy of this work whose guard keeps each batch within the budget.

        Only a `Loader` splits batches ahead, in its threads. A `CollectiveLoader` stays as it is, and the
        guard splits when the step runs.
        """
        loader = self.loader
        if isinstance(loader, Loader):
            _run_once(self.job, loader)
            loader = loader.with_budget(guard.split_ahead, batches_on_host=plan.batches_on_host)
        return replace(self, loader=loader, guard=guard)

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        """The units of an epoch, one per batch.

        done: the number of units to leave out at the beginning: an interrupted run has trained them.
        examples: the number of examples that these units had, over all ranks.
        """
        # Closed when the trainer stops early, so that no thread keeps preparing batches.
        with closing(self.loader.epoch(epoch, done, examples)) as batches:
            for batch in batches:
                if self.guard is None:
                    yield BatchUnit(self.job, batch)
                else:
                    yield self.guard.unit(batch, self._redraw)

    @property
    def _redraw(self) -> Redraw | None:
        """Samples seeds again, for over_budget=resample. It takes the key that decides the random draws.

        None for layout "tree" and for a graph in shards.
        """
        sampler = self.loader.neighbor_sampler
        return None if isinstance(sampler, TreeSampler | CollectiveSampler) else sampler.sample

    def check_exact(self) -> None:
        sampler = self.loader.neighbor_sampler
        if not isinstance(sampler, OwnSampler):  # over shards, no rank has the graph
            return
        edge = self.job.data.graph.edge
        on_batches = edge_arrays_read(self.job.model, sampler.edge)
        on_graph = edge_arrays_read(self.job.model, edge)
        if set(on_batches) != set(on_graph):
            raise ValueError(
                f"the convs read {' and '.join(on_batches) or 'no array'} of the edges that {sampler.name} gives, and "
                f"{' and '.join(on_graph) or 'no array'} of the graph's, so exact inference would compute something "
                "else: evaluate by test_step=, such as one that calls hl.infer.sampled, or take convs that read no "
                "such array"
            )

    def describe(self) -> WorkDescription:
        return self.loader.describe()
