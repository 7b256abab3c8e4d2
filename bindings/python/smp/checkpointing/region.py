"""One checkpointed call: forward without its saved tensors, and the same again when backward needs them."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import _functorch

from .. import _C
from ..exceptions import SMPUsageError
from ..log import logger
from .arguments import Arguments, tensors_of
from .module_entry import Entry, ModuleEntries
from .report import keep

_verifies = False


def verify(on: bool = True) -> None:
    """Checks in every recompute that a region gives back the same values as in forward; for debugging, since it costs a full second forward.

    Shapes and dtypes of what backward needs are checked always. A difference is an error, where it would have been wrong gradients.

    Args:
        on: for regions that are entered from now on, on this rank.

    Example:
        >>> smp.checkpointing.verify()
    """
    global _verifies
    _verifies = bool(on)


class Site:
    """A place that is checkpointed: some modules, or a function. Keeps what is learnt of it from call to call. Copies of a module have none.

    Attributes:
        report: its standing figures.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self.name = name
        self.report = _C.RegionReport(name)
        keep(self)
        self.entries = ModuleEntries(modules)
        self.told_of_random = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def held_anyway(self) -> list[torch.Tensor]:
        """Parameters and buffers."""
        buffers = [buffer.data for buffer in self.entries.buffers if buffer.data is not None]
        return [*(p for _, p in self.entries.parameters), *buffers]

    def warn_of_random(self) -> None:
        self.told_of_random = True
        text = (
            f"{self.name} drew random numbers in a checkpointed call with preserve_rng_state=False: it will draw other ones when it runs again, "
            "and gradients will be wrong. Leave preserve_rng_state at True"
        )
        warnings.warn(text, stacklevel=4)
        logger.warning("%s", text)


class _Replay:
    """Runs the function of a region again."""

    __slots__ = ("_arguments", "_entry", "_function", "_name")

    def __init__(self, function: Callable[..., Any], arguments: Arguments, entry: Entry, name: str) -> None:
        self._function, self._arguments, self._entry, self._name = function, arguments, entry, name

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = self._arguments.again(tensors)
        tensors.clear()
        result = self._entry.again(lambda: self._function(*args, **kwargs), self._name)
        return tensors_of(result) if _verifies else []


def run(
    site: Site, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], preserve_rng_state: bool
) -> Any:
    """Calls the function as a region. Without gradients it is a plain call."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if _functorch.peek_interpreter_stack() is not None:
        raise SMPUsageError(
            f"{site.name} was checkpointed inside torch.func.grad, vmap or another transform, which does not let tensors be dropped: use the "
            "transform inside it, or leave out checkpointing"
        )
    entry = site.entries.entry()
    arguments = Arguments(args, kwargs)
    watch_random = not preserve_rng_state and not site.told_of_random
    replay = _Replay(function, arguments, entry, site.name)
    forward = _C.RegionForward(site.report, preserve_rng_state, arguments.tensors, replay, watch_random)
    tensors, arguments.tensors = arguments.tensors, []
    with forward:
        result = function(*args, **kwargs)
    entry.end_forward()
    arguments.end_forward()
    if watch_random and forward.has_drawn:
        site.warn_of_random()
    if _verifies:
        forward.verify(tensors_of(result))
    forward.end([*tensors, *site.held_anyway()] if site.report.calls == 1 else ())
    return result
