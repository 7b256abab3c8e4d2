"""What a step gives back: the results of its microbatches, side by side."""

import copy
from collections import UserDict
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

_REMEDY = (
    "it holds one tensor for each microbatch: make one of them with .reduce_mean(), .reduce_sum(), .concat() or .stack(), or take the list "
    ".outputs"
)


class StepOutput:
    """One tensor that a step function returned, from each microbatch.

    It is no tensor: using it as one raises an AttributeError or TypeError that says how to get one.

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

    def __getattr__(self, name: str) -> NoReturn:
        remedy = "call model.backward(loss) in the step function" if name == "backward" else _REMEDY
        raise AttributeError(f"'StepOutput' object has no attribute {name!r}: {remedy}")

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else str(self)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"a StepOutput was used as a number or a tensor: {_REMEDY}")

    __float__ = __int__ = __neg__ = __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


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
