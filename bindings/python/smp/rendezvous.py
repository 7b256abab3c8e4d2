"""How the ranks of a launch find each other, where they do not meet over MPI: at a store of torch.distributed."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from . import _C
from .exceptions import SMPFailureError
from .launchers import Launch, Store

# The other ranks may still be importing, or waiting for their node.
_PATIENCE_S = 300.0
_LOOK_S = 0.02


def connect(launch: Launch) -> _C.Transport:
    """Joins the other ranks. Collective over all of them.

    Raises:
        SMPFailureError: the store or a rank cannot be reached. The message names it.
    """
    assert launch.store is not None
    # The ranks that meet may have been restarted by torchrun, with the store of before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _open(launch.store, launch.rank)
    return _C.make_tcp_transport(launch.rank, launch.size, _exchange_at(store, launch, f"smp/{attempt}"))


def _open(where: Store, rank: int) -> "dist.Store":
    try:
        # Several users in one process share a store of one port: torch.distributed.init_process_group may be another.
        return dist.TCPStore(
            where.host, where.port, is_master=rank == 0 and not where.hosted, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=_PATIENCE_S),
        )  # fmt: skip
    except (dist.DistError, RuntimeError) as error:
        raise SMPFailureError(
            f"rank {rank} cannot {'open' if rank == 0 and not where.hosted else 'reach'} the store of the ranks at {where.host} port "
            f"{where.port} (MASTER_ADDR and MASTER_PORT, or what the launcher chose): {error}"
        ) from error


def _exchange_at(store: "dist.Store", launch: Launch, prefix: str) -> Callable[[bytes], list[bytes]]:
    keys = [f"{prefix}/{rank}" for rank in range(launch.size)]

    def exchange(own: bytes) -> list[bytes]:
        store.set(keys[launch.rank], own)  # type: ignore[arg-type]  # bytes as well
        end = time.monotonic() + _PATIENCE_S
        # A wait inside the store could not be interrupted.
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            if time.monotonic() > end:
                raise SMPFailureError(
                    f"rank {launch.rank} waited {_PATIENCE_S:.0f} s for rank(s) {', '.join(map(str, missing))} of {launch.size}: they "
                    "have not called smp.init; see their own output"
                )
            time.sleep(_LOOK_S)
        return [store.get(key) for key in keys]

    return exchange
