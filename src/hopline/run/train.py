"""A run from its settings: the one place that turns names into objects.

    train(config)                in the process of the command
      launch.run(train_rank)     in every rank: starts processes, or joins those of torchrun or srun
        _open_together           the dataset, one copy per host
        make_model               the model, from its name
        _run_folder              runs/NAME-TIME, the same in all ranks
        _resolve_auto_method     method=auto becomes a method
        Trainer(...).fit()

Settings travel to the ranks as plain data (`to_dict`), and a run comes back in the same way, since ranks
may be other processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hopline.budget.plan import Budget
from hopline.data.dataset import Dataset
from hopline.data.host_copy import share
from hopline.data.registry import locate, open_dataset
from hopline.data.splits import random_split
from hopline.device.meter import find_device
from hopline.distributed import launch
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.nn.whole_module import as_batch_model
from hopline.run.compare_methods import Candidate, choose, compare, outline_of_run
from hopline.run.models import make_model
from hopline.run.settings import Auto, RunConfig, load_config
from hopline.shards.all_shards import join_shards
from hopline.shards.data import open_sharded
from hopline.shards.shard import is_shards
from hopline.training import checkpoint
from hopline.training.callbacks import Run
from hopline.training.settings import TrainSettings
from hopline.training.trainer import Trainer
from hopline.util.config import from_dict, to_dict
from hopline.util.files import CheckedFile, check_file
from hopline.util.log import logger, print_messages
from hopline.util.own_code import MAX_REASON_CHARACTERS, whole_name

RUNS = Path("runs")
"""The folder, in the current one, in which runs without out= are written."""
MAX_NAME_CHARACTERS = 100
"""Most characters of a dataset's name. Names of a dataset's arrays have the same limit."""


def train(config: RunConfig) -> Run:
    """Open the dataset, build the model, train and test it.

    Returns:
        The run of this process, or of the first rank that it started.
    """
    find_device(config.device)  # before processes are started, each of which would raise the same error
    config = _with_whole_paths(config)
    launch_settings = launch_settings_of(config)
    run = launch.run(train_rank, launch_settings, config, device=config.device)
    return run if isinstance(run, Run) else from_dict(Run, run)


def launch_settings_of(config: LaunchSettings) -> LaunchSettings:
    """The launch settings alone, from the settings of a command that include them."""
    names = [field.name for field in dataclasses.fields(LaunchSettings)]
    return LaunchSettings(**{name: getattr(config, name) for name in names})


def _with_whole_paths(config: RunConfig) -> RunConfig:
    """The settings with absolute paths, since `hopline infer` may run in another folder and reads them."""
    path = locate(config.data, options=config.conversion).path
    # A dataset that was named, and found under HOPLINE_DATA, keeps its name.
    if path is not None and path == Path(config.data).expanduser():
        config = dataclasses.replace(config, data=str(path.resolve()))
    model = dataclasses.replace(config.model, name=whole_name(config.model.name))
    return dataclasses.replace(config, model=model)


def train_rank(world: World, config: RunConfig) -> Run | dict[str, Any]:
    """Run one rank's part of a run. Returns the run, as plain data if there are several ranks."""
    with print_messages(config.show):
        data = _open_together(config, world)
        check_name(data.name)
        torch.manual_seed(config.seed)
        model = make_model(config.model, data)
        if config.weights is not None:
            load_weights(model, config.weights)
        config = _for_model(config, model, data)
        with _run_folder(data.name, config, world) as folder:
            config = _resolve_auto_method(config, model, data, folder, world)
            train_settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainSettings)}
            trainer = Trainer(
                model,
                data,
                config.method,
                out=folder,
                config=config,
                world=world,
                task=config.task,
                placement=config.placement,
                budget=config.budget,
                **train_settings,
            )
            run = trainer.fit()
    return run if world.size == 1 else to_dict(run)


def check_name(name: str) -> None:
    """Raise ValueError for a dataset whose name cannot name a run folder, such as a path.

    A dataset may come from somebody else, and must not choose where files are written.
    """
    is_blank = not name.strip(" .")
    has_bad_character = any(character in "/\\" or not character.isprintable() for character in name)
    if is_blank or has_bad_character or len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(
            f"the dataset is called {name[:MAX_NAME_CHARACTERS]!r}, which cannot name a run: convert it anew by "
            "`hopline convert DATASET FOLDER`, which calls it as FOLDER"
        )


