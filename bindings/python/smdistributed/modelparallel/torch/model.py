"""`smp.model` under its compatible name."""

from smp.model import DistributedModel

__all__ = ["DistributedModel"]
