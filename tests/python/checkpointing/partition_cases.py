"""Checkpointing in a model that is spread over ranks; run on every rank, asserted in test_partitions.py."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import smp
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 6
MICROBATCHES = 4
STEPS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class TupleLayer(Layer):
    """Takes and returns (hidden, mask), as layers of tensor-parallel transformers do."""

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = inputs
        return super().forward(x) * mask, mask


class TwoArguments(TupleLayer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward((x, mask))


class KeywordLayer(Layer):
    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


def plain(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.seq(net.fc1(x))


class Net(nn.Module):
    """How its forward calls its parts is set from outside."""

    def __init__(self, kind: type[nn.Module] = Layer, layers: int = 5, stack: type[Any] = nn.Sequential) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(Layer(), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        made = [kind() for _ in range(layers)]
        self.seq = stack(*made) if stack is nn.Sequential else stack(made)
        self.how: Callable[[Any, torch.Tensor], torch.Tensor] = plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def module_checkpointed(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = checkpoint(net.fc1, x)
    return net.seq(x)


def layers_with_keywords(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.fc1(x)
    for layer in net.seq:
        x = layer(x, scale=x.detach().abs().mean() + 1)
    return x


def tuples(net: Any, x: torch.Tensor) -> torch.Tensor:
    value = (net.fc1(x), torch.ones(1, WIDTH))
    for layer in net.seq:
        value = layer(value)
    return value[0]


def two_arguments(net: Any, x: torch.Tensor) -> torch.Tensor:
    value = (net.fc1(x), torch.ones(1, WIDTH))
    for layer in net.seq:
        value = layer(*value)
    return value[0]


class Sequential:
    """`checkpoint_sequential` in forward."""

    def __init__(self, strategy: str, as_tuple: bool | None = None) -> None:
        self.strategy, self.as_tuple = strategy, as_tuple

    def __call__(self, net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.fc1(x)
        if self.as_tuple is None:
            return checkpoint_sequential(net.seq, x, strategy=self.strategy)
        value = (x, torch.ones(1, WIDTH))
        return checkpoint_sequential(net.seq, value, strategy=self.strategy, pack_args_as_tuple=self.as_tuple)[0]


class Native:
    def __init__(self, use_reentrant: bool) -> None:
        self.use_reentrant = use_reentrant

    def __call__(self, net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.fc1(x)
        for layer in net.seq:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@smp.step
def train_step(model: smp.DistributedModel, x: torch.Tensor, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    model.backward(loss)
    return loss


def count_ready(model: smp.DistributedModel) -> dict[str, int]:
    counts = {}
    for name, parameter in model.local_named_parameters():
        counts[name] = 0

        def ready(gradient: torch.Tensor, name: str = name) -> None:
            counts[name] += 1

        parameter.register_hook(ready)
    return counts


def train(
    how: Callable[[Any, torch.Tensor], torch.Tensor],
    homes: Mapping[str, int],
    set_on: Mapping[str, dict[str, Any]] | None = None,
    net: Mapping[str, Any] | None = None,
    autocast: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """Losses, gradients and buffers of this rank after some steps, how often each gradient came, and the recomputes."""
    smp.init({"microbatches": MICROBATCHES, "auto_partition": False, "stall_timeout": 60, "partitions": 2, **config})
    torch.manual_seed(0)
    module = Net(**(net or {}))
    module.how = how
    for path, home in homes.items():
        smp.set_partition(module.get_submodule(path), home)
    model = smp.DistributedModel(module)
    for path, options in (set_on or {}).items():
        smp.set_activation_checkpointing(model.module.get_submodule(path), **options)
    before = len(smp.checkpointing.report().regions)
    x = torch.randn(4 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    losses = [train_step(model, x, autocast).outputs for _ in range(1)]
    counts = count_ready(model)
    losses += [train_step(model, x, autocast).outputs for _ in range(STEPS - 1)]
    result = {
        "losses": [loss for step in losses for loss in step],
        "gradients": {name: p.grad for name, p in model.local_named_parameters()},
        "buffers": dict(model.local_named_buffers()),
        "ready": counts,
        "recomputes": {r.name: r.recomputes for r in smp.checkpointing.report().regions[before:]},
        "report": "" if smp.state.partition_report is None else str(smp.get_partition_report()),
    }
    smp.shutdown()
    return result


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("smp").addHandler(handler)
    try:
        yield text
    finally:
        logging.getLogger("smp").removeHandler(handler)


def rule(how: Callable[[Any, torch.Tensor], torch.Tensor], set_on: str | None, by_hand: bool) -> tuple[str, str, int]:
    """Type and text of the error of a step whose checkpointed module is split, or "" and the log; and the number of Python warnings."""
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": not by_hand, "stall_timeout": 60})
    torch.manual_seed(0)
    net = Net()
    net.fc1 = nn.Sequential(*(Layer() for _ in range(16)))
    net.how = how
    if by_hand:
        smp.set_partition(net.fc1[2], 1)
    model = smp.DistributedModel(net)
    if set_on is not None:
        smp.set_activation_checkpointing(model.module.get_submodule(set_on))
    kind, message = "", ""
    with logged() as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                train_step(model, torch.randn(8, WIDTH), False)
            message = log.getvalue()
        except Exception as error:
            kind, message = type(error).__name__, str(error)
    smp.shutdown()
    return kind, message, sum("can't be checkpointed" in str(w.message) for w in caught)


def wrong_calls() -> dict[str, tuple[str, str]]:
    """What wrong calls of `set_activation_checkpointing` and `checkpoint_sequential` say."""

    def error_of(call: Callable[[], Any]) -> tuple[str, str]:
        try:
            call()
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""

    said = {"no model": error_of(lambda: smp.set_activation_checkpointing(nn.Linear(2, 2)))}
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "stall_timeout": 60})
    net = Net()
    smp.set_partition(net.seq, 1)
    model = smp.DistributedModel(net)
    put = smp.set_activation_checkpointing
    said |= {
        "foreign": error_of(lambda: put(nn.Linear(2, 2))),
        "no module": error_of(lambda: put("seq")),  # type: ignore[arg-type]
        "strategy": error_of(lambda: put(model.module.seq, strategy="group_0")),
        "options": error_of(lambda: put(model.module.seq[0], strategy="contiguous")),
        "no stack": error_of(lambda: checkpoint_sequential(net.seq[0], torch.zeros(1))),
        "no function": error_of(lambda: checkpoint(3, torch.zeros(1))),
    }
    train_step(model, torch.randn(8, WIDTH), False)
    said["late"] = error_of(lambda: put(model.module.seq))
    smp.shutdown()
    return said
