"""Mixed precision: `smp.amp.GradScaler`."""

from typing import Any

import torch

from .communication import allgather
from .ranks import PP_GROUP


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
        super().__init__(
            device or "cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled and available
        )

    def _start(self) -> None:
        # torch does this in `scale`, which only the rank that runs the step function calls.
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As in torch."""
        self._start()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As in torch, with one decision for all ranks of the model. Collective over them."""
        self._start()
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As in torch."""
        self._start()
        super().update(new_scale)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        # A rank without gradients has found no infinity; torch takes an empty answer for a mistake.
        device = torch.device(self._device)
        return super()._unscale_grads_(*args, **kwargs) or {device: torch.zeros((), dtype=torch.float32, device=device)}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # Collective: every rank learns whether any of them found an infinity, and skips the step and backs off together.
        found = optimizer_state["found_inf_per_device"]
        if any(allgather(any(value.item() for value in found.values()), PP_GROUP)):
            for value in found.values():
                value.fill_(1.0)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
