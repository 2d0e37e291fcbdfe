"""Which rank this process is, by the environment variables of its launcher.

`detect` reads the variables of torchrun, or of Slurm's srun, and returns a `Task`, or None if the process
is alone. Variables that are missing or contradict each other are refused by name.

`read_local_rank_and_node` is for process groups that somebody else has made. It returns only a rank's
number on its host, and the number of the host.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm gives numbers from here on to steps without srun: a batch script, an interactive shell."""
FIRST_PORT = 12_000
"""The lowest port that is made from a Slurm job's number: above those of services."""
NUM_PORTS = 20_000
"""Ports that are made from a Slurm job's number: they end below those that Linux gives away by default."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One process among those that a launcher started."""

    launcher: str
    """"torchrun" or "srun"."""
    rank: int
    """Number of this task among all."""
    size: int
    """Number of all tasks."""
    local_rank: int
    """Number of this task among those of its host."""
    local_size: int
    """Number of tasks on this host."""
    node: int
    """Number of this host. Different on every host."""
    num_nodes: int
    """Number of hosts."""
    address: str
    """Host of rank 0, where the ranks meet."""
    port: int
    """Port of the store at `address`."""
    has_store: bool = False
    """Whether the launcher itself serves the store in which ranks meet."""
    key: str = ""
    """Differs between starts that meet at the same address, such as a run and its restart."""


def detect(environ: Mapping[str, str]) -> Task | None:
    """The task that a launcher started as this process.

    None if it is alone, as in a Slurm allocation without srun.
    """
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read_torchrun(environ)
    is_slurm_step = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    if is_slurm_step and _read_number(environ, "SLURM_STEP_ID") < SPECIAL_STEPS:
        return _read_srun(environ)
    return None


