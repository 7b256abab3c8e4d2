"""A GPT stack under activation checkpointing: this library, PyTorch's own (both kinds), DeepSpeed's, and none.

python benchmarks/checkpointing.py [--size large|medium|small] [--layers 12] [--dropout 0.1]

One process of one thread; all in one run, in turns whose order is drawn anew each time. Every layer is a region. Printed for each: median time of a step and
its ratio to that of none, the peak of live bytes in a step, and what one region costs beside running again: a stack of functions that do next to nothing, less
one without checkpointing and less a forward of it.
DeepSpeed is measured where it is installed (`pip install deepspeed`).

"whole" is what a region could be that has no hooks: a forward without a graph, and all of it again, with one, when its gradient comes. It is the least
that can be done so, in bits that are those of none here, but neither random numbers nor settings nor state come back.
"""

import argparse
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from environment import describe
from gpt_stack import SIZES, Block
from torch import nn

from smp.checkpointing import checkpoint

Way = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


def deepspeed_way() -> Way:
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone, DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    deepspeed.checkpointing.configure(None)
    return deepspeed.checkpointing.checkpoint


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        context.function = function
        context.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = context.function(x)
        torch.autograd.backward(result, gradient)
        return None, x.grad


def find_ways() -> dict[str, Way]:
    ways: dict[str, Way] = {
        "none": lambda function, x: function(x),
        "library": checkpoint,
        "whole": lambda function, x: Whole.apply(function, x),
        "torch": lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False),
        "torch, re-entrant": lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True),
    }
    if importlib.util.find_spec("deepspeed"):
        ways["deepspeed"] = deepspeed_way()
    else:
        print("deepspeed is not installed, so it is not measured")
    return ways


def step(layers: nn.ModuleList, x: torch.Tensor, way: Way) -> None:
    h = x
    for layer in layers:
        h = way(layer, h)
    h.square().mean().backward()


def seconds_of(call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of tensors that a call has alive at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def cost_of_regions(ways: dict[str, Way], repeats: int) -> dict[str, float]:
    """Seconds for one region, beside running again."""
    count, x = 200, torch.zeros(8, requires_grad=True)

    def forward(way: Way) -> torch.Tensor:
        h = x
        for _ in range(count):
            h = way(torch.sin, h)
        return h

    def no_grad() -> None:
        with torch.no_grad():
            forward(ways["none"])

    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        again = seconds_of(no_grad, 5)
        plain = seconds_of(lambda: forward(ways["none"]).sum().backward(), 5)
        for name, way in ways.items():
            total = seconds_of(lambda way=way: forward(way).sum().backward(), 5)
            costs[name].append((total - plain - again) / count)
    return {name: statistics.median(values) for name, values in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.0, help="at the end of each layer")
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[options.size]
    ways = find_ways()
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.Sequential(Block(size.hidden), nn.Dropout(options.dropout)) for _ in range(options.layers)
    )
    x = torch.randn(size.rows, size.length, size.hidden, requires_grad=True)

    gradients = {}
    for name, way in ways.items():
        layers.zero_grad()
        torch.manual_seed(0)
        step(layers, x, way)
        gradients[name] = [p.grad.clone() for p in layers.parameters()]
    for name in ways:
        equal = all(torch.equal(a, b) for a, b in zip(gradients[name], gradients["none"], strict=True))
        print(f"gradients with '{name}' equal those with none: {equal}")

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name in random.sample(list(ways), len(ways)):
            seconds[name].append(seconds_of(lambda way=ways[name]: step(layers, x, way), 2))
    peaks = {name: peak_bytes(lambda way=way: step(layers, x, way)) for name, way in ways.items()}
    costs = cost_of_regions(ways, 9)

    print(describe("1 process of 1 thread"))
    print(f"{options.layers} layers, size {options.size} {size}; medians (quartiles) of {options.repeats}")
    for name in ways:
        low, middle, high = (1e3 * s for s in statistics.quantiles(seconds[name], n=4))
        ratio = middle / (1e3 * statistics.median(seconds["none"]))
        print(
            f"{name:18} {middle:8.1f} ms a step ({low:.1f} - {high:.1f}), {ratio:.2f} of none, "
            f"peak {peaks[name] / 2**20:.1f} MiB, {costs[name] * 1e6:6.1f} us a region"
        )
    print(f"a region costs {costs['library'] / costs['torch']:.2f} of PyTorch's")


if __name__ == "__main__":
    main()
