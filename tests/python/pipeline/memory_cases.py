"""How much a rank holds: microbatches with activations, and bytes of values."""

import time
from typing import Any

import torch
from torch import nn

import smp

WIDTH = 16


class Layer(nn.Module):
    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(WIDTH, WIDTH), slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow:
            time.sleep(0.002)
        return torch.relu(self.linear(x))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def microbatches_held(partitions: int, microbatches: int, slow: int, pipeline: str) -> int:
    """The most that this rank held at once; the layers of partition `slow` take longer."""
    smp.init(
        {
            "partitions": partitions,
            "microbatches": microbatches,
            "auto_partition": False,
            "pipeline": pipeline,
            "stall_timeout": 60,
        }
    )
    net = nn.Sequential(*(Layer(home == slow) for home in range(partitions) for _ in range(2)))
    for index, layer in enumerate(net):
        smp.set_partition(layer, index // 2)
    model = smp.DistributedModel(net)
    for _ in range(3):
        train_step(model, torch.randn(microbatches, WIDTH))
    held = model._runtime.engine.counts()["peak_microbatches"]
    smp.shutdown()
    return held


class Head(nn.Module):
    """Logits a thousand times as large as the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1000 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def bytes_of_logits(microbatches: int) -> dict[str, Any]:
    """Peak bytes in the table of values of this rank while logits that nobody needs again are made and summed up."""
    smp.init({"partitions": 2, "microbatches": microbatches, "auto_partition": False, "pipeline": "simple"})
    net = WithHead()
    smp.set_partition(net.head, 1)
    model = smp.DistributedModel(net)

    @smp.step
    def step(model, x):
        logits = model(x)
        loss = logits.sum()
        del logits
        model.backward(loss)
        return loss

    x = torch.randn(8 * microbatches, WIDTH)
    step(model, x)
    with smp.trace() as summary:
        step(model, x)
    smp.shutdown()
    return {"peak": [rank.peak_value_bytes for rank in summary.ranks], "logits": 8 * 1000 * WIDTH * 4}
