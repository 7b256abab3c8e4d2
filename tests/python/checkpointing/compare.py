"""What the tests of checkpointing share: the results and gradients of a function, to compare with those of a plain call."""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

WIDTH = 6


class Layer(nn.Module):
    """Saves several tensors for backward: a linear layer, an activation and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


def make(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def batch(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


def outcome(module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], passes: int = 1) -> list[torch.Tensor]:
    """Loss, gradients of the input and of all parameters, and all buffers, after some forwards and backwards."""
    x = batch()
    torch.manual_seed(2)
    losses = []
    for _ in range(passes):
        loss = run(x).square().sum()
        loss.backward()
        losses.append(loss.detach())
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in module.parameters()]
    return [*losses, x.grad, *gradients, *module.buffers(), torch.rand(3)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def is_as_plain(
    build: Callable[[], nn.Module],
    checkpointed: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    plain: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    passes: int = 1,
) -> bool:
    """Same bits of results, gradients, buffers and of the random numbers that come afterwards."""
    module = make(build)
    other = copy.deepcopy(module)
    run_plain = plain or (lambda m, x: m(x))
    expected = outcome(module, lambda x: run_plain(module, x), passes)
    return same(outcome(other, lambda x: checkpointed(other, x), passes), expected)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def bytes_left_by(call: Callable[[], object], times: int) -> int:
    """Bytes of tensors that some calls made and left alive."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(times):
            call()
    return sum(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")


def error_of(call: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """Type and message of what a call raises."""
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
