"""Rules of the code: no import cycle, libraries where they belong, no writes into others' objects, names that exist."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "hopline"
TESTS = Path(__file__).resolve().parent
PATHS = {
    ".".join(("hopline", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
"""The file of every module, by its dotted name."""

ONLY_IN = {
    "numba": ("ops/cpu/",),
    "llvmlite": ("ops/cpu/",),
    "triton": ("ops/gpu/",),
    "torch_geometric": ("nn/", "data/", "pyg/", "shards/convs/", "methods/sampled/pyg_loader.py", "run/models.py"),
    "typer": ("cli.py",),
    "pickle": (),
}
"""Where a library may be imported: beginnings of paths below src/hopline."""


def imported_modules(path: Path, *, at_top: bool) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of each import that can run, those for type checkers left out.

    at_top: only imports that run when the module itself is imported, so none inside a function.
    """
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif at_top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # `from package import name` runs the module `package.name` if there is one.
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in PATHS else str(node.module), node.lineno
        else:
            pending += ast.iter_child_nodes(node)


def test_modules_import_each_other_without_a_cycle():
    imports = {
        name: {other for other, _ in imported_modules(path, at_top=True) if other in PATHS and other != name}
        for name, path in PATHS.items()
    }

    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle = " <- ".join(error.args[1])
        pytest.fail(f"import cycle: {cycle}. Move what both need into a module below them, or import it where used")


def test_libraries_are_imported_only_where_they_belong():
    misplaced = []
    for path in PATHS.values():
        place = str(path.relative_to(SOURCE))
        for module, line in imported_modules(path, at_top=False):
            folders = ONLY_IN.get(module.split(".")[0])
            if folders is not None and not place.startswith(folders):
                misplaced.append(f"{place}:{line} imports {module}, which belongs in {' '.join(folders) or 'no file'}")

    assert not misplaced, "\n".join(misplaced)


def test_nothing_is_unpickled():
    texts = {path.name: path.read_text() for path in PATHS.values()}
    forbidden = ("allow_pickle=True", "weights_only=False")

    assert [name for name, text in texts.items() if any(word in text for word in forbidden)] == []


WRITES_INTO_OTHERS = {
    "nn/attributes.py": "a snapshot of a model is put back into its modules",
    "shards/convs/": "PyG's convs run with another `propagate` while they run over shards",
    "nn/probe.py": "caches of PyG's convs are emptied for a call, and come back after it",
    "nn/push_and_pull.py": "convs with GCN's norm take degrees from the graph while they run on a batch",
    "nn/traced_program.py": "leaves of a copy of a module record that they are called",
    "units/loss_at_outputs.py": "a train_step must get the model itself, which answers with outputs that are known",
    "pyg/door.py": "PyG's flags, and operators of pyg-lib that are to be ours, say what is there",
    "device/pinned.py": "a tensor holds what keeps its memory registered, for as long as it lives",
    "util/lazy.py": "a package keeps the names that were imported on first use",
    "util/output.py": "other standard streams take the place of those of `sys` during a run",
}
"""Files that write into objects of others, and why. Everywhere else an object is complete when it is constructed."""


def writes_into_others(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of writes by `__dict__`, `vars`, `setattr` or `__setattr__` into anything but self or cls."""
    changing = {"update", "setdefault", "pop", "clear"}

    def is_another(node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return not (isinstance(node, ast.Name) and node.id in ("self", "cls", "_own"))

    def of(node: ast.AST) -> ast.expr | None:
        """The object whose dict this is."""
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            return node.value
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
            return node.args[0]
        return None

    for node in ast.walk(ast.parse(path.read_text())):
        written: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changing:
            written = of(node.func.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            written = node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written = of(node.value)
        if written is not None and is_another(written):
            yield node.lineno, ast.unparse(node)


def test_nobody_writes_into_an_object_of_others():
    wrong = []
    excused = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        excuse = next((start for start in WRITES_INTO_OTHERS if name.startswith(start)), None)
        for line, code in writes_into_others(path):
            if excuse is None:
                wrong.append(f"{name}:{line}: {code}. Give the object what it needs when it is constructed")
            else:
                excused.add(excuse)

    assert not wrong, "\n".join(wrong)
    assert excused == set(WRITES_INTO_OTHERS), "take out of WRITES_INTO_OTHERS what writes nothing any more"


def test_no_graph_is_copied_field_by_field():
    """A call `Graph(graph.indptr, ...)` would drop the fields that it does not name. `with_arrays` has them all."""
    places = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in PATHS.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Graph"
        if re.search(r"graph\.(indptr|indices|edge)\b", ast.unparse(node))
    ]
    assert places == []


NAME = re.compile(r"\bhopline(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"\bfrom (hopline[\w.]*) import ((?:\w+(?:, )?)+)")


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of what a file imports from hopline, or names in a text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).split(".")[0] == "hopline":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, name) for name in NAME.findall(node.value))
            for module, names in IMPORT.findall(node.value):
                yield from ((node.lineno, f"{module}.{name}") for name in names.removesuffix(", ").split(", "))


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


def test_every_name_of_hopline_in_a_test_exists():
    """Tests that only run on a GPU or in an environment of their own would show a stale name there alone."""
    stale = []
    for path in sorted(TESTS.rglob("*.py")):
        for line, name in names_in(path):
            if not exists(name):
                stale.append(f"{path.relative_to(TESTS)}:{line}: {name}")

    assert not stale, "\n".join(stale)
