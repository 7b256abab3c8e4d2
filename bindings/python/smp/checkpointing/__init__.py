"""Activation checkpointing: modules that keep their inputs only, and run again when backward needs what they computed."""

from typing import Any

from .._C import is_recomputing, register_generator
from ..exceptions import SMPUsageError
from .api import checkpoint, checkpoint_sequential, set_activation_checkpointing
from .module_entry import rng_trackers
from .region import verify
from .report import Report, report


def register_rng_tracker(tracker: Any) -> None:
    """Generators by name, which regions draw from: their states are kept and restored with the others.

    Args:
        tracker: an object with `get_states()`, a dict of states by name, and `set_states(states)`.

    Raises:
        SMPUsageError: it has not.
    """
    if not callable(getattr(tracker, "get_states", None)) or not callable(getattr(tracker, "set_states", None)):
        raise SMPUsageError(
            f"register_rng_tracker got {type(tracker).__name__}: it needs get_states() and set_states(states)"
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
