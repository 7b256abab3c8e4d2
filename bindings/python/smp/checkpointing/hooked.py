"""A region around `forward` alone of a module that has hooks, which run outside of it, once."""

import threading
from typing import Any

from torch import nn

from ..forwards import ForwardOf
from .region import Site, run


class _Pending(threading.local):
    """The module whose next `forward` on this thread is a region."""

    module: nn.Module | None = None
    site: Site | None = None
    preserve_rng_state = True


_pending = _Pending()


def forward_here(module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `forward` of a module: as a region where `call_with_region` is what called it."""
    site = _pending.site
    if site is None or _pending.module is not module:
        return forward(*args, **kwargs)
    _pending.module = None
    return run(site, forward, args, kwargs, _pending.preserve_rng_state)


class _Waits(ForwardOf):
    """The module's own forward, which looks whether it is to be a region. It stays, since threads may be in it."""

    def __init__(self, module: nn.Module) -> None:
        forward = module.forward
        super().__init__(module, lambda *args, **kwargs: forward_here(module, forward, args, kwargs))
        self.smp_looks = True


def call_with_region(
    module: nn.Module, site: Site, preserve_rng_state: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not hasattr(module.forward, "smp_looks"):
        module.forward = _Waits(module)
    before = _pending.module, _pending.site, _pending.preserve_rng_state
    _pending.module, _pending.site, _pending.preserve_rng_state = module, site, preserve_rng_state
    try:
        return module(*args, **kwargs)
    finally:
        _pending.module, _pending.site, _pending.preserve_rng_state = before
