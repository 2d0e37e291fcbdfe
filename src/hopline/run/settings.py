"""Settings of each command, what it takes as key=value: plain data, so that reading them needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from hopline.contract import Budget, Job, Method, Work, upgrade_budget
from hopline.data.options import Columns, EdgeOptions, check_shares
from hopline.data.paths import is_dataset
from hopline.data.placement_settings import Placement
from hopline.data.registry import locate
from hopline.distributed.launch_settings import LaunchSettings
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Auto, Sampled
from hopline.run.model_settings import ModelSpec
from hopline.training.settings import TrainSettings, upgrade_schedule
from hopline.util.config import RemovedSetting, check_fields, from_dict, parse_chunk_bytes, settings

DATA_ROOT = {"data_root": RemovedSetting(None, "set the environment variable HOPLINE_DATA")}
"""A setting that commands had for the folder in which datasets are found by name."""
SPLIT_SHARES = {"split_shares": RemovedSetting(None, "set split=0.6,0.2,0.2")}
"""A setting that commands had for the shares of a split that is drawn."""


@settings
class RunConfig(TrainSettings, LaunchSettings):
    """A whole run: what `hopline train` takes as key=value."""

    REMOVED: ClassVar = DATA_ROOT | SPLIT_SHARES
    data: str = "demo"
    """Dataset: a name, a folder or an .npz file."""
    split: int | tuple[float, float, float] = 0
    """Which split, for datasets that come with several; or shares of train, valid and test nodes, such as 0.6,0.2,0.2,
    drawn among the labelled nodes: the same ones whatever seed= is."""
    symmetrize: bool | None = None
    """Add the reverse of every edge when the dataset is converted, or do not; each choice is kept under its own name.
    Default: as the dataset says."""
    features: Literal["given", "normalized", "standardized", "one_hot"] = "given"
    """Input rows as they are; each divided by its sum; each column with mean 0 and deviation 1; or one column per node,
    so that model.linear=true learns the input rows themselves."""
    model: ModelSpec = ModelSpec()
    """The model."""
    method: Sampled | Historical | FullBatch | Auto | Method = Sampled()
    """How to train; `auto` tries all for a few steps and takes the fastest that fits. A method of your own is
    package.module:Class or file.py:Class, whose settings `--keys method=package.module:Class` shows."""
    budget: Budget | None = None
    """Memory that the run may take: budget=8GiB is for where the model is."""
    placement: Placement = Placement()
    """Where a GPU finds graph and features."""
    out: Path | None = None
    """The run folder; runs/NAME-TIME by default."""
    weights: Path | None = None
    """Weights to begin with: a `state_dict` file of the same model, PyG's own or one of `hopline export`."""

    def __post_init__(self) -> None:
        TrainSettings.__post_init__(self)
        LaunchSettings.__post_init__(self)
        if isinstance(self.split, tuple):
            check_shares(self.split)
        elif self.split < 0:
            raise ValueError(
                f"split must be at least 0, not {self.split}: set split=0 for the dataset's first split, or "
                "split=0.6,0.2,0.2 to draw one"
            )

    @property
    def conversion(self) -> dict[str, Any]:
        """Options of the dataset's conversion, as far as they were given."""
        return {} if self.symmetrize is None else {"symmetrize": self.symmetrize}


@settings
class ExportConfig:
    """What `hopline export RUN FILE` takes as key=value."""

    weights: Literal["best", "last"] = "best"
    """Which weights of the run."""
    trust: bool = False
    """Import the module that the run's config.json names for its model (model=package.module:function)."""


@settings
class InferConfig(LaunchSettings):
    """What `hopline infer RUN` takes as key=value."""

    REMOVED: ClassVar = DATA_ROOT
    nodes: Literal["all", "train", "valid", "test"] = "all"
    """Which nodes to predict: rows are in the order of their ids."""
    write: Literal["classes", "scores"] = "classes"
    """Class numbers (0/1 per label for several labels), or the model's raw scores."""
    inference: Literal["exact", "sampled"] = "exact"
    """Over every edge, or over sampled ones with the run's fan-outs."""
    weights: Literal["best", "last"] | Path = "best"
    """Which weights of the run, or a `state_dict` file of the same model: PyG's own, `hopline export`'s or DDP's."""
    data: str | None = None
    """Another dataset with the same features, instead of the run's own; or a folder of shards."""
    device: str = "cpu"
    """Where layers are computed."""
    chunk_bytes: str | int | None = None
    """What the chunks of a layer may take beside the hidden rows, such as 2GiB; about a million edges by default."""
    folder: Path | None = None
    """Where hidden rows are kept as mapped files; the same command goes on from them if it was killed."""
    hops: int | None = None
    """Hops around a node that a model with forward(x, edge_index) alone reads; those of the run's fan-outs by default,
    or the whole graph at once where these are too few."""
    trust: bool = False
    """Import the module that the run's config.json names for its model (model=package.module:function)."""
    out: Path | None = None
    """The .npy file to write; RUN/predictions.npy by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_chunk_bytes(self.chunk_bytes)
        for name in ("chunk_bytes", "folder", "hops"):
            if self.inference == "sampled" and getattr(self, name) is not None:
                raise ValueError(f"{name}= is about exact inference: leave it out, or set inference=exact")


@settings
class ConvertConfig(EdgeOptions):
    """What `hopline convert SOURCE FOLDER` takes as key=value."""

    REMOVED: ClassVar = DATA_ROOT | SPLIT_SHARES
    nodes: Path | None = None
    """A file of nodes (features, label, split) that goes with an edge list."""
    columns: Columns = Columns()
    """Which columns of the files mean what."""
    ids: Literal["number", "map"] = "number"
    """Node ids are 0 .. num_nodes - 1, or anything, to be numbered."""
    num_nodes: int | None = None
    """Number of nodes, where the files do not tell."""
    split: tuple[float, float, float] | None = None
    """Shares of train, valid and test nodes, such as 0.6,0.2,0.2, drawn among the labelled nodes and stored. Default:
    the split of the source."""
    overwrite: bool = False
    """Replace a dataset that is in the folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None:
            check_shares(self.split)


