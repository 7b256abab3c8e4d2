"""The state of modules when a checkpointed call begins, to run it from there again without a trace."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _device

from .. import _C
from ..exceptions import SMPUsageError

# Objects with `get_states()` and `set_states(states)`: generators by name, as tensor-parallel code keeps them.
rng_trackers: list[Any] = []


_SMALL_BYTES = 1 << 16


def _can_be_overwritten(data: torch.Tensor) -> bool:
    """False for sparse tensors, and for expanded ones, whose elements share memory."""
    if data.layout is not torch.strided:
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(data.stride(), data.shape, strict=True))


def _differs(data: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    """Has a small buffer changed? On other devices by its version only, since to compare would wait for them."""
    return data._version != version or (data.device.type == "cpu" and not torch.equal(data, copy))


class _Buffer:
    """One buffer of the modules: does its data change in a call?"""

    __slots__ = ("changes", "data", "is_small", "is_training", "name")

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self.name, self.data = name, module._buffers[key]
        # Batch norm counts in C++, where no version tells; in evaluation it does not.
        counts = isinstance(module, nn.modules.batchnorm._NormBase) and key.startswith("running_")
        self.changes: bool | None = True if counts else None  # False: not seen to do so. None: not seen yet
        # A small one is kept in every call, in case it changes only now and then.
        self.is_small = False
        if self.data is not None and not is_lazy(self.data):
            if _can_be_overwritten(self.data):
                self.is_small = self.data.nbytes <= _SMALL_BYTES
            else:
                self.changes = False
        self.is_training = (lambda: module.training) if counts else None


class Entry:
    """What one call starts from."""

    __slots__ = (
        "_before",
        "_buffers",
        "_constant",
        "_device",
        "_lost",
        "_parameters",
        "_snapshot",
        "_trackers",
        "_unchanged",
        "_watch",
    )

    def __init__(self, modules: "ModuleEntries") -> None:
        self._watch = modules.attributes
        self._snapshot = self._watch.at_entry()
        self._device = _device.CURRENT_DEVICE
        self._trackers = [_copy(tracker.get_states()) for tracker in rng_trackers]
        self._parameters = [(name, p, p._version, p.requires_grad) for name, p in modules.parameters]
        self._lost = ""
        self._constant: list[tuple[_Buffer, torch.Tensor, int]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unchanged: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._before: list[tuple[_Buffer, torch.Tensor, int, torch.Tensor | None]] = []
        for buffer in modules.buffers:
            data = buffer.data
            if data is not None and not is_lazy(data) and not data.is_inference():
                may_change = buffer.changes is not False or buffer.is_small
                if may_change and buffer.is_training is not None:
                    may_change = buffer.is_training()
                self._before.append((buffer, data, data._version, data.detach().clone() if may_change else None))

    def end_forward(self) -> None:
        """Learns which buffers the call changed."""
        for buffer, data, version, copy in self._before:
            changed = data._version != version
            if copy is None:
                if changed:
                    if not _can_be_overwritten(data):
                        raise SMPUsageError(
                            f"a checkpointed call changed the buffer {buffer.name!r}, which is sparse or expanded: its value at entry can't be put back "
                            "for the recompute. Make it dense (contiguous), or change it outside"
                        )
                    buffer.changes = True
                    self._lost = buffer.name
                else:
                    self._constant.append((buffer, data, version))
            elif (
                buffer.changes
                or _differs(data, version, copy)
                or (buffer.changes is None and not torch.equal(data, copy))
            ):
                buffer.changes = True
                self._buffers.append((data, copy))
            else:
                buffer.changes = False
                if buffer.is_small:
                    self._unchanged.append((data, version, copy))
                else:
                    self._constant.append((buffer, data, version))
        self._before = []

    def _check(self, where: str) -> None:
        if self._lost:
            raise SMPUsageError(
                f"{where} changed its buffer {self._lost!r}, which it had not done in earlier calls, so its value at entry was not kept and it "
                "can't run again for backward. From now on it is kept: zero the gradients and run the step again"
            )
        for buffer, tensor, version in self._constant:
            if tensor._version != version and buffer.changes:
                raise SMPUsageError(
                    f"{where} can't run again for backward, since a later call changed its buffer {buffer.name!r}, which no call had done before, so "
                    "its value at entry was not kept. From now on it is kept: zero the gradients and run the step again"
                )
        kept: list[tuple[str, str, torch.Tensor, int]] = [("parameter", *kept[:3]) for kept in self._parameters]
        kept += [("buffer", buffer.name, tensor, version) for buffer, tensor, version in self._constant]
        for kind, name, tensor, version in kept:
            if tensor._version != version:
                raise SMPUsageError(
                    f"{where} can't run again for backward, since its {kind} {name!r} was changed in place after it was entered (by an "
                    "optimizer, or by load_state_dict): run backward first"
                )

    def again(self, function: Callable[[], Any], where: str) -> Any:
        """Runs the function from this state, and leaves everything as it was before."""
        self._check(where)
        now = self._watch.now()
        changed = [
            *self._buffers,
            *((data, copy) for data, version, copy in self._unchanged if _differs(data, version, copy)),
        ]
        values = [(data, data.detach().clone()) for data, _ in changed]
        trackers = [_copy(tracker.get_states()) for tracker in rng_trackers]
        thawed = [(p, p.requires_grad) for _, p, _, needed in self._parameters if p.requires_grad != needed]
        self._snapshot.put_back()
        for data, copy in changed:
            _C.overwrite(data, copy)
        for tracker, states in zip(rng_trackers, self._trackers, strict=False):
            tracker.set_states(_copy(states))
        for parameter, needs_now in thawed:
            parameter.requires_grad_(not needs_now)
        try:
            if self._device is None or self._device == _device.CURRENT_DEVICE:
                return function()
            with self._device:
                return function()
        finally:
            for parameter, needs_now in thawed:
                parameter.requires_grad_(needs_now)
            for tracker, states in zip(rng_trackers, trackers, strict=True):
                tracker.set_states(states)
            for data, value in values:
                _C.overwrite(data, value)
            now.put_back()


def _copy(states: Any) -> Any:
    if isinstance(states, dict):
        return {key: _copy(value) for key, value in states.items()}
    return states.clone() if isinstance(states, torch.Tensor) else states


class ModuleEntries:
    """Makes an `Entry` for each call of some modules. Keeps what was learnt of their buffers, and what they consist of until that changes."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._read()

    def _read(self) -> None:
        named = {m: name for module in self._modules for name, m in module.named_modules()}
        for module, name in named.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise SMPUsageError(
                    f"a TorchScript module ({name or 'itself'}, a {module.original_name}) was checkpointed: its interpreter does not let it run again in part. "
                    "Checkpoint the modules around it, or leave it in Python"
                )
        dicts = [d for m in named for d in (m._modules, m._parameters, m._buffers)]
        self._structure = _C.ModuleWatch(dicts)
        self._structure.changed()
        self.attributes = _C.ModuleWatch(dicts + [m.__dict__ for m in named])
        known = {id(buffer.data): buffer for buffer in getattr(self, "buffers", ())}
        self.buffers = []
        self.parameters: list[tuple[str, nn.Parameter]] = []
        for module, name in named.items():
            path = f"{name}." if name else ""
            for key, data in module._buffers.items():
                self.buffers.append(known.get(id(data)) or _Buffer(module, key, path + key))
            self.parameters += [
                (path + key, p) for key, p in module._parameters.items() if p is not None and not is_lazy(p)
            ]

    def entry(self) -> Entry:
        if self._structure.changed():
            self._read()
        return Entry(self)
