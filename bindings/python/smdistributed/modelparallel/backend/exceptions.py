"""Exceptions that launch toolkits look for, to show them to the user."""

from smp.exceptions import SMPError, SMPFailureError

__all__ = ["SMPError", "SMPFailureError"]
