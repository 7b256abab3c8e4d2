"""Modules whose results can't be known from the shapes of their arguments."""

from torch import nn

from .exceptions import SMPUsageError
from .state import state

# Kept in the module's own __dict__, so that a deep copy or an unpickled module keeps it.
_MARK = "_smp_dynamic"


def set_dynamic(module: nn.Module, dynamic: bool = True) -> None:
    """Says that what a module gives back varies, though the shapes of its arguments do not.

    A rank that calls a module elsewhere remembers which shapes, dtypes and other values came back for arguments of these
    shapes, and goes on at once the next time. A module that picks rows by their values, say, gives back another shape each time:
    then every call waits for its answer. Without this call the first step in which the result differs fails, and the
    module is treated so from then on. To be called on every rank; before the first step or between steps.

    Args:
        module: any module of the model. What contains it is treated the same.
        dynamic: False takes it back.

    Raises:
        SMPUsageError: `module` is no module.

    Example:
        >>> smp.set_dynamic(model.router)
    """
    if not isinstance(module, nn.Module):
        raise SMPUsageError(f"smp.set_dynamic got {type(module).__name__}: it must be a torch.nn.Module")
    module.__dict__[_MARK] = bool(dynamic)
    if getattr(state.model, "_runtime", None) is not None:
        state.model._runtime.update_dynamic(module)


def is_dynamic(module: nn.Module) -> bool:
    """Is a module marked, or one inside it?"""
    return any(m.__dict__.get(_MARK, False) for m in module.modules())
