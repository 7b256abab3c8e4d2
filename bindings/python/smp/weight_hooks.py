"""Hooks of `torch.nn.utils` that make a weight anew before each forward (`weight_norm`, `spectral_norm`, `prune`).

They are part of what the module computes, so they run where it does. Other hooks run where the module is called.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from .torch_patches import Patch, find, reached, reaches

_KINDS = (
    "torch.nn.utils.weight_norm:WeightNorm",
    "torch.nn.utils.spectral_norm:SpectralNorm",
    "torch.nn.utils.prune:BasePruningMethod",
)


class WeightHooks(Patch):
    """While it is installed, calls of modules that run elsewhere leave these hooks out, and `run` is for their homes."""

    def __init__(self, issues: Callable[[nn.Module], bool]) -> None:
        """`issues`: would a call of the module, here and now, be an instruction?"""
        self._issues = issues
        self._originals: list[tuple[Any, Callable[..., None]]] = []

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        places = [f"{kind}.__call__" for kind in _KINDS]
        return {place: functools.partial(self._unless_issued, place) for place in places}

    def _unless_issued(self, place: str, call: Callable[..., None]) -> Callable[..., None]:
        self._originals.append((find(place)[0], call))

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

    @classmethod
    def rehearsal(cls) -> "WeightHooks":
        return cls(reached)

    def examples(self) -> dict[str, Callable[[], bool]]:
        return {
            "the hook of torch.nn.utils.weight_norm": lambda: _is_left_out(_add_weight_norm),
            "the hook of torch.nn.utils.spectral_norm": lambda: _is_left_out(nn.utils.spectral_norm),
            "the hook of torch.nn.utils.prune.identity": lambda: _is_left_out(
                lambda module: prune.identity(module, "weight")
            ),
        }


def _add_weight_norm(module: nn.Module) -> None:
    owner, name = find("torch.nn.utils.weight_norm:WeightNorm.apply")
    # As torch.nn.utils.weight_norm does, without its warning that it is deprecated.
    inspect.unwrap(getattr(owner, name))(module, "weight", 0)


def _is_left_out(add: Callable[[nn.Module], Any]) -> bool:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(1, 1, device="cpu"))
    random_state = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            add(module)
    finally:
        torch.default_generator.set_state(random_state)
    hooks = list(module._forward_pre_hooks.values())
    return len(hooks) == 1 and reaches(hooks[0], module, ())
