"""`forward` of modules, replaced for a while."""

import copy
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class ReplacedForwards:
    """Gives modules another `forward` until `close`, which gives them their own back."""

    def __init__(self, replacements: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> None:
        self._before: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        for module, forward in replacements:
            self._before.append((module, module.__dict__.get("forward")))
            module.forward = forward

    def close(self) -> None:
        for module, forward in self._before:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class ForwardOf:
    """A `forward` in place of a module's own. Copies of the module, and what is unpickled, have the one before back.

    Attributes:
        smp_looks: it calls `checkpointing.hooked.forward_here`.
    """

    smp_looks = False

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, module.forward)
        self._module, self._call = module, call
        self._before: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self._before is not None:
            before: Callable[..., Any] = copy.deepcopy(self._before, memo)
            return before
        copied = memo.get(id(self._module))
        return self if copied is None else _own_forward(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_own_forward, (self._module,)) if self._before is None else (_itself, (self._before,))
