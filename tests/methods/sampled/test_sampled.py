"""`Sampled`: settings, batches of its loader, and units of training.

A loader gives every seed once an epoch, for any number of workers and of ranks, and repeats an epoch to the bit.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GraphNorm, SAGEConv

from hopline.contract import Job, Method, Unit, Work
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.core.row_handles import Rows
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN, Whole, as_batch_model
from hopline.tables import SparseTable, TensorTable
from hopline.units.batch_unit import BatchUnit
from hopline.util.errors import StageError
from tests.support.helpers import (
    assert_same_batches,
    assert_same_gradients,
    dataset_of,
    own_task,
    randn,
    random_graph,
    twin,
)
from tests.support.ranks import AgreeingWorld
from tests.support.runs import small

GRAPH = random_graph(dtype=torch.int32, weight=True)
X = randn(50, 6)
DATA = dataset_of(GRAPH, X)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the seeds."""
    assert batch.y is not None
    return nn.functional.cross_entropy(model(batch), batch.y)


def model_of(num_layers: int = 2, **options: Any) -> GNN:
    """SAGE layers in float64, always with the same first weights."""
    torch.manual_seed(0)
    widths = [6, *[8] * (num_layers - 1), 3]
    return GNN([SAGEConv(a, b) for a, b in itertools.pairwise(widths)], **options).double()


def job_of(model: nn.Module, **changes: Any) -> Job:
    """A job on the CPU; changes: of its fields."""
    batch_model = as_batch_model(model)
    ids = DATA.splits["train"]
    return replace(
        Job(data=DATA, model=batch_model, module=model, examples=Examples(ids), task=own_task(mean_loss)), **changes
    )


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fanouts": ()}, "one number per layer"),
        ({"fanouts": (5, 0)}, "fan-out"),
        ({"fanouts": (5, -1), "replace": True}, "replace=True"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"layout": "bush"}, "layout must be 'auto' or 'block' or 'tree'"),
        ({"workers": -1}, "workers must be 'auto' or a number from 0, not -1"),
        ({"workers": "many"}, "workers must be a whole number or 'auto'"),
        ({"look_ahead": 0}, "look_ahead must be 'auto' or a number from 1, not 0"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_with_a_message(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampled(**settings)


def test_fanouts_must_match_the_layers() -> None:
    with pytest.raises(ValueError, match=r"3 layers .*fanouts=\(5, 5\) .*fanouts=10,10,10"):
        Sampled(fanouts=(5, 5)).bind(job_of(model_of(3)))


def test_a_norm_over_all_nodes_is_refused_before_training_starts() -> None:
    with pytest.raises(ValueError, match="GraphNorm"):
        Sampled(fanouts=(5, 5)).bind(job_of(model_of(norm=[GraphNorm(8), nn.Identity()])))


def test_no_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="no seeds"):
        Sampled(fanouts=(5,)).loader(DATA, torch.empty(0, dtype=torch.int64))


# ---- the loader alone


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 25, 100])
def test_an_epoch_has_every_seed_once_with_its_label_and_rows(workers: int, batch_size: int) -> None:
    loader = Sampled(fanouts=(3, 2), batch_size=batch_size, workers=workers).loader(DATA, seed=4)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-25 // batch_size)
    assert torch.equal(torch.cat([b.seeds for b in batches]).sort().values, DATA.splits["train"])
    for batch in batches:
        assert isinstance(batch.x, Tensor)
        assert torch.equal(batch.x, X[batch.input_ids])
        assert batch.y is not None
        assert DATA.y is not None
        assert torch.equal(batch.y, DATA.y[batch.seeds])


@pytest.mark.parametrize("look_ahead", [1, 7])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_the_same_for_any_number_of_workers(workers: int, look_ahead: int) -> None:
    settings = Sampled(fanouts=(3, 2), batch_size=4, workers=0)
    serial = settings.loader(DATA, seed=4)
    threaded = replace(settings, workers=workers, look_ahead=look_ahead).loader(DATA, seed=4)
    for _ in range(2):
        for ours, expected in zip(threaded, serial, strict=True):
            assert_same_batches(ours, expected)


def test_iterating_advances_the_epoch_and_an_epoch_can_be_repeated() -> None:
    loader = Sampled(fanouts=(2,), batch_size=5, workers=0).loader(DATA)
    first = list(loader)
    second = list(loader)
    assert not torch.equal(first[0].seeds, second[0].seeds)
    for ours, expected in zip(loader.epoch(1), first, strict=True):
        assert_same_batches(ours, expected)


