"""Objects between ranks: which ranks are meant, what is refused, and that objects arrive as they were."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from smp import _C, communication, ranks
from smp.config import load_config
from smp.exceptions import SMPUsageError
from smp.state import State, state

TIMEOUT_S = 60


class _StateOfThread(threading.local):
    """Stands in for the state of a process, one for each thread."""

    def __init__(self) -> None:
        self.state = State()


def run_ranks(
    monkeypatch: pytest.MonkeyPatch, bodies: list[Callable[[], Any]], *, partitions: int, placement: str = "cluster"
) -> list[Any]:
    """Runs each body as one rank, in threads over the local transport; gives their results."""
    of_thread = _StateOfThread()

    class Proxy:
        def __getattr__(self, name: str) -> Any:
            return getattr(of_thread.state, name)

    monkeypatch.setattr(communication, "state", Proxy())
    monkeypatch.setattr(ranks, "state", Proxy())
    transports = _C.make_local_transports(len(bodies))
    results: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        of_thread.state.topology = _C.Topology(rank, len(bodies), partitions, 1, placement)
        of_thread.state.communicator = _C.Communicator(transports[rank])
        try:
            results[rank] = bodies[rank]()
        except Exception as error:
            logging.exception("rank %d", rank)
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a rank waits forever"
    for transport in transports:
        transport.close()
    return results


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a transport."""
    monkeypatch.setattr(state, "topology", _C.Topology(0, 1, 1, 1, "cluster"))
    monkeypatch.setattr(state, "cfg", load_config(environment={}))
    monkeypatch.setattr(state, "communicator", None)


def test_objects_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = [{"epoch": 3}, None, [1, "two", 3.0], b"\0" * 100_000]

    def sender() -> None:
        for obj in objects:
            communication.send(obj, 1, ranks.WORLD_RANK)

    def receiver() -> list[Any]:
        return [communication.recv_from(0, ranks.WORLD_RANK) for _ in objects]

    assert run_ranks(monkeypatch, [sender, receiver], partitions=2)[1] == objects


def test_ranks_are_counted_within_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # Spread: MP groups are {0, 2} and {1, 3}.
    def first() -> None:
        communication.send(ranks.rank(), 1, ranks.MP_RANK)

    def second() -> Any:
        return communication.recv_from(0, ranks.MP_RANK)

    results = run_ranks(monkeypatch, [first, first, second, second], partitions=2, placement="spread")
    assert results == [None, None, 0, 1]


def test_broadcast_is_taken_with_recv_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def sender() -> None:
        communication.broadcast("seed", ranks.WORLD)

    def receiver() -> Any:
        return communication.recv_from(1, ranks.WORLD_RANK)

    assert run_ranks(monkeypatch, [receiver, sender, receiver], partitions=3) == ["seed", None, "seed"]


def test_allgather_is_in_the_order_of_group_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> list[Any]:
        gathered = communication.allgather(ranks.rank(), ranks.DP_GROUP)
        communication.barrier()
        communication.mp_barrier()
        communication.dp_barrier()
        return gathered

    # Cluster: DP groups are {0, 2} and {1, 3}.
    assert run_ranks(monkeypatch, [body] * 4, partitions=2) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_barrier_waits_for_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[int] = []

    def body() -> int:
        arrived.append(ranks.rank())
        communication.barrier(ranks.WORLD)
        return len(arrived)

    assert run_ranks(monkeypatch, [body] * 3, partitions=3) == [3, 3, 3]


@pytest.mark.usefixtures("alone")
def test_one_rank_needs_no_transport() -> None:
    obj = [1]
    (copy,) = communication.allgather(obj, ranks.WORLD)
    assert copy == obj
    assert copy is not obj
    communication.broadcast(obj, ranks.MP_GROUP)
    communication.barrier()
    communication.mp_barrier()
    communication.dp_barrier()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rank", [-1, 1, True, "0", None])
def test_ranks_out_of_range_are_refused(rank: Any) -> None:
    with pytest.raises(SMPUsageError, match=r"dest_rank is .*MP_RANK must be an integer from 0 to 0"):
        communication.send(1, rank, ranks.MP_RANK)
    with pytest.raises(SMPUsageError, match="src_rank is"):
        communication.recv_from(rank, ranks.WORLD_RANK)


@pytest.mark.usefixtures("alone")
def test_a_rank_cannot_talk_to_itself() -> None:
    with pytest.raises(SMPUsageError, match="this rank itself"):
        communication.send(1, 0, ranks.WORLD_RANK)
    with pytest.raises(SMPUsageError, match="this rank itself"):
        communication.recv_from(0, ranks.PP_RANK)


@pytest.mark.usefixtures("alone")
def test_groups_and_rank_types_are_not_mixed_up() -> None:
    with pytest.raises(SMPUsageError, match=r"group is .*smp\.WORLD, smp\.MP_GROUP"):
        communication.barrier(ranks.MP_RANK)  # type: ignore[arg-type]
    with pytest.raises(SMPUsageError, match=r"rank type is .*smp\.WORLD_RANK"):
        communication.recv_from(0, ranks.WORLD)  # type: ignore[arg-type]


def test_everything_asks_for_init_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "topology", None)
    calls: list[Callable[[], Any]] = [
        lambda: communication.send(1, 0, ranks.WORLD_RANK),
        lambda: communication.recv_from(0, ranks.WORLD_RANK),
        lambda: communication.broadcast(1, ranks.WORLD),
        lambda: communication.allgather(1, ranks.WORLD),
        communication.barrier,
        communication.mp_barrier,
        communication.dp_barrier,
    ]
    for call in calls:
        with pytest.raises(SMPUsageError, match=r"smp\.init\(\) first"):
            call()
