"""How this process was started: what launchers tell the ranks in environment variables.

`mpirun` (the ranks meet over MPI), `torchrun`, `srun` and `smp.launch` (they meet at a store of torch.distributed and
connect by TCP). Whoever starts processes in another way sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import re
import sys
from dataclasses import dataclass

from .exceptions import SMPUsageError

# Where srun does not tell a port: one of so many, by the number of the job and its step.
_FIRST_PORT = 15_000
_NUM_PORTS = 20_000


@dataclass(frozen=True)
class Store:
    """The key-value store where ranks meet. `hosted`: somebody else (the agent of torchrun) runs it already."""

    host: str
    port: int
    hosted: bool


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process.

    Attributes:
        launcher: its name.
        rank, size: world rank and number of ranks.
        local_rank, local_size: the same among the ranks of this host; None where the launcher does not say.
        store: where the ranks meet; None where they meet over MPI.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    store: Store | None


def find_launch() -> Launch:
    """The launch of this process; of one rank where nothing says that there are more.

    Raises:
        SMPUsageError: the variables contradict each other, or one is missing.
    """
    for find in (_torchrun, _mpirun, _variables, _srun, _other_mpi):
        launch = find()
        if launch is not None:
            if not 0 <= launch.rank < launch.size:
                raise SMPUsageError(
                    f"{launch.launcher} says rank {launch.rank} of {launch.size}: ranks are 0 to size - 1"
                )
            return launch
    return Launch("none", 0, 1, 0, 1, None)


def _number(name: str, default: int | None = None) -> int | None:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise SMPUsageError(f"the environment variable {name} is {text!r}: it must be a whole number") from None


def _torchrun() -> Launch | None:
    """Also of one rank: then what started torchrun, once for each node say, does not count."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return _variables() or Launch("torchrun", 0, 1, 0, 1, None)


def _variables() -> Launch | None:
    size = _number("WORLD_SIZE", 1)
    assert size is not None
    if size <= 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise SMPUsageError(
            f"WORLD_SIZE is {size} but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: start the script with "
            "`torchrun --nproc-per-node N script.py` or `mpirun -np N python script.py`, which set all that is needed"
        )
    rank, port = _number("RANK"), _number("MASTER_PORT")
    assert rank is not None and port is not None
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = Store(os.environ["MASTER_ADDR"], port, hosted)
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the environment (RANK, WORLD_SIZE)"
    return Launch(name, rank, size, _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE"), store)


def _mpirun() -> Launch | None:
    """Open MPI, or an MPI that somebody else (mpi4py) has started."""
    size = _number("OMPI_COMM_WORLD_SIZE", 1)
    rank = _number("OMPI_COMM_WORLD_RANK", 0)
    mpi4py = sys.modules.get("mpi4py.MPI")
    if mpi4py is not None and mpi4py.Is_initialized():
        size, rank = mpi4py.COMM_WORLD.Get_size(), mpi4py.COMM_WORLD.Get_rank()
    assert size is not None and rank is not None
    if size <= 1:
        return None
    local_rank = _number("OMPI_COMM_WORLD_LOCAL_RANK", _number("MPI_LOCALRANKID"))
    local_size = _number("OMPI_COMM_WORLD_LOCAL_SIZE", _number("MPI_LOCALNRANKS"))
    return Launch("mpirun", rank, size, local_rank, local_size, None)


def _other_mpi() -> Launch | None:
    """MPICH and its relatives."""
    size = max(_number("PMI_SIZE", 1) or 1, _number("MPI_LOCALNRANKS", 1) or 1)
    if size <= 1:
        return None
    rank = _number("PMI_RANK", _number("MPI_LOCALRANKID", 0))
    assert rank is not None
    return Launch("mpirun", rank, size, _number("MPI_LOCALRANKID"), _number("MPI_LOCALNRANKS"), None)


def _srun() -> Launch | None:
    """A step of Slurm. Its variables are there in batch scripts too, and below the mpirun of an MPI that starts its own processes by
    srun: only the processes of a step count themselves.
    """
    size, rank = _number("SLURM_STEP_NUM_TASKS", 1), _number("SLURM_PROCID")
    assert size is not None
    if size <= 1 or rank is None or _number("PMI_SIZE", size) != size:
        return None
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "localhost"
    host = os.environ.get("MASTER_ADDR") or first_host(nodes)
    job = (_number("SLURM_JOB_ID", 0) or 0) * 64 + (_number("SLURM_STEP_ID", 0) or 0)
    port = _number("MASTER_PORT", _FIRST_PORT + job % _NUM_PORTS)
    assert port is not None
    per_node = expand_counts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number("SLURM_NODEID", 0) or 0
    local_size = per_node[node] if node < len(per_node) else None
    return Launch("srun", rank, size, _number("SLURM_LOCALID"), local_size, Store(host, port, False))


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation: "gpu[07-09,12],login" begins with gpu07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def expand_counts(counts: str) -> list[int]:
    """Counts in Slurm's notation, one for each node: "4(x2),3" is [4, 4, 3]."""
    result: list[int] = []
    for item in filter(None, counts.split(",")):
        count, _, times = item.partition("(x")
        result += [int(count)] * int(times.rstrip(")") or 1)
    return result
