"""Random numbers by module (`rng_by_module`): the same bits on any number of partitions.

Each module takes one key from the stream of its caller, and draws from a stream of its own that this seeds; each random
operator takes one key too. So what a module draws depends on where in the tree of calls it is, not on the rank that runs it.
Without the option a call to another rank does so, and modules inside it draw one after another, as in plain PyTorch.
"""

import functools
from collections.abc import Callable
from typing import Any

from . import _C


def with_own_stream(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a module, drawing from a stream of its own inside a step."""

    @functools.wraps(forward)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        _C.enter_module()
        try:
            return forward(*args, **kwargs)
        finally:
            _C.leave_module()

    return scoped
