"""`forward` of modules, replaced for a while."""

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
