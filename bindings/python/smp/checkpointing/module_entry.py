"""The state of modules when a checkpointed call begins, to run it from there again without a trace."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _device

from .. import _C
from ..exceptions import SMPUsageError

# Objects with `get_states()` and `set_states(states)`: generators by name, as tensor-parallel code keeps them.
rng_trackers: list[Any] = []


class _Buffer:
    """One buffer of the modules: does its data change in a call?"""

    __slots__ = ("changes", "key", "module", "name", "values_unseen")

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self.module, self.key, self.name = module, key, name
        # Batch norm counts in C++, where no version tells.
        self.values_unseen = isinstance(module, nn.modules.batchnorm._NormBase) and key.startswith("running_")
        self.changes: bool | None = True if self.values_unseen else None  # None: not seen yet


class Entry:
    """What one call starts from."""

    __slots__ = ("_before", "_buffers", "_device", "_lost", "_snapshot", "_trackers", "_watch")

    def __init__(self, watch: "ModuleEntries") -> None:
        self._watch = watch.snapshots
        self._snapshot = self._watch.at_entry()
        self._device = _device.CURRENT_DEVICE
        self._trackers = [_copy(tracker.get_states()) for tracker in rng_trackers]
        self._lost = ""
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before: list[tuple[_Buffer, torch.Tensor, int, torch.Tensor | None]] = []
        for buffer in watch.buffers:
            data = buffer.module._buffers.get(buffer.key)
            if data is not None and not data.is_inference():
                may_change = buffer.changes is not False and (not buffer.values_unseen or buffer.module.training)
                copy = data.detach().clone() if may_change else None
                self._before.append((buffer, data, data._version, copy))

    def end_forward(self) -> None:
        """Learns which buffers the call changed."""
        for buffer, data, version, copy in self._before:
            changed = data._version != version
            if copy is None:
                if changed:
                    buffer.changes = True
                    self._lost = buffer.name
            elif changed or buffer.values_unseen or (buffer.changes is None and not torch.equal(data, copy)):
                buffer.changes = True
                self._buffers.append((data, copy))
            elif buffer.changes is None:
                buffer.changes = False
        self._before = []

    def again(self, function: Callable[[], Any], where: str) -> Any:
        """Runs the function from this state, and leaves everything as it was before."""
        if self._lost:
            raise SMPUsageError(
                f"{where} changed its buffer {self._lost!r}, which it had not done in earlier calls, so its value at entry was not kept and it "
                "can't run again for backward. From now on it is kept: zero the gradients and run the step again"
            )
        now = self._watch.now()
        values = [(data, data.detach().clone()) for data, _ in self._buffers]
        trackers = [_copy(tracker.get_states()) for tracker in rng_trackers]
        self._snapshot.put_back()
        for data, copy in self._buffers:
            _C.overwrite(data, copy)
        for tracker, states in zip(rng_trackers, self._trackers, strict=False):
            tracker.set_states(_copy(states))
        try:
            if self._device is None or self._device == _device.CURRENT_DEVICE:
                return function()
            with self._device:
                return function()
        finally:
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
    """Makes an `Entry` for each call of some modules, which share nothing but what was learnt of their buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        named = {m: name for module in modules for name, m in module.named_modules()}
        self.snapshots = _C.ModuleWatch(list(named))
        self.buffers = [
            _Buffer(module, key, f"{name}.{key}" if name else key)
            for module, name in named.items()
            for key in module._buffers
        ]