def test_seed_epoch_and_step_each_change_the_key() -> None:
    method = Sampled(fanouts=(2,), batch_size=5, workers=0, shuffle=False)
    keys = [b.key for s in (0, 1) for epoch in (1, 2) for b in method.loader(DATA, seed=s).epoch(epoch)]
    assert len(set(keys)) == len(keys) == 20  # 2 seeds * 2 epochs * 5 steps


def test_drop_last_leaves_out_the_last_batch_and_shuffle_false_keeps_the_order() -> None:
    method = Sampled(fanouts=(2,), batch_size=4, workers=0, drop_last=True, shuffle=False)
    loader = method.loader(DATA, "test")
    assert len(loader) == 6
    assert torch.equal(torch.cat([b.seeds for b in loader]), DATA.splits["test"][:24])


def test_other_tables_come_as_handles() -> None:
    other = randn(50, 2, seed=5)
    data = replace(DATA, tables={**DATA.tables, "other": TensorTable(other)})
    batch = next(iter(Sampled(fanouts=(2,), workers=0).loader(data)))
    rows = batch.tables["other"]
    assert isinstance(rows, Rows)
    assert torch.equal(rows.read(), other[batch.input_ids])


def test_a_dataset_without_features_and_labels_gives_the_blocks_alone() -> None:
    data = replace(DATA, tables={}, y=None)
    batch = next(iter(Sampled(fanouts=(2,), workers=0).loader(data)))
    assert batch.x is batch.y is None
    with pytest.raises(ValueError, match="no features"):
        model_of(1)(batch)


@pytest.mark.parametrize(
    ("model", "table", "kept"),
    [
        (model_of(), TensorTable(X), True),
        (model_of(), TensorTable(X.float()), False),
        (model_of(), SparseTable.from_dense(X), False),
        (model_of(input_dropout=0.5), TensorTable(X), False),
        (GNN([GCNConv(6, 3)]).double(), TensorTable(X), False),
        (GNN([GCNConv(6, 3)]).double(), SparseTable.from_dense(X), True),
        (GNN([SAGEConv(8, 3)], encoder=nn.Linear(6, 8)).double(), SparseTable.from_dense(X), True),
        (None, TensorTable(X), False),
    ],
    ids=["fused", "other-dtype", "sparse-sum", "input-dropout", "gcn", "gcn-sparse", "encoder-sparse", "no-model"],
)
def test_rows_stay_unread_only_where_the_model_reads_them_itself(model: Any, table: Any, kept: bool) -> None:
    data = replace(DATA, tables={"x": table})
    fanouts = (2,) * (model.num_layers if model else 1)
    batch = next(iter(Sampled(fanouts=fanouts, workers=0).loader(data, model=model)))
    assert isinstance(batch.x, Rows) == kept
    if model:
        read = next(iter(Sampled(fanouts=fanouts, workers=0).loader(data)))
        torch.testing.assert_close(model.eval()(batch), model(read), rtol=1e-10, atol=1e-10)


def test_leaving_the_loop_early_stops_the_threads() -> None:
    for batch in Sampled(fanouts=(2,), batch_size=1, workers=3).loader(DATA):
        assert batch.num_seeds == 1
        break
    del batch
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("hopline-pipeline")]


def test_an_error_while_sampling_names_the_stage() -> None:
    method = Sampled(fanouts=(2,), batch_size=30, workers=1)
    loader = Loader(DATA, torch.tensor([1, 2, 99]), method, seed=0, device=torch.device("cpu"), model=None)
    with pytest.raises(StageError, match=r"'sample' failed: .*not a node"):
        list(loader)


# ---- units


def test_units_cover_the_training_nodes_and_repeat_for_the_same_epoch() -> None:
    work = Sampled(fanouts=(3, 2), batch_size=4).bind(job_of(model_of()))
    sizes = [unit.size for unit in work.units(1)]
    assert sum(sizes) == 25
    losses = [[float(u.forward_backward(u.size)) for u in work.units(epoch)] for epoch in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_units_weigh_the_loss_by_their_share_of_the_seeds() -> None:
    model = model_of()
    whole_model = twin(model)
    work = Sampled(fanouts=(-1, -1), batch_size=10).bind(job_of(model))
    total = sum(float(unit.forward_backward(25)) for unit in work.units(1))
    whole = next(iter(Sampled(fanouts=(-1, -1), batch_size=25).loader(DATA)))
    loss = mean_loss(whole_model, whole)
    loss.backward()

    assert total == pytest.approx(25 * loss.item(), rel=1e-12)
    assert_same_gradients(model, whole_model)


def test_bf16_runs_forward_under_autocast() -> None:
    output_dtypes = []

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch)
        output_dtypes.append(out.dtype)
        return out.float().square().mean()

    data = replace(DATA, tables={"x": TensorTable(X.float())})
    job = job_of(model_of().float(), data=data, task=own_task(step), bf16=True)
    unit = next(iter(Sampled(fanouts=(2, 2), workers=0).bind(job).units(1)))
    unit.forward_backward(unit.size)

    assert output_dtypes == [torch.bfloat16]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in job.model.parameters())


