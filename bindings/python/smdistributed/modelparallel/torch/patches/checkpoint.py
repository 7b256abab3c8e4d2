"""`smp.checkpointing` under its compatible name."""

from smp.checkpointing import checkpoint, checkpoint_sequential, set_activation_checkpointing

__all__ = ["checkpoint", "checkpoint_sequential", "set_activation_checkpointing"]
