"""Ranks and groups of this process.

World ranks are numbered over all processes. Every process belongs to one group of each kind: MP (one complete model),
DP (same pipeline rank), PP (the partitions of one replica), TP (peers that split modules) and RDP (same parameters).
The rank in a group is the index among the sorted world ranks of its members. All functions raise SMPUsageError before
`smp.init`; none of them communicates.
"""

import enum
from typing import NoReturn

from .exceptions import SMPUsageError
from .launchers import find_launch
from .state import state


class CommGroup(enum.Enum):
    """A group of ranks, for `broadcast`, `allgather` and `barrier`; also as `smp.WORLD`, `smp.MP_GROUP`, ..."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """How a rank is counted, for `send` and `recv_from`; also as `smp.WORLD_RANK`, `smp.MP_RANK`, ..."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

WORLD_RANK = RankType.WORLD_RANK
MP_RANK = RankType.MP_RANK
DP_RANK = RankType.DP_RANK
PP_RANK = RankType.PP_RANK
TP_RANK = RankType.TP_RANK
RDP_RANK = RankType.RDP_RANK


def is_initialized() -> bool:
    """True after `smp.init`."""
    return state.initialized


def is_tracing() -> bool:
    """True while a model is traced to decide its partition; models are partitioned without tracing, so False."""
    return False


def num_microbatches() -> int:
    """Number of microbatches of a step."""
    return state.require_cfg().microbatches


def rank() -> int:
    """World rank of this process."""
    return state.require_topology().rank


def size() -> int:
    """Number of processes."""
    return state.require_topology().size


def _local(index: int) -> int:
    world_size = size()
    launch = find_launch()
    value = (launch.local_rank, launch.local_size)[index]
    if value is None:
        raise SMPUsageError(
            f"which of the {world_size} ranks share a host is not known, since the launcher does not say: start the script with mpirun, "
            "torchrun or srun, or set LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return value


def local_rank() -> int:
    """Rank among the processes of this host, as the launcher says; scripts choose their device by it."""
    return _local(0)


def local_size() -> int:
    """Number of processes on this host, as the launcher says."""
    return _local(1)


def pp_rank() -> int:
    """Pipeline rank: the partition that this process holds."""
    return state.require_topology().pp_rank


def pp_size() -> int:
    """Number of partitions."""
    return state.require_topology().pp_size


def tp_rank() -> int:
    """Rank among the peers that split modules."""
    return state.require_topology().tp_rank


def tp_size() -> int:
    """Number of ranks that split a module."""
    return state.require_topology().tp_size


def rdp_rank() -> int:
    """Rank among those that hold the same parameters."""
    return state.require_topology().rdp_rank


def rdp_size() -> int:
    """Number of ranks that hold the same parameters."""
    return state.require_topology().rdp_size


def dp_rank() -> int:
    """Rank among those with the same pipeline rank."""
    return state.require_topology().dp_rank


def dp_size() -> int:
    """Number of ranks with the same pipeline rank."""
    return state.require_topology().dp_size


def mp_rank() -> int:
    """Rank among those that hold one complete model."""
    return state.require_topology().mp_rank


def mp_size() -> int:
    """Number of ranks that hold one complete model."""
    return state.require_topology().mp_size


def get_mp_group() -> list[int]:
    """World ranks of this process's MP group, ascending."""
    return state.require_topology().group("mp")


def get_dp_group() -> list[int]:
    """World ranks of this process's DP group, ascending."""
    return state.require_topology().group("dp")


def get_pp_group() -> list[int]:
    """World ranks of this process's PP group, ascending."""
    return state.require_topology().group("pp")


def get_tp_group() -> list[int]:
    """World ranks of this process's TP group, ascending."""
    return state.require_topology().group("tp")


def get_rdp_group() -> list[int]:
    """World ranks of this process's RDP group, ascending."""
    return state.require_topology().group("rdp")


def _no_process_group(group: CommGroup) -> NoReturn:
    state.require_topology()
    function = "get_world_process_group" if group is WORLD else f"get_{group.value}_process_group"
    raise SMPUsageError(
        f"smp.{function}() has nothing to return: torch.distributed groups come with data parallelism, which this "
        "version does not have yet; use smp.broadcast, smp.allgather and smp.barrier between ranks"
    )


def get_world_process_group() -> NoReturn:
    """The torch.distributed group of all ranks. Raises SMPUsageError: it comes with data parallelism."""
    _no_process_group(WORLD)


def get_mp_process_group() -> NoReturn:
    """The torch.distributed group of the MP group. Raises SMPUsageError: it comes with data parallelism."""
    _no_process_group(MP_GROUP)


def get_dp_process_group() -> NoReturn:
    """The torch.distributed group of the DP group. Raises SMPUsageError: it comes with data parallelism."""
    _no_process_group(DP_GROUP)


def get_pp_process_group() -> NoReturn:
    """The torch.distributed group of the PP group. Raises SMPUsageError: it comes with data parallelism."""
    _no_process_group(PP_GROUP)


def get_tp_process_group() -> NoReturn:
    """The torch.distributed group of the TP group. Raises SMPUsageError: it comes with data parallelism."""
    _no_process_group(TP_GROUP)


def get_rdp_process_group() -> NoReturn:
    """The torch.distributed group of the RDP group. Raises SMPUsageError: it comes with data parallelism."""
    _no_process_group(RDP_GROUP)
