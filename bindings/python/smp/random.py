"""Random numbers by module (`rng_by_module`): the same bits on any number of partitions.

Each module takes one key from the stream of its caller, and draws from a stream of its own that this seeds; each random
operator takes one key too. So what a module draws depends on where in the tree of calls it is, not on the rank that runs it.
Without the option a call to another rank does so, and modules inside it draw one after another, as in plain PyTorch.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import _C


class _Seeded(threading.local):
    pending = False


_seeded = _Seeded()


@contextlib.contextmanager
def seeded_already() -> Iterator[None]:
    """The first module that is called in the scope has its stream: the default generators were seeded for it."""
    _seeded.pending = True
    try:
        yield
    finally:
        _seeded.pending = False


def with_own_stream(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a module, drawing from a stream of its own inside a step."""

    @functools.wraps(forward)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        if _seeded.pending:
            _seeded.pending = False
            return forward(*args, **kwargs)
        _C.enter_module()
        try:
            return forward(*args, **kwargs)
        finally:
            _C.leave_module()

    return scoped
