"""Attributes and buffers of modules that run on other ranks: what code sets here, they never see."""

import operator
from collections.abc import Iterable
from typing import Any

from torch import nn

from .log import logger

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _SIMPLE) and a == b)


class ModuleState:
    """Notices in a step that code of this rank, such as a parent's forward or a hook, changes a module that runs elsewhere.

    Between steps such changes are the script's own, made on every rank.
    """

    # What calls carry along, and what is replaced here.
    _OURS = frozenset({"training", "forward"})

    def __init__(self, elsewhere: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(elsewhere)
        self._silent: set[nn.Module] = set()
        self._before: list[tuple[dict[str, Any], list[tuple[Any, int]]]] = []

    def forget(self, module: nn.Module) -> None:
        """For a module whose forward runs on this rank after all."""
        self._silent.add(module)

    def begin_step(self) -> None:
        self._before = [(module.__dict__.copy(), self._buffers(module)) for _, module in self._modules]

    def end_step(self) -> None:
        """Warns of modules that have been changed since `begin_step`, once of each."""
        before, self._before = self._before, []
        for (name, module), (attributes, buffers) in zip(self._modules, before, strict=True):
            now = module.__dict__
            what: list[str] = []
            if len(now) != len(attributes) or not all(map(operator.is_, now.values(), attributes.values())):
                keys = sorted((attributes.keys() | now.keys()) - self._OURS)
                what = [f"attribute {key!r}" for key in keys if not _same(attributes.get(key), now.get(key))]
            if not what and module._buffers:
                theirs = self._buffers(module)
                what = [
                    f"buffer {key!r}"
                    for key, (a, i), (b, j) in zip(module._buffers, buffers, theirs, strict=False)
                    if a is not b or i != j
                ]
            if what and module not in self._silent:
                self._silent.add(module)
                logger.warning(
                    "%s of module %r was changed in a step on this rank, by its parent or a hook, but the module runs on another partition and does "
                    "not see it: pass the value as an argument, or place the module with its parent (smp.set_partition)",
                    what[0],
                    name,
                )

    @staticmethod
    def _buffers(module: nn.Module) -> list[tuple[Any, int]]:
        return [(b, -1 if b is None or b.is_inference() else b._version) for b in module._buffers.values()]
