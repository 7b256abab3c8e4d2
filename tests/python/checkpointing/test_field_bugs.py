"""Bugs that other implementations of activation checkpointing had. Each name says what must not happen, or must."""

import ctypes
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compare import WIDTH, Layer, batch, bytes_left_by, error_of, is_as_plain, make, outcome, same, without_gc
from torch import nn

import smp
from smp import _C
from smp.checkpointing import checkpoint, checkpoint_sequential


def ck(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x)


# ---- data parallel


def hook_counts(module: nn.Module) -> dict[str, int]:
    """How often each gradient is complete, as a reducer that overlaps its allreduce with backward would see it."""
    counts = dict.fromkeys((name for name, _ in module.named_parameters()), 0)
    for name, parameter in module.named_parameters():

        def count(_: torch.Tensor, name: str = name) -> None:
            counts[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    return counts


def test_a_gradient_is_ready_once():
    net = make(lambda: nn.Sequential(Layer(), Layer(), Layer()))
    counts = hook_counts(net)
    checkpoint_sequential(net, batch()).sum().backward()
    assert set(counts.values()) == {1}


class Twice(nn.Module):
    """One layer in two regions, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ck(self.layer, torch.sin(ck(self.layer, x)))


def test_a_layer_that_is_checkpointed_twice_gives_one_gradient():
    net = make(Twice)
    counts = hook_counts(net)
    net(batch()).sum().backward()
    assert all(count == (0 if "unused" in name else 1) for name, count in counts.items())
    plain = lambda m, x: m.layer(torch.sin(m.layer(x)))  # noqa: E731
    assert is_as_plain(Twice, lambda m, x: m(x), plain)


class TwoResults(Layer):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = super().forward(x)
        return h, torch.exp(h)


def test_results_may_be_unused():
    for used in (0, 1):
        assert is_as_plain(TwoResults, lambda m, x, used=used: ck(m, x)[used], lambda m, x, used=used: m(x)[used])


# ---- random numbers


def test_dropout_draws_the_same_again():
    build = lambda: nn.Sequential(Layer(0.5), nn.Dropout(0.3), Layer(0.5))  # noqa: E731
    assert is_as_plain(build, ck, passes=3)
    assert is_as_plain(build, checkpoint_sequential, passes=3)


def test_random_numbers_that_are_not_preserved_are_warned_of():
    net = make(lambda: Layer(0.5))
    with pytest.warns(UserWarning, match="preserve_rng_state=False"):
        checkpoint(net, batch(), preserve_rng_state=False)
    without = make(Layer)
    assert same(
        outcome(without, lambda x: checkpoint(without, x, preserve_rng_state=False)),
        outcome(other := make(Layer), lambda x: other(x)),
    )


class DrawsFrom(Layer):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return super().forward(x) * torch.exp(noise * x)


def draws_twice(register: bool) -> list[list[torch.Tensor]]:
    results = []
    for call in (ck, lambda m, x: m(x)):
        generator = torch.Generator().manual_seed(5)
        if register:
            smp.checkpointing.register_generator(generator)
        net = make(lambda generator=generator: DrawsFrom(generator))
        results.append(outcome(net, lambda x, net=net, call=call: call(net, x), passes=2))
    return results


def test_a_generator_that_is_registered_draws_the_same_again():
    assert same(*draws_twice(register=True))


def test_a_generator_that_nobody_knows_of_is_an_error_in_verify_mode():
    assert not same(*draws_twice(register=False))  # what the mode is for
    smp.checkpointing.verify()
    try:
        kind, message = error_of(draws_twice, False)
        assert kind == "SMPUsageError" and "register_generator" in message
    finally:
        smp.checkpointing.verify(False)


class Tracker:
    """Named generators, as tensor-parallel code has them."""

    def __init__(self) -> None:
        self.generators = {"tensor parallel": torch.Generator().manual_seed(7)}

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        for name, value in states.items():
            self.generators[name].set_state(value)


def test_a_named_tracker_that_is_registered_draws_the_same_again():
    results = []
    for call in (ck, lambda m, x: m(x)):
        tracker = Tracker()
        smp.checkpointing.register_rng_tracker(tracker)
        net = make(lambda tracker=tracker: DrawsFrom(tracker.generators["tensor parallel"]))
        results.append(outcome(net, lambda x, net=net, call=call: call(net, x), passes=2))
    assert same(*results)


# ---- autocast


def autocast(call: Any) -> Any:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(module, x).float()

    return run


def test_autocast_is_in_force_again():
    assert is_as_plain(lambda: nn.Sequential(Layer(0.2), Layer()), autocast(ck), autocast(lambda m, x: m(x)))


def test_weights_that_two_regions_share_are_cast_as_without_checkpointing():
    plain = autocast(lambda m, x: m.layer(torch.sin(m.layer(x))))
    assert is_as_plain(Twice, autocast(lambda m, x: m(x)), plain, passes=2)


# ---- structure of arguments and results


class Pair(NamedTuple):
    value: torch.Tensor
    note: str


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    extra: Any = None


class Structured(Layer):
    """Gives back what it is asked for."""

    def forward(self, x: Any, kind: str = "pair", scale: torch.Tensor | None = None, more: Any = None) -> Any:
        if isinstance(x, Pair | Record):
            x = x.value
        if isinstance(x, dict):
            x = x["inner"][0] * x["inner"][1]["weight"]
        h = super().forward(x)
        if scale is not None:
            h = h * scale
        return {"pair": Pair(h, "note"), "record": Record(h), "none": (h, None, 3, "text", more)}[kind]


def test_a_named_tuple_stays_one():
    result = ck(make(Structured), Pair(batch(), "x"))
    assert type(result) is Pair and result.note == "note" and result.value.requires_grad
    assert is_as_plain(Structured, lambda m, x: ck(m, Pair(x, "a")).value, lambda m, x: m(x).value)


def test_a_dataclass_keeps_its_gradient():
    for argument in (lambda x: x, Record):
        assert is_as_plain(
            Structured,
            lambda m, x, argument=argument: checkpoint(m, argument(x), kind="record").value,
            lambda m, x: m(x).value,
        )


def test_what_is_no_tensor_passes():
    result = checkpoint(make(Structured), batch(), "none", more={"a": [1, None]})
    assert result[1:] == (None, 3, "text", {"a": [1, None]})


def test_tensors_in_keywords_get_gradients():
    scale = torch.full((WIDTH,), 2.0, requires_grad=True)
    checkpoint(make(Structured), batch(), scale=scale).value.sum().backward()
    given = scale.grad.clone()
    scale.grad = None
    make(Structured)(batch(), scale=scale).value.sum().backward()
    assert torch.equal(scale.grad, given)


def test_tensors_in_nested_containers_get_gradients():
    tree = lambda x: {"inner": [x, {"weight": x.exp()}]}  # noqa: E731
    assert is_as_plain(Structured, lambda m, x: ck(m, tree(x)).value, lambda m, x: m(tree(x)).value)


def test_a_change_of_a_tensor_in_a_container_is_noticed():
    hidden = batch() * 2
    loss = ck(make(Structured), {"inner": [hidden, {"weight": hidden}]}).value.sum()
    with torch.no_grad():
        hidden.add_(1)
    kind, message = error_of(loss.backward)
    assert kind == "SMPUsageError" and "changed in place after it was called" in message


def test_a_list_that_the_module_fills_is_filled_once():
    class Fills(Layer):
        def forward(self, x: torch.Tensor, seen: list[int], cache: dict[str, torch.Tensor]) -> torch.Tensor:
            h = super().forward(x * (1 + len(seen)))
            seen.append(len(seen))
            cache["h"] = h.exp() * cache.get("h", 1)
            return cache["h"].exp()

    seen, seen_plain = [], []
    assert is_as_plain(Fills, lambda m, x: checkpoint(m, x, seen, {}), lambda m, x: m(x, seen_plain, {}), passes=2)
    assert seen == [0, 1]


def test_results_need_gradients_though_no_argument_does():
    net = make(Layer)
    ck(net, batch(requires_grad=False)).sum().backward()
    other = make(Layer)
    other(batch(requires_grad=False)).sum().backward()
    assert torch.equal(net.linear.weight.grad, other.linear.weight.grad)


def test_a_frozen_embedding_before_the_first_region_stops_no_gradient():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(5, WIDTH), Layer()
            self.embed.requires_grad_(False)

    net = make(Model)
    ck(net.layer, net.embed(torch.arange(4))).sum().backward()
    assert net.layer.linear.weight.grad.abs().sum() > 0 and net.embed.weight.grad is None


def test_an_operator_in_place_on_a_view_at_the_end():
    class InPlace(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x) * 2
            h.view(-1)[::2].mul_(x.reshape(-1)[::2])
            return h

    assert is_as_plain(InPlace, ck)


# ---- memory


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, but is kept for later, does not count
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_computed_inside_is_freed_in_forward():
    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sigmoid(x)
        return x

    x = torch.zeros(2**22, requires_grad=True)  # 16 MiB
    kept = []
    with without_gc():
        for call in (many, lambda x: checkpoint(many, x)):
            before = resident_bytes()
            result = call(x)
            kept.append(resident_bytes() - before)
            result.sum().backward()
            del result
    assert kept[0] > 7.5 * x.nbytes and kept[1] < 1.5 * x.nbytes
    assert smp.checkpointing.report().regions[-1].saved_bytes >= 8 * x.nbytes


def test_nothing_is_left_over():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(str(x.sin().shape))

    def full(net: nn.Module) -> None:
        ck(net, batch()).sum().backward()

    def never_backward(net: nn.Module) -> None:
        ck(net, batch()).sum()

    def fails(net: nn.Module) -> None:
        error_of(checkpoint, broken, batch())

    def closure(net: nn.Module) -> None:
        box: dict[str, torch.Tensor] = {}

        def inside(x: torch.Tensor) -> torch.Tensor:
            return net(x) * len(box)

        box["result"] = checkpoint(inside, batch())
        box["result"].sum().backward()

    def nested(net: nn.Module) -> None:
        checkpoint(lambda x: ck(net, ck(net, x)), batch()).sum().backward()

    def keeps_result(net: nn.Module) -> None:
        net.kept = ck(net, batch()).exp()
        net.kept.sum().backward()

    with without_gc():
        before = _C.count_regions()
        for case in (full, never_backward, fails, closure, nested, keeps_result):
            left = []
            for steps in (2, 50):
                net = make(lambda: nn.Sequential(Layer(0.1), Layer()))
                left.append(bytes_left_by(functools.partial(case, net), steps))
                assert _C.count_regions() == before, case.__name__
            assert left[0] == left[1], case.__name__


def test_inputs_of_regions_are_freed_by_backward():
    def keeps_its_result(x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(torch.exp(-x))

    with without_gc():
        h, storages = batch(), []
        for _ in range(4):
            h = checkpoint(keeps_its_result, h)
            storages.append(h.untyped_storage()._weak_ref())
        loss = h.sum()
        del h
        assert not any(map(torch.UntypedStorage._expired, storages[:-1]))
        loss.backward()
        assert all(map(torch.UntypedStorage._expired, storages))


# ---- graphs


def test_five_thousand_regions_in_a_chain():
    x = batch()
    h = x
    for _ in range(5000):
        h = checkpoint(torch.sin, h)
    h.sum().backward()
    expected = (y := batch())
    for _ in range(5000):
        expected = torch.sin(expected)
    expected.sum().backward()
    assert torch.equal(x.grad, y.grad)


class GradInside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(y).square().sum(), y, create_graph=True)
        return super().forward(x) * slope


def test_a_gradient_inside_a_region():
    assert is_as_plain(GradInside, ck)


def test_a_gradient_of_a_gradient():
    results = []
    for call in (ck, lambda m, x: m(x)):
        net, x = make(Layer), batch()
        (slope,) = torch.autograd.grad(call(net, x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append([slope.detach(), x.grad, net.linear.weight.grad])
    assert same(*results)


def test_backward_of_some_inputs_only():
    net, x = make(Layer), batch()
    (slope,) = torch.autograd.grad(ck(net, x).sum(), x)
    other, y = make(Layer), batch()
    assert torch.equal(slope, torch.autograd.grad(other(y).sum(), y)[0])
    assert net.linear.weight.grad is None
    ck(net, x).sum().backward(inputs=[net.linear.bias])
    assert net.linear.bias.grad is not None and net.linear.weight.grad is None


def test_a_second_backward():
    net, x = make(lambda: Layer(0.5)), batch()
    torch.manual_seed(3)
    loss = ck(net, x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * once)
    loss.backward()
    assert error_of(loss.backward)[0] == "RuntimeError"


def test_regions_in_regions():
    def nested(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: ck(m[1], ck(m[0], h).sin()).exp(), x)

    build = lambda: nn.Sequential(Layer(0.3), Layer(0.3))  # noqa: E731
    assert is_as_plain(build, nested, lambda m, x: m[1](m[0](x).sin()).exp(), passes=2)


# ---- stacks


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2", "group_3", "group_9"])
def test_layers_need_not_divide_by_the_group(strategy):
    build = lambda: nn.Sequential(*(Layer(0.2) for _ in range(5)))  # noqa: E731
    assert is_as_plain(build, lambda m, x: checkpoint_sequential(m, x, strategy=strategy))


def test_later_layers_of_a_group_get_their_own_input():
    layers = [nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 8), nn.Sigmoid(), nn.Linear(8, 2)]
    assert is_as_plain(lambda: nn.Sequential(*layers), lambda m, x: checkpoint_sequential(m, x, strategy="contiguous"))


# ---- side effects


def test_batch_norm_counts_once():
    build = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())  # noqa: E731
    assert is_as_plain(build, ck, passes=3)
    assert is_as_plain(build, lambda m, x: checkpoint_sequential(m, x, strategy="group_2"), passes=3)
    # Two calls on their way: the second one has counted when the first one runs again.
    assert is_as_plain(build, lambda m, x: ck(m, x) + ck(m, 2 * x), lambda m, x: m(x) + m(2 * x))


class Counts(Layer):
    """Its results depend on what it keeps: a buffer and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = super().forward(x) * (1 + self.steps) * self.calls
        self.steps += 1
        self.loss = h.exp().sum()
        return h.exp()


def test_state_of_a_module_is_as_at_entry_and_left_alone():
    assert is_as_plain(Counts, lambda m, x: ck(m, ck(m, x)) + m.loss, lambda m, x: m(m(x)) + m.loss, passes=2)
    net = make(Counts)
    ck(net, ck(net, batch())).sum().backward()
    assert net.calls == 2 and net.loss.grad_fn is not None


def test_communication_in_a_region_is_refused():
    def gathers(x: torch.Tensor) -> torch.Tensor:
        smp.allgather(1, smp.WORLD)
        return x.sin()

    smp.init({"partitions": 1})
    try:
        kind, message = error_of(checkpoint, gathers, batch())
    finally:
        smp.shutdown()
    assert kind == "SMPUsageError" and "communicate outside" in message
