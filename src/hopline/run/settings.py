"""Settings of each command, typed as key=value, and settings of an earlier run, read from its folder.

The settings are plain data, and the module imports no torch, so that help and refusals come at once. The
sentence under a field is its line in `hopline COMMAND --keys`.

A run folder may come from somebody else. So reading its config.json imports no module that it names, unless
the user names the same method (`load_config`) or trusts the model's module (`load_trusted`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hopline.budget.plan import Budget
from hopline.contract import BlockSampler, Job, Method, SamplerSettings, Work
from hopline.data.options import Columns, EdgeOptions, check_shares
from hopline.data.paths import dgl_config, is_dataset
from hopline.data.placement_settings import Placement
from hopline.data.registry import locate
from hopline.distributed.launch_settings import LaunchSettings
from hopline.methods.listed import DEFAULT, ListedMethod
from hopline.report.settings import read_config
from hopline.run.model_settings import ModelSpec
from hopline.tasks.kinds import LabelKind
from hopline.tasks.settings import ListedTask
from hopline.training.settings import TrainSettings
from hopline.util.config import check_fields, from_dict, parse_chunk_bytes, settings, to_dict
from hopline.util.files import check_file

if TYPE_CHECKING:  # settings need no torch
    from hopline.core.graph import Graph

PREDICTIONS = (".csv", ".parquet", ".npy")


@settings
class Auto(Method):
    """Stands for the method that is fastest among those that fit the budget.

    `hopline train` replaces it before the run.
    """

    def bind(self, job: Job) -> Work:
        raise ValueError(
            "method=auto is found before a run: give the Trainer what `hopline.run.compare_methods.choose` returns"
        )


@settings
class RunConfig(TrainSettings, LaunchSettings):
    """The settings of a whole run: of `hopline train` and `hopline plan`."""

    data: str = "demo"
    """Dataset: a name, a folder or an .npz file."""
    split: int | tuple[float, float, float] = 0
    """Number of the split, from 0, for datasets that come with several. Or shares of train, valid and test
    nodes, such as 0.6,0.2,0.2: they are drawn among the labelled nodes, the same for every seed=."""
    symmetrize: bool | None = None
    """Whether the reverse of every edge is added when the dataset is converted. A download is stored under
    the data root once for each choice. Default: as the dataset says."""
    features: Literal["given", "normalized", "standardized", "one_hot"] = "given"
    """Input features: `given` as stored, `normalized` with rows divided by their sums, `standardized` with
    columns of mean 0 and deviation 1, `one_hot` with a column per node, so that model.linear=true learns an
    embedding per node."""
    edge_arrays: Literal["given", "none"] = "given"
    """Edge weights, features and types: `given`, so that every conv that takes some is given them, or `none`."""
    model: ModelSpec = ModelSpec()
    """The model."""
    task: ListedTask | None = None
    """What is learnt, with its loss and metric. Default: by the labels. task=regression also takes whole numbers of
    a file for numbers to predict."""
    method: ListedMethod | Auto | Method = DEFAULT
    """Training method. `auto` times a few steps of each and takes the fastest that fits. Your own class is
    package.module:Class or file.py:Class, and --keys method=package.module:Class lists its settings."""
    budget: Budget | None = None
    """Memory limit of the run. budget=8GiB limits the device of the model. Default: no limit."""
    placement: Placement = Placement()
    """Memory that holds the graph and the features for a GPU."""
    out: Path | None = None
    """Run folder to write. Default: runs/NAME-TIME."""
    weights: Path | None = None
    """Initial weights: a `state_dict` file of the same model, from PyG or `hopline export`. Default: drawn
    by seed=."""

    def __post_init__(self) -> None:
        TrainSettings.__post_init__(self)
        LaunchSettings.__post_init__(self)
        if self.overwrite and self.out is None:
            raise ValueError("overwrite=true replaces the run in out=: add out=FOLDER, or leave it out")
        if isinstance(self.split, tuple):
            check_shares(self.split)
        elif self.split < 0:
            raise ValueError(
                f"split must be at least 0, not {self.split}: set split=0 for the dataset's first split, or "
                "split=0.6,0.2,0.2 to draw one"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks get the settings as plain data: no process can import a method of file.py:Class by its name.
        return from_dict, (type(self), to_dict(self))

    @property
    def picks_method(self) -> bool:
        """Whether the method is found by timing: method=auto."""
        return isinstance(self.method, Auto)

    @property
    def conversion(self) -> dict[str, Any]:
        """Options of the dataset's conversion that the user has set, as keywords of `open_dataset`."""
        options: dict[str, Any] = {}
        if self.symmetrize is not None:
            options["symmetrize"] = self.symmetrize
        # Labels that are stored have their kind. Those of an .npz file are read now.
        is_read_now = Path(self.data).suffix == ".npz"
        if is_read_now and self.task is not None and len(self.task.kinds) == 1:
            (options["task"],) = self.task.kinds
        return options


