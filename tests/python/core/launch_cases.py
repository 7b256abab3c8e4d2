"""What the tests of launching run on each rank. As a script: trains, and saves what came out; with `launch` by smp.launch."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smp

STEPS = 4


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_batches(workers):
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(8 * STEPS, 8, generator=generator), torch.randint(4, (8 * STEPS,), generator=generator)
    )
    return DataLoader(data, batch_size=8, num_workers=workers)


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def facts_of(state, losses):
    return {"losses": torch.tensor(losses), **state}


def plain():
    """What `train` finds, without the library."""
    net, losses = make_net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for x, y in make_batches(0):
        parts = [F.cross_entropy(net(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        for part in parts:
            (part / 4).backward()
        losses.append(sum(part.detach() for part in parts) / 4)
        optimizer.step()
        optimizer.zero_grad()
    return facts_of(net.state_dict(), losses)


def is_mpi_loaded():
    return "libmpi.so" in Path("/proc/self/maps").read_text()


def train(folder):
    """Trains on two partitions, with a DataLoader whose workers are forked, and saves what every rank found."""
    torch.set_num_threads(1)
    smp.init({"partitions": 2, "microbatches": 4})
    model = smp.DistributedModel(make_net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    losses = []
    for x, y in make_batches(2):
        losses.append(train_step(model, x, y).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()
    try:
        local = [smp.local_rank(), smp.local_size()]
    except smp.SMPUsageError:
        local = None
    facts = {
        "rank": smp.rank(),
        "local": local,
        "mpi": is_mpi_loaded(),
        "objects": smp.allgather({"rank": smp.rank()}, smp.WORLD),
    }
    torch.save(facts | facts_of(model.state_dict(), losses), f"{folder}/rank{smp.rank()}.pt")


# ---- smp.launch


def place_and(value, *, times=1):
    smp.init({"partitions": int(os.environ["WORLD_SIZE"])})
    return smp.rank(), smp.size(), smp.local_rank(), smp.local_size(), value * times


def tensor_of_rank():
    return torch.full((1000, 1000), float(os.environ["RANK"]))


def without_library(value):
    return value


class UnreadableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail_on_rank_1(how):
    smp.init({"partitions": 2})
    if smp.rank() == 1:
        if how == "raise":
            raise LookupError("no such thing")
        if how == "unreadable":
            raise UnreadableError("this", "that")
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)  # another thread may be the one to get it
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        smp.barrier()
    except smp.SMPFailureError:
        return "told"
    time.sleep(60)
    return "not told"


def launch_again():
    return smp.launch(without_library, 1, (0,))


def unpicklable_result():
    return lambda: 0


if __name__ == "__main__":
    if sys.argv[2:] == ["launch"]:
        smp.launch(train, ranks=2, args=(sys.argv[1],))
    else:
        train(sys.argv[1])
