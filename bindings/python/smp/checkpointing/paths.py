"""Ways to the parts of an imported model that scripts use: `.module` of the model itself, and `.seq_layers` beside a layer stack.

They are properties of the classes while the model is distributed, so nothing is registered and no attribute of a model is hidden.
"""

from typing import Any

from torch import nn


def layer_stack(module: nn.Module) -> nn.Module | None:
    """The one child that is a stack of layers of one kind, or None."""
    stacks = [
        child
        for child in module.children()
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 0 and len({type(m) for m in child}) == 1
    ]
    return stacks[0] if len(stacks) == 1 else None


def _missing(module: nn.Module, name: str) -> AttributeError:
    return AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")


class _Property:
    """A property that gives way to everything that an instance itself has under the name."""

    def __init__(self, name: str, find: Any) -> None:
        self._name, self._find = name, find

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        for own in (instance._modules, instance._parameters, instance._buffers):
            if self._name in own:
                return own[self._name]
        found = self._find(instance)
        if found is None:
            raise _missing(instance, self._name)
        return found


class Paths:
    """Installs the properties for one model, until `close`."""

    def __init__(self, model: nn.Module) -> None:
        self._installed: list[tuple[type, str]] = []
        self._add(model, "module", lambda module: module if module is model else None)
        for module in model.modules():
            if type(module) not in (nn.ModuleList, nn.Sequential, nn.Module) and layer_stack(module) is not None:
                self._add(module, "seq_layers", layer_stack)

    def _add(self, module: nn.Module, name: str, find: Any) -> None:
        if not hasattr(module, name):
            setattr(type(module), name, _Property(name, find))
            self._installed.append((type(module), name))

    def close(self) -> None:
        for kind, name in self._installed:
            delattr(kind, name)
        self._installed = []
