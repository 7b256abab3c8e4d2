"""`smp.DistributedOptimizer`: an optimizer of a model that is spread over ranks."""

from collections.abc import Callable
from typing import Any

import torch

from .communication import allgather
from .exceptions import SMPUsageError
from .ranks import PP_GROUP
from .state import state

_PARTIAL_KEY = "_smp_is_partial"


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer of the whole model's parameters. Each rank updates the parameters that live on it: only they have
    gradients. Works with learning rate schedulers and gradient scalers.

    Args:
        optimizer: built from `model.parameters()`, before or after the model was wrapped.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: accepted; they matter for the FP16 wrapper only.

    Raises:
        SMPUsageError: before `smp.init`, or for something that is no optimizer.

    Example:
        >>> optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    """

    # A fused optimizer would be handed the scale and the found infinities as attributes, and so unscale by itself; these
    # are decided by all ranks together, so the scaler does it.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        # The base class is not initialised: it would keep a second list of parameters. All state is the wrapped optimizer's.
        state.require_topology()
        if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
            raise SMPUsageError(
                f"DistributedOptimizer got {type(optimizer).__name__}: it wraps a torch.optim.Optimizer, once"
            )
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.optimizer = values["optimizer"]

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, themselves: schedulers write to them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, of the parameters of this rank."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates this rank's parameters.

        Raises:
            SMPUsageError: inside a step function, where gradients are not complete.
        """
        if state.step is not None:
            raise SMPUsageError(
                "optimizer.step() was called inside a step: gradients are complete when the step has returned; call it after"
            )
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters that have one."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def _gather(self, part: dict[Any, Any]) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        for item in allgather(part, PP_GROUP):
            merged.update(item)
        return merged

    def local_state_dict(self) -> dict[str, Any]:
        """The state of this rank's parameters, with the mark `_smp_is_partial`."""
        return {**self.optimizer.state_dict(), _PARTIAL_KEY: True}

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, as the wrapped optimizer gives it with one process. Collective over the model's ranks."""
        whole = self.optimizer.state_dict()
        whole["state"] = self._gather(whole["state"])
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state, or the partial ones of all ranks (collective then). Each rank keeps its part."""
        entries = dict(state_dict)
        if entries.pop(_PARTIAL_KEY, False):
            entries["state"] = self._gather(entries["state"])
        if state.model is not None:
            local = {id(p) for p in state.model.local_parameters()}
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            kept = {i for i, p in enumerate(parameters) if id(p) in local}
            entries["state"] = {i: value for i, value in entries["state"].items() if i in kept}
        self.optimizer.load_state_dict(entries)
