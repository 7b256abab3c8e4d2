"""What launchers say of a process, and that a script gives the same on all of them."""

import os
import subprocess
import sys
from pathlib import Path

import launch_cases
import pytest
import torch
from cluster import LAUNCHERS, rank_environment

from smp import SMPUsageError
from smp.launchers import Launch, Store, expand_counts, find_launch, first_host

TIMEOUT_S = 150
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_COMM_", "PMI_", "MPI_LOCAL", "SLURM_")
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "1234",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "2",
}  # fmt: skip


def environment(**variables):
    """This process's environment with what launchers set replaced by `variables`."""
    return {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)} | variables


@pytest.fixture
def launched(monkeypatch):
    """`launched(**variables)`: what find_launch() says when a launcher sets these."""

    def find(**variables):
        for name in os.environ:
            if name.startswith(VARIABLES):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return find_launch()

    return find


def test_each_launcher_says_where_a_process_stands(launched):
    assert launched() == Launch("none", 0, 1, 0, 1, None)
    assert launched(**TORCHRUN) == Launch("torchrun", 5, 8, 1, 4, Store("head", 1234, True))
    assert launched(**OPEN_MPI) == Launch("mpirun", 3, 4, 1, 2, None)
    assert launched(PMI_RANK="1", PMI_SIZE="3", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1") == Launch(
        "mpirun", 1, 3, 0, 1, None
    )
    assert launched(**SLURM) == Launch("srun", 4, 5, 1, 2, Store("gpu07", 15_000 + 100 * 64 + 2, False))
    assert launched(**SLURM, MASTER_ADDR="other", MASTER_PORT="99").store == Store("other", 99, False)
    own = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert launched(**own) == Launch("the environment (RANK, WORLD_SIZE)", 1, 2, None, None, Store("a", 7, False))


def test_of_two_launchers_the_inner_one_counts(launched):
    # One torchrun for each node, started by mpirun or srun.
    assert launched(**TORCHRUN, **OPEN_MPI, **SLURM).launcher == "torchrun"
    # mpirun in an allocation of Slurm; that of MPICH starts its own processes by srun.
    assert launched(**OPEN_MPI, **SLURM).launcher == "mpirun"
    assert launched(**SLURM, PMI_RANK="1", PMI_SIZE="3").launcher == "mpirun"
    # A batch script runs once, not in a step.
    assert launched(SLURM_PROCID="0", SLURM_NTASKS="4").size == 1
    assert launched(**OPEN_MPI, **SLURM, **{**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}).size == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is 2", "RANK, MASTER_ADDR, MASTER_PORT are not set", "torchrun"]),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, ["MASTER_PORT is not set"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE is 'two'", "whole number"]),
        ({**TORCHRUN, "RANK": "8"}, ["rank 8 of 8"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "-1"}, ["rank -1 of 4"]),
    ],
)
def test_contradictions_are_named(launched, variables, words):
    with pytest.raises(SMPUsageError) as error:
        launched(**variables)
    assert [word for word in words if word not in str(error.value)] == []


def test_the_notation_of_slurm():
    assert first_host("login") == "login"
    assert first_host("a1,a2") == "a1"
    assert first_host("gpu[007-009,12],login") == "gpu007"
    assert first_host("rack[2,4]n[3-5].x,b") == "rack2n3.x"
    assert expand_counts("4(x2),3") == [4, 4, 3]
    assert expand_counts("") == []


# ---- the same on all


def start(launcher, folder):
    """Runs launch_cases.py on two ranks; returns exit code and output."""
    script = [launch_cases.__file__, str(folder)]
    if launcher in LAUNCHERS:
        commands, environments = [LAUNCHERS[launcher](2, *script)], [rank_environment()]
    elif launcher == "launch":
        commands, environments = [[sys.executable, *script, "launch"]], [environment()]
    else:
        commands = [[sys.executable, *script]] * 2
        port = str(20_000 + os.getpid() % 10_000)
        environments = [
            environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
            if launcher == "environment"
            else environment(
                SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="localhost", SLURM_JOB_ID=str(os.getpid()),
                SLURM_LOCALID=str(rank), SLURM_STEP_TASKS_PER_NODE="2",
            )
            for rank in range(2)
        ]  # fmt: skip
    processes = [
        subprocess.Popen(
            command,
            env={**rank_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    return [process.returncode for process in processes], "\n".join(texts)


@pytest.mark.parametrize("launcher", [*LAUNCHERS, "launch", "environment", "srun"])
def test_training_gives_the_same_bits_on_every_launcher(launcher, tmp_path):
    codes, text = start(launcher, tmp_path)
    assert set(codes) == {0}, text
    expected = launch_cases.plain()
    for rank in range(2):
        facts = torch.load(Path(tmp_path) / f"rank{rank}.pt")
        assert facts.pop("rank") == rank
        assert facts.pop("local") == (None if launcher == "environment" else [rank, 2])
        assert facts.pop("mpi") == (launcher == "mpirun"), "libmpi is loaded exactly where it is used"
        assert facts.pop("objects") == [{"rank": 0}, {"rank": 1}]
        assert facts.keys() == expected.keys()
        for name, value in facts.items():
            assert torch.equal(value, expected[name]), f"{name} on rank {rank}"
