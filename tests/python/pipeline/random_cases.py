"""Training with random numbers: dropout in modules and in glue, noise of the step function, recomputation."""

import contextlib
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
from small_net import job
from torch import nn
from torch.utils.checkpoint import checkpoint

import smp
from smp import _C

MICROBATCHES = 4
WIDTH = 8


class Block(nn.Module):
    """Dropout of both kinds, after a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.pause: random.Random | None = None
        self.recompute: dict[str, Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pause is not None:
            time.sleep(self.pause.random() * 0.02)
        if self.recompute is not None and self.training:
            return checkpoint(self.body, x, **self.recompute)
        return self.body(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.tanh(self.linear(x)))
        return F.dropout(x, 0.25, self.training)


class Middle(nn.Module):
    """A container over several partitions, with glue that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = x + 0.1 * torch.rand_like(x)
        return F.dropout(self.two(x), 0.25, self.training)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Middle(), Block()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + 0.1 * torch.randn(x.shape))
        x = F.dropout(x, 0.25, self.training)
        x = self.middle(self.middle(x))
        return self.last(self.dropout(x))


HOMES = {
    2: {"middle.two": 1, "last": 1},
    3: {"middle": 1, "middle.one": 2, "middle.two": 1, "last": 2},
    4: {"middle": 1, "middle.one": 1, "middle.two": 2, "last": 3},
}


@smp.step
def train_step(model, x):
    loss = (model(x) * torch.rand(())).square().mean()
    model.backward(loss)
    return loss


def same_rows() -> torch.Tensor:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(7)).expand(2 * MICROBATCHES, WIDTH).clone()


def train(
    partitions: int, timing: int | None = None, steps: int = 3, recompute: dict[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    """Losses, gradients of this rank and the state of random numbers after the steps. Weights stay as they are."""
    with job(partitions, MICROBATCHES, **config):
        torch.manual_seed(0)
        net = Noisy()
        for name, module in net.named_modules():
            if isinstance(module, Block):
                module.pause = None if timing is None else random.Random(f"{timing} {name} {smp.rank()}")
                module.recompute = None if name == "first" else recompute  # whose input needs no gradient
        for name, home in HOMES.get(partitions, {}).items():
            smp.set_partition(net.get_submodule(name), home)
        model = smp.DistributedModel(net)
        torch.manual_seed(1)
        losses = [torch.stack(train_step(model, same_rows()).outputs) for _ in range(steps)]
        after = torch.rand(3)
        torch.manual_seed(1)
        again = torch.stack(train_step(model, same_rows()).outputs)
        gradients = {name: p.grad.clone() for name, p in model.local_named_parameters()}
    return {"losses": losses, "again": again, "gradients": gradients, "after": after}


def after_keys(count: int) -> torch.Tensor:
    """What the script draws next on a rank of partition 0 after so many steps."""
    torch.manual_seed(1)
    for _ in range(count):
        _C.draw_key()
    return torch.rand(3)


def gpt2(partitions: int) -> dict[str, Any]:
    """GPT-2 of Hugging Face with its dropout, unmodified."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with job(partitions, 2, auto_partition=True, rng_by_module=True):
        torch.manual_seed(0)
        net = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=50, n_positions=16))
        model = smp.DistributedModel(net)
        model.train()

        @smp.step
        def step(model, ids):
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        torch.manual_seed(1)
        ids = torch.randint(50, (4, 16))
        losses = [torch.stack(step(model, ids).outputs) for _ in range(2)]
        gradients = {name: p.grad.clone() for name, p in model.local_named_parameters()}
    return {"losses": losses, "gradients": gradients}


def failed_step(partitions: int) -> list[bool]:
    """After a step that failed, the script's random numbers go on as before it."""
    with job(partitions, MICROBATCHES):
        torch.manual_seed(0)
        net = Noisy()
        for name, home in HOMES[partitions].items():
            smp.set_partition(net.get_submodule(name), home)
        model = smp.DistributedModel(net)
        train_step(model, same_rows())

        @smp.step
        def fails(model, x):
            loss = model(x).sum()
            if smp.state.microbatch == 2:
                raise ValueError("no more")
            model.backward(loss)

        torch.manual_seed(1)
        with contextlib.suppress(ValueError):
            fails(model, same_rows())
        state = torch.get_rng_state()
        torch.manual_seed(1)
        if smp.pp_rank() == 0:
            _C.draw_key()
        return [torch.equal(state, torch.get_rng_state())]
