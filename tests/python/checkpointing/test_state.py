"""What a checkpointed call starts from again: the identity of its arguments, parameters, buffers and modules; and what copies of modules do."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import WIDTH, Layer, batch, error_of, is_as_plain, make, outcome, same, without_gc
from torch import nn

import smp
from smp.checkpointing import checkpoint, checkpoint_sequential


def ck(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x)


# ---- arguments


def test_an_argument_that_is_given_twice_is_the_same_twice():
    sentinel = object()

    def looks(a: torch.Tensor, b: torch.Tensor, first: list[int], second: list[int], mark: object) -> torch.Tensor:
        same = (a is b) + 2 * (first is second) + 4 * (mark is sentinel)
        first.append(1)
        return torch.exp(a * same * len(second))

    def run(call: Any) -> Any:
        def loss(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
            items: list[int] = []
            return call(looks, x, x, items, items, sentinel)

        return loss

    assert is_as_plain(Layer, run(checkpoint), run(lambda function, *args: function(*args)))


def test_attention_that_is_given_one_tensor_three_times():
    build = lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)  # noqa: E731
    call = lambda m, x: m(x, x, x)[0]  # noqa: E731
    assert is_as_plain(build, lambda m, x: checkpoint(m, x, x, x)[0], call)


class Cache:
    """Does not pickle, and is changed by the call."""

    def __init__(self) -> None:
        self.function = lambda: None
        self.seen: dict[str, torch.Tensor] = {}


def test_an_object_that_the_call_changes_is_as_at_entry():
    class Fills(Layer):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            h = super().forward(x) * (1 + len(cache.seen))
            cache.seen[f"{len(cache.seen)}"] = h.exp()
            return cache.seen["0"] * h.exp()

    mine, theirs = Cache(), Cache()
    assert is_as_plain(Fills, lambda m, x: checkpoint(m, x, mine), lambda m, x: m(x, theirs))
    assert list(mine.seen) == ["0"]


def test_subclasses_and_parameters_stay_what_they_are():
    class Marked(torch.Tensor):
        pass

    def looks(x: torch.Tensor, weight: Any, marked: Any) -> torch.Tensor:
        return torch.exp(x * (isinstance(weight, nn.Parameter) + 2 * isinstance(marked, Marked))).as_subclass(
            torch.Tensor
        )

    weight, marked = nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(Marked)
    assert is_as_plain(Layer, lambda _, x: checkpoint(looks, x, weight, marked), lambda _, x: looks(x, weight, marked))


# ---- parameters, buffers, modules


@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_a_change_between_forward_and_backward_is_an_error(what):
    net = nn.Linear(WIDTH, WIDTH)
    net.register_buffer("buffer", torch.ones(2**16))  # a small one would be kept
    net.forward = lambda x: F.linear(x, net.weight).exp() * net.buffer[:WIDTH]
    loss = ck(net, batch()).sum()
    with torch.no_grad():
        getattr(net, what).mul_(2)
    kind, message = error_of(loss.backward)
    assert kind == "SMPUsageError" and f"{what!r} was changed in place" in message


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_in_forward_and_not_in_backward(frozen):
    results = []
    for call in (ck, lambda m, x: m(x)):
        net, x = make(lambda: nn.Sequential(Layer(), Layer())), batch()
        net[0].requires_grad_(not frozen)
        loss = call(net, x).square().sum()
        net[0].requires_grad_(frozen)
        loss.backward()
        assert net[0].linear.weight.requires_grad == frozen
        results.append([x.grad, net[1].linear.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class BehindVersions(Layer):
    """Changes its buffers where no version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("ema", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.batch_norm(super().forward(x), self.mean, torch.ones(WIDTH), training=True)
        self.ema.data.mul_(1.5)
        return (h * self.ema).exp()


def test_buffers_that_change_where_no_version_tells():
    assert is_as_plain(BehindVersions, lambda m, x: ck(m, x) + ck(m, x / 2), lambda m, x: m(x) + m(x / 2), passes=3)


class ChangesNowAndThen(Layer):
    """Changes a buffer in every third call, also where no version tells."""

    def __init__(self, size: int, by_version: bool = True) -> None:
        super().__init__()
        self.calls, self.by_version = 0, by_version
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            (self.scale if self.by_version else self.scale.data).mul_(1.5)
        return (super().forward(x) * self.scale[0].clone()).exp()


def test_a_buffer_that_changes_now_and_then():
    def several(call: Any) -> Any:  # calls before and after the change wait for backward together
        return lambda m, x: call(m, x) + call(m, x / 2) + call(m, x / 3) + call(m, x / 4)

    plain = several(lambda m, x: m(x))
    for by_version in (True, False):
        assert is_as_plain(lambda by_version=by_version: ChangesNowAndThen(8, by_version), several(ck), plain, passes=3)

    # A large one is kept from its first change on, which is an error.
    net = make(lambda: ChangesNowAndThen(2**16))
    kind, message = error_of(several(ck)(net, batch()).sum().backward)
    assert kind == "SMPUsageError" and "'scale'" in message and "From now on it is kept" in message
    net.scale.fill_(1)
    net.calls = 0
    other = make(lambda: ChangesNowAndThen(2**16))
    assert same(outcome(net, lambda x: several(ck)(net, x), 3), outcome(other, lambda x: plain(other, x), 3))


class Adjacent(Layer):
    """Has a buffer that can't be overwritten: sparse, or expanded."""

    def __init__(self, buffer: torch.Tensor, changes: bool = False) -> None:
        super().__init__()
        self.changes = changes
        self.register_buffer("adjacency", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            (self.adjacency[:, :1] if self.adjacency.layout is torch.strided else self.adjacency).mul_(2)
        return (self.adjacency.to_dense() @ super().forward(x)).exp()


@pytest.mark.parametrize(
    "buffer",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.ones(4, 1).expand(4, 4),
    ],
    ids=["coo", "csr", "expanded"],
)
def test_buffers_that_cannot_be_overwritten(buffer):
    gradients = []
    for call in (ck, lambda net, x: net(x)):
        net, x = make(lambda: Adjacent(buffer())), batch()
        call(net, x).sum().backward()
        gradients.append([x.grad, net.linear.weight.grad])
    assert same(*gradients)
    kind, message = error_of(ck, make(lambda: Adjacent(buffer(), changes=True)), batch())
    assert kind == "SMPUsageError" and "'adjacency'" in message and "sparse or expanded" in message


def test_a_module_that_is_replaced_later():
    def grows(call: Any) -> Any:
        def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
            y = call(m, x)
            m[1] = nn.BatchNorm1d(WIDTH)
            return y + call(m, x) + call(m, 2 * x)

        return run

    build = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
    assert is_as_plain(build, grows(ck), grows(lambda m, x: m(x)))


def test_functions_that_call_modules():
    build = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))  # noqa: E731
    twice = lambda call, m, x: call(m, x) + call(m, 2 * x)  # noqa: E731
    closure = lambda m, x: checkpoint(lambda h: m(h).exp(), x)  # noqa: E731
    argument = lambda m, x: checkpoint(lambda module, h: module(h).exp(), m, x)  # noqa: E731
    plain = lambda m, x: m(x).exp()  # noqa: E731
    for call in (closure, argument):
        assert is_as_plain(build, lambda m, x, call=call: twice(call, m, x), lambda m, x: twice(plain, m, x))


