"""Python objects between the ranks of a script, outside of steps.

Any picklable object can be sent. Every operation blocks until it is matched; an interrupt (Ctrl-C) leaves it. Objects
of one rank reach another in the order in which they were sent. Received objects are unpickled, so they are trusted as
much as the script itself.

All functions raise SMPUsageError before `smp.init`, and SMPFailureError when another rank has failed.
"""

import pickle
from typing import Any, TypeVar

from . import _C
from .exceptions import SMPUsageError
from .ranks import DP_GROUP, MP_GROUP, WORLD, CommGroup, RankType
from .state import state

_Kind = TypeVar("_Kind", CommGroup, RankType)


def _dump(obj: Any) -> bytes:
    return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)


def _check_kind(value: _Kind, kind: type[_Kind], what: str) -> _Kind:
    if not isinstance(value, kind):
        names = ", ".join(f"smp.{member.name}" for member in kind)
        raise SMPUsageError(f"the {what} is {value!r}: it must be one of {names}")
    return value


def _refuse_in_region() -> None:
    if _C.in_region() or _C.is_recomputing():
        raise SMPUsageError(
            "ranks were to communicate in a checkpointed module, which runs again for backward on some ranks only, and would wait for the others: "
            "communicate outside of it"
        )


def _members(group: CommGroup) -> list[int]:
    """World ranks of this rank's group."""
    _refuse_in_region()
    return state.require_topology().group(_check_kind(group, CommGroup, "group").value)


def _peer(peer_rank: int, rank_type: RankType, what: str) -> int:
    """World rank of another rank, which is counted within this rank's group of that kind."""
    _refuse_in_region()
    topology = state.require_topology()
    members = topology.group(_check_kind(rank_type, RankType, "rank type").value)
    if isinstance(peer_rank, bool) or not isinstance(peer_rank, int) or not 0 <= peer_rank < len(members):
        raise SMPUsageError(
            f"{what} is {peer_rank!r}: a rank of type smp.{rank_type.name} must be an integer from 0 to "
            f"{len(members) - 1}"
        )
    if members[peer_rank] == topology.rank:
        raise SMPUsageError(
            f"{what} is {peer_rank} of type smp.{rank_type.name}, which is this rank itself: name another rank"
        )
    return members[peer_rank]


def _communicator() -> _C.Communicator:
    if state.communicator is None:
        raise SMPUsageError("there is no connection between ranks: call smp.init() first")
    return state.communicator


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Sends `obj` to another rank. Returns when that rank has taken it with `recv_from`.

    Args:
        obj: any picklable object.
        dest_rank: the receiver, counted as `rank_type` says within this rank's group of that kind.
        rank_type: `smp.WORLD_RANK`, `smp.MP_RANK`, `smp.DP_RANK`, `smp.PP_RANK`, `smp.TP_RANK` or `smp.RDP_RANK`.

    Raises:
        SMPUsageError: the receiver is out of range or this rank itself.

    Example:
        >>> if smp.rank() == 0:
        ...     smp.send({"epoch": 3}, 1, smp.WORLD_RANK)
        ... elif smp.rank() == 1:
        ...     epoch = smp.recv_from(0, smp.WORLD_RANK)["epoch"]
    """
    destination = _peer(dest_rank, rank_type, "dest_rank")
    _communicator().send(destination, _dump(obj))


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """The next object that another rank sent to this one with `send` or `broadcast`; waits for it.

    Raises:
        SMPUsageError: `src_rank` is out of range or this rank itself.
    """
    source = _peer(src_rank, rank_type, "src_rank")
    return pickle.loads(_communicator().recv(source))


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends `obj` to all other members of this rank's group; each of them takes it with `recv_from`.

    Only the sender calls this. Returns when all have taken it.

    Example:
        >>> if smp.rank() == 0:
        ...     smp.broadcast(seed, smp.WORLD)
        ... else:
        ...     seed = smp.recv_from(0, smp.WORLD_RANK)
    """
    members = _members(group)
    if len(members) > 1:
        _communicator().broadcast(_dump(obj), members)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """The objects of all members of this rank's group, in the order of their ranks there.

    Collective over the group. Each entry is a copy, the own one too.

    Example:
        >>> losses = smp.allgather(loss.item(), smp.DP_GROUP)
    """
    members = _members(group)
    payload = _dump(obj)
    contributions = _communicator().allgather(payload, members) if len(members) > 1 else [payload]
    return [pickle.loads(contribution) for contribution in contributions]


def barrier(group: CommGroup = WORLD) -> None:
    """Returns when all members of this rank's group have called it. Collective over the group."""
    members = _members(group)
    if len(members) > 1:
        _communicator().barrier(members)


def mp_barrier() -> None:
    """`barrier` over the ranks of one model."""
    barrier(MP_GROUP)


def dp_barrier() -> None:
    """`barrier` over the ranks with the same pipeline rank."""
    barrier(DP_GROUP)
