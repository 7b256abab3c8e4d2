"""The settings that each thread of a rank runs with. As a script: writes them to a file for each rank, in the folder that it is given."""

import json
import sys
from pathlib import Path
from typing import Any

import environment
import torch
from torch import nn

import smp


class Notes(torch.autograd.Function):
    """Notes the settings of the threads that run forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, notes: list[dict[str, Any]]) -> torch.Tensor:
        ctx.notes = notes
        notes.append(environment.in_effect())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.notes.append(environment.in_effect())
        return gradient, None


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.notes: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Notes.apply(self.linear(x), self.notes)


@smp.step
def train_step(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


def settings_of_threads() -> dict[str, Any]:
    """Of this rank: those of the thread that calls, before and after a step, and of those that run its module, for each microbatch."""
    before = environment.in_effect()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False})
    net = nn.Sequential(Noting(), Noting())
    smp.set_partition(net[1], 1)
    train_step(smp.DistributedModel(net), torch.ones(4, 4))
    rank = smp.rank()
    smp.shutdown()
    return {"rank": rank, "caller": [before, environment.in_effect()], "module": net[rank].notes}


if __name__ == "__main__":
    found = settings_of_threads()
    Path(sys.argv[1], f"rank{found['rank']}").write_text(json.dumps(found))
