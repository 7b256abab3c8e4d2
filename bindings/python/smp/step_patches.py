"""What some functions of PyTorch mean while a partitioned model exists: random state, and the text of a tensor."""

from collections.abc import Callable
from typing import Any

import torch

from . import _C


class _StreamOrDefault:
    """The generator that `torch.get_rng_state`, `torch.set_rng_state`, `torch.manual_seed` and `torch.random.fork_rng` work on: in a step
    function the microbatch's own stream, so that recomputation there draws the same again; elsewhere the default generator.
    """

    def __init__(self, default: torch.Generator) -> None:
        self._default = default

    def __getattr__(self, name: str) -> Any:
        return getattr(_C.own_stream() or self._default, name)


class StepPatches:
    """Installed by the model, taken back by `close`."""

    def __init__(self, fetch: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._fetch = fetch
        self._default = torch.random.default_generator
        self._text = torch._tensor_str._str
        torch.random.default_generator = _StreamOrDefault(self._default)  # type: ignore[assignment]
        setattr(torch._tensor_str, "_str", self._text_of)  # noqa: B010

    def _text_of(self, tensor: torch.Tensor, **options: Any) -> str:
        if not _C.is_remote(tensor):
            return self._text(tensor, **options)
        if not _C.in_frame():
            return f"tensor(<on another partition>, size={tuple(tensor.shape)}, dtype={tensor.dtype})"
        return self._text(self._fetch(tensor), **options)

    def close(self) -> None:
        torch.random.default_generator = self._default
        torch._tensor_str._str = self._text
