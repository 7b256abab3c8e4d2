"""`smp.checkpointing` under its compatible name."""

from smp.checkpointing import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