@settings
class ExportConfig:
    """The settings of `hopline export RUN FILE`."""

    weights: Literal["best", "last"] = "best"
    """Weights of the run: those of the best evaluation, or the last ones."""
    trust: bool = False
    """Permission to import and run the modules that config.json names: of the model
    (model=package.module:function) and of the sampler (method.sampler=package.module:Class)."""


@settings
class OutputSettings:
    """How a run's outputs are computed."""

    data: str | None = None
    """Another dataset with the same features, for `infer` also a folder of shards. Default: the run's dataset."""
    weights: Literal["best", "last"] | Path = "best"
    """Weights of the run, or a `state_dict` file of the same model, from PyG, `hopline export` or DDP."""
    inference: Literal["exact", "sampled"] = "exact"
    """Edges to use: all of them (exact), or sampled ones with the run's fan-outs."""
    device: str = "cpu"
    """Device that computes the layers."""
    chunk_bytes: str | int | None = None
    """Memory for the chunks of a layer, such as 2GiB. The embeddings of all nodes are not counted. Default:
    chunks of a million edges, or of more on a GPU."""
    trust: bool = False
    """Permission to import and run the modules that config.json names: of the model
    (model=package.module:function) and of the sampler (method.sampler=package.module:Class)."""

    def __post_init__(self) -> None:
        check_fields(self)
        parse_chunk_bytes(self.chunk_bytes)


@settings
class InferConfig(OutputSettings, LaunchSettings):
    """The settings of `hopline infer RUN`."""

    nodes: str = "all"
    """Nodes to predict: all, train, valid, test, or a file of ids (.csv, .txt, .parquet or .npy)."""
    write: Literal["classes", "probabilities", "scores", "values", "embeddings"] | None = None
    """Values to write: the class with its probability (true or false per label for several labels), the
    probabilities or raw scores of all classes, the values of a regression in the units of the labels, or the rows of
    the last hidden layer. Default: classes, or values of a regression."""
    folder: Path | None = None
    """Folder for the embeddings as memory-mapped files. The same command resumes from them after a kill.
    Default: in memory."""
    hops: int | None = None
    """Number of hops around a node that its output depends on. For a model that is not made of layers and
    has forward(x, edge_index) alone. Default: the number of the run's fan-outs, or the whole graph where
    these are too few."""
    out: Path | None = None
    """The file to write: .csv or .parquet with a column of ids, or .npy with the values alone. Default:
    RUN/predictions.csv."""

    def __post_init__(self) -> None:
        LaunchSettings.__post_init__(self)
        OutputSettings.__post_init__(self)
        if self.out is not None and self.out.suffix not in PREDICTIONS:
            raise ValueError(f"out={self.out} must end in {', '.join(PREDICTIONS)}: choose one of these formats")
        for name in ("chunk_bytes", "folder", "hops"):
            if self.inference == "sampled" and getattr(self, name) is not None:
                raise ValueError(f"{name}= is for exact inference: leave it out, or set inference=exact")


@settings
class EvaluateConfig(OutputSettings):
    """The settings of `hopline test RUN`."""

    split: str = "test"
    """Nodes to test on: train, valid, test or all."""


@settings
class ConvertConfig(EdgeOptions):
    """The settings of `hopline convert SOURCE FOLDER`."""

    nodes: Path | None = None
    """Node file of an edge list: features, label and split of each node."""
    columns: Columns = Columns()
    """Names of the columns of both files."""
    ids: str = "number"
    """Node ids in the files: 0 .. num_nodes - 1 (number), or any values, which are then numbered (map). For a
    graph partitioned by DGL: an .npy or .pt file of the node ids that return_mapping=True returned."""
    num_nodes: int | None = None
    """Number of nodes. Default: as the files tell."""
    task: LabelKind | None = None
    """Kind of labels: one class per node (single), several labels (multi), a yes or no (binary) or numbers to predict
    (regression). Default: whole numbers are classes, other numbers a regression."""
    split: tuple[float, float, float] | None = None
    """Shares of train, valid and test nodes, such as 0.6,0.2,0.2, drawn among the labelled nodes and
    stored. Default: the split of the source."""
    overwrite: bool = False
    """Permission to replace a dataset in the folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None:
            check_shares(self.split)


@settings
class PartitionConfig:
    """The settings of `hopline partition DATASET FOLDER`."""

    shards: int = 0
    """Number of shards, one for each rank. Required."""
    how: Literal["metis", "streaming", "random", "range", "labels"] = "metis"
    """Partition of the nodes: few edges between parts (metis, or streaming in little memory), random, by id
    or by label."""
    labels: str = "y"
    """Labels for how=labels: y, or the name of a table with one column of integers, such as a part per
    node."""
    seed: int = 0
    """Seed of metis, streaming and random."""
    slack: float = 0.1
    """Largest difference of a shard's size from the mean, as a share of the mean. For streaming."""
    passes: int = 20
    """Largest number of times that the edges are read. For streaming."""
    overwrite: bool = False
    """Permission to replace what is in the folder."""

    def __post_init__(self) -> None:
        check_fields(self)


