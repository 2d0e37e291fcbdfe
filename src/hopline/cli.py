"""The `hopline` command: a name plus key=value overrides, never a flag per option."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hopline import __version__
from hopline.contract import Method
from hopline.data.registry import locate, names
from hopline.recipes import RECIPES, find_recipe
from hopline.run.settings import (
    ConvertConfig,
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
from hopline.util.own_code import own_settings
from hopline.util.signals import Interrupted

# A command imports what it computes with (torch, PyG, Numba) only after its settings, names and paths have proved to be
# right, so that help and refusals come at once.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch Geometric models on graphs that do not fit. Settings are key=value; --debug shows tracebacks.",
)
INTERRUPTED = 130
"""The exit status of a command that was ended by Ctrl-C."""
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value settings, for example model.hidden=64")]
# Declared for the help text alone: `main` answers --keys before typer asks for a source.
ShowKeys = Annotated[
    bool, typer.Option("--keys", help="List all settings with their defaults; --keys GROUP describes those of a group.")
]
SETTINGS = {
    "train": RunConfig,
    "plan": RunConfig,
    "infer": InferConfig,
    "export": ExportConfig,
    "convert": ConvertConfig,
    "partition": PartitionConfig,
}
"""What each command takes as key=value."""


@contextmanager
def _loading() -> Iterator[None]:
    """A context in which torch, PyG and the engine are imported: without Python's garbage collector.

    These imports make half a million objects that live as long as the process. The collector would look through all of
    them several times on the way, 0.7 s together, and later once more in the middle of an epoch.
    """
    if "torch" in sys.modules:  # a program that calls `main` has objects of its own
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else libraries report at the end that their objects were never freed


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hopline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    name: Annotated[
        str,
        typer.Argument(
            help=f"A recipe ({', '.join(RECIPES)}, or gas-MODEL-DATASET for historical "
            "embeddings), a dataset, or a folder"
        ),
    ] = "demo",
    overrides: Overrides = None,
    keys: ShowKeys = False,
) -> None:
    """Train, evaluate, test, and write a run folder."""
    config = _config(name, overrides)
    with _loading():
        from hopline.run import train as run

    try:
        done = run.train(config)
    except Interrupted as signal:
        raise _SignalExit(signal) from None  # typer would make one and the same status of every interruption
    if done.rank > 0:  # torchrun and srun start this command once per rank
        return
    print(f"\n{done}")
    return


@app.command()
def plan(
    name: Annotated[str, typer.Argument(help="A recipe, a dataset, or a folder, as for train")] = "demo",
    overrides: Overrides = None,
    keys: ShowKeys = False,
) -> None:
    """Show what each method would take of a budget=8GiB, and how long an epoch would last; trains nothing."""
    config = _config(name, overrides)
    from rich.console import Console
    from rich.table import Table

    with _loading():
        from hopline.run import train as run
        from hopline.run.compare_methods import recommend, table_of

    found = run.plan(config)
    table = Table("method", "device", "host", "disk", "an epoch", "steps", "how")
    for row in table_of(found):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for candidate in found:
        for line in [] if candidate.plan is None else candidate.plan.lines():
            print(f"{candidate.name} {line}")
    best = recommend(found)
    if best is None:
        raise ValueError("no method fits this budget: give more, or make the model or the batches smaller")
    print(f"recommended: method={best.name}, whose steps are the fastest of those that fit")
    return


@app.command()
def infer(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    overrides: Overrides = None,
    keys: ShowKeys = False,
) -> None:
    """Predict with a run's best weights and write an .npy file."""
    config = override(InferConfig(), overrides or [])
    load_trusted(folder, config.trust)
    with _loading():
        from hopline.run.infer import predict

    written = predict(folder, config)
    if written is not None:  # torchrun and srun start this command once per rank
        print(f"predictions: {written}")
    return


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    file: Annotated[Path, typer.Argument(help="The .pt file to write")],
    overrides: Overrides = None,
    keys: ShowKeys = False,
) -> None:
    """Write a run's weights as a plain state_dict that PyG and torch load."""
    config = override(ExportConfig(), overrides or [])
    load_trusted(folder, config.trust)
    from hopline.run import commands

    print(f"weights: {commands.export(folder, file, config)}")
    return


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A .npz, .csv, .parquet or .npy file, an OGB or DGL folder, or a name")],
    folder: Annotated[Path, typer.Argument(help="The dataset folder to write")] = Path(),
    overrides: Overrides = None,
    keys: ShowKeys = False,
) -> None:
    """Bring a graph into hopline's format: a folder of plain arrays that opens at once."""
    if folder == Path() or "=" in str(folder):
        raise ValueError(f"say where to write the dataset: hopline convert {source} FOLDER")
    config = override(ConvertConfig(), overrides or [])
    check_conversion(source, folder, config)
    from hopline.run import commands

    with print_messages():
        data = commands.convert(source, folder, config)
    print(f"{data!r}\nwritten to {folder}")
    if "split" in data.meta:
        print(f"split: {data.meta['split']}")
    return


