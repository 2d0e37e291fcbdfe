"""The memory of the host: that of the machine, or of the containers around the process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hopline.budget.plan import Item, Plan
from hopline.core import partition
from hopline.core.graph import Graph
from hopline.methods.full_batch.settings import FullBatch
from hopline.util.host import HostMemory, host_memory

MIB = 1 << 20
MACHINE = SimpleNamespace(total=64_000 * MIB, available=32_000 * MIB)
NO_LIMIT_V1 = "9223372036854771712"


CONTAINERS: dict[str, tuple[str, dict[str, int | str], tuple[int, int, bool]]] = {
    "no control groups": ("", {}, (64_000, 32_000, False)),
    "no limit": ("0::/", {"memory.max": "max"}, (64_000, 32_000, False)),
    "container with a namespace of its own": ("0::/", {"memory.max": 620, "memory.current": 200}, (620, 420, True)),
    "file pages can be taken back": (
        "0::/",
        {"memory.max": 620, "memory.current": 600, "memory.stat": f"anon 5\ninactive_file {500 * MIB}"},
        (620, 520, True),
    ),
    "nested: an outer group leaves less": (
        "0::/a/b",
        {"a/b/memory.max": 900, "a/b/memory.current": 100, "a/memory.max": 800, "a/memory.current": 700}
        | {"memory.stat": ""},
        (800, 100, True),
    ),
    "throttled from memory.high on": (
        "0::/a",
        {"a/memory.max": "max", "a/memory.high": 300, "a/memory.current": 0},
        (300, 300, True),
    ),
    "path of the machine, not seen from inside": (
        "0::/machine/path/of/the/container",
        {"memory.max": 620, "memory.current": 0},
        (620, 620, True),
    ),
    "outside the namespace": ("0::/../other", {"memory.max": "max"}, (64_000, 32_000, False)),
    "version 1": (
        "5:cpu,cpuacct:/x\n4:memory:/docker/id\n0::/",
        {
            "memory/docker/id/memory.limit_in_bytes": 620,
            "memory/docker/id/memory.usage_in_bytes": 120,
            "memory/docker/id/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}",
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        },
        (620, 520, True),
    ),
    "v1, no limit": ("4:memory:/", {"memory/memory.limit_in_bytes": NO_LIMIT_V1}, (64_000, 32_000, False)),
}
"""The control group of a process, files of groups (numbers are MiB), and (total MiB, available MiB, is_container)."""


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_memory_is_the_least_of_the_machine_and_all_groups(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    process, files, (total, available, is_container) = CONTAINERS[name]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    cgroup = tmp_path / "cgroup"
    for file, content in files.items():
        (cgroup / file).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / file).write_text(f"{content * MIB if isinstance(content, int) else content}\n")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("".join(f"{line}\n" for line in process.splitlines()))
    assert host_memory(cgroup, tmp_path / "proc") == (total * MIB, available * MIB, is_container)


def test_this_machine_has_memory():
    memory = host_memory()
    assert 0 < memory.available <= memory.total <= psutil.virtual_memory().total


def test_metis_is_refused_in_a_small_container(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pymetis")
    indptr = torch.arange(0, 3_000_001, 3)
    graph = Graph(indptr, torch.randint(0, 1_000_000, (3_000_000,), dtype=torch.int32))
    container = HostMemory(total=620 * MIB, available=300 * MIB, is_container=True)
    monkeypatch.setattr(partition, "host_memory", lambda: container)
    with pytest.raises(ValueError, match=r"METIS .*300 MiB .*how='streaming'"):
        partition.make_partition(graph, 4, how="metis")


def test_a_plan_warns_if_tensors_and_process_exceed_the_container():
    item = Item("weights", "host", 10 * MIB)
    plan = Plan(
        method=FullBatch(),
        items=(item,),
        limits={"device": None, "host": 500 * MIB, "disk": None},
        compute_place="host",
        step_bytes=5 * MIB,
        min_step_bytes=5 * MIB,
        steps=1,
        count=8,
        covers="a graph in {} shards",
        process_bytes=200 * MIB,
    )
    assert "plan: the process takes 200 MiB beside these tensors" in plan.lines()
    assert plan.excess_warning(800 * MIB) == ""
    assert "620 MiB" in plan.excess_warning(620 * MIB)
    assert plan.excess_warning(620 * MIB).endswith("set budget.host=420MiB or less")
