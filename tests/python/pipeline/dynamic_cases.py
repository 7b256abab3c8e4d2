"""Shapes that change: with the batch, and with the data."""

from typing import Any

import torch
from small_net import job
from torch import nn

import smp

WIDTH = 8
MICROBATCHES = 4


class Picks(nn.Module):
    """Gives back the rows whose first number is positive: how many depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x[:, 0] > 0]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picks = Picks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.picks(x)


class Varies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.around, self.last = nn.Linear(WIDTH, WIDTH), Around(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.around(torch.tanh(self.first(x)) + x))


def make_varies() -> Varies:
    torch.manual_seed(0)
    return Varies()


def make_batch(seed: int) -> torch.Tensor:
    return torch.randn(6 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(seed))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def plain() -> list[Any]:
    """Losses of two batches, and the gradients."""
    net = make_varies()
    losses = []
    for seed in (1, 2):
        for part in make_batch(seed).chunk(MICROBATCHES):
            loss = net(part).square().mean()
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
    return [torch.stack(losses), {name: p.grad for name, p in net.named_parameters()}]


def train(mark: str | None) -> dict[str, Any]:
    """Two batches. `mark`: when the module is said to vary; None: after the first step has failed, it runs again."""
    with job(2, MICROBATCHES):
        net = make_varies()
        smp.set_partition(net.around, 1)
        if mark == "before":
            smp.set_dynamic(net.around.picks)
        model = smp.DistributedModel(net)
        model._partition()
        if mark == "after":
            smp.set_dynamic(net.around.picks)
        message = None
        if mark is None:
            try:
                train_step(model, make_batch(1))
            except smp.SMPUsageError as error:
                message = str(error)
            model.zero_grad(set_to_none=True)
        losses = torch.stack([loss for seed in (1, 2) for loss in train_step(model, make_batch(seed)).outputs])
        asked = model._runtime.engine.counts()["asked"]
        gradients = {name: p.grad.clone() for name, p in model.local_named_parameters()}
    return {"message": message, "losses": losses, "gradients": gradients, "asked": asked}


class Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def lengths(layers: int, per_step: list[int]) -> list[int]:
    """How often the ranks asked what comes out, in each step, when every step has batches of other lengths."""
    with job(2, 2):
        net = Chain(layers)
        for layer in net.layers[1:]:
            smp.set_partition(layer, 1)
        model = smp.DistributedModel(net)
        model._partition()
        counts, before = [], 0
        for length in per_step:
            train_step(model, torch.randn(2, length, WIDTH))
            asked = sum(smp.allgather(model._runtime.engine.counts()["asked"], smp.WORLD))
            counts.append(asked - before)
            before = asked
    return counts