@app.command(context_settings={"ignore_unknown_options": True})
def partition(
    source: Annotated[str, typer.Argument(metavar="DATASET", help="A dataset folder, file or name")],
    folder: Annotated[Path, typer.Argument(help="The folder of shards to write")] = Path(),
    overrides: Annotated[list[str] | None, typer.Argument(help="shards=N how=metis, or --shards N --how metis")] = None,
    keys: ShowKeys = False,
) -> None:
    """Cut a dataset into shards that ranks open one each: nodes, in-edges, halo maps, rows, labels."""
    if folder == Path() or "=" in str(folder) or str(folder).startswith("-"):
        raise ValueError(f"say where to write the shards: hopline partition {source} FOLDER shards=4")
    config = override(PartitionConfig(), _without_dashes(overrides or []))
    locate(source)
    from hopline.run import commands

    print(commands.partition_dataset(source, folder, config))
    print(f"written to {folder}")
    return


def _without_dashes(arguments: list[str]) -> list[str]:
    """`--key value` as key=value."""
    found, words = [], iter(arguments)
    for word in words:
        if word.startswith("--") and "=" not in word:
            word = f"{word}={next(words, '')}"
        found.append(word.removeprefix("--"))
    return found


@app.command()
def verify(folder: Annotated[Path, typer.Argument(help="A dataset folder, or a folder of shards")]) -> None:
    """Check every byte and every value of a dataset folder, or that shards are one dataset."""
    locate(folder)
    from hopline.data.store import verify as verify_folder
    from hopline.shards.shard import is_shards
    from hopline.shards.verify import verify_shards

    for line in verify_shards(folder) if is_shards(folder) else verify_folder(folder):
        print(line)
    print(f"{folder} is intact")


