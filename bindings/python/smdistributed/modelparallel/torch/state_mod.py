"""`smp.state` under its compatible name."""

from smp.state import state

__all__ = ["state"]
