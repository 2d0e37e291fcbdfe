"""`Loader`: batches of neighbour sampling, prefetched by threads.

One batch goes through these stages:

    sample (thread)     gather (thread)        divide (thread)     move (thread)    ready (caller's thread)
    blocks around   ->  rows of features,  ->  seeds of each   ->  to the GPU,  ->  the GPU's stream waits
    the seeds           labels                 micro-batch         if needed        for the copies

"divide" runs only with a budget, and "move" does nothing on a CPU. If a GPU samples, there are no threads:
the caller's thread runs all stages.

Rows of the features come in one of four ways. A handle is a table with row ids, in place of the rows. The
loader chooses when it is made:

    handle, read later     a kernel of the model reads the rows itself        `keeps_handle`
    handle, aggregated     the same on the CPU: "gather" runs the first       `keeps_handle` and
                           layer's aggregation, which needs no weight         `GNN.read_ahead`
    read by the GPU        the host samples, the GPU reads the rows           `read_by_gpu`, after "move"
    read in "gather"       all others                                         -

A batch depends on (seed, epoch, step) alone, and not on threads or on where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hopline import ops
from hopline.contract import BlockSampler, SamplerSettings, WorkDescription
from hopline.core.batch import Batch, Block
from hopline.core.examples import Examples, as_examples
from hopline.core.row_handles import Readable, Rows
from hopline.core.sampler import NeighborSampler
from hopline.core.tree_layout import TreeSampler
from hopline.data.dataset import Dataset
from hopline.device.out_of_memory import free_memory
from hopline.distributed.world import World
from hopline.methods.sampled.own_sampler import own_sampler
from hopline.methods.sampled.seed_loader import RankExamples, SeedLoader, check_names
from hopline.nn.layered import Layered
from hopline.nn.whole_module import Whole
from hopline.ops import Slots
from hopline.pipeline.stages import Pipeline, Stage
from hopline.pipeline.transfer import Mover, PendingBatch
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.methods.sampled.settings import Sampled

MAX_TREE_SLOTS = 1 << 24
"""Most slots of a tree that layout "auto" takes, or the number of nodes of the graph if that is more.

