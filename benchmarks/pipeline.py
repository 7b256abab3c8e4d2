"""A GPT over ranks: this library, PyTorch's own pipelining split by hand at the same place, and what these cores could give.

mpirun -np 2 python benchmarks/pipeline.py [--ranks 2] [--size large|medium|small] [--microbatches 8]

In one run, in turns: (a) one plain process, (b) the library, (c) torch.distributed.pipelining with Schedule1F1B over Gloo, (d) as many plain
processes at once as there are ranks. The bound of a pipeline of p ranks and m microbatches is m / (m + p - 1) of what (d) does in
the same time.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from environment import describe
from gpt_stack import SIZES, VOCABULARY, Model, loss_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import smp


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2, help="as many as mpirun starts")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps in one measurement")
    return parser.parse_args()


def plain_way(options: argparse.Namespace) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    model = Model(SIZES[options.size], smp.size())

    def step(ids: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for part in ids.chunk(options.microbatches):
            loss = loss_of(model(part), part)
            (loss / options.microbatches).backward()
            losses.append(loss.detach())
        return losses

    return step


def library_way(options: argparse.Namespace) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    net = Model(SIZES[options.size], smp.size())
    for home, part in enumerate(net.parts):
        smp.set_partition(part, home)
    model = smp.DistributedModel(net)

    @smp.step
    def train_step(model: smp.DistributedModel, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), ids)
        model.backward(loss)
        return loss

    return lambda ids: train_step(model, ids).outputs


def hand_split_way(options: argparse.Namespace, rank: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    size = SIZES[options.size]
    ranks = smp.size()
    stage = PipelineStage(Model(size, ranks).parts[rank], rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=loss_of)

    def step(ids: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids)
        elif rank == ranks - 1:
            schedule.step(target=ids, losses=losses)
        else:
            schedule.step()
        return losses

    return step


def seconds_of(
    step: Callable[[torch.Tensor], object], batches: list[torch.Tensor], wait_for_all: Callable[[], None]
) -> float:
    wait_for_all()
    started = time.perf_counter()
    for ids in batches:
        step(ids)
    wait_for_all()
    return (time.perf_counter() - started) / len(batches)


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    smp.init({"partitions": options.ranks, "microbatches": options.microbatches, "auto_partition": False})
    rank, ranks, size = smp.rank(), smp.size(), SIZES[options.size]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29519")}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    ways = {
        "plain": plain_way(options),
        "library": library_way(options),
        "by hand": hand_split_way(options, rank),
    }

    generator = torch.Generator().manual_seed(0)
    rows = size.rows * options.microbatches
    batches = [torch.randint(VOCABULARY, (rows, size.length), generator=generator) for _ in range(options.steps)]
    losses = {name: step(batches[0]) for name, step in ways.items()}  # and warms up
    if rank == ranks - 1:  # where all three have losses
        for name in ("library", "by hand"):
            equal = all(torch.equal(a, b) for a, b in zip(losses[name], losses["plain"], strict=True))
            print(f"losses of '{name}' equal those of one plain process: {equal}", flush=True)

    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "library", "by hand", "plain, all at once")}
    for repeat in range(options.repeats + 1):
        measured = {
            "library": seconds_of(ways["library"], batches, smp.barrier),
            "by hand": seconds_of(ways["by hand"], batches, smp.barrier),
            "plain, all at once": seconds_of(ways["plain"], batches, smp.barrier),
        }
        if rank == 0:
            measured["plain"] = seconds_of(ways["plain"], batches, lambda: None)
        smp.barrier()
        if repeat and rank == 0:
            for name, value in measured.items():
                seconds[name].append(value)
    if rank == 0:
        report(options, seconds)
    smp.barrier()
    dist.destroy_process_group()


def report(options: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    m, p = options.microbatches, smp.size()
    print(describe(f"{p} ranks of 1 thread"))
    print(
        f"size {options.size} {SIZES[options.size]}, {m} microbatches; median (lowest - highest) of {options.repeats} measurements"
    )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:20} {medians[name] * 1e3:8.1f} ms a step ({min(values) * 1e3:.1f} - {max(values) * 1e3:.1f})")
    print(f"a microbatch on one rank: {medians['plain'] / m / p * 1e3:.1f} ms")
    # Plain processes at once do a step each in their time; a pipeline does one, and fills and drains once.
    bounds = [t / p * (m + p - 1) / m for t in seconds["plain, all at once"]]
    for name in ("library", "by hand"):
        shares = [bound / t for bound, t in zip(bounds, seconds[name], strict=True)]
        print(
            f"{name:20} {statistics.median(shares):6.2f} of the bound, {medians['plain'] / medians[name]:.2f} times one plain process"
        )
    ratios = [b / a for a, b in zip(seconds["library"], seconds["by hand"], strict=True)]
    print(f"library against by hand: {statistics.median(ratios):.2f} times as fast")


if __name__ == "__main__":
    main()
