"""The `hopline` command: a subcommand, a name, and settings as key=value.

`main` runs one command and turns every error into one line and an exit status:

    0      done
    1      an error of hopline, a rank that failed, or a bad finding of the doctor
    2      a mistake that the user can mend
    128+N  signal N ended the command (130: Ctrl-C)

Settings are those of the classes in `run/settings.py`, so that there is no flag per option. A command first
checks its settings, names and paths, which needs no torch. Only then it imports torch, PyG and Numba, so
that help and refusals come at once. Docstrings of commands and `help=` texts are what `--help` prints.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from hopline import __version__
from hopline.contract import Method, SamplerSettings
from hopline.data.registry import locate, names
from hopline.recipes import RECIPES, find_recipe
from hopline.run.settings import (
    ConvertConfig,
    EvaluateConfig,
    ExportConfig,
    InferConfig,
    PartitionConfig,
    RunConfig,
    check_conversion,
    load_trusted,
)
from hopline.util.config import nearest, override, settings_of
from hopline.util.errors import PeerError, RankError, StageError
from hopline.util.host import keep_freed_memory
from hopline.util.log import print_messages
from hopline.util.output import outlive_output
from hopline.util.own_code import own_settings
from hopline.util.signals import Interrupted

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch Geometric models on graphs that do not fit into memory. Settings are typed as key=value. "
    "--debug shows the traceback of an error.",
)
INTERRUPTED = 130
PIPE_COLUMNS = 140
"""Width of tables in characters, if standard output is not a terminal."""
# `main` answers --keys itself, since typer would ask for missing arguments first.
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings. --keys lists them with their defaults. --keys GROUP describes one group in full.",
    ),
]
SETTINGS = {
    "train": RunConfig,
    "plan": RunConfig,
    "infer": InferConfig,
    "test": EvaluateConfig,
    "export": ExportConfig,
    "convert": ConvertConfig,
    "partition": PartitionConfig,
}


@contextmanager
def _loading() -> Iterator[None]:
    """Import torch and PyG in this context, while Python's garbage collector is off.

    These imports create half a million objects that live as long as the process. The collector would scan
    all of them several times during the imports, 0.7 s together, and once more in the middle of an epoch.
    `gc.freeze` excludes them from later scans.
    """
    # torch is there already after an earlier `_loading`, or if a program that imported it calls `main`. The
    # program has objects of its own, which must not be frozen.
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # Else libraries report at exit that their objects were never freed.
        atexit.register(gc.unfreeze)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"hopline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    # The body is empty: typer only reads the options of `hopline` itself from this signature.
    pass


@app.command()
def train(
    name: Annotated[
        str,
        typer.Argument(
            help=f"A recipe ({', '.join(RECIPES)}, or gas-MODEL-DATASET for historical embeddings), the name of a "
            "dataset, a folder or an .npz file."
        ),
    ] = "demo",
    overrides: Overrides = None,
) -> None:
    """Train, evaluate and test a model, and write a run folder."""
    config = _run_config(name, overrides)
    with _loading():
        from hopline.run.train import train as train_model

    try:
        run = train_model(config)
    except Interrupted as signal:
        # `Interrupted` is a KeyboardInterrupt, for which typer would exit with one status, whatever the
        # signal.
        raise _SignalExit(signal) from None
    if run.rank == 0:  # torchrun and srun start this command once per rank
        print(f"\n{run}")


@app.command()
def plan(
    name: Annotated[str, typer.Argument(help="A recipe, a dataset or a folder, as for train.")] = "demo",
    overrides: Overrides = None,
) -> None:
    """Compare the methods' memory and time per epoch within a budget. Does not train."""
    config = _run_config(name, overrides)

    with _loading():
        from hopline.methods.plan_within import settings_to_type
        from hopline.run.compare_methods import REASON, recommend, table_of
        from hopline.run.train import plan as plan_methods

    candidates = plan_methods(config)
    _print_table(("method", "device", "host", "disk", "epoch", "steps", "how"), table_of(candidates))
    for candidate in candidates:
        if candidate.plan is not None:
            for line in candidate.plan.lines():
                print(f"{candidate.name} {line}")
    best = recommend(candidates)
    if best is None:
        raise ValueError("no method fits this budget: set a larger budget=")
    print(f"recommended: {settings_to_type(best.method)}, {REASON}")


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under the names of their columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    Console(width=width).print(table)


@app.command()
def infer(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    overrides: Overrides = None,
) -> None:
    """Predict with a run's weights, on its own or on new data, and write a file."""
    config = override(InferConfig(), overrides or [])
    # Called for its refusals alone, before torch is imported. So are `load_trusted` and `locate` in other
    # commands.
    load_trusted(folder, config.trust)
    with _loading():
        from hopline.run.infer import predict

    written = predict(folder, config)
    if written is None:  # torchrun and srun start this command once per rank
        return
    columns = f"columns {', '.join(written.columns[:4])}{', ...' if len(written.columns) > 4 else ''}"
    print(f"predictions: {written.file} ({written.num_rows:,} rows; {columns if written.columns else 'no ids'})")
    for name, value in (written.metrics or {}).items():
        print(f"{name}: {value:.4f}")


