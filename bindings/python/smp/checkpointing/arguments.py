"""Arguments of a checkpointed call: the tensors apart, and the rest as it was at entry.

What the call changes in a list, a dict or an object that it was given (a key-value cache), it finds unchanged when it runs again.
"""

import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type, range, slice, torch.dtype, torch.device, torch.Size)
)
# Never copied: code, and what has a state of its own that calls are meant to share.
_SHARED = (nn.Module, torch.Generator, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class _Slot:
    """Stands for a tensor, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Object:
    """Stands for an object that was pickled, with its tensors and shared objects by number."""

    __slots__ = ("first", "shared", "tree")

    def __init__(self, tree: bytes, first: int, shared: list[Any]) -> None:
        self.tree, self.first, self.shared = tree, first, shared


class _Named:
    """Stands for a NamedTuple."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: Any, items: list[Any]) -> None:
        self.kind, self.items = kind, items


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer, protocol=5)
        self._tensors, self._first = tensors, len(tensors)
        self._numbers: dict[int, int] = {}
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> tuple[bool, int] | None:
        if isinstance(obj, torch.Tensor):
            number = self._numbers.setdefault(id(obj), len(self._tensors) - self._first)
            if number == len(self._tensors) - self._first:
                self._tensors.append(obj)
            return True, number
        if isinstance(obj, _SHARED):
            self.shared.append(obj)
            return False, len(self.shared) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, saved: _Object, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(saved.tree))
        self._saved, self._tensors = saved, tensors

    def persistent_load(self, pid: Any) -> Any:
        is_tensor, number = pid
        return self._tensors[self._saved.first + number] if is_tensor else self._saved.shared[number]


def _split_object(value: Any, tensors: list[torch.Tensor]) -> Any:
    count = len(tensors)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, tensors)
    try:
        pickler.dump(value)
    except Exception:  # it can't be copied, so it is shared
        del tensors[count:]
        return value
    return _Object(buffer.getvalue(), count, pickler.shared)


def split(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a stand-in for each tensor and object, a copy of each container; appends the tensors."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _SHARED):
        return value
    if kind is tuple:
        return tuple([split(item, tensors) for item in value])
    if kind is list:
        return [split(item, tensors) for item in value]
    if kind is dict:
        return {key: split(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return _Named(kind, [split(item, tensors) for item in value])
    return _split_object(value, tensors)


def join(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What `split` took apart, with these tensors; a new copy of each container and object."""
    kind = type(value)
    if kind is _Slot:
        return tensors[value.number]
    if kind is tuple:
        return tuple([join(item, tensors) for item in value])
    if kind is list:
        return [join(item, tensors) for item in value]
    if kind is dict:
        return {key: join(item, tensors) for key, item in value.items()}
    if kind is _Named:
        return value.kind._make([join(item, tensors) for item in value.items])
    if kind is _Object:
        return _Unpickler(value, tensors).load()
    return value
