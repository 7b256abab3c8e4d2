"""Mixed precision: `smp.amp.GradScaler`."""

import pickle
from typing import Any

import torch

from .state import state


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a model that is spread over ranks: an infinity on one rank skips the step on all.

    Without an accelerator it passes everything through, as `torch.cuda.amp.GradScaler` does, unless a device is named.

    Args:
        device: device type of the gradients; None: "cuda" where there is one, else scaling is off.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.

    Example:
        >>> scaler = smp.amp.GradScaler()
        >>> model.backward(scaler.scale(loss))  # in the step
        >>> scaler.step(optimizer)  # after it
        >>> scaler.update()
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        device: str | None = None,
    ) -> None:
        available = device is not None or torch.cuda.is_available()
        super().__init__(device or "cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled and available)

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> float | None:
        # Collective: every rank learns whether any of them found an infinity, and skips the step and backs off together.
        found = optimizer_state["found_inf_per_device"]
        if state.communicator is not None:
            mine = any(value.item() for value in found.values())
            gathered = state.communicator.allgather(pickle.dumps(mine), state.require_topology().group("pp"))
            if any(pickle.loads(item) for item in gathered):
                for value in found.values():
                    value.fill_(1.0)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
