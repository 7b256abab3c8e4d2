"""Argument and result trees as bytes, with their tensors beside them.

A tree is pickled as a whole, so it may be anything that pickles: containers, dataclasses, NamedTuples, model outputs,
enums. Tensors and modules of the model are not pickled: a number stands for each.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .exceptions import SMPUsageError


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, module_numbers: Mapping[int, int]) -> None:
        super().__init__(buffer, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._module_numbers = module_numbers

    def persistent_id(self, obj: Any) -> int | tuple[str, int] | None:
        if isinstance(obj, torch.Tensor):
            number = self._numbers.get(id(obj))
            if number is None:
                number = self._numbers[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return number
        if isinstance(obj, nn.Module):
            module = self._module_numbers.get(id(obj))
            return None if module is None else ("module", module)
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, tree: bytes, tensors: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> None:
        super().__init__(io.BytesIO(tree))
        self._tensors = tensors
        self._modules = modules

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._tensors[pid]
        return self._modules[pid[1]]


_FIXED = (torch.Tensor, nn.Module, bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def may_change(values: Sequence[Any]) -> bool:
    """Could code that gets these values change one that is no tensor?"""
    return any(
        not isinstance(value, _FIXED) and (not isinstance(value, tuple) or may_change(value)) for value in values
    )


def pack(tree: Any, module_numbers: Mapping[int, int], what: str) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of a tree, and its tensors in the order of their numbers.

    Args:
        module_numbers: number of each module of the model, by `id()`.
        what: what the tree is, for messages: "the arguments of module 'h.3'".

    Raises:
        SMPUsageError: something in the tree does not pickle.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, module_numbers)
    try:
        packer.dump(tree)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SMPUsageError(
            f"{what} can't travel between ranks: {error}. Objects that cross a module of the model must pickle: define "
            "their class or function at the top level of a module, or pass what the callee needs of them"
        ) from error
    return buffer.getvalue(), packer.tensors


def unpack(tree: bytes, tensors: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> Any:
    """The tree that `pack` made the bytes of, with these tensors and modules in it."""
    return _Unpacker(tree, tensors, modules).load()
