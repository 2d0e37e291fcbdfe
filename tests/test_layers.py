"""Layers of folders: a folder imports only from the rows below its own. Imports for type checkers count too."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "hopline"

# From the bottom up. In a row, folders to the right may import those to their left of the same group; groups, which
# "|" divides, do not import each other.
ROWS = (
    "ops | util | metrics",
    "device core",
    "tasks",
    "distributed pipeline tables report nn data",
    "contract units | layerwise",
    "budget",
    "shards inference | interop | pyg",
    "methods/partitioned methods/sampled | methods/partitioned methods/historical",
    "methods/full_batch methods",
    "training",
    "run recipes",
    "cli",
)
ABOVE = {"training", "run", "recipes", "cli"}
"""Folders above the methods."""
DOORS = ("__init__", "__main__", "extend")
"""They name what users import, and stand above all."""


def folder_of(path: Path) -> str:
    """The folder of a file, of `methods/` each method's; for a file at the top its name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts == ("budget", "plan"):
        return "contract"  # budgets and plans name its jobs, and it names them: two files of one contract
    if parts[0] == "methods":
        return "/".join(parts[:2]) if len(parts) > 2 else "methods"
    return parts[0]


def file_of(name: str) -> Path | None:
    """The file of a dotted name, whose last part may be a name in the module before it."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    if path.with_suffix(".py").exists():
        return path.with_suffix(".py")
    if (path / "__init__.py").exists():
        return path / "__init__.py"
    return file_of(name.rpartition(".")[0]) if name.count(".") > 1 else None


def may_import() -> dict[str, set[str]]:
    """By folder, the folders that it may import."""
    allowed: dict[str, set[str]] = {}
    below: set[str] = set()
    for row in ROWS:
        for group in row.split(" | "):
            earlier: set[str] = set()
            for folder in group.split():
                allowed[folder] = allowed.get(folder, set()) | below | earlier
                earlier.add(folder)
        below |= set(row.replace("|", " ").split())
    return allowed


def imports() -> list[tuple[str, str, str]]:
    """(folder, imported folder, place) of every import from another folder, those within functions too."""
    crossings = []
    for path in sorted(SOURCE.rglob("*.py")):
        importer = folder_of(path)
        for node in ast.walk(ast.parse(path.read_text())) if importer not in DOORS else ():
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hopline":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("hopline.")]
            for name in names:
                file = file_of(name)
                imported = importer if file is None else folder_of(file)
                if imported != importer:
                    crossings.append((importer, imported, f"{path.relative_to(SOURCE)}:{node.lineno} imports {name}"))
    return crossings


def test_every_folder_has_its_row():
    allowed = may_import()
    unknown = {folder_of(path) for path in SOURCE.rglob("*.py")} - set(allowed) - set(DOORS)
    assert not unknown, f"{', '.join(sorted(unknown))}: add it to a row of ROWS, above all folders that it imports"


def test_a_folder_imports_only_from_below():
    allowed = may_import()
    wrong = []
    for importer, imported, place in imports():
        if imported not in allowed[importer]:
            wrong.append(f"{place}: {importer} stands below {imported}. Move what both need to {importer} or lower")
    assert not wrong, "\n".join(wrong)


def test_folders_above_the_methods_ask_a_method_and_not_which_it_is():
    known = ("methods/sampled", "methods/historical", "methods/full_batch")
    recipes = {"recipes"}  # runs with a method of their choice
    wrong = [place for importer, imported, place in imports() if imported in known and importer in ABOVE - recipes]
    assert not wrong, "\n".join([*wrong, "give Method an answer, or list the method in methods/listed.py"])


def test_only_tasks_ask_for_the_kind_of_labels():
    """Elsewhere a kind is a value that is handed on. Its answers are `LABELS` and the task."""
    asking = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if folder_of(path) != "tasks" else ():
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            words = {c.value for part in compared for c in ast.walk(part) if isinstance(c, ast.Constant)}
            if words & {"single", "multi", "binary", "regression"}:
                asking.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not asking, f"{', '.join(asking)}: give `Labels` in tasks/labels.py an answer"


def test_every_folder_opens_with_a_paragraph():
    silent = []
    for path in SOURCE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path.parent != SOURCE and len(text.split()) < 25:
            silent.append(str(path.relative_to(SOURCE)))
    assert not silent, f"{', '.join(silent)}: say what is in the folder, what to read first, and what others rely on"
