"""Functions of PyTorch that are replaced for a while, and the check, once a process, that PyTorch calls what replaces them.

Most of them are private, so another version of PyTorch may leave them out, or go another way. The check makes an error of what would else be
silence.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

from .exceptions import SMPUsageError


class Patch:
    """Functions of PyTorch that are replaced together, named "module:name" or "module:Class.name"."""

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        """For each of them what makes its replacement out of the original."""
        raise NotImplementedError

    @classmethod
    def rehearsal(cls) -> Self:
        """One that acts as in a step, for `examples`."""
        raise NotImplementedError

    def examples(self) -> dict[str, Callable[[], bool]]:
        """For public functions that must come here a tiny call, which says whether it did. It leaves nothing behind."""
        raise NotImplementedError


class _Reached(BaseException):
    """Ends an example as soon as it is in the replacement."""


_rehearsing: int | None = None  # the thread that verifies


def reached(*_: Any) -> Any:
    """For rehearsals, in place of what a replacement asks first. For other threads, which may come here too, the answer is no."""
    if threading.get_ident() == _rehearsing:
        raise _Reached
    return False


def reaches(function: Callable[..., Any], *args: Any) -> bool:
    """Does a call come to `reached`?"""
    try:
        function(*args)
    except _Reached:
        return True
    return False


def find(place: str) -> tuple[Any, str]:
    """The module or class of a function of PyTorch, and the function's name.

    Raises:
        SMPUsageError: this version of PyTorch has none.
    """
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
    except (ImportError, AttributeError) as error:
        raise _missing(place) from error
    # A class without __call__ is called itself.
    if not any(name in vars(kind) for kind in (owner.__mro__ if isinstance(owner, type) else (owner,))):
        raise _missing(place)
    return owner, name


def _shown(place: str) -> str:
    return place.replace(":", ".")


def _unusable(what: str) -> SMPUsageError:
    return SMPUsageError(
        f"torch {torch.__version__} {what}. Install a torch that smp was tested with (README.md) and build smp for it; where code of yours "
        "replaces the function, leave that out"
    )


def _missing(place: str) -> SMPUsageError:
    return _unusable(f"has no {_shown(place)}, which smp replaces")


def _take_back(taken: list[tuple[Any, str, bool, Any]]) -> None:
    for owner, name, own, original in reversed(taken):
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)  # what it inherits was hidden
    taken.clear()


def _install(patch: Patch, taken: list[tuple[Any, str, bool, Any]]) -> None:
    for place, over in patch.replacements().items():
        owner, name = find(place)
        original = getattr(owner, name)
        replacement = over(original)
        taken.append((owner, name, name in vars(owner), original))
        setattr(owner, name, replacement)


@contextlib.contextmanager
def _in_force(patch: Patch) -> Iterator[None]:
    taken: list[tuple[Any, str, bool, Any]] = []
    try:
        _install(patch, taken)
        yield
    finally:
        _take_back(taken)


_verified: set[type[Patch]] = set()


def verify(*kinds: type[Patch]) -> None:
    """Checks, once a process, that PyTorch calls the replacements. Afterwards everything is as before.

    Raises:
        SMPUsageError: it does not, or does not have the functions.
    """
    global _rehearsing
    for kind in kinds:
        if kind in _verified:
            continue
        patch = kind.rehearsal()
        _rehearsing = threading.get_ident()
        with _in_force(patch):
            for public, comes_here in patch.examples().items():
                cause = None
                try:
                    came = comes_here()
                except Exception as error:
                    came, cause = False, error
                if not came:
                    places = ", ".join(map(_shown, patch.replacements()))
                    raise _unusable(
                        f"does not call what smp puts in place of {places} when {public} is called, so that would do something else in a step"
                    ) from cause
        _verified.add(kind)


class Patches:
    """Patches that are in force until `close`."""

    def __init__(self, *patches: Patch) -> None:
        """Installs all of them, or none.

        Raises:
            SMPUsageError: see `verify`.
        """
        verify(*map(type, patches))
        self._taken: list[tuple[Any, str, bool, Any]] = []
        try:
            for patch in patches:
                _install(patch, self._taken)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives PyTorch its own functions back."""
        _take_back(self._taken)
