"""Exceptions that launch toolkits look for, to show them to the user."""

from smp.exceptions import SMPConfigError, SMPError, SMPUsageError

__all__ = ["SMPConfigError", "SMPError", "SMPUsageError"]
