"""Under every engine ranks train as one process does, and the engine's process group stays the engine's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.world import World
from hopline.util.host import num_cores
from tests.support.launched import environment, free_port
from tests.support.ranks import train
from tests.support.runs import losses, method, sage, small

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "engines"
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"]
COMMANDS = {"torchrun": TORCHRUN, "fabric": [sys.executable], "accelerate": ACCELERATE, "ray": [sys.executable]}
NEEDS = {"torchrun": "torch", "fabric": "lightning", "accelerate": "accelerate", "ray": "ray"}
FILES = {
    "torchrun": "torchrun_own_group",
    "fabric": "lightning_fabric",
    "accelerate": "hf_accelerate",
    "ray": "ray_train",
}


def run(*command: str) -> str:
    """What a command prints, in an environment without a word of a launcher."""
    variables = environment(RAY_DEDUP_LOGS="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    done = subprocess.run(command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def skip_without(engine: str) -> None:
    if importlib.util.find_spec(NEEDS[engine]) is None:
        pytest.skip(f"{NEEDS[engine]} is not installed: type make test-engines")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(World.alone(), "sage")


@pytest.mark.engines
@pytest.mark.parametrize("engine", COMMANDS)
def test_ranks_of_an_engine_train_fail_and_train_again(engine: str, tmp_path: Path, alone: dict[str, Any]):
    skip_without(engine)
    run(*COMMANDS[engine], "-m", "tests.engines.in_engine", engine, str(tmp_path))
    found = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in range(2)]
    assert found[1]["first"]["kind"] == "ValueError"
    assert "rank 1 stopped with ValueError: the labels of rank 1 are wrong" in found[0]["first"]["error"]
    data = small()
    wrapped = losses(hl.Trainer(sage(data), data, method(), epochs=2, show=False).fit())
    for rank, one in enumerate(found):
        after = one["after"]
        assert after["losses"] == pytest.approx(alone["losses"], abs=1e-9)
        assert after["metrics"] == alone["metrics"]
        for name, numbers in alone["weights"].items():
            assert after["weights"][name] == pytest.approx(numbers, abs=1e-6), name
        assert one["wrapped"] == pytest.approx(wrapped, rel=1e-4)
        assert one["seat"] == {"rank": rank, "size": 2, "local_rank": rank, "local_size": 2, "node": 0}
        assert one["threads"] == max(1, num_cores() // 2)
    print(engine, "losses", found[0]["after"]["losses"], "one process", alone["losses"])
    print(engine, "OMP_NUM_THREADS", found[0]["omp"], "set by the", found[0]["set_by"])


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["lightning", "fabric", "accelerate", "torchrun"])
def test_an_engine_divides_our_loaders_as_it_divides_pygs(engine: str):
    skip_without("fabric" if engine == "lightning" else engine)
    command = TORCHRUN if engine == "accelerate" else COMMANDS.get(engine, [sys.executable])
    printed = run(*command, "-m", "tests.engines.loaders", engine)
    print(engine, printed)
    results = [json.loads(line.removeprefix("RESULT ")) for line in printed.splitlines() if line.startswith("RESULT ")]
    seeds_per_rank = {"lightning": [920, 920], "fabric": [920, 920], "accelerate": [1000, 1000], "torchrun": [919, 920]}
    assert len(results) == {"lightning": 6, "fabric": 3, "accelerate": 3, "torchrun": 4}[engine]
    for name, numbers, num_distinct in results:
        expected = [1839, 1839] if "without world" in name else seeds_per_rank[engine]
        assert (numbers, num_distinct) == (expected, 1839), name


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three steps of 512 seeds an epoch."""
    folder = tmp_path_factory.mktemp("engines") / "graph"
    small(num_nodes=3000, num_edges=30_000, num_train=1500, num_valid=500).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(graph: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the examples in one process, whose batches are as large as those of two ranks."""
    out = tmp_path_factory.mktemp("alone") / "run"
    data = hl.open(graph)
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    hl.Trainer(model, data, hl.Sampled(fanouts=(10, 10), batch_size=512), epochs=3, out=out, show=False).fit()
    return out


def losses_in(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "epoch"]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert losses_in(folder) == pytest.approx(losses_in(expected), rel=1e-5)
    weights = {name: torch.load(path / "last.pt") for name, path in (("ours", folder), ("expected", expected))}
    torch.testing.assert_close(weights["ours"], weights["expected"], rtol=1e-3, atol=1e-4)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["torchrun", "fabric", "accelerate"])
def test_an_example_trains_as_one_process(engine: str, graph: str, expected: Path, tmp_path: Path):
    skip_without(engine)
    print_messages = run(*COMMANDS[engine], str(EXAMPLES / f"{FILES[engine]}.py"), graph, str(tmp_path / "run"))
    assert re.search(r"^test accuracy 0\.\d{4} on 2 ranks$", print_messages, flags=re.MULTILINE), print_messages
    assert_same_run(tmp_path / "run", expected)
    print(engine, "losses", losses_in(tmp_path / "run"), "one process", losses_in(expected))


@pytest.mark.engines
def test_a_worker_of_ray_is_killed_and_the_run_goes_on_to_the_bit(graph: str, expected: Path, tmp_path: Path):
    skip_without("ray")
    mark = Path(graph).parent / "killed"
    stored: dict[str, Path] = {}
    for name in ("whole", "killed"):
        if name == "whole":
            mark.write_text("nobody is killed")
        else:
            mark.unlink()
        print_messages = run(sys.executable, "-m", "tests.engines.ray_killed", graph, str(tmp_path / name))
        result = json.loads(print_messages.split("RESULT ")[1].splitlines()[0])
        assert result["metrics"]["test"] > 0.5
        stored[name] = Path(result["checkpoint"])
    assert mark.read_text().isdecimal()
    first_step = int((Path(graph).parent / "first_step").read_text())
    assert first_step == 4  # it went on from what was reported to Ray after the three steps of the first epoch
    assert_same_run(stored["whole"], expected)
    assert losses_in(stored["killed"]) == losses_in(stored["whole"])
    for file in ("last.pt", "best.pt"):
        ours, whole = (torch.load(stored[name] / file) for name in ("killed", "whole"))
        assert all(torch.equal(ours[name], whole[name]) for name in whole)
    print("ray losses", losses_in(stored["killed"]), "one process", losses_in(expected))


def test_the_examples_are_short():
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} == set(FILES.values())
    for file in files:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        assert len(lines) < 50, file
        assert lines[-2] == 'if __name__ == "__main__":'


def manifest(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: type make test-engines")
    return yaml.safe_load((EXAMPLES / name).read_text())


def on_this_host(text: str, graph: str, out: Path) -> str:
    """A command of a cluster, for a host without a GPU and with folders of its own."""
    changes = {"/data/graph": graph, "/data/runs/one": str(out), "device=cuda": "device=cpu epochs=1 show=false"}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def run_in_shell(command: str, **variables: str) -> None:
    path = f"{BIN}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command], cwd=ROOT, env=environment(PATH=path, **variables), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.engines
def test_the_command_of_the_kubernetes_manifest_trains(graph: str, tmp_path: Path):
    job = manifest("kubernetes_trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    command = on_this_host(" ".join([*trainer["command"], *trainer["args"]]), graph, tmp_path / "run")
    # What the runtime of Kubeflow Trainer sets, for one node with two processes.
    told = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    run_in_shell(command, **told, PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=str(free_port()))
    assert json.loads((tmp_path / "run" / "config.json").read_text())
    assert len(losses_in(tmp_path / "run")) == 1


@pytest.mark.engines
def test_the_command_of_the_skypilot_file_trains(graph: str, tmp_path: Path):
    task = manifest("skypilot.yaml")
    assert task["num_nodes"] == 2
    command = on_this_host(task["run"], graph, tmp_path / "run").replace("29500", str(free_port()))
    told = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    run_in_shell(command, **told, SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2")
    assert len(losses_in(tmp_path / "run")) == 1
