"""The shape of the code, enforced: import layers, sizes, tests that mirror modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "hopline"
MODULES = sorted(p for p in SOURCE.rglob("*.py") if "__pycache__" not in p.parts)

ROWS = [
    [
        "ops",
        "spec",
        "trace",
        "metrics",
        "progress",
        "validate",
        "memory",
        "cores",
        "interrupt",
        "heart",
        "place",
        "report_svg",
        "files",
        "handles",
        "dlpack",
        "pinned",
        "meter",
        "rescue",
        "explain",
        "recording",
    ],
    ["graph", "batch", "schedule", "world", "report_parts"],
    ["tree", "sharded", "transports", "exchange", "partial", "report_html"],
    ["tables", "sampling", "nn", "pipeline", "report", "settings", "transfer", "divide", "halo", "lossy"],
    [
        "data",
        "callbacks",
        "launch",
        "interop",
        "tree_sampling",
        "partition",
        "staging",
        "stale",
        "predict",
        "tuning",
        "budget",
    ],
    ["work", "loader", "shards", "layer_files", "kept", "split", "watch"],
    ["captured", "update", "cut", "rejoin", "collective", "shard_data", "parts", "layerwise", "guard"],
    ["methods", "infer", "models", "checkpoint", "sharing", "placement"],
    ["sweep", "shard_infer", "shard_by_shard", "shared_history", "mixing", "device_history", "plan", "replayed"],
    ["history_unit", "nano_pieces", "sweep_needed", "evaluation_process", "keep", "measure", "sampled_forms"],
    ["history_batches", "nano", "evaluation_thread"],
    ["history", "evaluation"],
    ["historical"],
    ["full_batch"],
    ["planning"],
    ["choose"],
    ["trainer"],
    ["run", "doctor"],
    ["recipes", "predictions"],
    ["cli"],
    ["__main__", "__init__"],
]
"""A module imports only from rows above its own in this list; modules of one row never import each other."""

ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}

ONLY_IN = {
    "numba": (
        "ops/cpu.py",
        "ops/cpu_access.py",
        "ops/cpu_core.py",
        "ops/cpu_pages.py",
        "ops/cpu_reduce.py",
        "ops/cpu_synthetic.py",
        "ops/cpu_tree.py",
    ),
    "llvmlite": ("ops/cpu_core.py", "ops/cpu_pages.py"),
    "triton": ("ops/gpu",),
    "torch_geometric": ("nn/", "data/", "models.py"),
    "typer": ("cli.py",),
    "pickle": (),
}
"""Who may import what."""

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def _name(path: Path) -> str:
    """The unit that the layers speak of: a module, or a package as a whole."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import, wherever it stands, but those for type checkers only."""
    tree = ast.parse(path.read_text())
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                submodule = node.module == "hopline" or _is_package(str(node.module))
                yield f"{node.module}.{alias.name}" if submodule else str(node.module), node.lineno


def _is_package(module: str) -> bool:
    return (SOURCE.parent / module.replace(".", "/") / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_only_from_lower_layers(path: Path):
    own = _name(path)
    assert own in ROW_OF, f"{own} has no row: add it to ROWS and to docs/design.md"
    for module, line in _imports(path):
        if not module.startswith("hopline."):
            continue
        other = module.split(".")[1]
        if other == own or other not in ROW_OF:
            continue
        assert ROW_OF[other] < ROW_OF[own], f"{path.name}:{line} imports {module}, which is not in a lower row"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_heavy_libraries_only_where_they_belong(path: Path):
    place = str(path.relative_to(SOURCE))
    for module, line in _imports(path):
        allowed = ONLY_IN.get(module.split(".")[0])
        assert allowed is None or place.startswith(allowed or ("-",)), f"{place}:{line} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_are_small(path: Path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
            size = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert size <= MAX_FUNCTION_LINES, f"{node.name} has {size} lines"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if not p.name.startswith("__")], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_every_module_has_its_tests(path: Path):
    relative = path.relative_to(SOURCE)
    assert (ROOT / "tests" / relative.parent / f"test_{relative.name}").exists()


def test_every_unit_test_has_its_module():
    modules = {str(p.relative_to(SOURCE).with_name(f"test_{p.name}")) for p in MODULES}
    extra = {"test_structure.py", "test_tiny.py", "test_examples.py", "test_documents.py", "test_results.py"}
    extra |= {"test_golden.py", "test_golden_gpu.py", "test_formats.py"}
    for test in (ROOT / "tests").rglob("test_*.py"):
        relative = str(test.relative_to(ROOT / "tests"))
        assert relative in modules | extra or relative.startswith(("equivalence/", "interop/", "ops/test_ops.py")), (
            relative
        )


def test_nothing_is_unpickled():
    for path in MODULES:
        text = path.read_text()
        assert "allow_pickle=True" not in text
        assert "weights_only=False" not in text


def test_the_design_page_shows_these_layers():
    page = (ROOT / "docs" / "design.md").read_text()
    for row in ROWS[:-1]:
        assert all(name in page for name in row)
