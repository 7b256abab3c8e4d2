"""Objects between the ranks of a launch; each function runs on every rank."""

import time
from typing import Any

import smp


def exchange() -> dict[str, Any]:
    """Every operation over real MPI, on four ranks that are two replicas of two partitions."""
    smp.init({"partitions": 2})
    rank, facts = smp.rank(), {}
    big = bytes(range(256)) * (1 << 16)  # 16 MiB
    objects = [{"epoch": 3}, None, [1, "two", 3.0], big, ("last",)]
    if rank == 0:
        for item in objects:
            smp.send(item, 3, smp.WORLD_RANK)
    elif rank == 3:
        facts["in order"] = [smp.recv_from(0, smp.WORLD_RANK) for _ in objects] == objects

    # Both ways at once: each waits for the other's recv_from, which comes after its own send has been matched.
    if smp.pp_rank() == 0:
        smp.send(("to", rank), 1, smp.PP_RANK)
        facts["pair"] = smp.recv_from(1, smp.PP_RANK)
    else:
        facts["pair"] = smp.recv_from(0, smp.PP_RANK)
        smp.send(("back", rank), 0, smp.PP_RANK)

    if rank == 1:
        smp.broadcast({"seed": 5}, smp.WORLD)
        facts["world"] = {"seed": 5}
    else:
        facts["world"] = smp.recv_from(1, smp.WORLD_RANK)
    if smp.dp_rank() == 1:
        smp.broadcast(rank, smp.DP_GROUP)
    else:
        facts["replica"] = smp.recv_from(1, smp.DP_RANK)

    groups = {"WORLD": smp.WORLD, "MP": smp.MP_GROUP, "DP": smp.DP_GROUP, "PP": smp.PP_GROUP}
    facts["gathered"] = {name: smp.allgather(rank, group) for name, group in groups.items()}

    arrived = time.monotonic()
    if rank == 2:
        time.sleep(0.3)
    smp.barrier()
    facts["waited_s"] = time.monotonic() - arrived
    smp.mp_barrier()
    smp.dp_barrier()
    smp.shutdown()
    return facts
