"""What a step gives back: the results of its microbatches, side by side."""

import copy
from collections import UserDict
from collections.abc import Sequence
from typing import Any

import torch


class StepOutput:
    """One tensor that a step function returned, from each microbatch.

    Attributes:
        outputs: the tensors, in the order of microbatches.

    Example:
        >>> loss = train_step(model, batch)
        >>> loss.reduce_mean().item()
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> torch.Tensor:
        """Mean over microbatches, of the shape of one output."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> torch.Tensor:
        """Sum over microbatches in their order, of the shape of one output."""
        total = self.outputs[0]
        for output in self.outputs[1:]:
            total = total + output
        return total

    def concat(self) -> torch.Tensor:
        """The outputs joined along their first (batch) dimension."""
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """The outputs along a new first dimension: [microbatches, *shape]."""
        return torch.stack(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def merge(results: Sequence[Any]) -> Any:
    """Joins what the microbatches returned: containers keep their type, each tensor becomes a StepOutput, None stays
    None, and any other leaf becomes a list with one entry for each microbatch."""
    first = results[0]
    if all(isinstance(result, torch.Tensor) for result in results):
        return StepOutput(results)
    if all(result is None for result in results):
        return None
    alike = all(type(result) is type(first) for result in results)
    if alike and isinstance(first, dict | UserDict) and all(result.keys() == first.keys() for result in results):
        merged = copy.copy(first)
        for key in first:
            merged[key] = merge([result[key] for result in results])
        return merged
    if (
        alike
        and isinstance(first, list | tuple)
        and not isinstance(first, torch.Size)
        and all(len(result) == len(first) for result in results)
    ):
        items = [merge(column) for column in zip(*results, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return list(results)