@settings
class PartitionConfig:
    """What `hopline partition DATASET FOLDER` takes as key=value."""

    REMOVED: ClassVar = DATA_ROOT
    shards: int = 0
    """How many shards to make, one for each rank."""
    how: Literal["metis", "streaming", "random", "range", "labels"] = "metis"
    """How to divide the nodes: fewest edges cut (metis, or streaming in little memory), or by chance, id or label."""
    labels: str = "y"
    """With how=labels: the labels themselves, or the table whose one column they are, such as a part per node."""
    seed: int = 0
    """Of metis, streaming and random."""
    slack: float = 0.1
    """How far sizes may be from their mean, as a share: of streaming."""
    passes: int = 20
    """At most how often the edges are read: of streaming."""
    overwrite: bool = False
    """Replace what is in the folder."""

    def __post_init__(self) -> None:
        check_fields(self)


@settings
class NotImported(Method):
    """A method of the user's own that a run folder names. Its module was not imported, which would run it."""

    name: str
    """As it was typed: package.module:Class."""

    def bind(self, job: Job) -> Work:
        raise ValueError(f"the run was trained by a method of its user's own: type method={self.name}")


def load_config(folder: Path, *, own_method: str = "") -> RunConfig:
    """The settings of an earlier run, from its folder.

    own_method: the one method of the user's own that is imported, since the command names it too. Any other is
    `NotImported`: the folder may come from somebody else.
    """
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a run folder: there is no config.json in it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it or train again") from error
    config = stored.get("config") if isinstance(stored, dict) else None
    if isinstance(config, dict) and "train" in config:
        raise ValueError(
            f"{folder} is a run of hl.Trainer in Python, whose model only that program can build: there, load the "
            f"weights with model.load_state_dict(torch.load('{folder}/best.pt')) and predict with hl.infer.exact"
        )
    if isinstance(config, dict) and stored.get("format", 1) < 2 and config.get("symmetrize") is False:
        config["symmetrize"] = None  # what it meant when it was written
    try:
        config = upgrade_config(stored["config"])
        kind = str(config["method"].get("kind", "")) if isinstance(config.get("method"), Mapping) else ""
        if ":" not in kind or kind == own_method:
            return from_dict(RunConfig, config)
        rest = {key: value for key, value in config.items() if key != "method"}
        return replace(from_dict(RunConfig, rest), method=NotImported(name=kind))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the settings of a `hopline train` run: {error}") from error


def upgrade_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored run, as this version has them where two settings became one."""
    found = dict(config)
    found.pop("gradients", None)  # of a program that gave the Trainer these settings and gradients=
    model, schedule = found.get("model"), found.get("schedule")
    shares = found.pop("split_shares", None)
    if shares is not None:
        found["split"] = shares
    # A process on the CPU evaluated: evaluate=async_cpu, or before that evaluate=async with evaluate_on=host. With
    # evaluate=async the run is the same: results are acted on as in the blocking run, whoever computes them. Only where
    # a GPU trained, metrics may differ in the last digits.
    found.pop("evaluate_on", None)
    if found.get("evaluate") == "async_cpu":
        found["evaluate"] = "async"
    budget = found.get("budget")
    if isinstance(budget, Mapping) and "cut_by" in budget:
        found["budget"] = upgrade_budget(budget)
    if isinstance(model, Mapping) and isinstance(model.get("residual"), bool):
        where = "before" if model.get("residual_first") else "after"
        kept = {key: value for key, value in model.items() if key != "residual_first"}
        found["model"] = kept | {"residual": where if model["residual"] else "none"}
    if isinstance(schedule, Mapping):
        found["schedule"] = upgrade_schedule(schedule)
    return found


def load_trusted(folder: Path, trust: bool) -> RunConfig:
    """The settings of a run whose model is to be built; one of the user's own code only if that is trusted.

    A run folder may come from somebody else, and importing a module runs it.
    """
    config = load_config(folder)
    if ":" in config.model.name and not trust:
        module = config.model.name.partition(":")[0]
        raise ValueError(
            f"{folder / 'config.json'} has model={config.model.name}, for which the module {module} would be imported "
            "and run: add trust=true if that is your code or you have read it"
        )
    return config


EDGE_LISTS = (".csv", ".gz", ".parquet", ".pq", ".txt", ".tsv")
"""How the names of edge lists end."""


def check_conversion(source: str, folder: Path, config: ConvertConfig) -> None:
    """Refuse a conversion of what does not exist, over what does, or with settings that mean nothing for it."""
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if is_dataset(folder) and not config.overwrite:
        raise ValueError(f"{folder} holds a dataset: choose another folder, or replace it with overwrite=true")
    if suffix in (*EDGE_LISTS, ".npz", ".npy"):
        if not path.is_file():
            raise ValueError(f"there is no file {path}: check the path")
    elif not path.exists():
        locate(source)
    if suffix not in EDGE_LISTS:
        has_nodes = suffix == ".npy" and config.nodes is not None
        meaningless = ("ids",) if has_nodes else ("nodes", "columns", "ids")
        given = [key for key in meaningless if getattr(config, key) != getattr(ConvertConfig(), key)]
        if given:
            raise ValueError(f"{given[0]}= is for edge lists (.csv, .parquet): leave it out for {source}")
