"""Checkpointing of calls that are instructions: a mark that they carry to the home of their module, where the region is."""

import contextlib
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_STACK = struct.Struct("<??I")
NO_REGION, REGION, REGION_WITHOUT_RNG = b"\0", b"\1", b"\2"


@dataclass(frozen=True)
class Request:
    """How something is checkpointed. `pack_args_as_tuple` and `limit` are for stacks.

    Attributes:
        limit: how many layers a region holds at most; None: no limit.
    """

    preserve_rng_state: bool
    pack_args_as_tuple: bool
    limit: int | None

    def mark_of_stack(self) -> bytes:
        return _STACK.pack(self.preserve_rng_state, self.pack_args_as_tuple, self.limit or 0)

    @staticmethod
    def of_mark(mark: bytes) -> "Request | None":
        """What a stack was asked for; None where the mark is not that of a stack."""
        if len(mark) != _STACK.size:
            return None
        preserve, pack, limit = _STACK.unpack(mark)
        return Request(preserve, pack, limit or None)


class _Asked(threading.local):
    mark = NO_REGION


_asked = _Asked()


@contextlib.contextmanager
def asking(mark: bytes) -> Iterator[None]:
    """Calls that this thread issues in the scope are regions where they run."""
    before, _asked.mark = _asked.mark, mark
    try:
        yield
    finally:
        _asked.mark = before


def region_mark(preserve_rng_state: bool) -> bytes:
    return REGION if preserve_rng_state else REGION_WITHOUT_RNG


def mark() -> bytes:
    """What the next call of this thread carries."""
    return _asked.mark