def test_inference_batches_keep_the_order_and_the_last_batch() -> None:
    method = Sampled(fanouts=(2, 2), batch_size=8, drop_last=True)
    ids = torch.tensor([40, 3, 17, 29, 5, 6, 7, 8, 9])
    assert torch.equal(torch.cat([b.seeds for b in method.inference_batches(job_of(model_of()), ids)]), ids)


@dataclass(frozen=True)
class EveryNodeAlone(Method):
    """A method of the user's own: one unit per training node, in reverse."""

    def bind(self, job: Job) -> EveryNodeAlone.Work:
        return EveryNodeAlone.Work(job)

    @dataclass
    class Work(Work):
        job: Job

        def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
            for node in self.job.train_ids.tolist()[::-1][done:]:
                loader = Sampled(fanouts=(-1, -1), workers=0).loader(self.job.data, torch.tensor([node]))
                yield BatchUnit(self.job, next(iter(loader)))


def test_a_custom_method_trains_the_same_model() -> None:
    model = model_of()
    sampled_model = twin(model)
    for method, trained_model in ((EveryNodeAlone(), model), (Sampled(fanouts=(-1, -1), batch_size=7), sampled_model)):
        for unit in method.bind(job_of(trained_model)).units(1):
            unit.forward_backward(25)
            unit.commit()
    assert_same_gradients(model, sampled_model)
    assert EveryNodeAlone().inference_batches(job_of(model), torch.arange(3)) is None


def test_a_method_without_bind_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="bind"):
        Method()  # type: ignore[abstract]


def test_sums_cannot_be_scaled_in_a_model_that_is_not_made_of_layers() -> None:
    model = Whole(SAGEConv(6, 4))
    job = Job(data=DATA, model=model, module=model, examples=Examples(torch.arange(5)), task=own_task(mean_loss))
    with pytest.raises(ValueError, match="scale_sums=true needs a model made of layers"):
        Sampled(fanouts=(3,), scale_sums=True).bind(job)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_after_a_restart_with_other_ranks_every_seed_has_its_turn_once(sizes: tuple[int, int], drop_last: bool):
    data = small()
    method = Sampled(fanouts=(2,), batch_size=7, workers=0, drop_last=drop_last)

    def seeds_of_ranks(size: int, steps: int | None, done: int, seeds_done: int) -> list[int]:
        """The seeds that the ranks of one start have in `steps` steps, rank by rank."""
        seen = []
        for rank in range(size):
            loader = method.loader(data, world=AgreeingWorld(rank, size))
            batches = itertools.islice(loader.epoch(1, done, seeds_done), steps)
            seen += [int(s) for batch in batches for s in batch.seeds]
        return seen

    before, after = sizes
    first = seeds_of_ranks(before, 3, 0, 0)
    seen = first + seeds_of_ranks(after, None, 3, len(first))
    assert len(seen) == len(set(seen))

    if not drop_last:
        assert sorted(seen) == data.splits["train"].tolist()
    else:
        assert len(data.splits["train"]) - len(seen) < 7 * after


def test_the_rest_of_an_epoch_has_the_batches_of_the_whole_epoch():
    loader = Sampled(fanouts=(3, 2), batch_size=32, workers=0).loader(small())
    whole = [(batch.seeds, batch.key) for batch in loader.epoch(2)]
    rest = [(batch.seeds, batch.key) for batch in loader.epoch(2, 2, 64)]
    assert len(whole) == len(rest) + 2
    for (seeds, key), (expected, expected_key) in zip(rest, whole[2:], strict=True):
        assert torch.equal(seeds, expected)
        assert key == expected_key


def test_fan_outs_may_be_a_list_as_pygs_are():
    assert Sampled(fanouts=[10, 5]) == Sampled(fanouts=(10, 5))  # type: ignore[arg-type]
