"""Errors that this library raises.

What the user can mend (`SMPConfigError`, `SMPUsageError`) is kept apart from what can happen at run time without
anybody's mistake (`SMPFailureError`).
"""


class SMPError(RuntimeError):
    """Base of all errors of this library."""


class SMPConfigError(SMPError, ValueError):
    """A configuration key has a value that is not allowed. The message gives key, value, rule and remedy."""


class SMPUsageError(SMPError):
    """A call breaks a rule of the API. The message gives the rule and the remedy."""


class SMPFailureError(SMPError):
    """Another rank failed or has gone, or the connection to it was closed."""
