"""Latency and bandwidth between two processes of one host: the transports of the library against plain MPI and against Gloo.

cmake --build build/editable --target rally
mpirun -np 2 python benchmarks/transport.py

For each size rank 0 sends a payload to rank 1, which sends it back. Plain MPI polls, into a buffer that it reuses. Gloo is
torch.distributed's send and recv, called from Python. The transports receive into a fresh tensor, on a thread, and answer there. All
take turns; the median of the time of one way counts.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from environment import describe

import smp
from smp.launchers import Launch, Store
from smp.rendezvous import connect

sys.path.insert(0, str(Path(__file__).parent.parent / "build" / "editable" / "benchmarks"))
import rally

SIZES = [8, 1 << 10, 4 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def gloo(rank: int, size_bytes: int, rounds: int) -> float:
    payload = torch.ones(size_bytes, dtype=torch.uint8)
    started = time.perf_counter()
    for _ in range(rounds):
        for turn in (0, 1):
            if turn == rank:
                dist.send(payload, 1 - rank)
            else:
                dist.recv(payload, 1 - rank)
    return (time.perf_counter() - started) / rounds / 2 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    smp.init({"partitions": 2})
    rank = smp.rank()
    port = int(os.environ.get("MASTER_PORT", "29523"))
    transports = {
        "smp mpi": smp.state.transport,
        "smp tcp": connect(Launch("benchmark", rank, 2, rank, 2, Store("127.0.0.1", port, False))),
    }
    rallies = {name: rally.Rally(transport) for name, transport in transports.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + 1)}
    dist.init_process_group("gloo", rank=rank, world_size=2)

    if rank == 0:
        print(describe(f"median of {options.repeats}"))
        print(
            f"{'bytes':>10} {'MPI':>10} {'smp mpi':>10} {'Gloo':>10} {'smp tcp':>10}   (µs one way)   mpi/MPI   tcp/Gloo   GB/s: mpi, tcp"
        )
    for size in SIZES:
        rounds = max(2, min(300, (8 << 20) // size))
        times: dict[str, list[float]] = {name: [] for name in ("MPI", "smp mpi", "Gloo", "smp tcp")}
        for _ in range(options.repeats):
            for name, one in rallies.items():
                one.prepare(rounds)
                smp.barrier()
                times[name].append(one.play(size))
            smp.barrier()
            times["MPI"].append(rally.plain_mpi(rank, size, rounds))
            smp.barrier()
            times["Gloo"].append(gloo(rank, size, rounds))
        if rank == 0:
            us = {name: statistics.median(values) for name, values in times.items()}
            print(
                f"{size:10} {us['MPI']:10.1f} {us['smp mpi']:10.1f} {us['Gloo']:10.1f} {us['smp tcp']:10.1f} {'':14} "
                f"{us['smp mpi'] / us['MPI']:9.2f} {us['smp tcp'] / us['Gloo']:10.2f}   "
                f"{size / us['smp mpi'] / 1e3:5.2f} {size / us['smp tcp'] / 1e3:5.2f}",
                flush=True,
            )
    smp.barrier()
    rallies.clear()
    dist.destroy_process_group()
    transports["smp tcp"].close()


if __name__ == "__main__":
    main()