def _for_model(config: RunConfig, model: nn.Module, data: Dataset) -> RunConfig:
    """The settings with numbers for settings of the method that depend on the model and the graph.

    `method.fanouts=auto` becomes 15,10,5 for a model of three layers, for example. config.json stores the
    numbers.
    """
    method = config.method.for_model(as_batch_model(model)).for_graph(data.num_nodes)
    return dataclasses.replace(config, method=method)  # type: ignore[arg-type]


def _resolve_auto_method(config: RunConfig, model: nn.Module, data: Dataset, folder: Path, world: World) -> RunConfig:
    """The settings with a method in place of method=auto; other settings are returned as they are.

    A run that is resumed keeps the method with which it began. Else the method is the fastest that fits.
    Rank 0 decides, and the other ranks get its settings: each would time the steps differently.
    """
    if not config.picks_method:
        return config
    resolved: dict[str, Any] | None = None
    if world.rank == 0:
        is_resumed = config.resume and (folder / checkpoint.FILE).exists()
        begun = dataclasses.replace(config, method=load_config(folder).method) if is_resumed else config
        if begun.picks_method:
            outline = outline_of_run(model.to(world.device), data, config, config.placement, config.task)
            method, reason = choose(outline, config.budget or Budget())
            logger.info(reason)
            begun = dataclasses.replace(config, method=method)  # type: ignore[arg-type]
        resolved = to_dict(begun)
    return from_dict(RunConfig, world.broadcast_object(resolved))


def plan(config: RunConfig) -> list[Candidate]:
    """Return the memory of each method within the run's budget, and its time per epoch. Does not train."""
    data = open_data(config)
    torch.manual_seed(config.seed)
    model = make_model(config.model, data).to(find_device(config.device))
    method = None if config.picks_method else _for_model(config, model, data).method
    outline = outline_of_run(model, data, config, config.placement, config.task)
    return compare(method, outline, config.budget or Budget())


def _open_together(config: RunConfig, world: World) -> Dataset:
    """The run's dataset, one copy of it per host. Every rank must call this.

    Rank 0 opens it before all others, since that may download and convert it into a folder that hosts share.
    Then every rank opens that folder. A dataset without a folder is opened by the first rank of each host,
    which shares its memory with the host's other ranks.
    """
    if is_shards(config.data):
        return _open_shards(config, world)
    data = open_data(config) if world.rank == 0 else None
    # The answer of rank 0 counts. The call also makes all ranks wait until rank 0 has opened the dataset.
    has_folder = world.broadcast_object(data is not None and data.folder is not None)
    if data is None and (has_folder or world.local_rank == 0):
        data = open_data(config)
    if not has_folder:
        return share(data, world)
    assert data is not None  # every rank has opened the folder
    return data


def _open_shards(config: RunConfig, world: World) -> Dataset:
    """The dataset of a folder of shards: one shard per rank, or all shards joined in one process.

    Raises:
        ValueError: A setting would change the dataset, which must happen before it is partitioned.
    """
    if config.symmetrize or config.features != "given" or config.edge_arrays != "given":
        raise ValueError(
            f"{config.data} is in shards already: leave out symmetrize=, features= and edge_arrays=, or train on the "
            "dataset that was partitioned"
        )
    if isinstance(config.split, tuple):
        shares = ",".join(f"{share:g}" for share in config.split)
        raise ValueError(
            f"{config.data} is in shards already, so no split can be drawn: leave split= out, or type "
            f"`hopline convert DATASET FOLDER split={shares}` and partition FOLDER with `hopline partition`"
        )
    if world.size == 1:
        return join_shards(config.data, split=config.split)
    return open_sharded(config.data, world, split=config.split)


@contextlib.contextmanager
def _run_folder(name: str, config: RunConfig, world: World) -> Iterator[Path]:
    """The folder of the run: out=, or under runs/ the folder of the run to resume, or a new one.

    Rank 0 decides, and all ranks get its answer. At the end of the context, folders that this call has
    created and that are still empty are removed: the run failed before it wrote anything.
    """
    if config.out is not None:
        yield config.out
        return
    run_folder: Path | None = None
    new_folders: list[Path] = []
    if world.rank == 0:
        run_folder = _newest_run(name, config) if config.resume else None
        if run_folder is None:
            has_parent = RUNS.exists()
            run_folder = _new_folder(name)
            new_folders = [run_folder] if has_parent else [run_folder, RUNS]
    try:
        yield Path(world.broadcast_object(str(run_folder)))
    finally:
        with contextlib.suppress(OSError):  # a folder that is not empty cannot be removed, and stays
            for folder in new_folders:
                folder.rmdir()


