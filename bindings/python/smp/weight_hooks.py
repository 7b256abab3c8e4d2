"""Hooks of `torch.nn.utils` that make a weight anew before each forward (`weight_norm`, `spectral_norm`, `prune`).

They are part of what the module computes, so they run where it does. Other hooks run where the module is called.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_KINDS: tuple[Any, ...] = (WeightNorm, SpectralNorm, BasePruningMethod)


class WeightHooks:
    """Until `close`, calls of modules that run elsewhere leave these hooks out, and `run` is for their homes."""

    def __init__(self, issues: Callable[[nn.Module], bool]) -> None:
        """`issues`: would a call of the module, here and now, be an instruction?"""
        self._issues = issues
        self._originals = [(kind, kind.__call__) for kind in _KINDS]
        for kind, call in self._originals:
            kind.__call__ = self._unless_issued(call)

    def _unless_issued(self, call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def hook(this: Any, module: nn.Module, inputs: Any) -> None:
            if not self._issues(module):
                call(this, module, inputs)

        return hook

    def run(self, module: nn.Module, inputs: Any) -> None:
        """The hooks of a module whose forward is about to run here."""
        for hook in module._forward_pre_hooks.values():
            for kind, call in self._originals:
                if isinstance(hook, kind):
                    call(hook, module, inputs)

    def close(self) -> None:
        for kind, call in self._originals:
            kind.__call__ = call