def _read_torchrun(environ: Mapping[str, str]) -> Task | None:
    """The task by the variables of torchrun, which Ray and others set too. None if it is the only task."""
    advice = "start with torchrun, which sets them all, or unset RANK, WORLD_SIZE and LOCAL_RANK"
    rank = _read_number(environ, "RANK", advice)
    size = _read_number(environ, "WORLD_SIZE", advice)
    local_rank = _read_number(environ, "LOCAL_RANK", advice)
    local_size = _read_number(environ, "LOCAL_WORLD_SIZE", advice)
    _check_below("RANK", rank, "WORLD_SIZE", size)
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    if local_size > size:
        raise ValueError(f"LOCAL_WORLD_SIZE is {local_size} but WORLD_SIZE only {size}: {advice}")
    if size == 1:
        return None
    port = _read_number(environ, "MASTER_PORT", advice)
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT is {port}: it must be between 1 and 65535")
    return Task(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=_read_node(environ, first_of_host=rank - local_rank),
        num_nodes=_read_number(environ, "GROUP_WORLD_SIZE", default=-(-size // local_size)),
        address=_read_text(environ, "MASTER_ADDR", advice),
        port=port,
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        key=f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _read_node(environ: Mapping[str, str], *, first_of_host: int) -> int:
    """The number of this host, from torchrun's GROUP_RANK or the NODE_RANK of Ray, Lightning and Kubeflow.

    first_of_host: The first rank of this host. It is the number if both variables are missing. Hosts may
        have different numbers of ranks, so a host cannot count the hosts before it, but no two have the
        same first rank.
    """
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in environ:
            return _read_number(environ, name)
    return first_of_host


class _RankVariables(NamedTuple):
    """Names of the variables in which a launcher says where a rank is."""

    rank: str
    """Variable with the number of the rank."""
    size: str
    """Variable with the number of ranks."""
    local_rank: str
    """Variable with the number of the rank on its host."""
    nodes: tuple[str, ...]
    """Variables with the number of the host. The first one that is set counts."""


_RANK_VARIABLES = (
    _RankVariables(rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK", nodes=("GROUP_RANK", "NODE_RANK")),
    _RankVariables(rank="SLURM_PROCID", size="SLURM_NTASKS", local_rank="SLURM_LOCALID", nodes=("SLURM_NODEID",)),
)
"""Variables of torchrun and of launchers that set the same ones, then those of Slurm."""


def read_local_rank_and_node(environ: Mapping[str, str], rank: int, size: int) -> tuple[int | None, int | None]:
    """(local rank, number of the host) of a rank, as its launcher says. None for what no launcher says.

    Variables may be left from a launcher that started another process, such as a rank of torchrun that
    starts processes of its own. So they count only if their number of ranks, and their rank if they name
    one, are the given ones.
    """
    for names in _RANK_VARIABLES:
        is_this_rank = environ.get(names.rank, str(rank)) == str(rank)
        is_this_size = environ.get(names.size, "") == str(size)
        if is_this_rank and is_this_size and environ.get(names.local_rank, "").isdecimal():
            nodes = [int(environ[name]) for name in names.nodes if environ.get(name, "").isdecimal()]
            return int(environ[names.local_rank]), nodes[0] if nodes else None
    return None, None


def _read_srun(environ: Mapping[str, str]) -> Task | None:
    """The task by the variables of srun. None if it is the only task.

    Slurm names no port. Every task makes the same one from the numbers of the job and of its step.
    """
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank = _read_number(environ, "SLURM_PROCID")
    size = _read_number(environ, size_name)
    local_rank = _read_number(environ, "SLURM_LOCALID")
    node = _read_number(environ, "SLURM_NODEID")
    _check_below("SLURM_PROCID", rank, size_name, size)
    if size == 1:
        return None

    hosts_name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    hosts = expand_hosts(_read_text(environ, hosts_name), hosts_name)
    tasks_per_node = _read_tasks_per_node(environ, size_name, size, len(hosts))
    _check_below("SLURM_NODEID", node, hosts_name, len(tasks_per_node))
    _check_below("SLURM_LOCALID", local_rank, "the number of tasks on this node", tasks_per_node[node])

    job = _read_number(environ, "SLURM_JOB_ID")
    step = _read_number(environ, "SLURM_STEP_ID")
    return Task(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=tasks_per_node[node],
        node=node,
        num_nodes=len(tasks_per_node),
        # A host may be unable to resolve its own name. Tasks on one host need no name.
        address=hosts[0] if len(tasks_per_node) > 1 else "127.0.0.1",
        # Times 7: the first seven steps of consecutive jobs have different ports.
        port=FIRST_PORT + (job * 7 + step) % NUM_PORTS,
        key=f"{job}.{step}",
    )


def _read_tasks_per_node(environ: Mapping[str, str], size_name: str, size: int, num_hosts: int) -> list[int]:
    """[number of nodes]: tasks of the step on each node.

    size_name: The variable that `size`, the number of all tasks, was read from. Errors name it.
    """
    if "SLURM_STEP_TASKS_PER_NODE" in environ:
        name = "SLURM_STEP_TASKS_PER_NODE"
        counts = list(_expand_counts(environ[name], name))
    elif "SLURM_NTASKS_PER_NODE" in environ:
        name = "SLURM_NTASKS_PER_NODE"
        max_per_node = _read_number(environ, name)
        # Every node has the most tasks that it may have, until none are left.
        counts = [max(0, min(max_per_node, size - node * max_per_node)) for node in range(num_hosts)]
    elif num_hosts in (1, size):
        return [size // num_hosts] * num_hosts
    else:
        raise ValueError("SLURM_STEP_TASKS_PER_NODE is missing: start with srun --ntasks-per-node=N")
    if sum(counts) != size:
        raise ValueError(f"{name} is {environ[name]!r}, {sum(counts)} tasks in all, but {size_name} is {size}")
    if len(counts) > num_hosts:
        raise ValueError(f"{name} is {environ[name]!r}, {len(counts)} nodes, but the list of nodes has {num_hosts}")
    return counts


def _expand_counts(text: str, name: str) -> Iterator[int]:
    """The numbers in Slurm's "2(x3),1": 2, 2, 2, 1."""
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ValueError(f"{name} is {text!r}, which is not of the form 2(x3),1")
        yield from itertools.repeat(int(match[1]), int(match[2] or 1))


def expand_hosts(text: str, name: str) -> list[str]:
    """The hosts in Slurm's "node[001-003,7],other": node001, node002, node003, node7, other.

    name: The variable that the text was read from. Errors name it.
    """
    if text.count("[") != text.count("]") or not re.fullmatch(r"[\w.\[\],\s-]+", text):
        raise ValueError(f"{name} is {text!r}, which is not a list of hosts such as node[1-3],other")
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):  # commas outside of brackets
        choices: list[list[str]] = []
        # Plain text and ranges alternate: "rack[0-1]n[1,3]" gives "rack", "0-1", "n", "1,3", "".
        for k, piece in enumerate(re.split(r"\[([^\[\]]*)\]", part.strip())):
            is_range = k % 2 == 1
            choices.append(list(_expand_ranges(piece, text, name)) if is_range else [piece])
        part_hosts = ["".join(choice) for choice in itertools.product(*choices)]
        if "" in part_hosts or any("[" in host or "]" in host for host in part_hosts):
            raise ValueError(f"{name} is {text!r}, which is not a list of hosts such as node[1-3],other")
        hosts += part_hosts
    return hosts


def _expand_ranges(ranges: str, text: str, name: str) -> Iterator[str]:
    """The numbers in "001-003,7" with their leading zeros: "001", "002", "003", "7"."""
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(?P<first>\d+)(?:-(?P<last>\d+))?\s*", part)
        if match is None or int(match["last"] or match["first"]) < int(match["first"]):
            raise ValueError(f"{name} is {text!r}: its range {part!r} cannot be read, expected one such as 001-003")
        num_digits = len(match["first"])
        first = int(match["first"])
        last = int(match["last"] or match["first"])
        yield from (f"{number:0{num_digits}d}" for number in range(first, last + 1))


def _read_text(environ: Mapping[str, str], name: str, advice: str = "start with srun") -> str:
    """The value of a variable that must be set. advice: what an error says to type."""
    if not environ.get(name, "").strip():
        raise ValueError(f"the environment variable {name} is missing: {advice}")
    return environ[name].strip()


def _read_number(
    environ: Mapping[str, str], name: str, advice: str = "start with srun", *, default: int | None = None
) -> int:
    """The value of a variable as a number from 0 on. default: the number if the variable is not set."""
    if default is not None and name not in environ:
        return default
    text = _read_text(environ, name, advice)
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name} is {text!r}, which is not a whole number: {advice}")
    return int(text)


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    """Refuse a number that is not below its limit: RANK, counted from 0, must be below WORLD_SIZE."""
    if value >= limit:
        raise ValueError(f"{name} is {value}, which does not go with {limit_name} = {limit}: count from 0")
