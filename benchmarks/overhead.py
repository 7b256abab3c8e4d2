"""What the library itself costs: one partition against a plain loop, a call to another rank, an operator on another rank's tensor.

mpirun -np 2 python benchmarks/overhead.py

One partition: the GPT of gpt_stack.py, in turns with a loop of plain PyTorch; the ratio of the times is printed. Calls: a chain of
modules on rank 1 that add a number; from issuing on rank 0 to the end on rank 1, per call. Operators: a chain of additions on a tensor of
rank 1. Both with different numbers of layers and microbatches, evaluated (forward) and trained (forward and backward).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from environment import describe
from gpt_stack import SIZES, VOCABULARY, Model, loss_of
from torch import nn

import smp


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


class Calls(nn.Module):
    """`layers` calls, one after another."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.layers = Add(), nn.ModuleList(Add() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Operators(nn.Module):
    """`layers` operators on a tensor of the other rank."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.other, self.count = Add(), Add(), layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.first(x))
        for _ in range(self.count):
            x = x + 1.0
        return x


def seconds_of(run: Callable[[], object], repeats: int) -> list[float]:
    """The first one warms up."""
    seconds = []
    for _ in range(repeats + 1):
        smp.barrier()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def chain(kind: type[nn.Module], layers: int, microbatches: int, repeats: int) -> list[float]:
    """Seconds of a step, evaluated and trained."""
    smp.init({"partitions": 2, "microbatches": microbatches, "auto_partition": False})
    net = kind(layers)
    for name, module in net.named_children():
        smp.set_partition(module, 0 if name == "first" else 1)
    model = smp.DistributedModel(net)

    @smp.step
    def evaluate(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).sum()

    @smp.step
    def train(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    x = torch.ones(microbatches, 8)
    seconds = [statistics.median(seconds_of(lambda step=step: step(model, x), repeats)) for step in (evaluate, train)]
    smp.shutdown()
    return seconds


def one_partition(size: str, repeats: int) -> list[float]:
    """Time with the library over time without, in turns; for one rank."""
    smp.init({"partitions": 1, "microbatches": 4})
    net = Model(SIZES[size])
    model = smp.DistributedModel(net)

    @smp.step
    def library(model: smp.DistributedModel, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), ids)
        model.backward(loss)
        return loss

    def plain(ids: torch.Tensor) -> None:
        for part in ids.chunk(4):
            (loss_of(net(part), part) / 4).backward()

    ids = torch.randint(VOCABULARY, (4 * SIZES[size].rows, SIZES[size].length))
    ratios = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        library(model, ids)
        between = time.perf_counter()
        plain(ids)
        ratios.append((between - started) / (time.perf_counter() - between))
    smp.shutdown()
    return ratios[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--one-partition", action="store_true", help="only that; start it without a launcher")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one_partition:
        print(describe("1 rank of 1 thread"))
        for size in ("medium", "small"):
            ratios = one_partition(size, 5 * options.repeats)
            print(f"one partition, {size}: {statistics.median(ratios):.3f} times the time of a plain loop")
        return
    rows = []
    for kind in (Calls, Operators):
        for layers, microbatches in ((10, 1), (10, 8), (10, 64), (100, 1), (100, 8), (1000, 1), (1000, 8)):
            with_layers, without = (chain(kind, count, microbatches, options.repeats) for count in (layers, 0))
            costs = [(a - b) / layers / microbatches * 1e6 for a, b in zip(with_layers, without, strict=True)]
            rows.append((kind.__name__, layers, microbatches, *costs))
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))) == 0:
        print(describe("2 ranks of 1 thread"))
        print(f"median of {options.repeats} steps, less those of a chain of no layers")
        print(f"{'µs a layer':10} {'layers':>6} {'microbatches':>12} {'forward':>8} {'and backward':>12}")
        for name, layers, microbatches, forward, both in rows:
            print(f"{name:10} {layers:6} {microbatches:12} {forward:8.1f} {both:12.1f}")


if __name__ == "__main__":
    main()
