"""What differs between the versions of PyTorch that smp runs with, as far as Python sees it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def place_of_checkpoint_generator() -> str:
    """The generator that `torch.utils.checkpoint.checkpoint(use_reentrant=False)` runs a function in.

    From 2.14 on it is another one, and the old name stays for callers outside of PyTorch, as a way to it.
    """
    old = "_checkpoint_without_reentrant_generator"
    new = f"{old}_impl"
    return f"torch.utils.checkpoint:{new if hasattr(torch.utils.checkpoint, new) else old}"


def reader_of_checkpoint_options(generator: Callable[..., Any]) -> Callable[..., tuple[bool, Any]]:
    """Finds `preserve_rng_state` and `context_fn` in the arguments of that generator: by position up to 2.13, then by name."""
    signature = inspect.signature(generator)

    def read(*args: Any, **kwargs: Any) -> tuple[bool, Any]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return call.arguments["preserve_rng_state"], call.arguments["context_fn"]

    return read