@app.command("test")
def print_metrics(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    overrides: Overrides = None,
) -> None:
    """Print the metrics of a run's weights, on its own or on new data."""
    config = override(EvaluateConfig(), overrides or [])
    load_trusted(folder, config.trust)
    with _loading():
        from hopline.run.infer import evaluate

    for name, value in evaluate(folder, config).items():
        print(f"{config.split} {name}: {value:.4f}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: .pt or .safetensors.")],
    overrides: Overrides = None,
) -> None:
    """Write a run's weights as a state_dict for PyG and torch, and the names of columns and classes beside them."""
    config = override(ExportConfig(), overrides or [])
    if file.suffix not in (".pt", ".safetensors"):
        raise ValueError(f"{file} must end in .pt or .safetensors: choose one of these formats")
    load_trusted(folder, config.trust)
    from hopline.run import commands

    weights, description = commands.export(folder, file, config)
    print(f"weights: {weights}\ncolumns and classes: {description}")


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="An .npz, .csv, .parquet or .npy file, an OGB or DGL folder, or a dataset's name."
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The dataset folder to write.", show_default=False)
    ] = Path(),
    overrides: Overrides = None,
) -> None:
    """Convert a graph into hopline's format, a folder of plain arrays."""
    if not _is_folder_given(folder):
        raise ValueError(f"say where to write the dataset: hopline convert {source} FOLDER")
    config = override(ConvertConfig(), overrides or [])
    check_conversion(source, folder, config)
    from hopline.run import commands

    with print_messages():
        data = commands.convert(source, folder, config)
    print(f"{data!r}\nwritten to {folder}")
    if "split" in data.meta:
        print(f"split: {data.meta['split']}")


@app.command()
def partition(
    source: Annotated[str, typer.Argument(metavar="DATASET", help="A dataset's folder, file or name.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of shards to write.", show_default=False)
    ] = Path(),
    overrides: Overrides = None,
) -> None:
    """Partition a dataset into shards, one per rank."""
    if not _is_folder_given(folder):
        raise ValueError(f"say where to write the shards: hopline partition {source} FOLDER shards=4")
    config = override(PartitionConfig(), overrides or [])
    locate(source)
    from hopline.run import commands

    print(commands.partition_dataset(source, folder, config))
    print(f"written to {folder}")


def _is_folder_given(folder: Path) -> bool:
    # Without a folder, typer takes the first setting for it.
    return folder != Path() and "=" not in str(folder)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A dataset folder, or a folder of shards.")],
) -> None:
    """Check the checksums and values of a dataset, or of its shards."""
    locate(folder)
    from hopline.data.store import verify as verify_folder
    from hopline.shards.shard import is_shards
    from hopline.shards.verify import verify_shards

    check = verify_shards if is_shards(folder) else verify_folder
    for line in check(folder):
        print(line)
    print(f"{folder} is intact")


@app.command()
def datasets(
    overrides: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """List the datasets known by name, and those in $HOPLINE_DATA."""
    if overrides:
        raise ValueError(
            f"hopline datasets takes no settings, and was given {overrides[0]}: to list another folder, set the "
            "environment variable HOPLINE_DATA"
        )
    _print_table(("name", "what it is", "where"), [[str(cell) for cell in row] for row in names()])


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]) -> None:
    """Rebuild report.html from a run folder."""
    from hopline.report.writer import write_html

    print(f"report: {write_html(folder)}")


@app.command()
def doctor() -> None:
    """Check this machine: versions, cores, memory and kernels."""
    from hopline.run.doctor import examine

    findings = list(examine())
    for subject, text, is_fine in findings:
        mark = "ok " if is_fine else "BAD"
        print(f"{mark}  {subject:<16} {text}")
    if not all(is_fine for _, _, is_fine in findings):
        raise typer.Exit(1)


def _run_config(name: str, overrides: list[str] | None) -> RunConfig:
    """The settings of a recipe or dataset with overrides. A dataset that does not exist is refused."""
    settings = list(overrides or [])
    if "=" in name:  # no name: `hopline train epochs=3` is the demo
        settings.insert(0, name)
        name = "demo"
    imports_torch = any(map(_own_class, settings))
    with _loading() if imports_torch else nullcontext():
        config = override(find_recipe(name)(), settings)
    locate(config.data, options=config.conversion)
    return config


OWN_CLASSES: dict[str, type] = {"method": Method, "method.sampler": SamplerSettings}
"""Settings that may be package.module:Class, a class of the user's. Its module imports torch."""


def _own_class(setting: str) -> tuple[str, str] | None:
    """(key, value) of a setting that names a class of the user's; None for another."""
    key, _, value = setting.partition("=")
    return (key, value) if key in OWN_CLASSES and ":" in value else None


class _SignalExit(Exception):
    """A signal ended a run that can be resumed."""

    def __init__(self, signal: Interrupted) -> None:
        self.number = signal.number
        super().__init__(f"interrupted by {signal.name}. To resume, type the same command with resume=true")


