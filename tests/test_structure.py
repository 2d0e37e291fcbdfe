"""Two rules of the code's shape: no import cycle at run time, and libraries only where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "hopline"
PATHS = {
    ".".join(("hopline", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
"""The file of every module, by its dotted name."""

ONLY_IN = {
    "numba": ("ops/cpu/",),
    "llvmlite": ("ops/cpu/",),
    "triton": ("ops/gpu/",),
    "torch_geometric": ("nn/", "data/", "shards/convs/", "methods/sampled/pyg_loader.py", "run/models.py"),
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
