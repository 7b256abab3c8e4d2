"""`smp.amp` under its compatible name."""

from smp.amp import GradScaler

__all__ = ["GradScaler"]
