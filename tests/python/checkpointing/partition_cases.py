"""Checkpointing in a model that is spread over ranks; run on every rank, asserted in test_partitions.py."""

import contextlib
import copy
import gc
import io
import logging
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import smp
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
from smp import _C

WIDTH = 6
MICROBATCHES = 4
STEPS = 3  # one alone, and one of each replica


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


class Nested(nn.Module):
    """Checkpoints a part of itself, and that in turn a part of its own."""

    is_checkpointed = True

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first, self.inner = Layer(), type(self)(depth - 1) if depth else Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x + (checkpoint(self.inner, x) if self.is_checkpointed else self.inner(x))


class NestedPlain(Nested):
    is_checkpointed = False


class Pair(nn.Module):
    """Two layers, which may lie on two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


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


class Methods(nn.Module):
    """Its forward checkpoints other methods of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sin()

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x).exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "plain"):
            return checkpoint(self.other, checkpoint(self.one, x))
        return self.other(self.one(x))


class PlainMethods(Methods):
    plain = True


def selective(net: Any, x: torch.Tensor) -> torch.Tensor:
    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), contextlib.nullcontext()

    return torch.utils.checkpoint.checkpoint(net.seq[4], net.fc1(x), use_reentrant=False, context_fn=contexts)


def closures(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.fc1(x)
    for layer in net.seq:
        x = checkpoint(lambda h, layer=layer: layer(h), x)
    return x


@smp.step
def train_step(model: smp.DistributedModel, x: torch.Tensor, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    model.backward(loss)
    return loss


class Replicas:
    """Stands for data-parallel training by two replicas, whose data this process has one after the other. Their gradients become the mean of
    both: each contribution as it is ready (as a reducer does that overlaps with backward), or all together at the end of the step.
    """

    def __init__(self, model: smp.DistributedModel, overlapped: bool) -> None:
        self._overlapped = overlapped
        self._parameters = dict(model.local_named_parameters())
        self.ready = dict.fromkeys(self._parameters, 0)
        for name, parameter in self._parameters.items():

            def reduce(gradient: torch.Tensor, name: str = name) -> torch.Tensor | None:
                self.ready[name] += 1
                return gradient / 2 if overlapped else None

            parameter.register_hook(reduce)

    def step(self, model: smp.DistributedModel, batches: list[torch.Tensor], autocast: bool) -> list[torch.Tensor]:
        model.zero_grad()
        losses = [loss for x in batches for loss in train_step(model, x, autocast).outputs]
        for parameter in self._parameters.values():
            if parameter.grad is not None and not self._overlapped:
                parameter.grad /= 2
        return losses


def train(
    how: Callable[[Any, torch.Tensor], torch.Tensor],
    homes: Mapping[str, int],
    set_on: Mapping[str, dict[str, Any]] | None = None,
    net: Mapping[str, Any] | None = None,
    autocast: bool = False,
    overlapped: bool = True,
    **config: Any,
) -> dict[str, Any]:
    """Losses, gradients and buffers of this rank after some steps of two replicas, how often each gradient came, and the recomputes."""
    smp.init({"microbatches": MICROBATCHES, "auto_partition": False, "stall_timeout": 60, "partitions": 2, **config})
    torch.manual_seed(0)
    module = Net(**(net or {}))
    module.how = how
    for path, home in homes.items():
        smp.set_partition(module.get_submodule(path), home)
    model = smp.DistributedModel(module)
    for path, options in (set_on or {}).items():
        smp.set_activation_checkpointing(model.module.get_submodule(path), **options)
    earlier = smp.checkpointing.report().regions
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2)]
    torch.manual_seed(2)
    losses = train_step(model, batches[0], autocast).outputs
    replicas = Replicas(model, overlapped)
    losses += replicas.step(model, batches, autocast)
    result = {
        "losses": losses,
        "gradients": {name: p.grad for name, p in model.local_named_parameters()},
        "buffers": dict(model.local_named_buffers()),
        "ready": replicas.ready,
        "recomputes": {r.name: r.recomputes for r in smp.checkpointing.report().regions if r not in earlier},
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
    """Type and text of the error of two steps whose checkpointed module is split, or "" and the log; and the number of Python warnings."""
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
        "positional strategy": error_of(lambda: put(model.module.seq, "each")),  # type: ignore[arg-type]
        "of PyTorch": error_of(lambda: checkpoint(net.fc1, torch.zeros(2, WIDTH), use_reentrant=False)),
        "of PyTorch, too": error_of(lambda: checkpoint(torch.sin, torch.zeros(2), use_reentrant=True)),
        "segments": error_of(lambda: checkpoint_sequential(net.seq, torch.tensor(3), torch.zeros(1))),
        "script": error_of(lambda: checkpoint(torch.jit.script(nn.Linear(2, 2)), torch.zeros(1, 2))),
        "vmap": error_of(lambda: torch.vmap(lambda x: checkpoint(torch.sin, x))(torch.zeros(2))),
        "tracker": error_of(lambda: smp.checkpointing.register_rng_tracker(torch.Generator)),
        "generator": error_of(lambda: smp.checkpointing.register_generator("cpu")),  # type: ignore[arg-type]
    }
    train_step(model, torch.randn(8, WIDTH), False)
    said["late"] = error_of(lambda: put(model.module.seq))
    smp.shutdown()
    return said


