"""`hl.load(RUN)`: a finished run with its model, ready to predict and to be tested.

    config.json   settings, and the form of the training data (`data.inputs.Inputs`)
    best.pt       the weights

The model is built from the settings and the widths of the training data. So neither the training data nor any
code of the folder is needed. Only a model of the user's own (model=package.module:function) is built by that
function, which gets the training data again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hopline import inference as infer
from hopline.contract import Method
from hopline.core.batch import Batch
from hopline.core.graph import Graph
from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.ids import original_ids
from hopline.data.inputs import Inputs
from hopline.data.nodes import select_nodes
from hopline.data.registry import locate
from hopline.data.splits import random_split
from hopline.methods.listed import DEFAULT
from hopline.nn.whole_module import as_batch_model, edge_arrays_read
from hopline.report.settings import read_config
from hopline.run.models import make_model
from hopline.run.settings import RunConfig, is_run_of_trainer, load_trusted
from hopline.run.train import load_weights, open_data
from hopline.shards.shard import is_shards
from hopline.tables import TensorTable
from hopline.tasks.labels import is_labelled
from hopline.tasks.task import Task, Write
from hopline.training.evaluation import hops_by_fanouts
from hopline.units.job import make_job
from hopline.util.log import logger

CHUNK_NODES = 1 << 18
"""Nodes whose rows are computed into columns at a time."""


def load(
    folder: Path | str,
    *,
    model: nn.Module | None = None,
    weights: Literal["best", "last"] | Path | str = "best",
    device: torch.device | str = "cpu",
    trust: bool = False,
) -> SavedRun:
    """Open the folder of a finished run, to predict and to test.

    Nothing of the folder is executed.

    Args:
        folder: A run folder of `hopline train`, or of `hl.Trainer(out=)`.
        model: The module that was trained. Needed for runs of `hl.Trainer`, whose model only your program can
            build. Its weights are replaced by those of the run.
        weights: "best", "last", or a `state_dict` file of the same model.
        device: The device to compute on.
        trust: Permission to import the module that the run names for its model
            (model=package.module:function).

    Returns:
        The run, with `model`, `settings`, `inputs`, `predict` and `evaluate`.

    Raises:
        ValueError: It is no run folder, a file is damaged, or `model` is missing or is another one.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> model = hl.nn.GNN([SAGEConv(4, 2)])
        >>> _ = hl.Trainer(model, data, epochs=1, show=False, out="runs/four").fit()
        >>> run = hl.load("runs/four", model=model)
        >>> list(run.predict(data))
        ['id', 'class', 'probability']
    """
    folder = Path(folder)
    stored, contents = read_inputs(folder)
    if is_run_of_trainer(folder):
        if model is None:
            raise ValueError(
                f"{folder} is a run of hl.Trainer in Python, whose model only your program can build: give it with "
                "hl.load(folder, model=model)"
            )
        settings = None
    else:
        settings = load_trusted(folder, trust)
        if model is None:
            model = build_model(settings, stored)
    is_of_run = weights in ("best", "last")
    file = folder / f"{weights}.pt" if is_of_run else Path(weights)
    if not is_of_run and not file.is_file():
        raise ValueError(f"there is no file {file}: give weights=best, weights=last or a state_dict file")
    load_weights(model, file, of_run=is_of_run)
    return SavedRun(folder, model.to(device), settings, stored, contents, torch.device(device))


def read_inputs(folder: Path) -> tuple[Inputs, dict[str, str]]:
    """The form and the checksums of a run's training data, from config.json.

    Raises a ValueError if the form is not there.
    """
    stored = read_config(folder)
    try:
        return Inputs.from_dict(stored.get("inputs")), stored.get("contents") or {}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be used for predictions ({error}): train again") from error


def build_model(settings: RunConfig, inputs: Inputs) -> nn.Module:
    """The model of a run, without its weights."""
    if ":" in settings.model.name:
        return make_model(settings.model, open_data(settings))
    # Widths alone are read of the dataset, and by PNA its degrees, which the weights replace.
    outline = Dataset(
        name="training data",
        graph=Graph(torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int64)),
        tables={"x": TensorTable(torch.zeros(1, inputs.num_features))} if inputs.num_features else {},
        task=inputs.task,
        num_classes=inputs.num_classes,
    )
    return make_model(settings.model, outline)


@dataclasses.dataclass(frozen=True, eq=False)
class SavedRun:
    """A finished run. `hl.load` makes it.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1], "test": [2, 3]},
        ... )
        >>> model = hl.nn.GNN([SAGEConv(4, 2)])
        >>> fitted = hl.Trainer(model, data, epochs=1, show=False, out="runs/four").fit()
        >>> hl.load("runs/four", model=model).evaluate(data) == {"accuracy": fitted.test}
        True
    """

    folder: Path
    """The run folder."""
    model: nn.Module
    """The model with the run's weights, on `device`."""
    settings: RunConfig | None
    """The settings of a run of `hopline train`. None for a run of `hl.Trainer`."""
    inputs: Inputs
    """The form of the training data: columns, statistics and classes."""
    contents: dict[str, str]
    """Checksums of the training data by array, as `Dataset.contents` has them. Empty if they are not known."""
    device: torch.device
    """The device that computes."""

    def predict(
        self,
        data: Dataset | str | None = None,
        nodes: NodeIds | str = "all",
        *,
        write: Write | None = None,
        inference: Literal["exact", "sampled"] = "exact",
        show: bool = False,
        **options: Any,
    ) -> dict[str, np.ndarray]:
        """Predict at the nodes of a dataset, which need not be the one that the run was trained on.

        Feature columns are matched by name with those of the training data, and standardised by its numbers.

        Args:
            data: A dataset, or the name or folder of one. Default: the run's own.
            nodes: "all", the name of a split, node numbers in a tensor, an array or a list, or a bool mask.
            write: "classes" with their probabilities, "probabilities" or "scores" of all classes, "values" of a
                regression, or "embeddings", the rows of the last hidden layer. Default: classes, or values.
            inference: "exact" over every edge, or "sampled" with the run's fan-outs.
            show: Show progress.
            options: chunk_bytes=, folder= and hops= of `hl.infer.exact`.

        Returns:
            Columns by name, each with a row per node, for `pandas.DataFrame(columns)`. The first is "id".

        Raises:
            ValueError: The dataset does not fit the run, or there are no such nodes.
        """
        write = self.check_write(write)
        fitted = self.fit(data)
        ids = select_nodes(fitted, nodes)
        chunks = self.chunks(fitted, ids, write=write, inference=inference, show=show, **options)
        parts = [self.columns(user_ids(fitted, chunk_ids), values, write) for chunk_ids, values in chunks]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def evaluate(
        self,
        data: Dataset | str | None = None,
        split: str = "test",
        *,
        inference: Literal["exact", "sampled"] = "exact",
        show: bool = False,
        **options: Any,
    ) -> dict[str, float]:
        """The metric of a split, by name: {"accuracy": 0.89}. Nodes without a label are left out.

        data, inference, show, options: as of `predict`. split: "train", "valid", "test" or "all".

        Raises:
            ValueError: As of `predict`. Or the dataset has no labels, or classes that the run does not know.
        """
        fitted = self.fit(data, labels=True)
        ids = select_nodes(fitted, split)
        ids = ids[is_labelled(fitted.labels[ids])]
        if not ids.numel():
            raise ValueError(f"no node of {split!r} of {fitted.name!r} has a label: choose another split, such as all")
        chunks = self.chunks(fitted, ids, write="scores", inference=inference, show=show, **options)
        scores = torch.cat([values for _, values in chunks])
        return self.task.measure(scores, fitted.labels[ids])

    @cached_property
    def task(self) -> Task:
        """What the model learnt. Of a task of the user's: the default one of the labels."""
        return self.inputs.make_task()

    def check_write(self, write: Write | None) -> Write:
        """What is to be written, with its default. Raises a ValueError for what the task has not."""
        allowed = (*self.task.writes, "embeddings")
        if write is not None and write not in allowed:
            raise ValueError(f"write must be one of {', '.join(allowed)} for a run of this task, not {write!r}")
        return write or allowed[0]

    def columns(self, ids: np.ndarray, values: Tensor, write: Write) -> dict[str, np.ndarray]:
        """The values of some nodes as columns, the first of which is "id".

        ids: [n]: the user's own. values: [n, num_outputs] scores, or embeddings, as of `chunks`.
        """
        if write == "embeddings":
            columns = {f"embedding_{i}": values[:, i].float() for i in range(values.shape[1])}
        else:
            columns = self.task.columns(values, write, self.inputs.classes)
        return {"id": ids} | {name: np.ascontiguousarray(column) for name, column in columns.items()}

    def fit(self, data: Dataset | str | None = None, *, labels: bool = False) -> Dataset:
        """A dataset in the form of the training data. labels: whether its labels are needed."""
        is_given = isinstance(data, Dataset)
        if data is None or isinstance(data, str):
            data = self._open(data)
        expect_dataset(data, "a run", "a hopline Dataset, or the name or folder of one")
        shares = None if self.settings is None else self.settings.split
        if is_given and isinstance(shares, tuple) and data.y is not None and not self._other_contents(data):
            data = random_split(data, shares)  # the run's own data, with a split on which it was not trained
        read = edge_arrays_read(as_batch_model(self.model), data.edge_arrays)
        return self.inputs.fit(data, read, labels=labels)

    def _open(self, name: str | None) -> Dataset:
        if self.settings is None:
            raise ValueError(f"{self.folder} is a run of hl.Trainer in Python: give predict the dataset")
        settings = self.settings_for(name)
        shares = settings.split
        # The run drew its split among labelled nodes. Other data are split in the same way, if they have labels.
        is_drawn = isinstance(shares, tuple)
        data = open_data(dataclasses.replace(settings, split=0) if is_drawn else settings)
        if name is None:
            self.tell_other_data(data)
        if not is_drawn or data.y is None or is_shards(settings.data):
            return data
        return random_split(data, shares)

    def settings_for(self, name: str | None) -> RunConfig:
        """The settings that open a dataset as it is stored: the one that is named, or the run's own.

        Raises:
            ValueError: The run's own is not there any more.
        """
        assert self.settings is not None
        if name is None:
            try:
                locate(self.settings.data, options=self.settings.conversion)
            except ValueError as error:
                raise ValueError(
                    f"the training data of {self.folder} cannot be opened ({str(error).rstrip('.')}): give data= the "
                    "dataset to predict on"
                ) from error
        data = name or self.settings.data
        return dataclasses.replace(self.settings, features="given", edge_arrays="given", data=data)

    def tell_other_data(self, data: Dataset) -> None:
        """Say if the run's own data, which were opened by their path, are not those that it was trained on."""
        now = data.contents()
        is_comparable = any(name in now for name in self.contents)  # shards are known by their cut
        others = self._other_contents(data)
        if is_comparable and others:
            assert self.settings is not None
            logger.warning(
                f"the data at {self.settings.data} are not those that the run was trained on, which had other "
                f"{', '.join(others)}: give data= if other data are meant"
            )

    def _other_contents(self, data: Dataset) -> list[str]:
        """Names of the arrays of the training data that a dataset has not, or with other values."""
        now = data.contents()
        return [name for name, text in self.contents.items() if now.get(name) != text] if self.contents else ["arrays"]

    def chunks(
        self,
        data: Dataset,
        ids: Tensor,
        *,
        write: Write = "scores",
        inference: Literal["exact", "sampled"] = "exact",
        show: bool = False,
        **options: Any,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """([m] node ids, their values), chunk by chunk, in the order of `ids`.

        The values are [m, num_outputs] scores, or [m, width] embeddings.
        """
        batch_model = as_batch_model(self.model)
        if write == "embeddings":
            yield from self._embeddings(batch_model, data, ids, inference, show, options)
            return
        if inference == "sampled":
            yield ids, infer.sampled(self.model, self.sampled_batches(data, ids), num_nodes=ids.numel(), show=show)
            return
        if options.get("hops") is None:
            options["hops"] = hops_by_fanouts(batch_model, data, self.method)
        read = infer.exact_rows(batch_model, data, ids, device=self.device, show=show, **options)
        for chunk_ids in ids.split(CHUNK_NODES):
            yield chunk_ids, read(chunk_ids)

    @property
    def method(self) -> Method:
        return DEFAULT if self.settings is None else self.settings.method

    def sampled_batches(self, data: Dataset, ids: Tensor | str) -> Iterable[Batch]:
        """Batches of the run's method for inference at `ids`, in their order.

        ids: of a graph in shards also the name of a split.
        """
        seed = 0 if self.settings is None else self.settings.seed
        no_examples = torch.empty(0, dtype=torch.int64)
        job = make_job(self.model, data, examples=no_examples, task=self.task, seed=seed, device=self.device)
        batches = self.method.inference_batches(job, ids)
        if batches is None:
            raise ValueError("inference=sampled needs the fan-outs of a run by method=sampled: set inference=exact")
        return batches

    def _embeddings(
        self, batch_model: Any, data: Dataset, ids: Tensor, inference: str, show: bool, options: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        num_layers = getattr(batch_model, "num_layers", 0)
        if inference != "exact" or num_layers < 2:
            raise ValueError(
                "write=embeddings needs inference=exact and a model of two layers or more, made of layers: write scores"
            )
        rows: dict[int, Tensor] = {}

        def keep(layer: int, node_ids: Tensor, chunk: Tensor) -> None:
            if layer == num_layers - 2:
                table = rows.setdefault(layer, chunk.new_zeros((data.num_nodes, chunk.size(1)), device="cpu"))
                table[node_ids.cpu()] = chunk.cpu()

        infer.exact(batch_model, data, device=self.device, show=show, keep=keep, **options)
        for chunk_ids in ids.split(CHUNK_NODES):
            yield chunk_ids, rows[num_layers - 2][chunk_ids]


def bare_values(task: Task, values: Tensor, write: Write) -> np.ndarray:
    """The values of some nodes without their ids. values: as of `SavedRun.columns`."""
    rows = values.float() if write == "embeddings" else task.predict(values, write)
    return rows.contiguous().numpy()


def user_ids(data: Dataset, ids: Tensor) -> np.ndarray:
    """[n]: the ids that nodes had in their file, or their numbers."""
    table = data.tables.get("node_ids")
    if table is None:
        return ids.numpy()
    return original_ids(TensorTable(table.read(ids)))