def _print_keys(command: str, before: list[str], groups: list[str]) -> None:
    """Print the settings of a command, a line for each. Groups that are named are printed in full.

    before: words that were typed before --keys. If the first one is a recipe, its values are shown in place
        of the defaults.
    groups: words that were typed after --keys. If there are none, all groups are printed, in short.

    A method or sampler of the user, in either list, is listed with the other settings.
    """
    if command not in SETTINGS:
        raise ValueError(f"hopline {command} has no settings: --keys is for {', '.join(SETTINGS)}")
    # Only `train` and `plan` know recipes and methods.
    is_run = SETTINGS[command] is RunConfig
    recipe = RECIPES.get(before[0]) if is_run and before else None
    recipe_values = None if recipe is None else recipe()
    own_classes = {}
    for word in [*before, *groups] if is_run else ():
        named = _own_class(word)
        if named is not None:
            key, value = named
            own_classes[word] = own_settings(key, value, OWN_CLASSES[key])
    settings = settings_of(SETTINGS[command], recipe_values, own_classes)
    titles = list(dict.fromkeys(setting.group for setting in settings))
    for group in groups:
        if not any(_is_named(title, group) for title in titles):
            hint = nearest(group, titles)
            raise ValueError(f"there is no group {group!r} of settings.{hint} Groups: {', '.join(titles)}.")

    # On a terminal, or with COLUMNS set, lines end at the right edge: that of a setting is cut, the text of a group is
    # wrapped. In a file or pipe lines are whole.
    has_edge = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if has_edge else None
    for title in titles:
        if groups and not any(_is_named(title, group) for group in groups):
            continue
        print(f"\n{title}")
        for setting in settings:
            if setting.group != title:
                continue
            default = "VALUE" if setting.default is None else setting.default
            assignment = f"{setting.key}={default}"
            if groups:
                text = f"{setting.sentence} ({setting.expected})"
                lines = [text] if width is None else textwrap.wrap(text, width - 6, break_on_hyphens=False)
                print("\n      ".join([f"  {assignment}", *lines]))
                continue
            line = f"  {assignment:<34} {setting.sentence}"
            if width is not None and len(line) > width:
                line = f"{line[: width - 1]}…"
            print(line)
    if not groups:
        print(f"\nFor a group in full, type hopline {command} --keys {titles[-1]}")


def _is_named(title: str, name: str) -> bool:
    """Whether a name means a group. "method" means all of "method=KIND", "sampled" only "method=sampled"."""
    return name in (title, *title.split("="))


def main() -> None:
    """Run the command line of this process, and exit. The module docstring has the exit statuses."""
    with outlive_output():  # `hopline train | head` trains to the end
        _main()


def _main() -> None:
    """`main`, where standard output and standard error never fail."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"] or ["--help"]
    if "" not in sys.path:
        # model=my_module:function and method=my_module:Class may name a module of the current folder.
        sys.path.append("")
    # A program that has imported torch and calls `main` keeps its own settings of the heap.
    if "torch" not in sys.modules:
        keep_freed_memory()
    try:
        _check_command(arguments)
        if "--keys" in arguments and arguments[0] in _commands():
            index = arguments.index("--keys")
            _print_keys(arguments[0], before=arguments[1:index], groups=arguments[index + 1 :])
            sys.exit(0)
        status = app(arguments, standalone_mode=False) or 0
    except typer.Exit as exit_request:
        status = exit_request.exit_code
    except _SignalExit as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(128 + interruption.number)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        if debug:
            raise
        message, status = _describe_error(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(status)
    if status == INTERRUPTED:  # typer may turn Ctrl-C into this status itself
        print("interrupted", file=sys.stderr)
    sys.exit(status)


def _commands() -> list[str]:
    return [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


def _check_command(arguments: list[str]) -> None:
    """Raise ValueError for a command that does not exist, with a suggestion. arguments: at least one."""
    commands = _commands()
    command = arguments[0]
    if not command.startswith("-") and command not in commands:
        hint = nearest(command, commands) or f" Commands: {', '.join(commands)}."
        raise ValueError(f"there is no command {command!r}.{hint}")


def _describe_error(error: BaseException) -> tuple[str, int]:
    """(a line for the user, the exit status) for an exception. Errors of hopline itself get the name of their type."""
    # An error in a stage of the pipeline is told as the stage raised it.
    if isinstance(error, StageError) and error.__cause__ is not None:
        error = error.__cause__
    if hasattr(error, "format_message"):  # typer's own errors
        message = str(error.format_message())  # type: ignore[attr-defined]
        option = str(getattr(error, "option_name", "")).lstrip("-")
        if option:
            message = f"{message}. Settings are key=value: type {option}=VALUE."
        return (message, 2)
    if isinstance(error, OSError) and error.strerror:
        file = f"{error.filename}: " if error.filename else ""
        return (f"{file}{error.strerror}: check the path, its permissions and the free space", 2)
    text = str(error) or type(error).__name__
    if isinstance(error, PeerError | RankError):
        return (text, 1)
    if isinstance(error, ValueError | OSError):
        return (text, 2)
    return (f"{type(error).__name__}: {text} (run again with --debug for the traceback)", 1)