# ---- memory and failures


class Wide(nn.Module):
    """Keeps some MiB for backward. Its recompute fails when it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and smp.checkpointing.is_recomputing():
            raise ArithmeticError("in the recompute")
        return x + torch.tanh(self.linear(x))


def wide_model(partitions: int) -> tuple[smp.DistributedModel, torch.Tensor]:
    smp.init({"partitions": partitions, "microbatches": 2, "auto_partition": False, "stall_timeout": 60})
    torch.manual_seed(0)
    net = Net(Wide, 4)
    net.fc1 = nn.Sequential(Wide())
    for index, layer in enumerate(net.seq):
        smp.set_partition(layer, index * partitions // len(net.seq))
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(model.module.fc1)
    smp.set_activation_checkpointing(model.module.seq, strategy="group_2")
    return model, torch.randn(2 * 1024, 256)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def fifty_steps(partitions: int) -> dict[str, Any]:
    """What this rank holds after steps without the garbage collector: bytes by which the last forty grew it, and what is left of regions."""
    model, x = wide_model(partitions)
    gc.collect()
    gc.disable()
    try:
        for step in range(50):
            model.zero_grad()
            train_step(model, x, False)
            if step == 9:
                before = resident_bytes()
        grown, regions = resident_bytes() - before, _C.count_regions()
        state = model._runtime.engine.state() if model._runtime is not None else {}
    finally:
        gc.enable()
    recomputes = sum(r.recomputes for r in smp.checkpointing.report().regions)
    smp.shutdown()
    return {
        "grown": grown,
        "one": x.nbytes // 2,
        "regions": regions,
        "state": state,
        "recomputes": recomputes,
    }


def copies_of_modules() -> dict[str, Any]:
    """What copies of this rank's modules give when their weights are zero, and what the modules then give."""
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "stall_timeout": 60})
    torch.manual_seed(0)
    net = Net(Wide, 4)
    smp.set_partition(net.seq, 1)
    net.fc1 = nn.Sequential(Wide())
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(model.module.seq)
    x = torch.randn(16, 256)
    train_step(model, x, False)
    mine = net.seq[0] if smp.pp_rank() == 1 else net.fc1[0]
    expected = mine(x)
    results = []
    for again in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        for parameter in again.parameters():
            parameter.data.zero_()
        results.append(torch.equal(again(x), x))
    facts = {"copies": results, "own": torch.equal(mine(x), expected)}
    smp.shutdown()
    return facts


def failing_recompute(partitions: int) -> dict[str, Any]:
    """A step whose recompute fails on the last partition, and the gradients of this rank after a step that follows it."""
    model, x = wide_model(partitions)
    train_step(model, x, False)
    expected = {name: p.grad.clone() for name, p in model.local_named_parameters()}
    Wide.fails = smp.pp_rank() == partitions - 1
    said: tuple[str, str, list[str]] = ("", "", [])
    try:
        train_step(model, x, False)
    except Exception as error:
        said = type(error).__name__, str(error), getattr(error, "__notes__", [])
    Wide.fails = False
    deadline = time.monotonic() + 10
    while _C.count_regions() > 0 and time.monotonic() < deadline:
        time.sleep(0.01)  # what another rank's failure leaves is freed beside
    regions = _C.count_regions()
    model.zero_grad()
    train_step(model, x, False)
    equal = all(torch.equal(expected[name], p.grad) for name, p in model.local_named_parameters())
    smp.shutdown()
    return {"said": said, "equal": equal, "regions": regions}
