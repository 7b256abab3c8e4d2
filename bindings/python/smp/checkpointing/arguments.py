"""Arguments of a checkpointed call: the tensors apart, and the rest as it was at entry.

What the call changes in a list, a dict or an object that it was given (a key-value cache), it finds unchanged when it runs again. What it
was given twice it is given twice again, and objects that hold no tensors and were not changed are the very same.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type, range, slice, torch.dtype, torch.device, torch.Size)
)


class _Slot:
    """Stands for a tensor, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Node:
    """Stands for a container or an object, with what it held at entry. `anew`: another one is made for a recompute."""

    __slots__ = ("anew", "items", "original")

    def __init__(self, original: Any) -> None:
        self.original = original
        self.items: dict[Any, Any] = {}
        self.anew = False


def _items_of(value: Any) -> dict[Any, Any] | None:
    """What a container or an object holds; None where it can't be looked into."""
    if isinstance(value, list | tuple | set):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, nn.Module | torch.Generator | type) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if type(attributes) is dict else None


class Arguments:
    """The arguments of one call.

    Attributes:
        tensors: each tensor once.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._kinds: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._nodes: dict[int, _Node] = {}
        self._args = [self._split(value) for value in args]
        self._kwargs = {key: self._split(value) for key, value in kwargs.items()}

    def _split(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
                # A parameter is kept by its module anyway.
                self._kinds.append(value if isinstance(value, nn.Parameter) else type(value))
            return _Slot(number)
        if type(value) in _PLAIN:
            return value
        node = self._nodes.get(id(value))
        if node is None:
            items = _items_of(value)
            if items is None:
                return value
            node = self._nodes[id(value)] = _Node(value)
            node.items = {key: self._split(item) for key, item in items.items()}
            node.anew = any(type(item) is _Slot or (type(item) is _Node and item.anew) for item in node.items.values())
        return node

    def end_forward(self) -> None:
        """Learns which objects the call has changed: only those are made anew, and those that hold tensors."""
        for node in self._nodes.values():
            if not node.anew:
                node.anew = not self._is_as_at_entry(node)
        # What holds a changed object must be made anew with it.
        for node in reversed(self._nodes.values()):
            node.anew |= any(type(item) is _Node and item.anew for item in node.items.values())
            if node.anew:
                node.original = _prototype(node.original)
        self._numbers.clear()

    @staticmethod
    def _is_as_at_entry(node: _Node) -> bool:
        now = _items_of(node.original)
        if now is None or list(now) != list(node.items):
            return False
        entry = (item.original if type(item) is _Node else item for item in node.items.values())
        return all(a is b for a, b in zip(now.values(), entry, strict=True))

    def again(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they were at entry, with these tensors."""
        given: list[torch.Tensor] = []
        for x, kind in zip(tensors, self._kinds, strict=True):
            if isinstance(kind, nn.Parameter):
                given.append(kind)
            else:
                given.append(x if kind is torch.Tensor else x.as_subclass(kind))
        made: dict[int, Any] = {}
        args = [self._join(value, given, made) for value in self._args]
        return args, {key: self._join(value, given, made) for key, value in self._kwargs.items()}

    def _join(self, value: Any, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        if type(value) is _Slot:
            return tensors[value.number]
        if type(value) is not _Node:
            return value
        if not value.anew:
            return value.original
        found = made.get(id(value))
        if found is not None:
            return found
        prototype = value.original
        if isinstance(prototype, type) and issubclass(prototype, tuple):
            make = getattr(prototype, "_make", prototype)  # of a NamedTuple
            new = made[id(value)] = make([self._join(item, tensors, made) for item in value.items.values()])
            return new
        new = made[id(value)] = _make_empty(prototype)
        items = {key: self._join(item, tensors, made) for key, item in value.items.items()}
        if isinstance(new, list):
            new.extend(items.values())
        elif isinstance(new, dict | set):
            new.update(items if isinstance(new, dict) else items.values())
        else:
            new.__dict__.update(items)
        return new


def _prototype(original: Any) -> Any:
    """What another object of the kind is made from, without the contents: the class, or an empty container."""
    kind = type(original)
    if kind in (list, dict, set) or not isinstance(original, list | dict | set):
        return kind
    empty = copy.copy(original)  # a defaultdict, say
    if empty is original:
        return kind
    empty.clear()
    return empty


def _make_empty(prototype: Any) -> Any:
    if not isinstance(prototype, type):
        return copy.copy(prototype)
    return prototype() if issubclass(prototype, list | dict | set) else object.__new__(prototype)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a tree."""
    return Arguments((value,), {}).tensors