# ---- copies


def test_copies_of_checkpointed_modules_are_their_own():
    smp.init({"partitions": 1})
    net = make(lambda: nn.Sequential(Layer(), nn.Sequential(Layer(), Layer())))
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(model.module[0])
    smp.set_activation_checkpointing(model.module[1], strategy="contiguous")
    net(batch()).sum().backward()
    checkpoint_sequential(net, batch()).sum().backward()
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    smp.shutdown()
    for copied in copies:
        assert torch.equal(copied(batch()), net(batch()))
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert copied(batch()).abs().sum() == 0 and net(batch()).abs().sum() > 0


def test_modules_that_were_checkpointed_are_freed():
    def make_modules() -> list[nn.Module]:
        hooked, own_buffer, refers, stack = Layer(), nn.BatchNorm1d(WIDTH), Layer(), nn.Sequential(Layer(), Layer())
        hooked.register_forward_hook(lambda *_: None)
        refers.me = refers
        checkpoint_sequential(stack, batch(), "contiguous").sum().backward()
        for module in (hooked, own_buffer, refers):
            ck(module, batch()).sum().backward()
        return [hooked, own_buffer, refers, stack]

    alive = [weakref.ref(module) for module in make_modules()]
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_backwards_that_fail_keep_nothing():
    def fails(gradient: torch.Tensor) -> None:
        raise ValueError("upstream")

    storages = []

    def function(h: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = h.exp()
            if smp.checkpointing.is_recomputing():
                storages.append(h.untyped_storage()._weak_ref())
        return h

    with without_gc():
        before = batch() * 1
        before.register_hook(fails)
        loss = checkpoint(function, before).sum()
        for _ in range(5):
            assert error_of(loss.backward, None, True) == ("ValueError", "upstream")
        assert len(storages) >= 10 and sum(not torch.UntypedStorage._expired(s) for s in storages) <= 3


# ---- hooks, reports, and saved tensors


class Recurrent(nn.Module):
    """An LSTM, whose kernels without gradients give other bits; and what code may ask of gradients in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.is_grad_enabled() and x.requires_grad
        return self.lstm(x.expand(7, *x.shape).transpose(0, 1))[0]


def test_forward_is_that_of_training():
    assert is_as_plain(Recurrent, ck)


def test_hooks_run_once_and_logs_can_be_left_out():
    logged, hooked = [], []

    class Logs(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not smp.checkpointing.is_recomputing():
                logged.append(x)
            return super().forward(x)

    net = make(Logs)
    net.register_forward_pre_hook(lambda *_: hooked.append(1))
    ck(net, batch()).sum().backward()
    assert (len(logged), len(hooked)) == (1, 1)


def test_a_report_tells_what_was_saved():
    net = make(lambda: nn.Sequential(*(Layer() for _ in range(3))))
    ck(net, batch()).sum().backward()
    report = smp.checkpointing.report().regions[-1]
    assert (report.calls, report.recomputes) == (1, 1)
    assert report.input_bytes == 4 * WIDTH * 4 and report.saved_bytes > 2 * report.input_bytes
    assert report.name in str(smp.checkpointing.report())


def test_saved_tensors_that_a_function_reads_twice():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.exp())
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            first = float(ctx.saved_tensors[0].sum())
            return gradient * first / ctx.saved_tensors[0].sum()

    x = batch()
    checkpoint(Square.apply, x).sum().backward()
    assert torch.allclose(x.grad, torch.ones_like(x))


# ---- what a region must do the same


def test_a_branch_that_changes_is_an_error():
    class Branches(Layer):
        more = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            return (h.exp() * h if switch["on"] else h).sin()

    switch = {"on": True}
    net = make(Branches)
    loss = ck(net, batch()).sum()
    switch["on"] = False
    kind, message = error_of(loss.backward)
    assert kind == "SMPUsageError" and "when it ran again" in message
    switch["on"] = True
    ck(net, batch()).sum().backward()  # usable again


def test_other_shapes_are_an_error():
    sizes = [4]
    loss = checkpoint(lambda x: torch.sin(x[: sizes[0]]).exp(), batch()).sum()
    sizes[0] = 3
    kind, message = error_of(loss.backward)
    assert kind == "SMPUsageError" and "Float [4, 6] on cpu" in message and "[3, 6]" in message


def test_an_exception_in_a_recompute_leaves_everything_usable():
    net = make(lambda: nn.Sequential(Layer(0.3), nn.BatchNorm1d(WIDTH)))
    fails = [False]

    def maybe(x: torch.Tensor) -> torch.Tensor:
        h = net(x).sin()
        if fails[0]:
            raise ValueError("in the recompute")
        return h.exp()

    loss = checkpoint(maybe, batch()).sum()
    fails[0] = True
    torch.manual_seed(11)
    assert error_of(loss.backward) == ("ValueError", "in the recompute")
    after = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(3)) and torch.is_grad_enabled()
    fails[0] = False
    assert is_as_plain(lambda: nn.Sequential(Layer(0.3), Layer()), ck)


class CopiesItself(Cache):
    """Its own way to be copied gives the very same object."""

    def __copy__(self) -> "CopiesItself":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("can't be pickled")


def test_an_object_with_its_own_way_to_be_copied_is_left_alone():
    cache = CopiesItself()
    cache.seen["x"] = torch.ones(WIDTH)
    result = checkpoint(lambda x, c: (x * c.seen["x"]).exp(), batch(), cache)
    assert list(cache.seen) == ["x"]
    result.sum().backward()
    assert list(cache.seen) == ["x"]
