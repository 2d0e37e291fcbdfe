"""Which rank this process is, by the environment variables of its launcher.

`detect` reads the variables of torchrun, or of Slurm's srun, and returns a `Task`, `ALONE` if the process
is. Variables that are missing or contradict each other are refused by name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm gives numbers from here on to steps without srun: a batch script, an interactive shell."""
FIRST_PORT = 12_000
"""The lowest port that is made from a Slurm job's number: above those of services."""
NUM_PORTS = 20_000
"""Ports that are made from a Slurm job's number: they end below those that Linux gives away by default."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which one of several processes a process is, and where it meets the others. By default it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of the rank among those of its host."""
    local_size: int = 1
    node: int = 0
    """Number of its host. Different on every host."""
    address: str = "127.0.0.1"
    """Host of the store in which the ranks meet."""
    port: int = 0
    """Port of the store. 0: the process that serves it takes a free one."""
    key: str = ""
    """Differs between starts that meet in the same store, such as a run and its restart."""


@dataclass(frozen=True, kw_only=True)
class Task(Rank):
    """One process among those that a launcher started. With devices= it starts ranks of its own."""

    launcher: str = ""
    """"torchrun", "srun", or "" without a launcher."""
    num_nodes: int = 1
    has_store: bool = False
    """Whether the launcher itself serves the store in which ranks meet."""


ALONE = Task()
"""A process that no launcher started, or the only one that it started."""


def detect(environ: Mapping[str, str]) -> Task:
    """The task that a launcher started as this process. `ALONE` without one, as in a Slurm allocation without srun."""
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read_torchrun(environ)
    is_slurm_step = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    if is_slurm_step and _read_number(environ, "SLURM_STEP_ID") < SPECIAL_STEPS:
        return _read_srun(environ)
    return ALONE


def _read_torchrun(environ: Mapping[str, str]) -> Task:
    """The task by the variables of torchrun, which Ray and others set too."""
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
        return ALONE
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


def _read_srun(environ: Mapping[str, str]) -> Task:
    """The task by the variables that srun sets for each of its steps.

    Slurm names no port. Every task makes the same one from the numbers of the job and of its step.
    """
    rank = _read_number(environ, "SLURM_PROCID")
    size = _read_number(environ, "SLURM_STEP_NUM_TASKS")
    local_rank = _read_number(environ, "SLURM_LOCALID")
    node = _read_number(environ, "SLURM_NODEID")
    _check_below("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", size)
    if size == 1:
        return ALONE

    counts_text = _read_text(environ, "SLURM_STEP_TASKS_PER_NODE")
    tasks_per_node = list(_expand_counts(counts_text, "SLURM_STEP_TASKS_PER_NODE"))
    if sum(tasks_per_node) != size:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE is {counts_text!r}, {sum(tasks_per_node)} tasks in all, but "
            f"SLURM_STEP_NUM_TASKS is {size}"
        )
    _check_below("SLURM_NODEID", node, "the number of nodes", len(tasks_per_node))
    _check_below("SLURM_LOCALID", local_rank, "the number of tasks on this node", tasks_per_node[node])

    job = _read_number(environ, "SLURM_JOB_ID")
    step = _read_number(environ, "SLURM_STEP_ID")
    first_host = _read_first_host(environ, "SLURM_STEP_NODELIST")
    return Task(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=tasks_per_node[node],
        node=node,
        num_nodes=len(tasks_per_node),
        # A host may be unable to resolve its own name. Tasks on one host need no name.
        address=first_host if len(tasks_per_node) > 1 else "127.0.0.1",
        # Times 7: the first seven steps of consecutive jobs have different ports.
        port=FIRST_PORT + (job * 7 + step) % NUM_PORTS,
        key=f"{job}.{step}",
    )


def _expand_counts(text: str, name: str) -> Iterator[int]:
    """The numbers in Slurm's "2(x3),1": 2, 2, 2, 1."""
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ValueError(f"{name} is {text!r}, which is not of the form 2(x3),1")
        yield from itertools.repeat(int(match[1]), int(match[2] or 1))


def _read_first_host(environ: Mapping[str, str], name: str) -> str:
    """The first host in Slurm's "node[001-003,7],other": node001."""
    text = _read_text(environ, name)
    first, *_ = re.split(r",(?![^\[]*\])", text)  # commas outside of brackets
    host = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"{name} is {text!r}, which is not a list of hosts such as node[1-3],other")
    return host


def _read_text(environ: Mapping[str, str], name: str, advice: str = "start with srun") -> str:
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
    if value >= limit:
        raise ValueError(f"{name} is {value}, which does not go with {limit_name} = {limit}: count from 0")