@app.command()
def datasets(
    overrides: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """List the datasets that can be opened by name, and those in the folder that HOPLINE_DATA names."""
    if overrides:
        raise ValueError(
            f"hopline datasets takes no settings, and was given {overrides[0]}: to list another folder, set the "
            "environment variable HOPLINE_DATA"
        )
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it is", "where")
    for row in names():
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")]) -> None:
    """Write a run's report.html again from its files."""
    from hopline.report.writer import write_html

    print(f"report: {write_html(folder)}")


@app.command()
def doctor() -> None:
    """Look at this machine: versions, cores, memory, kernels."""
    from hopline.run.doctor import examine

    findings = list(examine())
    for what, finding, fine in findings:
        print(f"{'ok ' if fine else 'BAD'}  {what:<16} {finding}")
    if not all(fine for _, _, fine in findings):
        raise typer.Exit(1)


def _config(name: str, overrides: list[str] | None) -> RunConfig:
    """A recipe with other settings, on a dataset that exists; `hopline train epochs=3` is the demo with one."""
    settings = list(overrides or [])
    if "=" in name:
        name, settings = "demo", [name, *settings]
    with _loading() if any(map(_names_method, settings)) else nullcontext():  # importing it imports torch
        config = override(find_recipe(name)(), settings)
    locate(config.data, options=config.conversion)
    return config


def _names_method(setting: str) -> bool:
    """Whether it is method=package.module:Class, a method of the user's own."""
    return setting.startswith("method=") and ":" in setting


class _SignalExit(Exception):
    """A signal ended a run that can go on."""

    def __init__(self, signal: Interrupted) -> None:
        self.number = signal.number
        super().__init__(f"interrupted by {signal.name}. To resume, type the same command with resume=true")


def _print_keys(command: str, before: list[str], wanted: list[str]) -> None:
    """Every setting on a line of its own, by groups; of a group that is named, with all that there is to say.

    before: what was typed before --keys: perhaps a recipe, whose values are shown in place of the defaults. A method of
    the user's own, here or among the groups, is shown with the others.
    """
    if command not in SETTINGS:
        raise ValueError(f"hopline {command} has no settings: --keys is for {', '.join(SETTINGS)}")
    is_run = SETTINGS[command] is RunConfig
    recipe = RECIPES.get(before[0]) if is_run and before else None
    typed = [word for word in [*before, *wanted] if is_run and _names_method(word)]
    own = {word: own_settings("method", word.partition("=")[2], Method) for word in typed}
    found = settings_of(SETTINGS[command], None if recipe is None else recipe(), own)
    titles = list(dict.fromkeys(setting.group for setting in found))
    for group in wanted:
        if not any(_is_in(group, title) for title in titles):
            hint = nearest(group, titles)
            raise ValueError(f"there is no group {group!r} of settings.{hint} Groups: {', '.join(titles)}.")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for title in titles:
        if wanted and not any(_is_in(group, title) for group in wanted):
            continue
        print(f"\n{title}")
        for setting in (s for s in found if s.group == title):
            typed = f"{setting.key}={'VALUE' if setting.default is None else setting.default}"
            if wanted:
                print(f"  {typed}\n      {setting.sentence} ({setting.expected})")
            else:
                line = f"  {typed:<34} {setting.sentence}"
                print(line if width is None or len(line) <= width else f"{line[: width - 1]}…")
    if not wanted:
        print(f"\nA group in full: hopline {command} --keys {titles[-1]}")


def _is_in(name: str, title: str) -> bool:
    """Whether a group is meant by a name: "method" is all of "method=sampled" and so on, "sampled" one of them."""
    return name in (title, *title.split("="))


def main() -> None:
    """Run the command; a user's mistake ends in one sentence and status 2."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"] or ["--help"]
    if "" not in sys.path:
        sys.path.append("")  # model=my_module:function and method=my_module:Class find one in the current folder
    if "torch" not in sys.modules:  # else a program has called this, whose settings are its own
        keep_freed_memory()
    try:
        _check_command(arguments)
        if "--keys" in arguments and arguments[0] in _commands():
            at = arguments.index("--keys")
            _print_keys(arguments[0], arguments[1:at], arguments[at + 1 :])
            sys.exit(0)
        status = app(arguments, standalone_mode=False) or 0
    except typer.Exit as done:
        status = done.exit_code
    except _SignalExit as ended:
        print(ended, file=sys.stderr)
        sys.exit(128 + ended.number)
    except BrokenPipeError:  # of `hopline train --keys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at its end, and fails
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        _fail(*_sentence(error), debug)
    if status == INTERRUPTED:  # typer may turn Ctrl-C into this status itself
        print("interrupted", file=sys.stderr)
    sys.exit(status)


def _commands() -> list[str]:
    return [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]


def _check_command(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _commands():
        raise ValueError(f"there is no command {arguments[0]!r}.{nearest(arguments[0], _commands())}")


def _sentence(error: BaseException) -> tuple[str, int]:
    """(what to tell the user, exit status): 2 for what the user can mend, 1 for what we should."""
    if isinstance(error, StageError) and error.__cause__ is not None:
        error = error.__cause__
    if hasattr(error, "format_message"):  # typer's own errors
        option = str(getattr(error, "option_name", "")).lstrip("-")
        hint = f" Settings are key=value: type {option}=VALUE." if option else ""
        return f"{error.format_message()}.{hint}" if hint else str(error.format_message()), 2  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}: check the path, its permissions and the free space", 2
    text = str(error) or type(error).__name__
    if isinstance(error, PeerError | RankError):
        return text, 1
    if isinstance(error, ValueError | OSError):
        return text, 2
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)", 1


def _fail(sentence: str, status: int, debug: bool) -> NoReturn:
    if debug:
        raise  # the one being handled
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(status)
