"""What an exactness test needs to know of a model, and the reference: plain PyTorch in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH_SIZE = 8
LEARNING_RATE = 1e-2

Batch = dict[str, Any]


@dataclass
class TrainingCase:
    """A model together with everything that is needed to train it, with or without the library.

    `homes` maps a number of partitions to {module name: partition} for every module of the model (`""` is the root,
    always 0), or to None where the partitioner decides. `make_batch(seed)` gives tensors with `BATCH_SIZE` rows and
    possibly other objects, which every microbatch sees as they are. `step(model, batch, backward)` is the body of a
    step function for one microbatch: it calls `backward(tensors, grad_tensors=None)` and returns the loss.
    """

    model: nn.Module
    make_batch: Callable[[int], Batch]
    step: Callable[[nn.Module, Batch, Callable[..., None]], torch.Tensor]
    homes: dict[int, dict[str, int] | None] = field(default_factory=lambda: {2: None, 4: None})


@dataclass
class TrainingResult:
    losses: list[list[torch.Tensor]]  # by step, then microbatch
    gradients: list[dict[str, torch.Tensor | None]]  # by step; None where no gradient came
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def by_prefix(model: nn.Module, prefixes: dict[str, int]) -> dict[str, int]:
    """A home for every module of `model`: that of the longest prefix of its name in `prefixes`, else 0."""
    modules = dict(model.named_modules())
    unknown = sorted(set(prefixes) - set(modules))
    assert not unknown, f"no such modules: {unknown}"

    def home(name: str) -> int:
        while name not in prefixes:
            if not name:
                return 0
            name = name.rpartition(".")[0]
        return prefixes[name]

    return {name: home(name) for name in modules}


def microbatch_of(batch: Batch, index: int, microbatches: int) -> Batch:
    """Microbatch `index` of `batch`: an equal piece of each tensor along axis 0."""

    def piece(value: Any) -> Any:
        return value.chunk(microbatches)[index] if isinstance(value, torch.Tensor) else value

    return {name: piece(value) for name, value in batch.items()}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all exactness tests."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def plain_training(build: Callable[[], TrainingCase], microbatches: int, steps: int = 3) -> TrainingResult:
    """Trains a new case in one process, the microbatches one after another.

    Each backward starts from 1/microbatches, so gradients are means over the microbatches, added up in their order.
    """
    case = build()
    model = case.model.train()
    optimizer = make_optimizer(model.parameters())
    losses: list[list[torch.Tensor]] = []
    gradients: list[dict[str, torch.Tensor | None]] = []

    def backward(tensors: Any, grad_tensors: Any = None) -> None:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if grad_tensors is None:
            grad_tensors = [torch.ones_like(tensor) for tensor in tensors]
        elif isinstance(grad_tensors, torch.Tensor):
            grad_tensors = [grad_tensors]
        torch.autograd.backward(tensors, [gradient / microbatches for gradient in grad_tensors])

    for step in range(steps):
        batch = case.make_batch(step)
        parts = [microbatch_of(batch, index, microbatches) for index in range(microbatches)]
        losses.append([case.step(model, part, backward).detach() for part in parts])
        gradients.append({name: _copy(parameter.grad) for name, parameter in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return TrainingResult(
        losses,
        gradients,
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()
