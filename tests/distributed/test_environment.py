"""Launchers are recognised by their environment variables."""

from __future__ import annotations

import pytest

from hopline.distributed.environment import ALONE, FIRST_PORT, NUM_PORTS, detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[08-10],big",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def without(environ: dict[str, str], *names: str, **changes: str) -> dict[str, str]:
    return {name: value for name, value in (environ | changes).items() if name not in names}


def test_torchrun_is_recognised_by_its_variables():
    place = detect(TORCHRUN)
    assert (place.launcher, place.rank, place.size, place.local_rank, place.local_size) == ("torchrun", 5, 8, 1, 4)
    assert (place.node, place.num_nodes, place.address, place.port) == (1, 2, "node1", 29500)
    assert not place.has_store
    agent = detect(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert agent.has_store
    assert agent.key != place.key
    rays = detect(without(TORCHRUN | {"NODE_RANK": "3"}, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert (rays.node, rays.num_nodes) == (3, 2)
    both = detect(TORCHRUN | {"NODE_RANK": "3"})
    assert both.node == 1


@pytest.mark.parametrize("sizes", [(4, 4), (1, 3), (3, 1), (2, 2, 4), (1, 1, 2)], ids=str)
def test_hosts_of_any_size_have_different_numbers_without_a_word_of_the_launcher(sizes: tuple[int, ...]):
    nodes = []
    rank = 0
    for host, local_size in enumerate(sizes):
        for local_rank in range(local_size):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(sum(sizes))}
            variables |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}
            place = detect(without(TORCHRUN | variables, "GROUP_RANK", "GROUP_WORLD_SIZE"))
            nodes.append((host, place.node))
            rank += 1
    assert len(set(nodes)) == len({node for _, node in nodes}) == len(sizes)


def test_torchrun_inside_of_srun_is_torchrun():
    place = detect(SRUN | TORCHRUN)
    assert place.launcher == "torchrun"


def test_srun_is_recognised_by_its_variables():
    place = detect(SRUN)
    assert (place.launcher, place.rank, place.size, place.local_rank, place.local_size) == ("srun", 3, 7, 1, 2)
    assert (place.node, place.num_nodes, place.address, place.has_store) == (1, 4, "gpu08", False)
    assert FIRST_PORT <= place.port < FIRST_PORT + NUM_PORTS
    last = detect(SRUN | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"})
    assert (last.local_size, last.port) == (1, place.port)
    other = detect(SRUN | {"SLURM_STEP_ID": "1"})
    assert other.port != place.port


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # ranks of one host need no name of it
        ({"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a"}, (7, 1, "127.0.0.1")),
        # a step on some nodes of a larger job
        ({"SLURM_NTASKS": "99", "SLURM_JOB_NODELIST": "x[1-50]"}, (2, 4, "gpu08")),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, (2, 4, "gpu08")),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0"}, (1, 4, "gpu08")),
    ],
    ids=str,
)
def test_the_variables_of_a_step_give_local_size_hosts_and_address(
    changes: dict[str, str], expected: tuple[int, int, str]
):
    place = detect(SRUN | changes)
    assert (place.local_size, place.num_nodes, place.address) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin", "MASTER_PORT": "1"},
        without(SRUN, "SLURM_PROCID"),  # salloc
        without(SRUN, "SLURM_STEP_ID"),  # sbatch without srun
        SRUN | {"SLURM_STEP_ID": "4294967291"},  # the step of a batch script
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # an interactive step
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
    ids=range(8),
)
def test_alone(environ: dict[str, str]):
    assert detect(environ) == ALONE


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_torchrun_needs_all_its_variables(name: str):
    with pytest.raises(ValueError, match=f"variable {name} is missing"):
        detect(without(TORCHRUN, name))


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_JOB_ID",
    ],
)
def test_srun_needs_its_variables(name: str):
    with pytest.raises(ValueError, match=rf"variable {name} is missing"):
        detect(without(SRUN, name))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK is 8, which does not go with WORLD_SIZE = 8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1', which is not a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, which does not go with LOCAL_WORLD_SIZE = 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9 but WORLD_SIZE only 8"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        (SRUN | {"SLURM_PROCID": "7"}, "SLURM_PROCID is 7, which does not go with SLURM_STEP_NUM_TASKS = 7"),
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "8"},
            r"SLURM_STEP_TASKS_PER_NODE is '2\(x3\),1', 7 tasks in all, but SLURM_STEP_NUM_TASKS is 8",
        ),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "SLURM_STEP_TASKS_PER_NODE is '2x3', which is not of the form"),
        (SRUN | {"SLURM_NODEID": "4"}, "SLURM_NODEID is 4"),
        (SRUN | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID is 2"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[8-"}, "SLURM_STEP_NODELIST is 'gpu"),
    ],
    ids=range(12),
)
def test_variables_that_contradict_each_other_are_named(environ: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a,b,c", "a"),
        ("node[001-003,7],other", "node001"),
        ("n[9-11]", "n9"),
        ("rack[0-1]n[1,3]", "rack0n1"),
        ("a-b[1-2].example.org,c_d", "a-b1.example.org"),
        ("[1-2]x", "1x"),
        ("10.0.0.[1-2]", "10.0.0.1"),
        ("n[08],m", "n08"),
    ],
)
def test_ranks_meet_on_the_first_host_of_the_list(hosts: str, first: str):
    place = detect(SRUN | {"SLURM_STEP_NODELIST": hosts})
    assert place.address == first


@pytest.mark.parametrize("hosts", ["n[1-2", "n1]", "n[a-b]", "n[]", ",a", "n[1[2]]", "a b;c", "["])
def test_a_list_of_hosts_that_cannot_be_read_is_refused(hosts: str):
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST is "):
        detect(SRUN | {"SLURM_STEP_NODELIST": hosts})