@settings
class NotImported(Method):
    """A method of the user that a run folder names.

    Its module was not imported, because that would run it.
    """

    name: str
    """The method as it was typed: package.module:Class."""

    def bind(self, job: Job) -> Work:
        raise ValueError(f"the run was trained by a method of its user: type method={self.name}")


@settings
class NotImportedSampler(SamplerSettings):
    """A sampler of the user that a run folder names, as `NotImported` is a method."""

    name: str
    """The sampler as it was typed: package.module:Class."""

    def bind(self, graph: Graph) -> BlockSampler:
        raise ValueError(
            f"the run sampled by {self.name}, which would be imported and run: add trust=true if that is your code or "
            "you have read it"
        )


def load_config(folder: Path, *, own_method: str = "", own_sampler: str | None = "") -> RunConfig:
    """Return the settings of an earlier run, from config.json in its folder.

    own_method: the one method of the user ("package.module:Class") that may be imported, because the
        command names it too. Any other becomes `NotImported`, since the folder may come from somebody else.
    own_sampler: the same for the method's sampler. None: any may be imported.

    Raises:
        ValueError: The folder is no run folder, or config.json is damaged or holds other settings.
    """
    config = read_config(folder)["config"]
    if _is_of_trainer(config):
        raise ValueError(
            f"{folder} is a run of hl.Trainer in Python, whose model only your program can build: there, predict with "
            f"hl.load('{folder}', model=model).predict(data)"
        )
    # A program may give a Trainer a RunConfig, and what it has no field for: gradients=, an optimizer of its own.
    config = {key: value for key, value in config.items() if key not in ("gradients", "own")}
    method = config.get("method")
    sampler = method.get("sampler") if isinstance(method, Mapping) else None
    sampler_name = str(sampler.get("kind", "")) if isinstance(sampler, Mapping) else ""
    try:
        if sampler_name == own_sampler or not sampler_name or own_sampler is None:
            return _from_config(config, own_method)
        loaded = _from_config({**config, "method": {**config["method"], "sampler": None}}, own_method)
        method: Any = loaded.method
        if not hasattr(method, "sampler"):  # a method of the user's, which was not imported
            return loaded
        return replace(loaded, method=replace(method, sampler=NotImportedSampler(name=sampler_name)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'config.json'} does not hold the settings of a `hopline train` run: {error}"
        ) from error


def _from_config(config: Mapping[str, Any], own_method: str) -> RunConfig:
    """The settings of config.json. A method of the user's but `own_method` becomes `NotImported`."""
    method = config.get("method")
    kind = str(method.get("kind", "")) if isinstance(method, Mapping) else ""
    if ":" not in kind or kind == own_method:
        return from_dict(RunConfig, config)
    without_method = {key: value for key, value in config.items() if key != "method"}
    return replace(from_dict(RunConfig, without_method), method=NotImported(name=kind))


def is_run_of_trainer(folder: Path) -> bool:
    """Whether a folder holds a run of hl.Trainer in Python, rather than of `hopline train`."""
    return _is_of_trainer(read_config(folder)["config"])


def _is_of_trainer(config: Mapping[str, Any]) -> bool:
    """Whether settings are a Trainer's. It stores some under "train"; `hopline train` stores none there."""
    return "train" in config


def load_trusted(folder: Path, trust: bool) -> RunConfig:
    """Return the settings of a run whose model is to be built.

    A run folder may come from somebody else, and importing a module runs it. So a model of the user's code
    needs `trust`.

    Raises:
        ValueError: The settings cannot be read, or the model needs `trust`.
    """
    config = load_config(folder, own_sampler=None if trust else "")
    if ":" in config.model.name and not trust:
        module = config.model.name.partition(":")[0]
        raise ValueError(
            f"{folder / 'config.json'} has model={config.model.name}, for which the module {module} would be imported "
            "and run: add trust=true if that is your code or you have read it"
        )
    return config


EDGE_LISTS = (".csv", ".gz", ".parquet", ".pq", ".txt", ".tsv")


def check_conversion(source: str, folder: Path, config: ConvertConfig) -> None:
    """Raise ValueError for a conversion that cannot work, before anything is read or written.

    The source does not exist, the folder holds a dataset, or a setting means nothing for the source.
    """
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if is_dataset(folder) and not config.overwrite:
        raise ValueError(f"{folder} holds a dataset: choose another folder, or replace it with overwrite=true")
    if suffix in (*EDGE_LISTS, ".npz", ".npy"):
        check_file(path)
    elif not path.exists():
        locate(source)  # raises ValueError if no dataset has this name
    if suffix not in EDGE_LISTS:
        has_node_file = suffix == ".npy" and config.nodes is not None
        meaningless = ("ids",) if has_node_file else ("nodes", "columns", "ids")
        if dgl_config(path) is not None:
            meaningless = ("nodes", "columns")
        defaults = ConvertConfig()
        for key in meaningless:
            if getattr(config, key) != getattr(defaults, key):
                raise ValueError(f"{key}= is for edge lists (.csv, .parquet): leave it out for {source}")
    elif config.ids not in ("number", "map"):
        raise ValueError(f"ids= is {config.ids!r}: choose number or map")