def _newest_run(name: str, config: RunConfig) -> Path | None:
    """The folder of the newest run with the same settings and a checkpoint; None if there is none.

    name: of the dataset, with which the folder's name begins.
    """
    # If this run has a method or sampler of the user, the same one may be imported for stored settings too.
    method = to_dict(config)["method"]
    own_sampler = (method.get("sampler") or {}).get("kind", "")
    identity = _identity(config, config.picks_method)
    for folder in sorted(RUNS.glob(f"{glob.escape(name)}-*"), reverse=True):
        try:
            stored = load_config(folder, own_method=method["kind"], own_sampler=own_sampler)
        except ValueError:
            continue
        is_same = _identity(stored, config.picks_method) == identity
        if is_same and (folder / checkpoint.FILE).exists():
            return folder
    return None


def _new_folder(name: str) -> Path:
    """A new run folder. It is created here, so that runs that begin in the same second get one each."""
    by_time = RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = by_time
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = by_time.with_name(f"{by_time.name}-{number}")
        except OSError as error:
            raise ValueError(
                f"cannot write the run folder '{folder}' ({error.strerror or error}): choose another with out=FOLDER"
            ) from error


def _identity(config: RunConfig, any_method: bool) -> RunConfig:
    """The settings that decide whether two runs are the same, with defaults for those that do not.

    A resumed run may show less, run on other ranks, or train for more epochs. any_method: also ignore the
    method, for method=auto.
    """
    launch_defaults = {field.name: field.default for field in dataclasses.fields(LaunchSettings)}
    config = dataclasses.replace(config, method=Auto()) if any_method else config
    return dataclasses.replace(
        config, resume=False, overwrite=False, show=True, out=None, epochs=1, checkpoint_s=0.0, **launch_defaults
    )


def open_data(config: RunConfig) -> Dataset:
    """Return the run's dataset in one process, with the features and the split of the settings."""
    if is_shards(config.data):
        return _open_shards(config, World.alone())
    if isinstance(config.split, tuple):
        data = random_split(open_dataset(config.data, **config.conversion), config.split)
    else:
        data = open_dataset(config.data, split=config.split, **config.conversion)
    if config.edge_arrays == "none":
        data = data.without_edge_arrays()
    if config.features == "normalized":
        return data.normalized()
    if config.features == "standardized":
        return data.standardized()
    if config.features == "one_hot":
        return data.one_hot()
    return data


def _read_weights(content: bytes, suffix: str) -> Any:
    if suffix != ".safetensors":
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    import safetensors.torch  # whoever has such a file has the package, as a rule

    return safetensors.torch.load(content)


DDP_PREFIX = "module."
"""The prefix that torch's DistributedDataParallel adds to the names of weights."""


def load_weights(model: nn.Module, path: Path, *, of_run: bool = False) -> None:
    """Load a `state_dict` file into a model. Nothing in the file is executed (weights_only).

    A checksum beside the file is compared. of_run: whether there must be one, as beside all weights of a run.

    Raises:
        ValueError: The file is missing or damaged, or holds weights of another model.
    """
    if not path.exists():
        reason = ": the run has not finished an epoch, or they were removed" if of_run else ": check the path"
        raise ValueError(f"there are no weights at {path}{reason}")
    check_file(path)
    file = CheckedFile(path)
    if of_run and not file.has_checksum:
        raise ValueError(
            f"there is no {file.checksum_path} to check the weights by: restore it, train again, or have the weights "
            f"read as they are by `hopline infer RUN weights={path}`"
        )
    try:
        weights = _read_weights(file.read(), path.suffix)
    except Exception as error:  # torch, zip and pickle fail in many ways
        reason = error if type(error) in (OSError, ValueError) else type(error).__name__
        raise ValueError(f"{path} is damaged ({reason}): restore it or train again") from error
    is_from_ddp = isinstance(weights, dict) and all(str(name).startswith(DDP_PREFIX) for name in weights)
    if is_from_ddp:
        weights = {name.removeprefix(DDP_PREFIX): value for name, value in weights.items()}
    try:
        model.load_state_dict(weights)
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
        raise ValueError(f"{path} does not hold weights of this model: {reason}") from error