A larger tree would hold many nodes several times, and a block has each of them once. A rule of thumb.
"""


class Loader(SeedLoader):
    """Batches of a dataset, prefetched by threads. Each iteration over the loader is the next epoch.

    Usually made by `hl.Sampled(...).loader(data, ids)`, which fills in the arguments. An epoch has the same
    batches for any number of threads. A loader belongs to one thread, which takes the batches.

    The ranks of a `world` share the seeds of each step, `batch_size` times the number of ranks. Every rank
    gets the same number of batches, and `batch.total_seeds` counts the seeds of all ranks. In the last step
    a rank may have no seeds. Without a `world` all seeds belong to this process, and `batch.total_seeds` is
    None.

    The loader is a `torch.utils.data.DataLoader`, so Lightning, Fabric and Accelerate divide its seeds among
    ranks.

    Args:
        data: The dataset.
        examples: The seeds, [n] int64, or `Examples`. A node may come several times.
        method: The settings, with `fanouts` as numbers, or with a sampler of neighbours.
        seed: Seed of every random draw, together with the epoch.
        device: The device of the batches.
        model: A model whose first layer may read rows of features itself. Such rows stay handles. None:
            `batch.x` is a tensor.
        world: The ranks that share the seeds.
        split_ahead: `Guard.split_ahead` of a budget, which plans the micro-batches of a prepared batch. It
            runs in the threads. With it, a batch that does not fit on the GPU is yielded on the host.
        batches_on_host: Whether batches for a GPU stay on the host, because the guard moves them in
            micro-batches.
        sampler: Positions in `examples`, in place of the method's `shuffle`. They may repeat.
        batch_sampler: Lists of such positions, in place of the method's `batch_size` and `drop_last` too.
        dataloader_arguments: Arguments of `DataLoader` with which Lightning makes a loader again. The method
            decides in their place.

    Raises:
        ValueError: There are no seeds, the method's fan-outs are "auto", its layout does not go with the
            model, or a world and a sampler are given.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> loader = hl.Sampled(fanouts=(2, 2), batch_size=2).loader(data, torch.arange(4))
        >>> len(loader), [batch.num_seeds for batch in loader]
        (2, [2, 2])
    """

    seed: int

    def __init__(
        self,
        data: Dataset,
        examples: Tensor | Examples,
        method: Sampled,
        seed: int,
        device: torch.device,
        model: Layered | Whole | None,
        world: World | None = None,
        *,
        split_ahead: Callable[[Batch], Batch] | None = None,
        batches_on_host: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        **dataloader_arguments: Any,
    ) -> None:
        check_names(dataloader_arguments)
        examples = as_examples(examples)
        if not len(examples):
            raise ValueError("there are no seeds to make batches of: give a split or ids that are not empty")
        if isinstance(sampler, SamplerSettings | BlockSampler) and not isinstance(sampler, Iterable):
            raise ValueError(
                f"the sampler= of a loader is an order of its seeds, and {type(sampler).__name__} samples neighbours: "
                f"give it to the method, hl.Sampled(sampler={type(sampler).__name__}(...))"
            )
        self.data = data
        self.examples = examples
        self.method = method
        self.device = device
        self.model = model
        self.split_ahead = split_ahead
        self.batches_on_host = batches_on_host

        self.on_gpu = data.graph.indptr.device.type != "cpu"
        self.layout = resolve_layout(method, data, device, model)
        if self.layout == "tree":
            self.neighbor_sampler = TreeSampler(data.graph, method.fanout_per_layer, replace=method.replace)
        elif method.sampler is not None:
            tried_seeds = examples.nodes.to(device) if self.on_gpu else examples.nodes
            self.neighbor_sampler = own_sampler(method.sampler, data.graph, tried_seeds)
        else:
            self.neighbor_sampler = NeighborSampler(
                data.graph,
                method.fanout_per_layer,
                replace=method.replace,
                one_list=isinstance(model, Whole),
                repeats=sampler is not None or batch_sampler is not None,
                law=method.law,
                weight=method.weight,
            )
        self.read_by_gpu = self._is_read_by_gpu()
        self.keeps_handle = self._can_keep_handle()

        self.prepare_s: dict[str, float] = {}
        """`Pipeline.stage_s` of the last epoch. Empty if it did not run to its end, or had no threads."""
        has_batch_sampler = batch_sampler is not None
        super().__init__(
            len(examples),
            batch_size=1 if has_batch_sampler else method.batch_size,
            shuffle=method.shuffle and sampler is None and not has_batch_sampler,
            drop_last=method.drop_last and not has_batch_sampler,
            seed=seed,
            num_workers=method.workers,
            look_ahead=method.look_ahead,
            law_every=method.law_every,
            on_gpu=self.on_gpu,
            world=world,
            sampler=sampler,
            batch_sampler=batch_sampler,
        )

    def with_budget(self, split_ahead: Callable[[Batch], Batch] | None, *, batches_on_host: bool) -> Loader:
        """A loader of the same batches for a budget's guard. The arguments are those of `Loader`."""
        return Loader(
            data=self.data,
            examples=self.examples,
            method=self.method,
            seed=self.seed,
            device=self.device,
            model=self.model,
            world=self.world,
            split_ahead=split_ahead,
            batches_on_host=batches_on_host,
        )

    def epoch(self, epoch: int, done: int = 0, examples_done: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, counted from 1.

        done: the number of batches to leave out at the beginning. examples_done: the number of their examples,
        over all ranks. Both are needed, because these batches may have had another size.
        """
        return self._batches(self._shared_steps(self._order.steps(self.epoch_key(epoch), done, examples_done)))

    def _batches(self, steps: Iterator[RankExamples]) -> Generator[Batch, None, None]:
        self.prepare_s = {}
        workers, look_ahead = self.threads
        mover = None if self._stays_on_host else Mover(self.device, look_ahead)
        stages = [Stage("sample", self._sample), Stage("gather", self._gather)]
        # Without threads nothing is gained by planning before the step: the guard does it in the step.
        if self.split_ahead is not None and workers:
            stages.append(Stage("divide", self.split_ahead))
        if mover is not None:
            stages.append(Stage("move", mover.move))
        pipeline = Pipeline(stages, workers=workers, look_ahead=look_ahead)

        with closing(pipeline.run(steps)) as batches:
            for batch in batches:
                yield batch if mover is None else self._finish_move(mover, batch)
        self.prepare_s = pipeline.stage_s

    def _batch(self, step: RankExamples) -> Batch:
        return self._add_rows_on_gpu(self._gather(self._sample(step)).to(self.device))

    @property
    def _stays_on_host(self) -> bool:
        """Whether batches stay on the host although they are for a GPU."""
        return self.batches_on_host and not self.on_gpu and self.device.type != "cpu"

    def _finish_move(self, mover: Mover, prepared: Batch | PendingBatch[Batch]) -> Batch:
        """The batch on the device, with all its rows.

        If it does not fit there and a budget's guard is at work, the batch goes back to the host. The guard
        then moves it in micro-batches.
        """
        batch = prepared
        try:
            batch = mover.ready(prepared)
            return self._add_rows_on_gpu(batch)
        except torch.OutOfMemoryError:
            if self.split_ahead is None:
                raise
            trace.count("batches.without_room", 1)
        # Never a `PendingBatch`: for one, `ready` allocates nothing, and so cannot run out of memory.
        assert isinstance(batch, Batch)
        batch = batch.to("cpu")
        free_memory(self.device)
        if not self.read_by_gpu:
            return batch
        return replace(batch, x=self.data.tables["x"].read(batch.input_ids))

    def describe(self) -> WorkDescription:
        """Describes how batches were prepared in the last epoch, or will be in the first one."""
        workers, look_ahead = self.threads
        return WorkDescription(
            workers=workers,
            look_ahead=look_ahead,
            max_workers=0 if self.on_gpu else max(1, self.num_cores),
            on_gpu=self.on_gpu,
            is_sampled=True,
            prepare_s=self.prepare_s,
        )

    def _sample(self, step: RankExamples) -> Batch:
        """The step's seeds with sampled blocks, still without rows. The pipeline's first stage."""
        examples = self.examples
        seeds, output_idx = examples.nodes[step.numbers], None
        if self.on_gpu:
            seeds = seeds.to(self.device)
        if not isinstance(self.neighbor_sampler, TreeSampler):  # every slot of a tree is a seed of its own
            seeds, output_idx = examples.distinct(seeds)
        if isinstance(self.neighbor_sampler, TreeSampler):
            # Trees are drawn by slot, and slots are numbered over the seeds of all ranks.
            blocks: tuple[Block, ...] = self.neighbor_sampler.sample(seeds, step.key, step.first)
        else:
            blocks = self.neighbor_sampler.sample(seeds, step.key, step.draw_key)
        if self.method.scale_sums:
            blocks = tuple(block.with_scale_sums(True) for block in blocks)
        if not self.on_gpu:  # counting the edges of a tree would synchronise with the GPU
            trace.count("edges.sampled", sum(block.num_edges for block in blocks))

        y = None if examples.y is None else examples.labels(None, step.numbers)
        return Batch(seeds, blocks, x=None, y=y, key=step.key, total_seeds=step.total, output_idx=output_idx)

    def _gather(self, batch: Batch) -> Batch:
        """The batch with labels, and with rows or handles to them. The second stage."""
        handles = {name: batch.blocks[0].handle(table) for name, table in self.data.tables.items()}
        x: Rows | Tensor | None = handles.pop("x", None)
        if self.read_by_gpu and not self._stays_on_host:
            x = None  # `_add_rows_on_gpu` sets it, once the ids are on the GPU
        elif isinstance(x, Rows) and self.keeps_handle and not self._stays_on_host:
            # `read_ahead` is for blocks, whose handles are exactly `Rows`. Those of a tree are a subclass.
            if isinstance(self.model, Layered) and not self.on_gpu and type(x) is Rows:
                x = self.model.read_ahead(x, batch.blocks[0])
        elif isinstance(x, Rows):
            x = x.read() if self._reads_at_ids(x.table) else x.table.read(x.ids.cpu())
            trace.count("bytes.gathered", x.numel() * x.element_size())
        y = self.labels(batch.example_ids) if batch.y is None else batch.y
        return replace(batch, x=x, y=y, tables=handles)

    def _add_rows_on_gpu(self, batch: Batch) -> Batch:
        """The batch after its move, with rows that the GPU reads.

        Without `read_by_gpu`, the batch as it is.
        """
        if not self.read_by_gpu:
            return batch
        x = batch.blocks[0].handle(self.data.tables["x"])
        if self.keeps_handle:
            return replace(batch, x=x)
        try:
            return replace(batch, x=x.read())
        except torch.OutOfMemoryError:
            # Once more: memory that failed steps hold, or that torch caches, may be enough once it is free.
            free_memory(self.device)
            return replace(batch, x=x.read())

    def labels(self, nodes: Tensor) -> Tensor | None:
        """[n, ...]: the dataset's labels of nodes, on their own device; None without labels."""
        y = self.data.y
        return None if y is None else ops.gather_rows(y, nodes.to(y.device))

    def _reads_at_ids(self, table: Readable) -> bool:
        """Whether a table can be read by ids on the device that samples.

        If not, the ids go to the host first.
        """
        return not self.on_gpu or table.tiers(self.device) is not None

    def _is_read_by_gpu(self) -> bool:
        """Whether the host samples and a GPU reads the features, from its own memory or by zero-copy."""
        if self.on_gpu or self.device.type != "cuda" or "x" not in self.data.tables:
            return False
        tiers = self.data.tables["x"].tiers(self.device)
        return tiers is not None and tiers.hot.device.type == "cuda"

    def _can_keep_handle(self) -> bool:
        """Whether `batch.x` stays a handle, because a kernel of the model reads the rows itself, and fast."""
        model = self.model
        if model is None or "x" not in self.data.tables:
            return False
        table = self.data.tables["x"]
        if self.on_gpu and self.layout == "tree":
            return self._reads_at_ids(table)

        # The kernel needs the row ids on the model's device: drawn there, or moved there with the batch.
        samples_at_model = self.device.type == ("cuda" if self.on_gpu else "cpu")
        has_ids_at_model = self.read_by_gpu or samples_at_model
        if not (has_ids_at_model and self._reads_at_ids(table) and model.keeps_handle(table)):
            return False
        # A GPU reads rows in host memory faster by ascending ids, each once, than in the order of the
        # edges, as the model's kernel would. So such rows are gathered first.
        storage = table.storage()
        return storage is None or storage.device.type == self.device.type


def resolve_layout(
    method: Sampled, data: Dataset, device: torch.device, model: Layered | Whole | None
) -> Literal["block", "tree"]:
    """The layout, with "auto" replaced: trees if a GPU reads graph and features, else blocks.

    A step on trees never synchronises with the GPU, so it can be captured.

    Raises:
        ValueError: layout="tree" is set for a model that is not made of layers.
    """
    if method.layout == "tree" and isinstance(model, Whole):
        raise ValueError(
            f"layout=tree needs a model made of layers, and {type(model.module).__name__} is not: use hl.nn.GNN, or "
            "set layout=block"
        )
    if method.layout != "auto":
        return method.layout
    if method.sampler is not None:
        return "block"
    if data.graph.indptr.device.type != "cuda" or -1 in method.fanout_per_layer or not isinstance(model, Layered):
        return "block"
    x = data.tables.get("x")
    tiers = None if x is None else x.tiers(device)
    is_readable = tiers is not None and tiers.hot.device.type == "cuda"
    num_slots = Slots(method.batch_size, method.fanout_per_layer).offsets[-1]
    is_small = num_slots <= max(MAX_TREE_SLOTS, data.num_nodes)
    return "tree" if is_readable and is_small else "block"
