"""What the tests of the Python layer share: a net of two linear layers, spread over the partitions, and a job around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp

WIDTH = 4
CLASSES = 3
BATCH_SIZE = 8


class Net(nn.Module):
    """`first` lives on partition 0, the others on the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(torch.tanh(self.first(x))))


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def make_batch(seed: int = 0, size: int = BATCH_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


@contextmanager
def job(partitions: int = 2, microbatches: int = 2, **config: Any) -> Iterator[None]:
    """smp between init and shutdown, with modules placed by hand. Without the shutdown where the body raises: the launch ends then."""
    smp.init(
        {"partitions": partitions, "microbatches": microbatches, "auto_partition": False, "stall_timeout": 60, **config}
    )
    yield
    smp.shutdown()


def distribute(net: nn.Module | None = None, **options: Any) -> smp.DistributedModel:
    """`net` (a new one by default) over the partitions of the job."""
    net = make_net() if net is None else net
    last = smp.state.cfg.partitions - 1
    smp.set_partition(net.norm, last)
    smp.set_partition(net.second, last)
    return smp.DistributedModel(net, **options)


@smp.step
def train_step(model: smp.DistributedModel, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def plain_step(
    net: nn.Module, x: torch.Tensor, y: torch.Tensor, microbatches: int = 2, average: bool = True
) -> list[torch.Tensor]:
    """What `train_step` does, with plain PyTorch: the losses, by microbatch."""
    losses = []
    for part, labels in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = F.cross_entropy(net(part), labels)
        (loss / microbatches if average else loss).backward()
        losses.append(loss.detach())
    return losses


def raised(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Type and message of what `call` raises."""
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"nothing was raised, but {result!r} was returned")
