"""Cutting the arguments of a step into microbatches."""

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from .exceptions import SMPUsageError


def _split(name: str, value: Any, axis: int, microbatch: int, microbatches: int) -> Any:
    def again(item: Any) -> Any:
        return _split(name, item, axis, microbatch, microbatches)

    if isinstance(value, torch.Tensor):
        return _split_tensor(name, value, axis, microbatch, microbatches)
    if hasattr(value, "smp_slice"):
        return value.smp_slice(microbatches, microbatch, axis)
    if isinstance(value, dict | UserDict):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = again(item)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(again, value))
    if isinstance(value, list | tuple | set):
        return type(value)(map(again, value))
    return value


def _split_tensor(name: str, value: torch.Tensor, axis: int, microbatch: int, microbatches: int) -> torch.Tensor:
    if value.dim() == 0:
        return value  # it has no batch
    if not -value.dim() <= axis < value.dim():
        raise SMPUsageError(
            f"argument {name!r} holds a tensor of shape {tuple(value.shape)}, which has no axis {axis} to split: name the right one in "
            "input_split_axes, or the argument in non_split_inputs"
        )
    size = value.shape[axis]
    if size % microbatches:
        raise SMPUsageError(
            f"argument {name!r} holds a tensor of shape {tuple(value.shape)}, whose axis {axis} has size {size}: it must divide by "
            f"microbatches = {microbatches}. Use another batch size, drop the last incomplete batch (drop_last=True), set another number "
            "of microbatches, or name the argument in non_split_inputs"
        )
    part = size // microbatches
    return value.narrow(axis, microbatch * part, part)


class Splitter:
    """Binds the arguments of one call to a step function, and cuts them.

    Args:
        function: the step function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis of an argument, by name; 0 otherwise.

    Raises:
        SMPUsageError: a name is no argument of the function, what should be names or axes is something else, or the function is a generator.
    """

    def __init__(
        self, function: Callable[..., Any], non_split_inputs: Collection[str], input_split_axes: Mapping[str, int]
    ) -> None:
        if isinstance(non_split_inputs, str):
            raise SMPUsageError(
                f"non_split_inputs is {non_split_inputs!r}: it must be a list of names, [{non_split_inputs!r}]"
            )
        if not isinstance(input_split_axes, Mapping) or not all(isinstance(a, int) for a in input_split_axes.values()):
            raise SMPUsageError(
                f"input_split_axes is {input_split_axes!r}: it must be a dict from names of arguments to the numbers of their batch axes, "
                'such as {"x": 1}'
            )
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise SMPUsageError(
                f"@smp.step got {function.__qualname__}, a generator or coroutine: a step function returns its results"
            )
        self._signature = inspect.signature(function)
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(input_split_axes)
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._signature.parameters.values())
        for option, names in (("non_split_inputs", self._whole), ("input_split_axes", self._axes)):
            unknown = sorted(set(names) - set(self._signature.parameters))
            if unknown and not takes_any:
                raise SMPUsageError(
                    f"{option} names {unknown[0]!r}, which is no argument of {getattr(function, '__qualname__', function)}: it has "
                    f"{', '.join(self._signature.parameters) or 'none'}"
                )

    def microbatch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, count: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of microbatch `index` of `count`. Tensors are views of the whole ones.

        Raises:
            SMPUsageError: a batch does not divide by `count`.
            TypeError: the arguments do not fit the function.
        """
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: self._cut(key, item, index, count) for key, item in value.items()}
            else:
                bound.arguments[name] = self._cut(name, value, index, count)
        return bound.args, bound.kwargs

    def _cut(self, name: str, value: Any, index: int, count: int) -> Any:
        return value if name in self._whole else _split(name, value, self._axes.get(name, 0), index, count)
