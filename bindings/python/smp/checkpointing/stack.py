"""Stacks of layers that are called one after another, and how they are grouped into regions."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import _C
from ..exceptions import SMPUsageError
from ..random import seeded_already
from .region import Site, run

_GROUP = re.compile(r"group_([1-9][0-9]*)")


def check_strategy(strategy: str) -> int | None:
    """How many layers a region holds at most; None: no limit.

    Raises:
        SMPUsageError: no such strategy.
    """
    if strategy == "each":
        return 1
    if strategy == "contiguous":
        return None
    found = _GROUP.fullmatch(strategy) if isinstance(strategy, str) else None
    if found is None:
        shown = repr(strategy) if isinstance(strategy, str | int | None) else f"a {type(strategy).__name__}"
        raise SMPUsageError(
            f"strategy is {shown}: it must be 'each', 'contiguous', or 'group_N' with a number of layers N (group_2). PyTorch's "
            "checkpoint_sequential(seq, segments, x) is checkpoint_sequential(seq, x, strategy='group_N') here"
        )
    return int(found[1])


def groups(homes: Sequence[int | None], limit: int | None) -> list[range]:
    """Layers that make one region each: neighbours of one partition, at most `limit` of them. None as home: a layer of its own."""
    result: list[range] = []
    for i, home in enumerate(homes):
        last = result[-1] if result else range(0)
        fits = limit is None or len(last) < limit
        if last and fits and home is not None and homes[last[0]] == home:
            result[-1] = range(last.start, i + 1)
        else:
            result.append(range(i, i + 1))
    return result


@functools.cache
def _positions(kind: type[nn.Module]) -> tuple[int, int]:
    """How few and how many positional arguments `forward` takes; no more than one where it takes any number."""
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return 1, 1
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 0, 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional), len(positional)


def call_layer(layer: nn.Module, value: Any, pack_args_as_tuple: bool) -> Any:
    """A tuple is one argument, or, where `forward` takes that many, as many as it has items."""
    if type(value) is tuple and not pack_args_as_tuple:
        fewest, most = _positions(type(layer))  # type: ignore[arg-type]
        if fewest <= len(value) <= most:
            return layer(*value)
    return layer(value)


def chain(layers: Sequence[nn.Module], value: Any, pack_args_as_tuple: bool) -> Any:
    for layer in layers:
        value = call_layer(layer, value, pack_args_as_tuple)
    return value


class Run(nn.Module):
    """Neighbours of one partition in a stack that is split: a call of it runs some of them, one after another, as one region.

    Attributes:
        issues: is a call of it, here and now, an instruction? Set by the runtime.
    """

    issues: Callable[[], bool]

    def __init__(self, layers: Sequence[nn.Module], name: str, first: int) -> None:
        """`first`: number of the first of the layers in the stack."""
        super().__init__()
        self._name, self._layers, self._first = name, list(layers), first
        self._sites: dict[tuple[int, int], Site] = {}
        for i, layer in enumerate(layers):
            self.add_module(str(i), layer)

    def call(self, value: Any, start: int, stop: int, preserve_rng_state: bool, pack_args_as_tuple: bool) -> Any:
        """Issues the call. Takes a key for each layer from the stream of random numbers, as their own calls would; the last one is the call's."""
        keys = torch.tensor([_C.draw_key() for _ in range(start, stop - 1)], dtype=torch.uint64)
        return self(value, keys, start, stop, preserve_rng_state, pack_args_as_tuple)

    def forward(
        self, value: Any, keys: torch.Tensor, start: int, stop: int, preserve_rng_state: bool, pack_args_as_tuple: bool
    ) -> Any:
        site = self._sites.get((start, stop))
        if site is None:
            numbers = f"layers {self._first + start} to {self._first + stop - 1}"
            site = self._sites[start, stop] = Site(f"{numbers} of {self._name}", self._layers[start:stop])
        args = (value, keys.tolist(), start, stop, pack_args_as_tuple)
        return run(site, self._run, args, {}, preserve_rng_state)

    def _run(self, value: Any, keys: Sequence[int], start: int, stop: int, pack_args_as_tuple: bool) -> Any:
        of_call = _C.RandomState()
        for i, layer in enumerate(self._layers[start:stop]):
            if i < len(keys):
                _C.seed_defaults(keys[i])
            else:
                of_call.restore()
            with seeded_already():
                value = call_layer(layer, value, pack_args_as_tuple)
        return value
