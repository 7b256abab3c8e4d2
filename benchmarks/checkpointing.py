"""A GPT stack under activation checkpointing: this library, PyTorch's own (both kinds), DeepSpeed's, and none.

python benchmarks/checkpointing.py [--size large|medium|small] [--layers 12]

One process of one thread; all in one run, in turns. Every layer is a region. Printed for each: time of a step as a ratio to none, the peak of live bytes in
a step, and what one region costs beside running again: a stack of functions that do next to nothing, less one without checkpointing and less a forward of it.
DeepSpeed is measured where it is installed (`pip install deepspeed`).
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.utils.checkpoint
from environment import describe
from gpt_stack import SIZES, Block
from torch import nn

from smp.checkpointing import checkpoint

Way = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


def deepspeed_way() -> Way:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.configure(None)
    return checkpointing.checkpoint


def find_ways() -> dict[str, Way]:
    ways: dict[str, Way] = {
        "none": lambda function, x: function(x),
        "library": checkpoint,
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
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[options.size]
    ways = find_ways()
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(size.hidden) for _ in range(options.layers))
    x = torch.randn(size.rows, size.length, size.hidden, requires_grad=True)

    gradients = {}
    for name, way in ways.items():
        layers.zero_grad()
        step(layers, x, way)
        gradients[name] = [p.grad.clone() for p in layers.parameters()]
    for name in ways:
        equal = all(torch.equal(a, b) for a, b in zip(gradients[name], gradients["none"], strict=True))
        print(f"gradients with '{name}' equal those with none: {equal}")

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            seconds[name].append(seconds_of(lambda way=way: step(layers, x, way), 2))
    peaks = {name: peak_bytes(lambda way=way: step(layers, x, way)) for name, way in ways.items()}
    costs = cost_of_regions(ways, options.repeats)

    print(describe("1 process of 1 thread"))
    print(f"{options.layers} layers, size {options.size} {size}; median (lowest - highest) of {options.repeats}")
    for name in ways:
        ratios = [t / none for t, none in zip(seconds[name], seconds["none"], strict=True)]
        print(
            f"{name:18} {statistics.median(seconds[name]) * 1e3:8.1f} ms a step, {statistics.median(ratios):.2f} of none "
            f"({min(ratios):.2f} - {max(ratios):.2f}), peak {peaks[name] / 2**20:.1f} MiB, {costs[name] * 1e6:6.1f} us a region"
        )
    print(f"a region costs {costs['library'] / costs['torch']:.2f} of PyTorch's")


if __name__ == "__main__":
    main()
