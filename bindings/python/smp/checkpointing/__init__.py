"""Activation checkpointing: modules that keep their inputs only, and run again when backward needs what they computed."""

from typing import Any

import torch

from .. import _C
from ..exceptions import SMPUsageError
from .api import checkpoint, checkpoint_sequential, set_activation_checkpointing
from .module_entry import rng_trackers
from .region import verify
from .report import Report, report


def is_recomputing() -> bool:
    """Does this thread run a region again? For code that must not run twice: a log, a counter outside of modules.

    Example:
        >>> if not smp.checkpointing.is_recomputing():
        ...     losses.append(loss)
    """
    return _C.is_recomputing()


def register_generator(generator: torch.Generator) -> None:
    """A generator that regions draw from: its state is kept and restored with those of the default generators.

    To be called on every rank, before the first step.

    Args:
        generator: of any device.

    Raises:
        SMPUsageError: no generator.
    """
    if not isinstance(generator, torch.Generator):
        got = f"the class {generator.__name__}" if isinstance(generator, type) else type(generator).__name__
        raise SMPUsageError(
            f"register_generator got {got}: it takes a torch.Generator; what holds several, with get_states() and "
            "set_states(states), is for register_rng_tracker"
        )
    _C.register_generator(generator)


def register_rng_tracker(tracker: Any) -> None:
    """Generators by name, which regions draw from: their states are kept and restored with the others.

    To be called on every rank, before the first step. Without it, regions that draw from the tracker have wrong gradients, which
    `verify` alone finds.

    Args:
        tracker: an object with `get_states()`, a dict of states by name, and `set_states(states)`.

    Raises:
        SMPUsageError: it has not.
    """
    has_both = all(callable(getattr(tracker, name, None)) for name in ("get_states", "set_states"))
    if isinstance(tracker, type) or not has_both:
        got = f"the class {tracker.__name__}" if isinstance(tracker, type) else type(tracker).__name__
        raise SMPUsageError(
            f"register_rng_tracker got {got}: it takes an object with get_states() and set_states(states); a torch.Generator is for "
            "register_generator"
        )
    if not any(known is tracker for known in rng_trackers):
        rng_trackers.append(tracker)


__all__ = [
    "Report",
    "checkpoint",
    "checkpoint_sequential",
    "is_recomputing",
    "register_generator",
    "register_rng_tracker",
    "report",
    "set_activation_checkpointing",
    "verify",
]
